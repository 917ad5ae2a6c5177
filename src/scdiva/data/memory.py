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
    most: int | None = None,
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
    most
        Maximum number of cells; more are subsampled, and only the sample is held in memory. None: no maximum.
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
    chosen = chosen[np.argsort(batch[chosen], kind="stable")]
    if most is not None and len(chosen) > most:
        chosen = chosen[np.sort(np.random.default_rng([seed, 1]).choice(len(chosen), most, replace=False))]
    kept, parts = np.zeros(source.n_obs, dtype=bool), []
    kept[chosen] = True
    with progress_bar(desc="reading", unit="cell", total=source.n_obs) as bar:
        for rows, part in source.windows(source.block_rows, on_read=bar.update):
            parts.append(part if kept[rows].all() else take_cells(part, np.flatnonzero(kept[rows])))
    indptr = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(part[0]) for part in parts]))])
    tokens, values = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    ragged = take_cells((indptr, tokens, values), np.searchsorted(np.flatnonzero(kept), chosen))
    names, numbers = np.unique(batch[chosen], return_inverse=True)
    return InMemoryCells(*ragged, numbers, source.measured_tokens, len(names)), chosen


def means_by(x: np.ndarray, number: np.ndarray, n: int) -> np.ndarray:
    """Mean of the rows of `x` in each of n groups, float64 `(n, width)`; 0 for a group without rows."""
    sums = np.zeros((n, x.shape[1]))
    np.add.at(sums, number, x)
    return sums / np.maximum(np.bincount(number, minlength=n), 1)[:, None]
