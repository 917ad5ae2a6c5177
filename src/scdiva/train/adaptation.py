"""Cells held in memory, that heads and models are fitted on; nothing is written to disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scdiva._rng import step_seed
from scdiva._settings import progress_bar
from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.cells import CellSource, Ragged
from scdiva.data.corpus import take_cells, warn_left_out
from scdiva.models.inference import read_out, runs_transformer
from scdiva.models.scdiva import ScDiVa

LEAST_CELLS = 20
"""Fewest cells that a model is fitted to."""


class Split(NamedTuple):
    """Numbers of the cells that are trained on, and of those held out; both ascending."""

    training: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True)
class AdaptationCells:
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

    @property
    def n_obs(self) -> int:
        """The same, as of an opened source."""
        return len(self.batch)

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

    def subset(self, rows: np.ndarray, max_length: int | None = None) -> AdaptationCells:
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

    def split(self, held_out: float, seed: int) -> Split:
        """Hold a share of the cells out, at least one, and leave at least one.

        Parameters
        ----------
        held_out
            Share, above 0 and below 1.
        seed
            Of the choice.
        """
        order = np.random.default_rng(step_seed(seed, 0, "split")).permutation(self.n_cells)
        n = min(max(1, round(held_out * self.n_cells)), self.n_cells - 1)
        return Split(np.sort(order[n:]), np.sort(order[:n]))


def read_cells(
    source: CellSource, batch: np.ndarray, *, whole: bool = False, trains: bool = True, least: int = LEAST_CELLS
) -> tuple[AdaptationCells, np.ndarray]:
    """Read all cells into memory, ordered by batch, without those that have no known gene.

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
    least
        Cells with a known gene that are needed.

    Returns
    -------
    The cells, and the row of the source that each comes from.

    Raises
    ------
    ValueError
        If too few cells have a known gene.
    """
    n_known = int((source.lengths > 0).sum())
    if n_known < least:
        what = "training" if trains else "a fit to them"
        raise ValueError(f"{n_known} cells have a known gene; {what} needs {least} or more.")
    if whole:
        source = replace(source, max_length=source.vocabulary.n_genes)
    if trains:
        warn_left_out("adata", source.n_obs - n_known, source.n_obs, 1)
    with progress_bar(desc="reading", unit="cell", total=source.n_obs) as bar:
        (rows, ragged), *_ = source.windows(source.n_obs, on_read=bar.update)
    names, kept = np.unique(batch[rows], return_inverse=True)
    order = np.argsort(kept, kind="stable")
    cells = AdaptationCells(*take_cells(ragged, order), kept[order], source.measured_tokens, len(names))
    return cells, rows[order]


@torch.no_grad()
def encoded(
    model: ScDiVa, cells: AdaptationCells, block: int = 1024, *, what: Literal["state", "embedding"] = "state"
) -> Tensor:
    """Cell states, or embeddings (`"embedding"`), `(n_cells, dim)`, on the CPU."""
    device, parts = next(model.parameters()).device, []
    size = 1 if runs_transformer(model) and device.type == "cpu" else block
    for start in range(0, cells.n_cells, size):
        batch = cells.take(np.arange(start, min(start + size, cells.n_cells))).to(device)
        parts.append(read_out(model, batch.packed, what).float().cpu())
    return torch.cat(parts)
