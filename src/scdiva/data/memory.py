"""Cells held in memory, that heads and models are fitted on; nothing is written to disk."""

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
"""Fewest cells that a model is fitted to."""


@dataclass(frozen=True)
class InMemoryCells:
    """Serialised cells in memory.

    Attributes
    ----------
    indptr, tokens, values
        As :func:`scdiva.tokenizer.serialize.serialize` returns them; no cell is empty.
    batch
        int64 `(n_cells,)`, number of the batch of each cell, from 0, ascending.
    measured
        int64, tokens that the data have a column for, ascending.
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
    """The same, as of an opened source."""

    def windows(self, n_cells: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[np.ndarray, Ragged]]:
        """Give all cells at once, as :func:`scdiva._running.run_cells` takes the windows of a source."""
        yield np.arange(self.n_cells), (self.indptr, self.tokens, self.values)

    def take(self, rows: np.ndarray, max_length: int | None = None) -> CellBatch:
        """Make a batch of cells.

        Parameters
        ----------
        rows
            Numbers of the cells.
        max_length
            Genes kept of each; None keeps all.
        """
        ragged = take_cells((self.indptr, self.tokens, self.values), rows, max_length)
        return from_ragged(*ragged, self.batch[rows])

    def subset(self, rows: np.ndarray, max_length: int | None = None) -> InMemoryCells:
        """Return some of the cells.

        Parameters
        ----------
        rows
            Their numbers, ascending.
        max_length
            Genes kept of each; None keeps all.
        """
        ragged = take_cells((self.indptr, self.tokens, self.values), rows, max_length)
        return replace(self, indptr=ragged[0], tokens=ragged[1], values=ragged[2], batch=self.batch[rows])

    def keeping(self, kept: np.ndarray) -> InMemoryCells:
        """Take away the entries that a mask, bool (T,), does not keep; cells may be left without any."""
        indptr = np.concatenate([[0], np.cumsum(kept)])[self.indptr]
        return replace(self, indptr=indptr, tokens=self.tokens[kept], values=self.values[kept])

    def matrix(self, n_tokens: int) -> sp.csr_matrix:
        """Give the expression as a matrix, cells × tokens, of the same arrays."""
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
    """Read cells into memory, ordered by batch, without those that have no known gene; block by block.

    Parameters
    ----------
    source
        The opened cells.
    batch
        Number of the batch of each, `(n_obs,)`.
    whole
        Read all genes of a cell, also those beyond what the model reads.
    trains
        Whether the cells are trained on: those left out are then warned of.
    most
        Of more cells so many are drawn, and no other is held in memory; None: all are.
    seed
        Of the draw.

    Returns
    -------
    The cells, and the row of the source that each comes from.

    Raises
    ------
    ValueError
        If fewer than 20 cells have a known gene.
    """
    wanted = np.flatnonzero(source.lengths > 0)
    if len(wanted) < LEAST_CELLS:
        what = "training" if trains else "a fit to them"
        raise ValueError(f"{len(wanted)} cells have a known gene; {what} needs {LEAST_CELLS} or more.")
    if whole:
        source = replace(source, max_length=source.vocabulary.n_genes)
    if trains:
        warn_left_out("adata", source.n_obs - len(wanted), source.n_obs, 1)
    wanted = wanted[np.argsort(batch[wanted], kind="stable")]
    if most is not None and len(wanted) > most:
        wanted = wanted[np.sort(np.random.default_rng([seed, 1]).choice(len(wanted), most, replace=False))]
    kept, parts = np.zeros(source.n_obs, dtype=bool), []
    kept[wanted] = True
    with progress_bar(desc="reading", unit="cell", total=source.n_obs) as bar:
        for rows, part in source.windows(source.block_rows, on_read=bar.update):
            parts.append(part if kept[rows].all() else take_cells(part, np.flatnonzero(kept[rows])))
    indptr = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(part[0]) for part in parts]))])
    tokens, values = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    ragged = take_cells((indptr, tokens, values), np.searchsorted(np.flatnonzero(kept), wanted))
    names, numbers = np.unique(batch[wanted], return_inverse=True)
    return InMemoryCells(*ragged, numbers, source.measured_tokens, len(names)), wanted


def means_by(x: np.ndarray, number: np.ndarray, n: int) -> np.ndarray:
    """Give the mean of the rows of each of n groups, float64 `(n, width)`; of a group without rows 0."""
    sums = np.zeros((n, x.shape[1]))
    np.add.at(sums, number, x)
    return sums / np.maximum(np.bincount(number, minlength=n), 1)[:, None]
