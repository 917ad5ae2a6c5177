"""Batches for training: a stream that depends on the seed and the batch's number only, and fixed validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.order import BlockShuffle
from scdiva.data.packed import take_cells
from scdiva.data.packing import WINDOW, deal_batches, n_dealt

Cells = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""indptr (n + 1,), tokens (T,), values (T,) of n cells, and the study of each (n,)."""


class Source(Protocol):
    """What a :class:`~scdiva.data.cells.CellSource` and a :class:`~scdiva.data.packed.PackedCells` have in common."""

    @property
    def n_obs(self) -> int:
        """Number of cells."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """Known genes of each cell, int (n_obs,)."""
        ...

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read cells `start` to `stop`: indptr, tokens, values."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class CellPool:
    """The usable cells of several studies, counted through.

    Parameters
    ----------
    sources
        Opened studies, or one packed corpus.
    studies
        For each source, the study number of each of its cells, int (n_obs,).
    min_genes
        Cells with fewer known genes are left out.
    context
        Genes kept per cell, the first of its ranking.
    block_rows
        Neighbouring cells read together.
    """

    def __init__(
        self, sources: Sequence[Source], studies: Sequence[np.ndarray], min_genes: int, context: int, block_rows: int
    ) -> None:
        self.sources = list(sources)
        self.studies = list(studies)
        self.context = context
        self.blocks: list[tuple[int, np.ndarray]] = []
        for number, source in enumerate(self.sources):
            usable = np.flatnonzero(source.lengths >= min_genes)
            # No block spans two studies: then a packed corpus gives the very stream that its files give.
            of_studies = np.split(usable, np.flatnonzero(np.diff(self.studies[number][usable])) + 1)
            for rows in of_studies:
                self.blocks += [(number, rows[i : i + block_rows]) for i in range(0, len(rows), block_rows)]
        self.block_sizes = tuple(len(rows) for _, rows in self.blocks)
        self.n_cells = sum(self.block_sizes)
        self._n_tokens = [np.minimum(source.lengths, context).astype(np.int32) + 1 for source in self.sources]

    def n_tokens(self, block: int) -> np.ndarray:
        """Count the tokens of a block's cells, `[LAT]` with them; nothing is read.

        An upper bound: where a file has two columns of one gene, they become one token.

        Parameters
        ----------
        block
            Its number.

        Returns
        -------
        int32 (n,).
        """
        number, rows = self.blocks[block]
        return self._n_tokens[number][rows]

    def read_block(self, block: int) -> Cells:
        """Read one block.

        Parameters
        ----------
        block
            Its number.

        Returns
        -------
        indptr, tokens, values, and the study of each cell.
        """
        number, rows = self.blocks[block]
        start, stop = int(rows[0]), int(rows[-1]) + 1
        kept = take_cells(self.sources[number].read(start, stop), rows - start, self.context)
        return *kept, self.studies[number][rows]


def _join(parts: Sequence[tuple[np.ndarray, ...]]) -> Cells:
    lengths = [np.diff(part[0]) for part in parts]
    indptr = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    tokens, values, study = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
    return indptr, tokens, values, study


def _batch(cells: Cells, rows: np.ndarray) -> CellBatch:
    return from_ragged(*take_cells(cells[:3], rows), study=cells[3][rows])


class TrainingStream(IterableDataset):
    """Endless training batches. Batch s is a function of (cells, batch size or tokens, seed, s) and of nothing else.

    With several processes (distributed training), step s takes the batches ``s * world_size + rank``. Workers of a data
    loader take turns, so their number changes nothing in what is seen. Each worker reads its own copy of the buffer:
    one worker overlaps reading with training, more than two seldom pay.

    Parameters
    ----------
    pool
        The cells.
    order
        The shuffle.
    batch_size
        Cells of a batch; without effect if `batch_tokens` is given.
    start_step, max_steps
        First step, and the step to end before; None never ends.
    batch_tokens
        Most tokens of a batch. The shuffled cells of each window of at least 4,096 are then sorted by length and dealt
        into batches (:func:`~scdiva.data.packing.deal_batches`), which follow one another in random order. The number
        of batches of an epoch depends on lengths only, so any batch is found without reading those before it.
    """

    def __init__(
        self,
        pool: CellPool,
        order: BlockShuffle,
        batch_size: int,
        start_step: int = 0,
        max_steps: int | None = None,
        *,
        batch_tokens: int | None = None,
    ) -> None:
        self.pool, self.order, self.batch_size, self.batch_tokens = pool, order, batch_size, batch_tokens
        self.start_step, self.max_steps = start_step, max_steps
        self._read: tuple[tuple[int, range], Cells] | None = None
        self._epochs: list[int] = [0]
        self._windows: tuple[int, list[range], np.ndarray] | None = None
        self.rank, self.world_size = 0, 1
        # asked here: a data loader's worker that is not forked knows nothing of the process group
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def batch(self, number: int) -> CellBatch:
        """Make one batch of the stream.

        Parameters
        ----------
        number
            Its number, from 0.
        """
        if self.batch_tokens is not None:
            return self._dealt(number, self.batch_tokens)
        pieces = []
        start = number * self.batch_size
        for epoch, buffer, rows in self.order.locate(start, start + self.batch_size):
            cells = self._buffers(epoch, range(buffer, buffer + 1))
            pieces.append((*take_cells(cells[:3], rows), cells[3][rows]))
        indptr, tokens, values, study = _join(pieces)
        return from_ragged(indptr, tokens, values, study)

    def _buffers(self, epoch: int, buffers: range) -> Cells:
        """Read neighbouring buffers; those read last are kept."""
        key = (epoch, buffers)
        if self._read is None or self._read[0] != key:
            self._read = None  # let go of the old ones first
            blocks = np.concatenate([self.order.buffers(epoch)[0][buffer] for buffer in buffers])
            # Read in the order of the file, then put into the order drawn.
            read = {int(block): self.pool.read_block(int(block)) for block in np.sort(blocks)}
            self._read = key, _join([read[int(block)] for block in blocks])
        return self._read[1]

    def _dealt(self, number: int, budget: int) -> CellBatch:
        """Make a batch of a token budget."""
        while self._epochs[-1] <= number:  # batches before each epoch, counted as far as was asked
            self._epochs.append(self._epochs[-1] + int(self._dealt_before(len(self._epochs) - 1, budget)[1][-1]))
        epoch = int(np.searchsorted(self._epochs, number, side="right")) - 1
        windows, before = self._dealt_before(epoch, budget)
        window = int(np.searchsorted(before, number - self._epochs[epoch], side="right")) - 1
        at = number - self._epochs[epoch] - int(before[window])
        buffers = windows[window]
        starts = self.order.buffers(epoch)[1]
        drawn = [self.order.permutation(epoch, i) + starts[i] - starts[buffers[0]] for i in buffers]
        cells = np.concatenate(drawn)
        batches = deal_batches(self._lengths(epoch, buffers)[cells], budget)
        # The fourth number keeps this draw apart from those of the order.
        turn = np.random.default_rng([self.order.seed, epoch, window, 1]).permutation(len(batches))
        return _batch(self._buffers(epoch, buffers), cells[batches[turn[at]]])

    def _dealt_before(self, epoch: int, budget: int) -> tuple[list[range], np.ndarray]:
        """Windows of an epoch, and the number of batches before each; the epoch asked for last is kept."""
        if self._windows is None or self._windows[0] != epoch:
            windows = self.order.windows(epoch, WINDOW)
            n = [n_dealt(self._lengths(epoch, buffers), budget) for buffers in windows]
            self._windows = epoch, windows, np.concatenate([[0], np.cumsum(n)])
        return self._windows[1:]

    def _lengths(self, epoch: int, buffers: range) -> np.ndarray:
        of_epoch = self.order.buffers(epoch)[0]
        return np.concatenate([self.pool.n_tokens(int(block)) for i in buffers for block in of_epoch[i]])

    def __iter__(self) -> Iterator[CellBatch]:
        worker = get_worker_info()
        turn, turns = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        step = self.start_step + turn
        while self.max_steps is None or step < self.max_steps:
            yield self.batch(step * self.world_size + self.rank)
            step += turns


class ValidationBatches(IterableDataset):
    """The same cells in the same order every time.

    Parameters
    ----------
    pool
        The cells.
    batch_size
        Cells of a batch; the last one may be smaller.
    n_cells
        Number of cells, taken evenly from all; None takes all.
    batch_tokens
        Most tokens of a batch, in place of `batch_size`: cells are taken in order as long as they fit.
    """

    def __init__(
        self, pool: CellPool, batch_size: int, n_cells: int | None = None, *, batch_tokens: int | None = None
    ) -> None:
        self.pool = pool
        if n_cells is None or n_cells >= pool.n_cells:
            self._chosen = np.arange(pool.n_cells)
        else:
            self._chosen = np.arange(n_cells) * pool.n_cells // n_cells
        if batch_tokens is None:
            self._ends = [*range(batch_size, len(self._chosen), batch_size), len(self._chosen)]
        else:
            lengths = np.concatenate([pool.n_tokens(block) for block in range(len(pool.blocks))])[self._chosen]
            self._ends = _ends_in_order(lengths, batch_tokens)

    def __iter__(self) -> Iterator[CellBatch]:
        worker = get_worker_info()
        if worker is not None and worker.id > 0:
            return  # one worker reads them all, so that the order holds
        starts = np.concatenate([[0], np.cumsum(self.pool.block_sizes)])
        block_of = np.searchsorted(starts, self._chosen, side="right") - 1
        waiting: list[tuple[np.ndarray, ...]] = []
        n_given = n_read = batch = 0
        for block in np.unique(block_of):
            cells = self.pool.read_block(int(block))
            rows = self._chosen[block_of == block] - starts[block]
            waiting.append((*take_cells(cells[:3], rows), cells[3][rows]))
            n_read += len(rows)
            if n_read < self._ends[batch]:
                continue
            joined, first = _join(waiting), n_given
            while batch < len(self._ends) and self._ends[batch] <= n_read:
                yield _batch(joined, np.arange(n_given, self._ends[batch]) - first)
                n_given = self._ends[batch]
                batch += 1
            rest = np.arange(n_given, n_read) - first
            waiting = [(*take_cells(joined[:3], rest), joined[3][rest])]


def _ends_in_order(lengths: np.ndarray, budget: int) -> list[int]:
    """Find the ends of batches that take cells in order as long as they fit."""
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ends = [0]
    while ends[-1] < len(lengths):
        ends.append(int(np.searchsorted(before, before[ends[-1]] + budget, side="right")) - 1)
    return ends[1:]
