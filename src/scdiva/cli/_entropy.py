"""`scdiva entropy`: the entropy of each gene over a corpus, in one pass or in parts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from scdiva.tokenizer.names import read_species

_ENDINGS = {"out": ".safetensors", "histogram": ".npz"}


def entropy(
    files: list[str],
    out: str,
    *,
    vocabulary: str = "human",
    histogram: str | None = None,
    merge: list[str] | None = None,
    min_genes: int = 200,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Count the entropy of each gene over files and write a vocabulary with it.

    Parameters
    ----------
    files
        ``.h5ad`` or ``.zarr`` files and folders of them, read once, by blocks of rows. None, if histograms are merged.
    out
        Vocabulary to write (safetensors), which `scdiva pretrain --vocabulary` takes.
    vocabulary
        Genes: a name, a model folder or the file of a vocabulary.
    histogram
        Where to keep the counts too (``.npz``), for `merge`.
    merge
        Histograms of other runs, over other files, which are added: counts are integers, so the sum is that of one run
        over all files, to the bit.
    min_genes
        Cells with fewer known genes are not counted, as `scdiva pretrain` does not train on them.
    layer, use_raw, input, gene_ids
        Where the expression is and what it is, as in :func:`scdiva.pp.match_genes` and the other calls.
    species
        Whose genes these are; null finds out of each file whether they are a mouse's.
    overwrite
        Replace what stands at `out`, and at `histogram`. A file that is read never is.

    Returns
    -------
    The written vocabulary.

    Raises
    ------
    FileExistsError
        If `out` or `histogram` exists and `overwrite` is False, or is a file that is read.
    FileNotFoundError
        If a file is missing.
    ValueError
        If `out` does not end in ``.safetensors`` or `histogram` not in ``.npz``, there is nothing to count, a file is
        damaged or does not pass the checks, or a histogram is of other genes or given twice.
    """
    import numpy as np

    from scdiva._constants import N_SPECIAL
    from scdiva._settings import logger
    from scdiva.data.files import data_files, study_names
    from scdiva.data.output import refuse_target, whole_or_not
    from scdiva.pp import corpus_entropy
    from scdiva.tokenizer.entropy import EntropyHistogram
    from scdiva.tokenizer.vocabulary import load_vocabulary

    files = [os.path.expanduser(one) for one in files]
    merged = [Path(one).expanduser() for one in merge or []]
    vocabulary = os.path.expanduser(vocabulary)
    written = {"out": Path(out).expanduser()}
    if histogram is not None:
        written["histogram"] = Path(histogram).expanduser()
    if not files and not merged:
        raise ValueError("there is nothing to count: name files, or histograms to merge.")
    for one in merged:
        if [other.resolve() for other in merged].count(one.resolve()) > 1:
            raise ValueError(f"the histogram {str(one)!r} is given twice: its cells would be counted twice.")
    found = [Path(one) for one in data_files(files)] if files else []
    if found:
        study_names(found)
    for one in (*found, *merged):
        if not one.exists():
            raise FileNotFoundError(f"no file {str(one)!r}.")
    of_genes = [one for one in (Path(vocabulary), Path(vocabulary) / "vocabulary.safetensors") if one.is_file()]
    for name, target in written.items():  # by their endings neither is the other
        if target.suffix != _ENDINGS[name]:
            raise ValueError(f"{name} must end in {_ENDINGS[name]}; got {str(target)!r}.")
        if not target.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {str(target.parent)!r} to write to.")
        refuse_target(target, overwrite, *found, *merged, *of_genes)
    table = read_species(species)
    genes = load_vocabulary(vocabulary)
    counts = EntropyHistogram(genes.n_genes + N_SPECIAL, genes.fingerprint)
    for one in merged:
        try:
            counts.merge(EntropyHistogram.load(one))
        except ValueError as error:
            raise ValueError(f"{one}: {error}") from error
    if found:
        counts.merge(
            corpus_entropy(
                found,
                genes,
                min_genes=min_genes,
                layer=layer,
                use_raw=use_raw,
                input=input,
                gene_ids=gene_ids,
                species=table,
            )
        )
    if not counts.n_cells:
        raise ValueError(f"no cell has {min_genes} known genes or more.")
    if histogram is not None:
        counts.save(written["histogram"])
    known = counts.entropy()[N_SPECIAL:]
    with whole_or_not(written["out"]) as new:
        genes.with_entropy(known).write(new)
    logger.info("%d cells counted; %d genes have an entropy", counts.n_cells, int(np.isfinite(known).sum()))
    return written["out"]
