"""Batches of one study each: cells that are asked about, and others of the study around them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

from scdiva._rng import step_seed
from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.packed import PackedCells, take_cells
from scdiva.tokenizer.vocabulary import Vocabulary

LEAST_CONTEXT = 16
STUDY_POWER = 0.6
"""A study is drawn as often as this power of its size says: large ones have more to teach, and not all of it."""


def n_query_cells(n_cells: int, batch_size: int) -> int:
    """Cells of a batch that are asked about, its first: as many as leave 16 around them."""
    return min(batch_size, n_cells - LEAST_CONTEXT)


class StudyBatches(IterableDataset[CellBatch]):
    """Endless batches of one study each, the first cells asked about, the others their context.

    Batch s is a function of (cells, sizes, seed, s) and of nothing else. Of the context there are as many cells as are
    drawn log-uniformly from 16 to `context_cells`, fewer in a small study. With several processes step s takes the
    batches ``s * world_size + rank``.

    Parameters
    ----------
    cells
        A packed corpus, read into memory.
    batch_size, context_cells
        Cells asked about, fewer in a small study, and the most around them.
    seed, start_step, max_steps
        As for :class:`~scdiva.data.stream.TrainingStream`.
    """

    def __init__(
        self,
        cells: PackedCells,
        batch_size: int,
        context_cells: int,
        seed: int,
        start_step: int = 0,
        max_steps: int | None = None,
    ) -> None:
        self.ragged, self.study = cells.read(0, cells.n_obs), cells.study
        cells.close()
        self.batch_size, self.context_cells, self.seed = batch_size, context_cells, seed
        self.start_step, self.max_steps = start_step, max_steps
        self.sizes = np.bincount(self.study, minlength=len(cells.study_names))
        drawn = np.where(self.sizes >= 2 * LEAST_CONTEXT, self.sizes, 0) ** STUDY_POWER
        if not drawn.any():
            raise ValueError(f"no study has {2 * LEAST_CONTEXT} cells: a batch is of one study, with others around.")
        self.drawn = drawn / drawn.sum()
        self.rank, self.world_size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def batch(self, number: int) -> CellBatch:
        """Make one batch; :func:`n_query_cells` says how many of its cells are asked about."""
        rng = np.random.default_rng(step_seed(self.seed, number, "study"))
        study = rng.choice(len(self.drawn), p=self.drawn)
        rows = rng.permutation(np.flatnonzero(self.study == study))
        asked = n_query_cells(len(rows), self.batch_size)
        most = min(self.context_cells, len(rows) - asked)
        n_around = int(np.exp(rng.uniform(np.log(LEAST_CONTEXT), np.log(most + 1))))
        rows = rows[: asked + min(n_around, most)]
        return from_ragged(*take_cells(self.ragged, rows), self.study[rows], copy=False)

    def __iter__(self) -> Iterator[CellBatch]:
        step = self.start_step
        while self.max_steps is None or step < self.max_steps:
            yield self.batch(step * self.world_size + self.rank)
            step += 1


class StudyDataModule(pl.LightningDataModule):
    """:class:`StudyBatches` of a packed corpus for :func:`scdiva.train.fit`.

    Parameters
    ----------
    train
        A file that :func:`scdiva.data.pack_files` wrote.
    vocabulary
        Its genes.
    batch_size, context_cells, seed
        As for :class:`StudyBatches`.
    """

    def __init__(
        self,
        train: str | Path,
        *,
        vocabulary: Vocabulary,
        batch_size: int = 24,
        context_cells: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.file, self.vocabulary, self.start_step = Path(train), vocabulary, 0
        self.batch_size, self.context_cells, self.seed = batch_size, context_cells, seed

    def train_dataloader(self) -> DataLoader[CellBatch]:
        """Load the stream of batches, from `start_step` on."""
        cells = PackedCells(self.file, self.vocabulary)
        stream = StudyBatches(cells, self.batch_size, self.context_cells, self.seed, self.start_step)
        return DataLoader(stream, batch_size=None)

    def val_dataloader(self) -> list[DataLoader[CellBatch]]:
        """There is none: benchmarks/denoising.py asks studies that are held out."""
        return []
