"""Batches for training: a stream that depends on the seed and the batch's number only, and fixed validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from scdiva.data.ahead import ReadAhead
from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.order import BlockShuffle
from scdiva.data.packed import take_cells
from scdiva.data.packing import WINDOW, deal_batches, n_dealt
from scdiva.data.pool import CellPool, Cells, Held

Buffers = tuple[int, range]
"""Epoch, and neighbouring buffers of its order."""


def _join(parts: Sequence[tuple[np.ndarray, ...]]) -> Cells:
    lengths = [np.diff(part[0]) for part in parts]
    indptr = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    tokens, values, study = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
    return indptr, tokens, values, study


def _batch(cells: Cells, rows: np.ndarray) -> CellBatch:
    return from_ragged(*take_cells(cells[:3], rows), study=cells[3][rows])


class TrainingStream(IterableDataset[CellBatch]):
    """Endless training batches. Batch s is a function of (cells, batch size or tokens, seed, s) and of nothing else.

    With several processes (distributed training), step s takes the batches ``s * world_size + rank``. Workers of a data
    loader take turns, so their number changes nothing in what is seen. Together they see each epoch's permutation
    exactly once. An epoch need not fill its last step: then the processes that it has no batch for begin with the next
    epoch, and no cell is left out or repeated. Without `batch_tokens` a batch may hold the end of one epoch and the
    beginning of the next.

    A thread reads the next buffer while the present one is used, so that there are two in memory. Each worker reads
    its own copies: one worker overlaps the rest of the work with training too, more than two seldom pay.

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
    prefetch
        Whether the thread reads ahead; the batches are the same without.
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
        prefetch: bool = True,
    ) -> None:
        self.pool, self.order, self.batch_size, self.batch_tokens = pool, order, batch_size, batch_tokens
        self.start_step, self.max_steps, self.prefetch = start_step, max_steps, prefetch
        self._read: tuple[Buffers, Held] | None = None
        self._ahead: ReadAhead[Buffers, Held] | None = None
        self._deal: tuple[Buffers | None, list[np.ndarray]] = None, []
        self._epochs: list[int] = [0]
        self._windows: dict[int, tuple[list[range], np.ndarray]] = {}
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
            # no name is kept for it: of two buffers the first must go before the second comes
            pieces.append(self._buffers((epoch, range(buffer, buffer + 1))).take(rows))
        indptr, tokens, values, study = _join(pieces) if len(pieces) > 1 else pieces[0]
        return from_ragged(indptr, tokens, values, study, copy=False)

    def _buffers(self, key: Buffers) -> Held:
        """Give neighbouring buffers; those read last are kept."""
        if self._ahead is not None:
            return self._ahead.get(key)
        if self._read is None or self._read[0] != key:
            self._read = None  # let go of the old ones first
            self._read = key, self._read_buffers(key)
        return self._read[1]

    def _read_buffers(self, key: Buffers) -> Held:
        epoch, buffers = key
        return self.pool.read_blocks(np.concatenate([self.order.buffers(epoch)[0][buffer] for buffer in buffers]))

    def _find(self, number: int, budget: int) -> tuple[Buffers, int, int]:
        """Find a batch of a token budget: its epoch and buffers, the number of that window, its place in the window."""
        while self._epochs[-1] <= number:  # batches before each epoch, counted as far as was asked
            self._epochs.append(self._epochs[-1] + int(self._dealt_before(len(self._epochs) - 1, budget)[1][-1]))
        epoch = int(np.searchsorted(self._epochs, number, side="right")) - 1
        windows, before = self._dealt_before(epoch, budget)
        window = int(np.searchsorted(before, number - self._epochs[epoch], side="right")) - 1
        return (epoch, windows[window]), window, number - self._epochs[epoch] - int(before[window])

    def _dealt(self, number: int, budget: int) -> CellBatch:
        """Make a batch of a token budget."""
        key, window, at = self._find(number, budget)
        if self._deal[0] != key:  # all batches of a window are dealt at once
            epoch, buffers = key
            starts = self.order.buffers(epoch)[1]
            drawn = [self.order.permutation(epoch, i) + starts[i] - starts[buffers[0]] for i in buffers]
            cells = np.concatenate(drawn)
            batches = deal_batches(self._lengths(epoch, buffers)[cells], budget)
            # The fourth number keeps this draw apart from those of the order.
            turn = np.random.default_rng([self.order.seed, epoch, window, 1]).permutation(len(batches))
            self._deal = key, [cells[batches[i]] for i in turn]
        return from_ragged(*self._buffers(key).take(self._deal[1][at]), copy=False)

    def _dealt_before(self, epoch: int, budget: int) -> tuple[list[range], np.ndarray]:
        """Windows of an epoch, and the number of batches before each; the two epochs asked for last are kept."""
        if epoch not in self._windows:
            windows = self.order.windows(epoch, WINDOW)
            n = [n_dealt(self._lengths(epoch, buffers), budget) for buffers in windows]
            while len(self._windows) > 1:  # reading ahead, one epoch ends while the next is asked for
                self._windows.pop(next(iter(self._windows)))
            self._windows[epoch] = windows, np.concatenate([[0], np.cumsum(n)])
        return self._windows[epoch]

    def _lengths(self, epoch: int, buffers: range) -> np.ndarray:
        of_epoch = self.order.buffers(epoch)[0]
        return np.concatenate([self.pool.n_tokens(int(block)) for i in buffers for block in of_epoch[i]])

    def _numbers(self) -> Iterator[int]:
        """Numbers of the batches of this process and worker."""
        worker = get_worker_info()
        turn, turns = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        step = self.start_step + turn
        while self.max_steps is None or step < self.max_steps:
            yield step * self.world_size + self.rank
            step += turns

    def _needed(self) -> Iterator[Buffers]:
        """List what is read for these batches, in order, each as often as it is read."""
        last: Buffers | None = None
        for number in self._numbers():
            if self.batch_tokens is not None:
                keys = [self._find(number, self.batch_tokens)[0]]
            else:
                at = number * self.batch_size
                keys = [(epoch, range(i, i + 1)) for epoch, i, *_ in self.order.spans(at, at + self.batch_size)]
            for key in keys:
                if key != last:
                    yield key
                last = key

    def __iter__(self) -> Iterator[CellBatch]:
        mine = copy(self)  # what is read belongs to this round alone
        mine._read = None
        if not self.prefetch:
            yield from map(mine.batch, mine._numbers())
            return
        with ReadAhead(mine._read_buffers, mine._needed()) as mine._ahead:
            yield from map(mine.batch, mine._numbers())


class ValidationBatches(IterableDataset[CellBatch]):
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
            self.chosen = np.arange(pool.n_cells)
        else:
            self.chosen = np.arange(n_cells) * pool.n_cells // n_cells
        if batch_tokens is None:
            self._ends = [*range(batch_size, len(self.chosen), batch_size), len(self.chosen)]
        else:
            lengths = np.concatenate([pool.n_tokens(block) for block in range(len(pool.blocks))])[self.chosen]
            self._ends = _ends_in_order(lengths, batch_tokens)

    def __iter__(self) -> Iterator[CellBatch]:
        worker = get_worker_info()
        if worker is not None and worker.id > 0:
            return  # one worker reads them all, so that the order holds
        starts = np.concatenate([[0], np.cumsum(self.pool.block_sizes)])
        block_of = np.searchsorted(starts, self.chosen, side="right") - 1
        waiting: list[tuple[np.ndarray, ...]] = []
        n_given = n_read = batch = 0
        for block in np.unique(block_of):
            cells = self.pool.read_block(int(block))
            rows = self.chosen[block_of == block] - starts[block]
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
