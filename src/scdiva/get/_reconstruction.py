"""Cells as they were, as the model reconstructed them, and what it expects of genes that dropped out."""

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
    """List cells as they were beside reconstructed ones, one row per cell and rank.

    Parameters
    ----------
    adata
        Data that `scdiva.tl.reconstruct` wrote to, or some of its cells.
    key
        Its `key_added`.

    Returns
    -------
    `obs_name` (categorical), `rank` (int32, from 1), `gene` and `reconstructed_gene` (categorical, var
    names), which stand there in the cell as it was and in the reconstructed one; `value` and `reconstructed_value`
    (float32), the log-normalised values of these two genes; and `masked` (bool), whether the gene there was masked. By
    cell and rank. Where the reconstructed cell has no gene of adata, its name and value are missing.

    Raises
    ------
    KeyError
        If there is no such reconstruction.
    ValueError
        If names of cells or genes repeat, the layers do not belong together, or columns were dropped since.

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
    """List the genes that are often recovered where they were masked.

    Of the cells in which a gene was masked, its recall is the share whose reconstruction has it, at whatever rank. It
    says nothing of the gene's value. A gene that most cells express is easily found, so compare only lists made with
    the same `min_recall` and the same share of masked genes.

    Parameters
    ----------
    adata
        Data that `scdiva.tl.reconstruct` wrote to, or some of its cells.
    key
        Its `key_added`.
    min_cells
        Cells in which a gene must have been masked.
    min_recall
        Least recall, 0 to 1.

    Returns
    -------
    Var names, in their order; none where no gene is found again so often.

    Raises
    ------
    KeyError
        If there is no such reconstruction.
    ValueError
        If `min_cells` is below 1, `min_recall` is not between 0 and 1, no gene was masked in so many cells, the layers
        do not belong together, or columns were dropped since.

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
    """List imputed values, one row per cell and one column per gene.

    Parameters
    ----------
    adata
        Data that `scdiva.tl.impute` wrote to, or some of its cells.
    genes
        Names of genes, in the order wanted; None gives all that were imputed.
    key
        Its `key_added`; with ``"_sd"`` behind it the spread around the values.

    Returns
    -------
    float32, index obs names, columns names of genes: log1p of counts per ten thousand, or its standard deviation.

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
    >>> adata.obs["imputed"] = sd.get.imputed_df(adata)[adata.var_names[0]]  # for plots of scanpy
    """
    check_anndata(adata)
    found = adata.obsm.get(key)
    if not isinstance(found, pd.DataFrame):
        if key not in adata.layers:
            there = [*adata.obsm, *adata.layers]
            raise no_entry("adata, in obsm and layers,", key, there, "scdiva.tl.impute(adata)")
        layer = np.asarray(adata.layers[key])
        known = ~np.isnan(layer).all(axis=0)
        found = pd.DataFrame(layer[:, known], adata.obs_names, adata.var_names[known])
    if genes is None:
        return found.copy()
    names = [genes] if isinstance(genes, str) else list(genes)
    refuse_absent(names, found.columns, "genes were not imputed", ": call scdiva.tl.impute(adata, [...]) with them")
    return found[names].copy()


class Recovered(NamedTuple):
    """The genes of all cells as they were, one element each, by cell and rank, and what became of them."""

    cell: NDArray[np.intp]
    gene: NDArray[np.intp]
    """Column of the gene."""
    rank: NDArray[np.int32]
    """In the cell as it was, from 1."""
    reconstructed_rank: NDArray[np.int32]
    """0: the reconstructed cell does not have the gene."""
    value: NDArray[np.float32]
    reconstructed_value: NDArray[np.float32]
    """NaN where the reconstructed cell does not have the gene."""
    masked: NDArray[np.bool_]
    gene_there: NDArray[np.intp]
    """Column of the gene that the reconstructed cell has at this rank; -1: none."""
    value_there: NDArray[np.float32]
    """Its value; NaN: none."""


def parameters_of(adata: AnnData, key: str) -> Mapping[str, Any]:
    """Give what `scdiva.tl.reconstruct` noted of a reconstruction.

    Parameters
    ----------
    adata
        Cells that it wrote to.
    key
        Its `key_added`.

    Raises
    ------
    KeyError
        If a layer or the note is missing.
    """
    wanted = [key, *(f"{key}_{ending}" for ending in (RANK, TRUE, TRUE_RANK, MASKED))]
    missing = [name for name in wanted if name not in adata.layers]
    ours = our_uns(adata)
    if missing or key not in ours:
        where = f"adata.layers has no {missing[0]!r}" if missing else f"adata.uns[{UNS!r}] has no {key!r}"
        raise KeyError(f"{where}: call scdiva.tl.reconstruct(adata, ..., key_added={key!r}) first.")
    return dict(ours[key])


def recovered_of(adata: AnnData, key: str) -> Recovered:
    """Set the cells as they were beside the reconstructed ones, gene by gene and rank by rank.

    Parameters
    ----------
    adata
        Cells that `scdiva.tl.reconstruct` wrote to, or some of them.
    key
        Its `key_added`.

    Returns
    -------
    One element for each gene, and so each rank, of each cell as it was.

    Raises
    ------
    KeyError
        If there is no such reconstruction.
    ValueError
        If the layers do not belong together, or columns were dropped since they were written.
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
    there = gene_there >= 0
    value_there[there] = _values_at(adata, key, cell[there], gene_there[there])
    reconstructed_rank = _values_at(adata, f"{key}_{RANK}", cell, gene).astype(np.int32)
    value = _values_at(adata, key, cell, gene).astype(np.float32)
    value[reconstructed_rank == 0] = np.nan
    true_value = _values_at(adata, f"{key}_{TRUE}", cell, gene)
    return Recovered(
        cell, gene, rank.astype(np.int32), reconstructed_rank, true_value, value, masked, gene_there, value_there
    )


def _entries(adata: AnnData, key: str) -> sp.coo_matrix:
    """Give what a layer stores, but for zeros."""
    entries = sp.coo_matrix(adata.layers[key])
    entries.eliminate_zeros()
    return entries


def _values_at(adata: AnnData, key: str, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> NDArray[Any]:
    """Read a layer at some cells and genes; what it does not store is 0."""
    matrix = sp.csr_matrix(adata.layers[key]).sorted_indices()  # unsorted, each value is searched for by all of a row
    return np.asarray(matrix[rows, columns]).ravel() if len(rows) else np.zeros(0, matrix.dtype)
