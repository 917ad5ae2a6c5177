"""Reconstructed cells as they stand in AnnData, place by place and gene by gene."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva._constants import HIDDEN, RANK, TRUE, TRUE_RANK, UNS

if TYPE_CHECKING:
    from anndata import AnnData


class Places(NamedTuple):
    """The places of all cells, one element each, by cell and place."""

    cell: NDArray[np.intp]
    place: NDArray[np.int32]
    gene: NDArray[np.intp]
    """Column of the gene that stands there in the cell as it was."""
    reconstructed_gene: NDArray[np.intp]
    """Column of the gene that the reconstructed cell has there; -1: none."""
    value: NDArray[np.float32]
    reconstructed_value: NDArray[np.float32]
    """Of the gene reconstructed there; NaN: none."""
    hidden: NDArray[np.bool_]


class Recovered(NamedTuple):
    """The genes of all cells as they were, one element each, by cell and place, and what became of them."""

    cell: NDArray[np.intp]
    gene: NDArray[np.intp]
    rank: NDArray[np.int32]
    reconstructed_rank: NDArray[np.int32]
    """0: the reconstructed cell does not have the gene."""
    value: NDArray[np.float32]
    reconstructed_value: NDArray[np.float32]
    """NaN where the reconstructed cell does not have the gene."""
    hidden: NDArray[np.bool_]


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
    wanted = [key, *(f"{key}_{ending}" for ending in (RANK, TRUE, TRUE_RANK, HIDDEN))]
    missing = [name for name in wanted if name not in adata.layers]
    ours = adata.uns.get(UNS, {})
    if missing or not isinstance(ours, Mapping) or key not in ours:
        where = f"adata.layers has no {missing[0]!r}" if missing else f"adata.uns[{UNS!r}] has no {key!r}"
        raise KeyError(f"{where}: call scdiva.tl.reconstruct(adata, ..., key_added={key!r}) first.")
    found: Mapping[str, Any] = ours[key]
    return found


def places_of(adata: AnnData, key: str) -> Places:
    """Set the cells as they were beside the reconstructed ones, place by place.

    Parameters
    ----------
    adata
        Cells that `scdiva.tl.reconstruct` wrote to, or some of them.
    key
        Its `key_added`.

    Returns
    -------
    One element for each place of each cell. Places count from 1.

    Raises
    ------
    KeyError
        If there is no such reconstruction.
    ValueError
        If the layers do not belong together, or columns were dropped since they were written.
    """
    parameters_of(adata, key)
    cell, gene, place, starts = _sequences(adata, key)
    other = _entries(adata, f"{key}_{RANK}")
    n = np.diff(starts)[other.row]
    bad = (other.data < 1) | (other.data > n)
    if bad.any():
        at = int(np.argmax(bad))
        raise ValueError(
            f"adata.layers[{f'{key}_{RANK}'!r}] has {bad.sum():,} places that the cell as it was does not have (first: "
            f"{other.data[at]} in cell {adata.obs_names[other.row[at]]!r} with {n[at]} genes): {_ANEW}"
        )
    at = starts[other.row] + other.data - 1
    if np.bincount(at, minlength=1).max() > 1:
        first = at[np.argmax(np.bincount(at)[at] > 1)]
        raise ValueError(
            f"adata.layers[{f'{key}_{RANK}'!r}] has two genes at one place (first: place {place[first]} of cell "
            f"{adata.obs_names[cell[first]]!r}): {_ANEW}"
        )
    reconstructed = np.full(len(gene), -1, dtype=np.intp)
    reconstructed[at] = other.col
    there = reconstructed >= 0
    value = np.full(len(gene), np.nan, dtype=np.float32)
    value[there] = _values_at(adata, key, cell[there], reconstructed[there])
    return Places(
        cell,
        place,
        gene,
        reconstructed,
        _values_at(adata, f"{key}_{TRUE}", cell, gene),
        value,
        _hidden_at(adata, key, cell, gene),
    )


def recovered_of(adata: AnnData, key: str) -> Recovered:
    """Look up each gene of the cells as they were in the reconstructed cells.

    Parameters
    ----------
    adata
        Cells that `scdiva.tl.reconstruct` wrote to, or some of them.
    key
        Its `key_added`.

    Returns
    -------
    One element for each gene of each cell as it was.

    Raises
    ------
    KeyError, ValueError
        As :func:`places_of`.
    """
    places = places_of(adata, key)
    rank = _values_at(adata, f"{key}_{RANK}", places.cell, places.gene).astype(np.int32)
    value = _values_at(adata, key, places.cell, places.gene).astype(np.float32)
    value[rank == 0] = np.nan
    return Recovered(places.cell, places.gene, places.place, rank, places.value, value, places.hidden)


_ANEW = "they were changed since scdiva.tl.reconstruct wrote them. Reconstruct the cells anew."


def _entries(adata: AnnData, key: str) -> sp.coo_matrix:
    """Give what a layer stores, but for zeros."""
    entries = sp.coo_matrix(adata.layers[key])
    entries.eliminate_zeros()
    return entries


def _values_at(adata: AnnData, key: str, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> NDArray[Any]:
    """Read a layer at some cells and genes; what it does not store is 0."""
    matrix = sp.csr_matrix(adata.layers[key]).sorted_indices()  # unsorted, each value is searched for by all of a row
    return np.asarray(matrix[rows, columns]).ravel() if len(rows) else np.zeros(0, matrix.dtype)


def _sequences(
    adata: AnnData, key: str
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int32], NDArray[np.intp]]:
    """Give cell, gene and place of each place, and where the places of each cell begin, (n_obs + 1,)."""
    ranks = _entries(adata, f"{key}_{TRUE_RANK}")
    order = np.lexsort((ranks.data, ranks.row))
    cell, gene, place = (part[order] for part in (ranks.row, ranks.col, ranks.data))
    starts = np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=adata.n_obs))]).astype(np.intp)
    broken = place != np.arange(len(place)) - starts[cell] + 1
    if broken.any():
        cells = np.unique(cell[broken])
        raise ValueError(
            f"adata.layers[{f'{key}_{TRUE_RANK}'!r}] skips or repeats places in {len(cells):,} of {adata.n_obs:,} "
            f"cells (first: {adata.obs_names[cells[0]]!r}). Were genes dropped after scdiva.tl.reconstruct? Keep all "
            "columns, or reconstruct the cells anew."
        )
    return cell.astype(np.intp), gene.astype(np.intp), place.astype(np.int32), starts


def _hidden_at(adata: AnnData, key: str, cell: NDArray[np.intp], gene: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Say at which places the gene was hidden."""
    hidden = _values_at(adata, f"{key}_{HIDDEN}", cell, gene).astype(bool)
    n = _entries(adata, f"{key}_{HIDDEN}").nnz
    if n != hidden.sum():
        raise ValueError(
            f"adata.layers[{f'{key}_{HIDDEN}'!r}] hides {n:,} genes, of which the cells as they were have "
            f"{hidden.sum():,}: {_ANEW}"
        )
    return hidden
