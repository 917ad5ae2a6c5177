"""Batches for training: a stream that depends on the seed and the batch's number only, and fixed validation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.order import Buffer, Order
from scdiva.data.packed import PackedCells
from scdiva.data.pool import CellPool, Held, Source

Key = TypeVar("Key")
Item = TypeVar("Item")


class TrainingStream(IterableDataset[CellBatch]):
    """Endless training batches. Batch n is a function of the order and n, and of nothing else.

    Of W processes (distributed training, or workers of a data loader) each takes every W-th batch. Batch n is of lane n
    mod `lanes` of the order; so where W divides the number of lanes, each process reads its own lanes.

    The present buffer of each of its lanes is in memory. A thread reads the next one that will be needed.

    Parameters
    ----------
    order
        Which cells are in each batch.
    start, stop
        First batch, and the batch to end before, counted over all processes; None never ends.
    prefetch
        Whether the thread reads ahead; the batches are the same without.
    """

    def __init__(self, order: Order, start: int = 0, stop: int | None = None, *, prefetch: bool = True) -> None:
        self.order, self.start, self.stop, self.prefetch = order, start, stop, prefetch
        self.rank, self.world_size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def batch(self, number: int) -> CellBatch:
        """Make one batch of the stream.

        Parameters
        ----------
        number
            Its number, from 0.
        """
        return from_ragged(*self.order.pool.read(self._cells(number)).take(slice(None)), copy=False)

    def _cells(self, number: int) -> np.ndarray:
        buffer, at = self.order.find(number)
        cells, batches = self.order.cells_of(buffer)
        return np.asarray(cells[batches[at]])

    def rows_of(self, number: int) -> list[tuple[Source, int, int]]:
        """Say where the cells of a batch lie, without reading them.

        Parameters
        ----------
        number
            Of the batch, from 0.

        Returns
        -------
        Of each cell its source, its row there, and the study that stands there.
        """
        pool = self.order.pool
        rows = zip(*(one.tolist() for one in pool.rows_of(self._cells(number))), strict=True)
        return [(pool.sources[source], row, study) for source, row, study in rows]

    def _read(self, buffer: Buffer) -> tuple[Held, list[np.ndarray]]:
        """Read the cells of a buffer, and say which of them each of its batches holds."""
        cells, batches = self.order.cells_of(buffer)
        return self.order.pool.read(cells), batches

    def _numbers(self) -> Iterator[int]:
        """Numbers of the batches of this process, or of this worker of it."""
        first, step = self.start + self.rank, self.world_size
        if (worker := get_worker_info()) is not None:  # a data loader takes the batches of its workers in turn
            first, step = first + worker.id * step, step * worker.num_workers
        return iter(itertools.count(first, step) if self.stop is None else range(first, self.stop, step))

    def _places(self) -> Iterator[tuple[Buffer, int, bool]]:
        """Find these batches: buffer, place there, and whether that buffer is needed for the first time."""
        present: dict[int, Buffer] = {}
        for number in self._numbers():
            buffer, at = self.order.find(number)
            yield buffer, at, present.get(buffer.lane) != buffer
            present[buffer.lane] = buffer

    def __iter__(self) -> Iterator[CellBatch]:
        places, ahead = itertools.tee(self._places())
        read = (_read_ahead if self.prefetch else map)(self._read, (buffer for buffer, _, first in ahead if first))
        present: dict[int, tuple[Held, list[np.ndarray]]] = {}
        for buffer, at, first in places:
            if first:
                present.pop(buffer.lane, None)  # of two buffers of a lane the first must go before the second comes
                present[buffer.lane] = next(read)
            held, batches = present[buffer.lane]
            yield from_ragged(*held.take(batches[at]), copy=False)


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
        n = pool.n_cells if n_cells is None else min(n_cells, pool.n_cells)
        self.chosen = np.arange(n) * pool.n_cells // n
        if batch_tokens is None:
            self._ends = [*range(batch_size, len(self.chosen), batch_size), len(self.chosen)]
        else:
            self._ends = _ends_in_order(pool.n_tokens(self.chosen), batch_tokens)

    def __iter__(self) -> Iterator[CellBatch]:
        for first, last in itertools.pairwise([0, *self._ends]):
            yield from_ragged(*self.pool.read(self.chosen[first:last]).take(slice(None)), copy=False)

    def studies(self) -> tuple[list[str], np.ndarray]:
        """Name the study of each cell, without reading any: batches say only whether it is trained on.

        Returns
        -------
        Names of the studies, and for each cell, in the order in which the batches give them, the number of its study
        among these, int `(n_cells,)`.
        """
        names: list[str] = []
        number, row, _ = self.pool.rows_of(self.chosen)
        study = np.empty(len(row), np.int64)
        for i, source in enumerate(self.pool.sources):  # a pool may hold some of the studies, and has its own numbers
            study[number == i] = len(names)
            if isinstance(source, PackedCells):
                study[number == i] += source.study[row[number == i]]
            names += source.study_names if isinstance(source, PackedCells) else [source.name]
        present, numbers = np.unique(study, return_inverse=True)
        return [names[i] for i in present], numbers


def _ends_in_order(lengths: np.ndarray, budget: int) -> list[int]:
    """Find the ends of batches that take cells in order as long as they fit."""
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ends = [0]
    while ends[-1] < len(lengths):
        ends.append(int(np.searchsorted(before, before[ends[-1]] + budget, side="right")) - 1)
    return ends[1:]


def _read_ahead(read: Callable[[Key], Item], keys: Iterator[Key]) -> Iterator[Item]:
    """Read the items of keys in a thread, one ahead of those that are used.

    What goes wrong is raised where the item is asked for. The thread is gone when the iterator is.
    """
    with ThreadPoolExecutor(1, "scdiva-read-ahead") as thread:
        begun = (thread.submit(read, key) for key in keys)
        for coming, _ in itertools.pairwise(itertools.chain(begun, [Future[Item]()])):  # the next one has begun
            yield coming.result()
