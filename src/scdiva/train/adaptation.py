"""Cells held in memory, that heads and models are fitted on; nothing is written to disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scdiva._rng import step_seed
from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.packed import take_cells
from scdiva.models.inference import read_out, runs_transformer
from scdiva.models.scdiva import ScDiVa


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

    def subset(self, rows: np.ndarray) -> AdaptationCells:
        """Return some of the cells.

        Parameters
        ----------
        rows
            Their numbers, ascending.
        """
        ragged = take_cells((self.indptr, self.tokens, self.values), rows)
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


@torch.no_grad()
def encoded(
    model: ScDiVa, cells: AdaptationCells, block: int = 1024, *, what: Literal["state", "lat"] = "state"
) -> Tensor:
    """Cell states, or embeddings (`"lat"`), `(n_cells, dim)`, on the CPU."""
    device, parts = next(model.parameters()).device, []
    size = 1 if runs_transformer(model) and device.type == "cpu" else block
    for start in range(0, cells.n_cells, size):
        batch = cells.take(np.arange(start, min(start + size, cells.n_cells))).to(device)
        parts.append(read_out(model, batch.packed, what).float().cpu())
    return torch.cat(parts)
