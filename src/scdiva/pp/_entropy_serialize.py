"""Rank the genes of each cell, as the model sees them."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy.sparse as sp

from scdiva._checks import check_least, or_nearest
from scdiva._constants import LAYER_RANK, MAX_LENGTH, N_SPECIAL, UNS
from scdiva._docs import with_shared_docs
from scdiva._settings import progress_bar
from scdiva._validate import Input
from scdiva.data.cells import CellSource, open_cells
from scdiva.data.genes import tokens_of_var
from scdiva.data.output import open_store, refuse_target, whole_or_not
from scdiva.data.reading import Empty, Reading, Species
from scdiva.data.writing import check_anndata, check_key, check_writable, noted
from scdiva.tokenizer.serialize import ENTROPY_FLOOR, score_denominator, serialize
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary

if TYPE_CHECKING:
    from anndata import AnnData


@with_shared_docs
def entropy_serialize(
    adata: AnnData,
    vocabulary: Vocabulary | str | Path = "human",
    *,
    max_length: int = MAX_LENGTH,
    entropy_key: str | None = None,
    entropy_floor: float = ENTROPY_FLOOR,
    layer: str | None = None,
    use_raw: bool = False,
    input: Input = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    empty: Empty = "error",
    key_added: str = LAYER_RANK,
    out: str | PathLike[str] | None = None,
    overwrite: bool = False,
    copy: bool = False,
) -> AnnData | None:
    r"""Rank the genes of each cell by entropy-normalised expression.

    The score is :math:`S_g = v_g / (\max(H_g, \mathrm{floor}) + 10^{-6})` with v the log-normalised expression (target
    1e4) and H the gene's entropy (paper, appendix, eq. entropy_score; the floor is ours and keeps rare genes from the
    top). Rank 1 is the highest score; equal scores are ranked by token. The models' own calls do the same themselves:
    this one is for looking.

    The matrix is read by row blocks, so backed, zarr and dask data are never loaded whole. The ranks are held, 8 bytes
    each and twice that while they are put together: AnnData keeps layers in memory even where X is backed by a file.
    Where that is too much, `out` has them written to a file.

    Parameters
    ----------
    adata
        Cells by genes, counts or log-normalised values.
    vocabulary
        A vocabulary, "human", the name of a bundled model, the folder of a saved model, or the file of a vocabulary.
    max_length
        Genes ranked per cell.
    entropy_key
        Column of `adata.var` with entropies in nats, as :func:`scdiva.pp.gene_entropy` writes. None takes those of the
        vocabulary, which "human" does not have.
    entropy_floor
        Least entropy that is divided by, in nats; 0 is the paper to the letter.
    %(reading)s
    empty
        Cells without a known gene: "error", or "nan" to give them no ranks.
    key_added
        Layer, and entry of `uns`, to write.
    out
        Write the ranks block by block to this new file instead of into `adata`: a ``.zarr`` folder if its name ends so,
        else an ``.h5ad`` file. It is written beside `out` and renamed, so it is there whole or not at all.
    overwrite
        Replace `out` if it exists.
    copy
        Write into a copy and return it.

    Returns
    -------
    None, or the copy. Written are, into `adata`, the copy or a new file of `obs` and `var` alone,

    `adata.layers[key_added]`
        int32 CSR (n_obs, n_vars): ranks 1 to `max_length`, nothing where a gene is not expressed, not known, or ranked
        lower. Of several columns of one gene the first has its rank.
    `adata.uns[key_added]`
        `n_truncated` (cells with more known genes than `max_length`), what the input was found to be, the
        vocabulary's fingerprint, and the arguments.

    Raises
    ------
    KeyError, ValueError
        As :func:`scdiva.pp.match_genes`; if `adata.raw` is read and holds known genes that `adata` does not, whose
        ranks would have no place; if the entropies are absent or incomplete; if cells have no known gene; for
        `out` with `copy=True`.
    FileExistsError
        If `out` exists and `overwrite` is False, or is the file that `adata` is backed by, or a folder that is no
        ``.zarr``.
    RuntimeError
        If another call is writing the same `out`.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy()
    >>> sd.pp.gene_entropy(adata)
    >>> sd.pp.entropy_serialize(adata, entropy_key="scdiva_entropy")
    >>> adata.layers["scdiva_rank"].dtype
    dtype('int32')
    """
    check_least(max_length=(max_length, 1))
    reading = Reading(layer, use_raw, input, gene_ids, species, duplicates, empty)
    if out is None:
        check_writable(adata, copy=copy, call="pp.entropy_serialize", layers=[key_added], uns=[key_added])
    elif copy:
        raise ValueError("out and copy=True exclude each other: with out nothing is written into adata.")
    else:
        check_anndata(adata)
        check_key(key_added, "key_added")
        _refuse(Path(out), adata, overwrite)
    genes = load_vocabulary(vocabulary)
    if entropy_key is None:
        denominator = score_denominator(genes.entropy, entropy_floor)
    elif entropy_key not in adata.var:
        raise KeyError(
            f"adata.var has no column {entropy_key!r}{or_nearest(entropy_key, adata.var.columns)}; "
            "scdiva.pp.gene_entropy(adata) writes 'scdiva_entropy'."
        )
    source = open_cells(adata, genes, reading, ranked=False)
    column = _columns_of_tokens(adata, source, use_raw)
    if entropy_key is not None:
        denominator = score_denominator(_entropy_of_tokens(adata, column, entropy_key), entropy_floor)
    found = {
        "n_truncated": 0,
        "kind": source.kind,
        "vocabulary": genes.fingerprint,
        "max_length": max_length,
        "entropy_key": entropy_key or "",
        "entropy_floor": entropy_floor,
        **reading.parameters(),
        "empty": empty,
    }
    blocks = _ranked(source, denominator, column, max_length, adata.n_vars, found)
    if out is not None:
        _write(Path(out), adata, blocks, key_added, found, overwrite)
        return None
    ranks = sp.csr_matrix(sp.vstack(list(blocks), format="csr"))
    target = adata.copy() if copy else adata
    target.layers[key_added] = ranks
    target.uns[key_added] = found
    target.uns[UNS] = noted(target, "pp.entropy_serialize", None, layers=[key_added], uns=[key_added])
    return target if copy else None


def _ranked(
    source: CellSource, denominator: np.ndarray, column: np.ndarray, max_length: int, n_vars: int, found: dict[str, Any]
) -> Iterator[sp.csr_matrix]:
    """Rank the cells block by block, (rows, columns of `adata`); cells with too many genes are added to `found`."""
    with progress_bar(desc="ranking genes", unit="cell", total=source.n_obs) as bar:
        for _, cells in source.expression_blocks():
            found["n_truncated"] += int((np.diff(cells.indptr) > max_length).sum())
            indptr, tokens, _ = serialize(cells, denominator, max_length)
            rank = np.arange(1, len(tokens) + 1) - np.repeat(indptr[:-1], np.diff(indptr))
            block = sp.csr_matrix((rank.astype(np.int32), column[tokens], indptr), shape=(cells.shape[0], n_vars))
            block.sort_indices()
            yield block
            bar.update(cells.shape[0])


def _write(
    out: Path, adata: AnnData, blocks: Iterator[sp.csr_matrix], key: str, found: dict[str, Any], overwrite: bool
) -> None:
    """Write annotation and ranks to a new file, the ranks block by block."""
    import anndata.io

    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_or_not(out) as new:
        _refuse(out, adata, overwrite)  # another call may have made it meanwhile
        with open_store(new, "w") as file:
            for name in ("obs", "var"):
                frame = getattr(adata, name)
                anndata.io.write_elem(file, name, frame.to_memory() if hasattr(frame, "to_memory") else frame)
            anndata.io.write_elem(file, "layers", {})
            anndata.io.write_elem(file["layers"], key, next(blocks), dataset_kwargs={"indptr_dtype": np.int64})
            ranks = anndata.io.sparse_dataset(file["layers"][key])
            for block in blocks:
                ranks.append(block)
            anndata.io.write_elem(file, "uns", {key: found})


def _refuse(out: Path, adata: AnnData, overwrite: bool) -> None:
    refuse_target(out, overwrite, *([Path(adata.filename)] if adata.isbacked else []))


def _columns_of_tokens(adata: AnnData, source: CellSource, use_raw: bool) -> np.ndarray:
    """First column of `adata` that holds each token, int32 (n_tokens,), -1 where there is none."""
    tokens = tokens_of_var(adata, source.tokens, use_raw)
    if use_raw and not adata.var_names.is_unique:
        raise ValueError(
            "adata.var_names repeat names, so adata.raw can't be matched with them: call "
            "adata.var_names_make_unique() first, or work on adata.raw.to_adata()."
        )
    known = np.flatnonzero(tokens >= 0)[::-1]
    column = np.full(source.n_tokens, -1, dtype=np.int32)
    column[tokens[known]] = known  # the last one written, the first column, stays
    lost = (source.tokens >= 0) & (column[source.tokens] < 0)
    if lost.any():
        raise ValueError(
            f"adata.raw holds {int(lost.sum())} known genes that adata lacks (first: "
            f"{str(adata.raw.var_names[np.flatnonzero(lost)[0]])!r}); their ranks would have no place. "
            "Work on adata.raw.to_adata()."
        )
    return column


def _entropy_of_tokens(adata: AnnData, column: np.ndarray, key: str) -> np.ndarray:
    """Entropies of `adata.var[key]` by token, float32 (n_tokens,); 0 for tokens without a column."""
    given = np.asarray(adata.var[key], dtype=np.float32)  # of pandas, or of xarray where adata is lazy
    entropy = np.zeros(len(column), dtype=np.float32)
    there = np.flatnonzero(column[N_SPECIAL:] >= 0) + N_SPECIAL
    entropy[there] = given[column[there]]
    bad = column[there][~np.isfinite(entropy[there]) | (entropy[there] < 0)]
    if len(bad):
        raise ValueError(
            f"adata.var[{key!r}] is missing, infinite or negative for {len(bad)} of {len(there)} known genes (first: "
            f"{str(adata.var_names[bad.min()])!r}). Compute it anew with scdiva.pp.gene_entropy(adata)."
        )
    return entropy
