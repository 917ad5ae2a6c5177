"""Batches for training: a stream that depends on the seed and the batch's number only, and fixed validation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.order import BlockShuffle
from scdiva.data.packed import take_cells


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

    def read_block(self, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
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


def _join(parts: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    lengths = [np.diff(part[0]) for part in parts]
    indptr = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    tokens, values, study = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
    return indptr, tokens, values, study


def _batch(cells: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], rows: np.ndarray) -> CellBatch:
    return from_ragged(*take_cells(cells[:3], rows), study=cells[3][rows])


class TrainingStream(IterableDataset):
    """Endless training batches. Batch s is a function of (cells, batch size, seed, s) and of nothing else.

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
        Cells of a batch.
    start_step, max_steps
        First step, and the step to end before; None never ends.
    """

    def __init__(
        self, pool: CellPool, order: BlockShuffle, batch_size: int, start_step: int = 0, max_steps: int | None = None
    ) -> None:
        self.pool, self.order, self.batch_size = pool, order, batch_size
        self.start_step, self.max_steps = start_step, max_steps
        self._buffers: OrderedDict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]
        self._buffers = OrderedDict()
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
        pieces = []
        start = number * self.batch_size
        for epoch, buffer, rows in self.order.locate(start, start + self.batch_size):
            cells = self._buffer(epoch, buffer)
            pieces.append((*take_cells(cells[:3], rows), cells[3][rows]))
        indptr, tokens, values, study = _join(pieces)
        return from_ragged(indptr, tokens, values, study)

    def _buffer(self, epoch: int, buffer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        key = (epoch, buffer)
        if key not in self._buffers:
            if self._buffers:
                self._buffers.popitem(last=False)
            blocks = self.order.buffers(epoch)[0][buffer]
            # Read in the order of the file, then put into the order drawn.
            read = {int(block): self.pool.read_block(int(block)) for block in np.sort(blocks)}
            self._buffers[key] = _join([read[int(block)] for block in blocks])
        return self._buffers[key]

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
    """

    def __init__(self, pool: CellPool, batch_size: int, n_cells: int | None = None) -> None:
        self.pool, self.batch_size = pool, batch_size
        if n_cells is None or n_cells >= pool.n_cells:
            self._chosen = np.arange(pool.n_cells)
        else:
            self._chosen = np.arange(n_cells) * pool.n_cells // n_cells

    def __iter__(self) -> Iterator[CellBatch]:
        worker = get_worker_info()
        if worker is not None and worker.id > 0:
            return  # one worker reads them all, so that the order holds
        starts = np.concatenate([[0], np.cumsum(self.pool.block_sizes)])
        block_of = np.searchsorted(starts, self._chosen, side="right") - 1
        waiting: list[tuple[np.ndarray, ...]] = []
        n_waiting = 0
        for block in np.unique(block_of):
            cells = self.pool.read_block(int(block))
            rows = self._chosen[block_of == block] - starts[block]
            waiting.append((*take_cells(cells[:3], rows), cells[3][rows]))
            n_waiting += len(rows)
            if n_waiting >= self.batch_size:
                joined = _join(waiting)
                n_full = n_waiting // self.batch_size * self.batch_size
                for first in range(0, n_full, self.batch_size):
                    yield _batch(joined, np.arange(first, first + self.batch_size))
                rest = np.arange(n_full, n_waiting)
                waiting, n_waiting = [(*take_cells(joined[:3], rest), joined[3][rest])], len(rest)
        if n_waiting:
            yield from_ragged(*_join(waiting))
