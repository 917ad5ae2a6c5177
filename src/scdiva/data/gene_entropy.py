"""Calls of `scdiva.pp` on genes: match them with a vocabulary, compute their entropy, rank them in each cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from anndata import AnnData

from scdiva._checks import check_arguments, check_least, no_entry
from scdiva._constants import LAYER_RANK, MATCH, MAX_LENGTH, N_SPECIAL, VAR_ENTROPY, VAR_TOKEN
from scdiva._docs import with_shared_docs
from scdiva._files import as_path, is_path
from scdiva._validate import Input
from scdiva.data.cells import CellSource, open_cells
from scdiva.data.genes import (
    ORTHOLOGS,
    Duplicates,
    Empty,
    InputOptions,
    Species,
    check_unique,
    first_columns,
    input_options,
    tokens_of_var,
)
from scdiva.data.matrix import BLOCK_ROWS
from scdiva.data.results import check_anndata, check_writable, write
from scdiva.data.soma import SomaCells
from scdiva.tokenizer.entropy import BIN_WIDTH, EntropyHistogram
from scdiva.tokenizer.serialize import ENTROPY_FLOOR, score_denominator, serialize
from scdiva.tokenizer.vocabulary import Vocabulary, load_vocabulary


@check_arguments
@with_shared_docs
def match_genes(
    adata: AnnData,
    vocabulary: Vocabulary | str | Path = "human",
    *,
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Duplicates = "sum",
    layer: str | None = None,
    use_raw: bool = False,
    input: Input = "auto",
    copy: bool = False,
) -> AnnData | None:
    """Set how genes are read, match them with a vocabulary, and report the share of the data that it covers.

    Names may be current symbols, previous symbols, aliases, Ensembl ids (with or without version), or a mixture; see
    :meth:`scdiva.tokenizer.Vocabulary.match`. The matrix is read once to weigh genes by their counts and to check that
    it is counts or log-normalised.

    Other calls match genes themselves, with the `gene_ids`, `species` and `duplicates` of the last call of this
    function on the object, or a copy, subset or file of it. Without such a call they read `var_names`, infer human or
    mouse, and sum the columns of one gene. A new object, as from `anndata.concat`, needs a new call.

    Parameters
    ----------
    adata
        Cells × genes, counts or log-normalised expression.
    vocabulary
        A vocabulary, "human", the name of a bundled model, the folder of a saved model, or the file of a vocabulary.
    %(gene_ids)s
    %(species)s
    %(duplicates)s
    %(layer)s
    %(use_raw)s
    %(input)s
    copy
        Write into a copy and return it.

    Returns
    -------
    None, or the copy. Written are

    `adata.var["scdiva_token"]`
        int32, token of each gene; -1 if it is not in the vocabulary.
    `adata.uns["scdiva"]["match"]`
        `n_genes`, `n_mapped`, `share_genes`, `share_counts`, `n_duplicates`, `vocabulary` (fingerprint), `how` (number
        of names matched as "ensembl", "symbol", "previous", "alias", "ortholog", "unknown"), and the arguments under
        `params`; with a table of species, `orthologs` (arrays `gene` and `human_gene`).

    Raises
    ------
    ValueError
        If less than half of the counts fall on known genes, with the remedy if genes are in the rows or human and mouse
        cells are in one matrix; if columns are not genes by `var["feature_types"]`; if `duplicates="error"` and two
        columns mean one gene; if the matrix is absent, empty or scaled, or has NaN, infinite or negative values.
    KeyError
        If the column or layer does not exist.

    Warns
    -----
    UserWarning
        If less than 80% of the counts fall on known genes; if genes are read as their human orthologs; if there are
        human and mouse cells; if columns have antibody counts, judged by their names and counts.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy()
    >>> sd.pp.match_genes(adata)
    >>> adata.uns["scdiva"]["match"]["share_counts"]
    1.0
    """
    check_writable(adata, copy=copy, call="pp.match_genes", entry=MATCH, var=[VAR_TOKEN])
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates, empty="nan")
    cells = open_cells(adata, vocabulary, reading, ranked=False, keep=False)
    tokens = tokens_of_var(adata, cells.tokens, use_raw)
    report = dict(cells.report)
    report["params"] = {
        "vocabulary": str(vocabulary) if isinstance(vocabulary, str | Path) else "given",
        **{name: value for name, value in reading.parameters().items() if name != "input"},
    }
    if isinstance(reading.species, dict):
        table = {"gene": list(reading.species), "human_gene": list(reading.species.values())}
        report[ORTHOLOGS] = {name: np.array(names, dtype=object) for name, names in table.items()}
    return write(adata, "pp.match_genes", MATCH, report, copy=copy, var={VAR_TOKEN: tokens})


@check_arguments
@with_shared_docs
def gene_entropy(
    adata: AnnData,
    vocabulary: Vocabulary | str | Path = "human",
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Input = "auto",
    key_added: str = VAR_ENTROPY,
    copy: bool = False,
) -> AnnData | None:
    r"""Compute the Shannon entropy of each gene's expression over cells.

    :math:`H_g = -\sum_b p_{g,b} \log p_{g,b}` over bins b of log-normalised expression (paper, appendix, eq.
    gene_entropy): one bin for zero and fixed bins of width 0.5 above it. Ubiquitous and rare genes have low entropy.
    Models rank genes by the entropy of their training corpus; use this call to inspect a dataset, or for
    :func:`scdiva.pp.entropy_serialize` with ``entropy_key``.

    Parameters
    ----------
    adata
        Cells × genes. For several datasets, use :func:`scdiva.pp.corpus_entropy`.
    vocabulary
        A vocabulary, "human", the name of a bundled model, the folder of a saved model, or the file of a vocabulary.
        Other genes get no entropy.
    %(reading)s
    key_added
        Column to write.
    copy
        Write into a copy and return it.

    Returns
    -------
    None, or the copy. Written are

    `adata.var[key_added]`
        float32, in nats; NaN for genes that are not in the vocabulary. Columns of one gene get the entropy of their
        sum.
    `adata.uns["scdiva"][key_added]`
        Number of cells, fingerprint of the vocabulary, and the arguments.

    Raises
    ------
    KeyError, ValueError
        As :func:`scdiva.pp.match_genes`.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy()
    >>> sd.pp.gene_entropy(adata)
    >>> adata.var["scdiva_entropy"].dtype
    dtype('float32')
    """
    check_anndata(adata)
    reading = input_options(adata, layer, use_raw, input, empty="nan")
    check_writable(adata, copy=copy, call="pp.gene_entropy", entry=key_added, var=[key_added])
    genes = load_vocabulary(vocabulary)
    histogram = EntropyHistogram.empty(genes.n_genes + N_SPECIAL, genes.fingerprint)
    source = open_cells(adata, genes, reading, ranked=False)
    _count(source, histogram)
    tokens, entropy = tokens_of_var(adata, source.tokens, use_raw), histogram.entropy()
    notes = {
        "n_cells": histogram.n_cells,
        "vocabulary": genes.fingerprint,
        "bin_width": BIN_WIDTH,
        **reading.parameters(),
    }
    values = np.where(tokens >= 0, entropy[tokens], np.float32(np.nan)).astype(np.float32)
    return write(adata, "pp.gene_entropy", key_added, notes, copy=copy, var={key_added: values})


@check_arguments
@with_shared_docs
def corpus_entropy(
    data: AnnData | SomaCells | str | Path | Sequence[AnnData | SomaCells | str | Path],
    vocabulary: Vocabulary | str | Path = "human",
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Input = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Duplicates = "sum",
    min_genes: int = 0,
    block_rows: int = BLOCK_ROWS,
) -> EntropyHistogram:
    """Count the expression histograms of a corpus, by files and blocks of rows.

    The counts are integers: histograms of files that different workers count, in any order and block size, can be added
    and give the same bits as one pass (see the example).

    Parameters
    ----------
    data
        AnnData objects or ``.h5ad`` / ``.zarr`` files, each a study; its cells count for the genes in its columns.
        Human and mouse files may be mixed. A matrix of dask chunks is computed `block_rows` rows at a time.
    vocabulary
        As in :func:`gene_entropy`.
    %(reading)s
    %(gene_ids)s
    %(species)s
    %(duplicates)s
    min_genes
        Minimum number of known genes per cell; other cells are not counted.
    block_rows
        Rows per block.

    Returns
    -------
    The histogram. ``vocabulary.with_entropy(histogram.entropy()[3:])`` is the vocabulary with its entropies (3 special
    tokens come first).

    Raises
    ------
    ValueError
        If there are no data, or a file does not pass the checks; the message names it.

    Examples
    --------
    >>> import scdiva as sd
    >>> studies = [sd.datasets.toy(rng=1), sd.datasets.toy(rng=2)]
    >>> histogram = sd.pp.corpus_entropy(studies)
    >>> histogram == sd.pp.corpus_entropy(studies[0]) + sd.pp.corpus_entropy(studies[1])
    True

    Many files on many workers, with dask (extra ``dist``)::

        from functools import reduce
        from operator import add

        from dask.distributed import Client

        with Client() as client:  # or Client("scheduler:8786")
            histogram = reduce(add, client.gather(client.map(sd.pp.corpus_entropy, paths)))
    """
    reading = InputOptions(layer, use_raw, input, gene_ids, species, duplicates, empty="nan")
    studies = list(data) if isinstance(data, list | tuple) else [data]
    if not studies:
        raise ValueError("no files were given.")
    genes = load_vocabulary(vocabulary)
    histogram = EntropyHistogram.empty(genes.n_genes + N_SPECIAL, genes.fingerprint)
    for number, study in enumerate(studies):
        try:
            source = open_cells(study, genes, reading, ranked=False, block_rows=block_rows)
        except (KeyError, ValueError) as error:
            name = as_path(study).name if is_path(study) else f"data set {number}"
            raise ValueError(f"{name}: {error.args[0]}") from error
        _count(source, histogram, min_genes)
        source.close()
    return histogram


def _count(source: CellSource, histogram: EntropyHistogram, min_genes: int = 0) -> None:
    measured = source.measured_tokens
    for start, cells in source.expression_blocks("counting"):
        if min_genes > 0:
            cells = cells[np.flatnonzero(source.lengths[start : start + cells.shape[0]] >= min_genes)]
        histogram.update(cells, measured)


@check_arguments
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
    empty: Empty = "error",
    key_added: str = LAYER_RANK,
    copy: bool = False,
) -> AnnData | None:
    r"""Rank the genes of each cell by entropy-normalised expression.

    The score is :math:`S_g = v_g / (\max(H_g, \mathrm{floor}) + 10^{-6})` with v the log-normalised expression (target
    1e4) and H the gene's entropy (paper, appendix, eq. entropy_score; the floor is an addition that keeps rare genes
    from the top ranks). Rank 1 is the highest score; ties are ranked by token. Models rank genes themselves; use this
    call to inspect the ranks.

    The matrix is read by blocks of rows, so backed, zarr and dask data are never loaded whole. The ranks take 8 bytes
    each: AnnData keeps layers in memory even if X is backed by a file.

    Parameters
    ----------
    adata
        Cells × genes, counts or log-normalised expression.
    vocabulary
        A vocabulary, "human", the name of a bundled model, the folder of a saved model, or the file of a vocabulary.
    max_length
        Maximum number of ranked genes per cell.
    entropy_key
        Column of `adata.var` with entropies in nats, from :func:`scdiva.pp.gene_entropy`. None: entropies of the
        vocabulary, which "human" does not have.
    entropy_floor
        Minimum entropy in the denominator, in nats; 0 as in the paper.
    %(reading)s
    empty
        Cells without a known gene: raise an error, or give them no ranks ("nan").
    key_added
        Layer, and entry of `uns`, to write.
    copy
        Write into a copy and return it.

    Returns
    -------
    None, or the copy. Written are

    `adata.layers[key_added]`
        int32 CSR (n_obs, n_vars), ranks 1 to `max_length`; no entry if a gene is not expressed, unknown, or ranked
        lower. The first of several columns of one gene has its rank.
    `adata.uns[key_added]`
        `n_truncated` (cells with more known genes than `max_length`), unit of the input, fingerprint of the vocabulary,
        and the arguments.

    Raises
    ------
    KeyError, ValueError
        As :func:`scdiva.pp.match_genes`; if `adata.raw` is read and has known genes that `adata` lacks; if entropies
        are missing; if cells have no known gene.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy()
    >>> sd.pp.gene_entropy(adata)
    >>> sd.pp.entropy_serialize(adata, entropy_key="scdiva_entropy")
    >>> adata.layers["scdiva_rank"].dtype
    dtype('int32')
    """
    check_anndata(adata)
    check_least(max_length=(max_length, 1))
    reading = input_options(adata, layer, use_raw, input, empty)
    check_writable(adata, copy=copy, call="pp.entropy_serialize", layers=[key_added], uns=[key_added])
    genes = load_vocabulary(vocabulary)
    if entropy_key is None:
        denominator = score_denominator(genes.entropy, entropy_floor)
    elif entropy_key not in adata.var:
        raise no_entry("adata.var", entropy_key, adata.var.columns, "scdiva.pp.gene_entropy(adata)")
    source = open_cells(adata, genes, reading, ranked=False)
    column = _columns_of_tokens(adata, source, use_raw)
    if entropy_key is not None:
        denominator = score_denominator(_entropy_of_tokens(adata, column, entropy_key), entropy_floor)
    notes = {
        "n_truncated": 0,
        "kind": source.kind,
        "vocabulary": genes.fingerprint,
        "max_length": max_length,
        "entropy_key": entropy_key or "",
        "entropy_floor": entropy_floor,
        **reading.parameters(),
        "empty": empty,
    }
    # one allocation; concatenating parts would take twice the memory
    bound = int(np.minimum(source.lengths, max_length).sum(dtype=np.int64))
    data, indices, indptr = np.empty(bound, np.int32), np.empty(bound, np.int32), np.zeros(adata.n_obs + 1, np.int64)
    for start, cells in source.expression_blocks("ranking genes"):
        notes["n_truncated"] += int((np.diff(cells.indptr) > max_length).sum())
        bounds, tokens, _ = serialize(cells, denominator, max_length)
        first, n_rows = int(indptr[start]), len(bounds) - 1
        indptr[start + 1 : start + n_rows + 1] = first + bounds[1:]
        data[first : first + len(tokens)] = np.arange(1, len(tokens) + 1) - np.repeat(bounds[:-1], np.diff(bounds))
        indices[first : first + len(tokens)] = column[tokens]
    ranks = sp.csr_matrix((data[: indptr[-1]], indices[: indptr[-1]], indptr), shape=adata.shape)
    ranks.sort_indices()
    parts = {"layers": {key_added: ranks}, "uns": {key_added: notes}}
    return write(adata, "pp.entropy_serialize", None, None, copy=copy, **parts)


def _columns_of_tokens(adata: AnnData, source: CellSource, use_raw: bool) -> np.ndarray:
    """First column of `adata` of each token, int64 (n_tokens,); -1 if there is none."""
    tokens = tokens_of_var(adata, source.tokens, use_raw)
    if use_raw:
        check_unique(adata.var_names)
    column = first_columns(tokens, source.n_tokens)
    missing = (source.tokens >= 0) & (column[source.tokens] < 0)
    if missing.any():
        raise ValueError(
            f"adata.raw holds {int(missing.sum())} known genes that adata lacks (first: "
            f"{str(adata.raw.var_names[np.flatnonzero(missing)[0]])!r}); their ranks would have no place. "
            "Work on adata.raw.to_adata()."
        )
    return column


def _entropy_of_tokens(adata: AnnData, column: np.ndarray, key: str) -> np.ndarray:
    """Entropies in `adata.var[key]` by token, float32 (n_tokens,); 0 for tokens without a column."""
    values = np.asarray(adata.var[key], dtype=np.float32)  # pandas, or xarray if adata is lazy
    entropy = np.zeros(len(column), dtype=np.float32)
    measured = np.flatnonzero(column[N_SPECIAL:] >= 0) + N_SPECIAL
    entropy[measured] = values[column[measured]]
    bad = column[measured][~np.isfinite(entropy[measured]) | (entropy[measured] < 0)]
    if len(bad):
        raise ValueError(
            f"adata.var[{key!r}] is missing, infinite or negative for {len(bad)} of {len(measured)} known genes "
            f"(first: {str(adata.var_names[bad.min()])!r}). Compute it again with scdiva.pp.gene_entropy(adata)."
        )
    return entropy
