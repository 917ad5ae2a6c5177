"""Serialised cells in memory, to fit heads and models to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sp

from scdiva._settings import progress_bar
from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.cells import CellSource, Ragged, take_cells
from scdiva.data.corpus import warn_left_out

LEAST_CELLS = 20
"""Minimum number of cells to fit a model to."""


@dataclass(frozen=True)
class InMemoryCells:
    """Serialised cells in memory.

    Attributes
    ----------
    indptr, tokens, values
        As :func:`scdiva.tokenizer.serialize.serialize` returns them; no cell is empty.
    batch
        int64 `(n_cells,)`, batch number of each cell, from 0, ascending.
    measured
        int64, tokens of the columns of the data, ascending.
    n_batches
        Number of batches.
    """

    indptr: np.ndarray
    tokens: np.ndarray
    values: np.ndarray
    batch: np.ndarray
    measured: np.ndarray
    n_batches: int

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return len(self.batch)

    n_obs = n_cells
    """The same, under the name that an opened source uses."""

    def windows(self, n_cells: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[np.ndarray, Ragged]]:
        """Yield all cells in one window, see :meth:`scdiva.data.cells.CellSource.windows`."""
        yield np.arange(self.n_cells), (self.indptr, self.tokens, self.values)

    def take(self, rows: np.ndarray, max_length: int | None = None) -> CellBatch:
        """Batch of the cells `rows`, each cut to its first `max_length` genes (None: all)."""
        ragged = take_cells((self.indptr, self.tokens, self.values), rows, max_length)
        return from_ragged(*ragged, self.batch[rows])

    def subset(self, rows: np.ndarray, max_length: int | None = None) -> InMemoryCells:
        """Cells `rows` (ascending), each cut to its first `max_length` genes (None: all)."""
        indptr, tokens, values = take_cells((self.indptr, self.tokens, self.values), rows, max_length)
        return replace(self, indptr=indptr, tokens=tokens, values=values, batch=self.batch[rows])

    def keeping(self, kept: np.ndarray) -> InMemoryCells:
        """Keep the entries of a mask, bool (T,); cells may become empty."""
        indptr = np.concatenate([[0], np.cumsum(kept)])[self.indptr]
        return replace(self, indptr=indptr, tokens=self.tokens[kept], values=self.values[kept])

    def matrix(self, n_tokens: int) -> sp.csr_matrix:
        """Expression as CSR matrix (cells, tokens), which shares memory with the cells."""
        return sp.csr_matrix((self.values, self.tokens, self.indptr), shape=(self.n_cells, n_tokens))


def read_cells(
    source: CellSource,
    batch: np.ndarray,
    *,
    whole: bool = False,
    trains: bool = True,
    only: np.ndarray | None = None,
    most: int | None = None,
    balanced: np.ndarray | None = None,
    seed: int = 0,
) -> tuple[InMemoryCells, np.ndarray]:
    """Read cells into memory by blocks, ordered by batch; cells without a known gene are skipped.

    Parameters
    ----------
    source
        Opened cells.
    batch
        Batch number of each cell, `(n_obs,)`.
    whole
        Whether to read all genes of a cell rather than the `max_length` genes that the model reads.
    trains
        Whether the cells are used for training; skipped cells then cause a warning.
    only
        bool `(n_obs,)`, the cells to read; None: all.
    most
        Maximum number of cells; more are subsampled, and only the sample is held in memory. None: no maximum.
    balanced
        Group number of each cell, `(n_obs,)`: the sample takes equally many cells of each group, or all cells of a
        group that has fewer. None: the sample is uniform.
    seed
        Seed of the subsample.

    Returns
    -------
    The cells, and their rows in the source.

    Raises
    ------
    ValueError
        If fewer than 20 cells have a known gene.
    """
    chosen = np.flatnonzero(source.lengths > 0)
    if len(chosen) < LEAST_CELLS:
        what = "training" if trains else "a fit to them"
        raise ValueError(f"{len(chosen)} cells have a known gene; {what} needs {LEAST_CELLS} or more.")
    if whole:
        source = replace(source, max_length=source.vocabulary.n_genes)
    if trains:
        warn_left_out("adata", source.n_obs - len(chosen), source.n_obs, 1)
    if only is not None:
        chosen = chosen[only[chosen]]
    if balanced is not None and most is not None:
        chosen = chosen[balanced_sample(balanced[chosen], most, np.random.default_rng([seed, 1]))]
    chosen = chosen[np.argsort(batch[chosen], kind="stable")]
    if most is not None and len(chosen) > most:
        chosen = chosen[np.sort(np.random.default_rng([seed, 1]).choice(len(chosen), most, replace=False))]
    # every cell is written to its place at once: only one block is ever held twice
    place = np.full(source.n_obs, -1)
    place[chosen] = np.arange(len(chosen))
    room = np.minimum(source.lengths[chosen], source.max_length).astype(np.int64)
    starts, lengths = (np.cumsum(room) - room).tolist(), np.zeros(len(chosen), dtype=np.int64)
    tokens, values = np.empty(room.sum(), dtype=np.int32), np.empty(room.sum(), dtype=np.float32)
    with progress_bar(desc="reading", unit="cell", total=source.n_obs) as bar:
        for rows, (bounds, *block) in source.windows(source.block_rows, on_read=bar.update):
            for i, first, last in zip(place[rows].tolist(), bounds.tolist(), bounds[1:].tolist(), strict=False):
                if i >= 0:
                    lengths[i] = last - first
                    at = slice(starts[i], starts[i] + last - first)
                    tokens[at], values[at] = block[0][first:last], block[1][first:last]
    if (lengths > room).any():
        raise ValueError("the cells were changed while they were read: call again once the data are complete.")
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    if indptr[-1] < len(tokens):  # several columns of one gene were added
        for array in (tokens, values):
            for at, start, length in zip(indptr.tolist(), starts, lengths.tolist(), strict=False):
                array[at : at + length] = array[start : start + length]
        tokens, values = tokens[: indptr[-1]], values[: indptr[-1]]
    names, numbers = np.unique(batch[chosen], return_inverse=True)
    return InMemoryCells(indptr, tokens, values, numbers, source.measured_tokens, len(names)), chosen


def balanced_sample(group: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Draw equally many cells of each group, or all cells of a group that has fewer.

    Parameters
    ----------
    group
        Group number of each cell, `(n_cells,)`.
    most
        Maximum number of cells.
    rng
        Source of the draw.

    Returns
    -------
    Cell numbers, ascending; all cells if there are at most `most`.
    """
    if len(group) <= most:
        return np.arange(len(group))
    # groups take turns: one cell of each, a second of each, and so on
    order = rng.permutation(len(group))
    order = order[np.argsort(group[order], kind="stable")]
    ordered = group[order]
    turn = np.arange(len(group)) - np.searchsorted(ordered, ordered)
    return np.sort(order[np.argsort(turn, kind="stable")[:most]])


def means_by(x: np.ndarray, number: np.ndarray, n: int) -> np.ndarray:
    """Mean of the rows of `x` in each of n groups, float64 `(n, width)`; 0 for a group without rows."""
    sums = np.zeros((n, x.shape[1]))
    np.add.at(sums, number, x)
    return sums / np.maximum(np.bincount(number, minlength=n), 1)[:, None]
