"""Tables of reconstructed and imputed expression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from numpy.typing import NDArray

from scdiva._checks import check_arguments, check_least, no_entry, refuse_absent
from scdiva._constants import IMPUTED, MASKED, RANK, RECONSTRUCTED, TRUE, TRUE_RANK, UNS
from scdiva.data.results import check_anndata, our_uns


@check_arguments
def reconstruction_df(adata: AnnData, *, key: str = RECONSTRUCTED) -> pd.DataFrame:
    """Reconstructed cells compared with the input cells, one row per cell and rank.

    Parameters
    ----------
    adata
        Data with a reconstruction by `scdiva.tl.reconstruct`, or a subset of its cells.
    key
        `key_added` of that call.

    Returns
    -------
    `obs_name` (categorical), `rank` (int32, from 1), `gene` and `reconstructed_gene` (categorical, var names), the
    genes at this rank in the input and in the reconstructed cell; `value` and `reconstructed_value` (float32), their
    log-normalised values; and `masked` (bool), whether the input gene was masked. Sorted by cell and rank. If the
    reconstructed gene is not in adata, its name and value are missing.

    Raises
    ------
    KeyError
        If there is no such reconstruction.
    ValueError
        If names of cells or genes repeat, the layers do not match, or genes were removed afterwards.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(12, 60)
    >>> sd.tl.reconstruct(adata)
    >>> sd.get.reconstruction_df(adata).columns.to_list()
    ['obs_name', 'rank', 'gene', 'reconstructed_gene', 'value', 'reconstructed_value', 'masked']
    """
    check_anndata(adata)
    for names, what in ((adata.obs_names, "obs_names"), (adata.var_names, "var_names")):
        if not names.is_unique:
            raise ValueError(f"adata.{what} repeat names: call adata.{what}_make_unique() first.")
    found = recovered_of(adata, key)
    return pd.DataFrame(
        {
            "obs_name": pd.Categorical.from_codes(found.cell, adata.obs_names),
            "rank": found.rank,
            "gene": pd.Categorical.from_codes(found.gene, adata.var_names),
            "reconstructed_gene": pd.Categorical.from_codes(found.gene_there, adata.var_names),
            "value": found.value,
            "reconstructed_value": found.value_there,
            "masked": found.masked,
        }
    )


@check_arguments
def reconstructed_genes(
    adata: AnnData, *, key: str = RECONSTRUCTED, min_cells: int = 10, min_recall: float = 0.5
) -> list[str]:
    """Genes that are frequently recovered when they are masked.

    The recall of a gene is the fraction of the cells with this gene masked in which the reconstruction contains it, at
    any rank and with any value. Widely expressed genes are recovered more easily, so only compare lists with the same
    `min_recall` and the same share of masked genes.

    Parameters
    ----------
    adata
        Data with a reconstruction by `scdiva.tl.reconstruct`, or a subset of its cells.
    key
        `key_added` of that call.
    min_cells
        Minimum number of cells in which a gene was masked.
    min_recall
        Minimum recall, 0 to 1.

    Returns
    -------
    Var names, in their order.

    Raises
    ------
    KeyError
        If there is no such reconstruction.
    ValueError
        If `min_cells` is below 1, `min_recall` is not between 0 and 1, no gene was masked in `min_cells` cells, the
        layers do not match, or genes were removed afterwards.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(20, 60)
    >>> sd.tl.reconstruct(adata)
    >>> genes = sd.get.reconstructed_genes(adata, min_cells=3)
    >>> set(genes) <= set(adata.var_names)
    True
    """
    check_anndata(adata)
    check_least(min_cells=(min_cells, 1))
    if not 0 <= min_recall <= 1:
        raise ValueError(f"min_recall must be between 0 and 1, got {min_recall}.")
    genes = recovered_of(adata, key)
    n_masked = np.bincount(genes.gene[genes.masked], minlength=adata.n_vars)
    if n_masked.max(initial=0) < min_cells:
        raise ValueError(
            f"no gene was masked in {min_cells} cells, the most in {n_masked.max(initial=0)}: take a lower min_cells, "
            "or reconstruct more cells with a higher mask_ratio."
        )
    n_found = np.bincount(genes.gene[genes.masked & (genes.reconstructed_rank > 0)], minlength=adata.n_vars)
    kept = (n_masked >= min_cells) & (n_found / np.maximum(n_masked, 1) >= min_recall)
    return list(adata.var_names[kept])


@check_arguments
def imputed_df(adata: AnnData, genes: Sequence[str] | str | None = None, *, key: str = IMPUTED) -> pd.DataFrame:
    """Imputed values, one row per cell and one column per gene.

    Parameters
    ----------
    adata
        Data with a result of `scdiva.tl.impute`, or a subset of its cells.
    genes
        Names of genes, in the order of the columns. None: all imputed genes.
    key
        `key_added` of that call; with the suffix ``"_sd"``, the spread around the values.

    Returns
    -------
    float32, indexed by obs names, with gene names as columns: log1p of counts per 10,000, or its standard deviation.

    Raises
    ------
    KeyError
        If there is no such result, or a gene was not imputed.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> sd.tl.impute(adata, list(adata.var_names[:2]))
    >>> sd.get.imputed_df(adata).shape
    (60, 2)
    >>> adata.obs["imputed"] = sd.get.imputed_df(adata)[adata.var_names[0]]  # for scanpy plots
    """
    check_anndata(adata)
    found = adata.obsm.get(key)
    if not isinstance(found, pd.DataFrame):
        if key not in adata.layers:
            present = [*adata.obsm, *adata.layers]
            raise no_entry("adata, in obsm and layers,", key, present, "scdiva.tl.impute(adata)")
        layer = np.asarray(adata.layers[key])
        known = ~np.isnan(layer).all(axis=0)
        found = pd.DataFrame(layer[:, known], adata.obs_names, adata.var_names[known])
    if genes is None:
        return found.copy()
    names = [genes] if isinstance(genes, str) else list(genes)
    refuse_absent(names, found.columns, "genes were not imputed", ": call scdiva.tl.impute(adata, [...]) with them")
    return found[names].copy()


class Recovered(NamedTuple):
    """Genes of the input cells, one element for each cell and rank, and their reconstruction."""

    cell: NDArray[np.intp]
    gene: NDArray[np.intp]
    """Column of the gene."""
    rank: NDArray[np.int32]
    """Rank in the input cell, from 1."""
    reconstructed_rank: NDArray[np.int32]
    """Rank in the reconstructed cell; 0: not in it."""
    value: NDArray[np.float32]
    reconstructed_value: NDArray[np.float32]
    """NaN: not in the reconstructed cell."""
    masked: NDArray[np.bool_]
    gene_there: NDArray[np.intp]
    """Column of the gene at this rank of the reconstructed cell; -1: none."""
    value_there: NDArray[np.float32]
    """Value of that gene; NaN: none."""


def parameters_of(adata: AnnData, key: str) -> Mapping[str, Any]:
    """Parameters of a reconstruction.

    Parameters
    ----------
    adata
        Data with the reconstruction.
    key
        `key_added` of that call.

    Raises
    ------
    KeyError
        If a layer or the parameters are missing.
    """
    wanted = [key, *(f"{key}_{ending}" for ending in (RANK, TRUE, TRUE_RANK, MASKED))]
    missing = [name for name in wanted if name not in adata.layers]
    ours = our_uns(adata)
    if missing or key not in ours:
        where = f"adata.layers has no {missing[0]!r}" if missing else f"adata.uns[{UNS!r}] has no {key!r}"
        raise KeyError(f"{where}: call scdiva.tl.reconstruct(adata, ..., key_added={key!r}) first.")
    return dict(ours[key])


def recovered_of(adata: AnnData, key: str) -> Recovered:
    """Input and reconstructed cells, gene by gene and rank by rank.

    Parameters
    ----------
    adata
        Data with the reconstruction, or a subset of its cells.
    key
        `key_added` of that call.

    Returns
    -------
    One element for each gene, and so each rank, of each input cell.

    Raises
    ------
    KeyError
        If there is no such reconstruction.
    ValueError
        If the layers do not match, or genes were removed afterwards.
    """
    parameters_of(adata, key)
    true = _entries(adata, f"{key}_{TRUE_RANK}")
    order = np.lexsort((true.data, true.row))
    cell, gene, rank = true.row[order].astype(np.intp), true.col[order].astype(np.intp), true.data[order]
    n_genes = np.bincount(cell, minlength=adata.n_obs)
    starts = np.cumsum(n_genes) - n_genes
    broken = rank != np.arange(len(rank)) - starts[cell] + 1
    if broken.any():
        cells = np.unique(cell[broken])
        raise ValueError(
            f"adata.layers[{f'{key}_{TRUE_RANK}'!r}] skips or repeats ranks in {len(cells):,} of {adata.n_obs:,} "
            f"cells (first: {adata.obs_names[cells[0]]!r}). Were genes dropped after scdiva.tl.reconstruct? Keep all "
            "columns, or reconstruct the cells anew."
        )
    masked = _values_at(adata, f"{key}_{MASKED}", cell, gene).astype(bool)
    other = _entries(adata, f"{key}_{RANK}")
    at = starts[other.row] + other.data - 1
    ranked = (other.data >= 1) & (other.data <= n_genes[other.row])
    for ending, fits in (
        (MASKED, _entries(adata, f"{key}_{MASKED}").nnz == masked.sum()),
        (RANK, ranked.all() and len(np.unique(at)) == len(at)),
    ):
        if not fits:
            raise ValueError(
                f"adata.layers[{f'{key}_{ending}'!r}] holds other genes or ranks than the cells as they were: it was "
                "changed since scdiva.tl.reconstruct wrote it. Reconstruct the cells anew."
            )
    gene_there, value_there = np.full(len(gene), -1, dtype=np.intp), np.full(len(gene), np.nan, dtype=np.float32)
    gene_there[at] = other.col
    filled = gene_there >= 0
    value_there[filled] = _values_at(adata, key, cell[filled], gene_there[filled])
    reconstructed_rank = _values_at(adata, f"{key}_{RANK}", cell, gene).astype(np.int32)
    value = _values_at(adata, key, cell, gene).astype(np.float32)
    value[reconstructed_rank == 0] = np.nan
    true_value = _values_at(adata, f"{key}_{TRUE}", cell, gene)
    return Recovered(
        cell, gene, rank.astype(np.int32), reconstructed_rank, true_value, value, masked, gene_there, value_there
    )


def _entries(adata: AnnData, key: str) -> sp.coo_matrix:
    """Stored entries of a layer without zeros."""
    entries = sp.coo_matrix(adata.layers[key])
    entries.eliminate_zeros()
    return entries


def _values_at(adata: AnnData, key: str, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> NDArray[Any]:
    """Entries of a layer at cells and genes; 0 if not stored."""
    matrix = sp.csr_matrix(adata.layers[key]).sorted_indices()  # look-up in unsorted rows is slow
    return np.asarray(matrix[rows, columns]).ravel() if len(rows) else np.zeros(0, matrix.dtype)
