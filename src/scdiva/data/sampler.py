"""Training batches of several studies, read in blocks. Seed and batch number determine the cells of a batch."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from scdiva.data.batch import CellBatch, deal_batches, from_ragged
from scdiva.data.cells import CellSource
from scdiva.data.matrix import BLOCK_ROWS
from scdiva.data.packed import PackedCells

Source: TypeAlias = CellSource | PackedCells
Cells = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""indptr (n + 1,), tokens (T,), values (T,) of n cells, and the study of each (n,)."""
LEFT_OUT = -2
"""Study number of cells that are not part of a pool."""
CHUNK = 1 << 16
"""Cells per step when blocks are made."""


class Held(NamedTuple):
    """Cells as they were read; they are not copied into order.

    Attributes
    ----------
    parts
        Tokens and values of each read.
    part, start, length, study
        int64 (n,), for each cell: its part, its first position there, its number of genes, and its study.
    """

    parts: list[tuple[np.ndarray, np.ndarray]]
    part: np.ndarray
    start: np.ndarray
    length: np.ndarray
    study: np.ndarray

    def take(self, rows: np.ndarray | slice) -> Cells:
        """Copy some of the cells (at least one)."""
        start, length = self.start[rows], self.length[rows]
        where = list(zip(self.part[rows].tolist(), start.tolist(), (start + length).tolist(), strict=True))
        # in the dtypes of a batch, so that the batch does not copy them again
        tokens = np.concatenate([self.parts[p][0][a:b] for p, a, b in where], dtype=np.int64)
        values = np.concatenate([self.parts[p][1][a:b] for p, a, b in where], dtype=np.float32)
        return np.concatenate([[0], length]).cumsum(), tokens, values, self.study[rows]


class CellPool:
    """Training cells of several studies, in blocks of neighbouring rows and numbered from 0.

    A block keeps only its source and its first and last row (28 bytes with its counts: 26 MB for 59 million cells). Its
    rows are computed from the lengths and studies of the source, which may be memory-mapped.

    Parameters
    ----------
    sources
        Opened studies, or one packed corpus.
    studies
        For each source, the study of each cell, int (n_obs,).
    min_genes
        Minimum number of known genes per cell; other cells are excluded.
    context
        Maximum number of genes per cell, the first of its ranking.
    block_rows
        Cells per block. A block has cells of one study.
    numbers
        For each source, int (n_studies,), new numbers for its studies; cells of a study with number :data:`LEFT_OUT`
        are excluded. None: the numbers in `studies`.

    Attributes
    ----------
    n_cells
        Number of cells.
    sizes, tokens
        int32 (n_blocks,), cells and tokens (with `[LAT]` of each cell) per block.
    starts
        int64 (n_blocks,), number of the first cell of each block.
    longest
        Tokens of the longest cell; 0 without cells.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        studies: Sequence[np.ndarray],
        min_genes: int,
        context: int,
        block_rows: int,
        numbers: Sequence[np.ndarray] | None = None,
    ) -> None:
        self.sources, self.studies = list(sources), list(studies)
        self.context, self.min_genes, self.numbers, self.longest = context, min_genes, numbers, 0
        self._lengths = [source.lengths for source in self.sources]
        columns = [array(kind) for kind in "iIiii"]  # 32-bit arrays that grow in place
        for number in range(len(self.sources)):
            for blocks in self._blocks(number, block_rows):
                for column, values in zip(columns, blocks, strict=True):
                    column.frombytes(values.astype(column.typecode).tobytes())
        self._source, self._first, self._span, self.sizes, self.tokens = map(np.asarray, columns)
        self.starts = np.cumsum(self.sizes, dtype=np.int64) - self.sizes
        self.n_cells = int(self.sizes.sum())

    def _usable(self, number: int, start: int, stop: int) -> np.ndarray:
        """Rows of a source from `start` to `stop` that belong to this pool."""
        usable = self._lengths[number][start:stop] >= self.min_genes
        return start + np.flatnonzero(usable & (self._study(number, slice(start, stop)) != LEFT_OUT))

    def _study(self, number: int, rows: np.ndarray | slice) -> np.ndarray:
        study = self.studies[number][rows]
        return study if self.numbers is None else self.numbers[number][study]

    def _length(self, number: int, rows: np.ndarray | slice) -> np.ndarray:
        return np.minimum(self._lengths[number][rows].astype(np.int64), self.context)

    def _blocks(self, number: int, block_rows: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield source, first row, number of rows, cells and tokens of the blocks of a source."""
        n_obs = len(self._lengths[number])
        rows = np.zeros(0, np.int64)
        for start in range(0, n_obs, CHUNK):
            rows = np.concatenate([rows, self._usable(number, start, min(start + CHUNK, n_obs))])
            if not len(rows):
                continue
            # blocks of one study, so that a packed corpus and its files give the same batches
            runs = np.concatenate([[0], np.flatnonzero(np.diff(self.studies[number][rows])) + 1, [len(rows)]])
            n = -(-np.diff(runs) // block_rows)
            bounds = np.repeat(runs[:-1] - block_rows * (np.cumsum(n) - n), n) + block_rows * np.arange(n.sum())
            bounds = np.append(bounds, len(rows))
            if start + CHUNK < n_obs and bounds[-1] - bounds[-2] < block_rows:  # may continue in the next rows
                bounds = bounds[:-1]
            firsts, lasts, waiting = rows[bounds[:-1]], rows[bounds[1:] - 1], rows[bounds[-1] :]
            n_tokens = self._length(number, rows) + 1
            self.longest = max(self.longest, int(n_tokens.max()))
            before = np.concatenate([[0], np.cumsum(n_tokens)])[bounds]
            yield np.full(len(firsts), number), firsts, lasts + 1 - firsts, np.diff(bounds), np.diff(before)
            rows = waiting

    def _find(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block, source and row of each cell."""
        block = np.searchsorted(self.starts, cells, side="right") - 1
        blocks, at = np.unique(block, return_inverse=True)
        where = zip(*(column[blocks].tolist() for column in (self._source, self._first, self._span)), strict=True)
        rows = np.concatenate([self._usable(number, first, first + span) for number, first, span in where])
        before = np.cumsum(self.sizes[blocks]) - self.sizes[blocks]
        return block, self._source[block], rows[(before - self.starts[blocks])[at] + cells]

    def rows_of(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Source, row and study of each cell (numbers in the pool, at least one), each int (n,); nothing is read."""
        _, source, row = self._find(cells)
        return source, row, _each(self._study, source, row)

    def n_tokens(self, cells: np.ndarray) -> np.ndarray:
        """Tokens of each cell, with `[LAT]`, int64 (n,); nothing is read.

        This is an upper bound: two columns of one gene become one token.
        """
        _, source, row = self._find(cells)
        return _each(self._length, source, row) + 1

    def read(self, cells: np.ndarray) -> Held:
        """Read cells; the rows of a file are read in order, many at once.

        In each block, all rows between the first and the last requested cell are read.

        Parameters
        ----------
        cells
            Numbers in the pool, at least one.

        Returns
        -------
        The cells, in the order of `cells`.
        """
        block, source, row = self._find(cells)
        order = np.lexsort((row, source))
        bounds = np.concatenate([[0], np.flatnonzero(np.diff(block[order])) + 1, [len(cells)]])
        first, stop, of = row[order[bounds[:-1]]], row[order[bounds[1:] - 1]] + 1, source[order[bounds[:-1]]]
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        part, start, length = np.empty((3, len(cells)), np.int64)
        # each read has rows of one source, and a limited number of rows
        changes = np.diff(of) | np.diff(np.cumsum(stop - first) // BLOCK_ROWS)
        for a, b in itertools.pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(of)]):
            ranges = list(zip(first[a:b].tolist(), stop[a:b].tolist(), strict=True))
            indptr, tokens, values = self.sources[of[a]].read_ranges(ranges)
            members = order[bounds[a] : bounds[b]]
            before = np.cumsum(stop[a:b] - first[a:b]) - stop[a:b]  # rows read before, minus the first row
            at = row[members] + np.repeat(before, np.diff(bounds[a : b + 1]))
            part[members], start[members] = len(parts), indptr[at]
            length[members] = np.minimum(indptr[at + 1] - indptr[at], self.context)
            parts.append((tokens, values))
        return Held(parts, part, start, length, _each(self._study, source, row))


def _each(function: Callable[[int, np.ndarray], np.ndarray], source: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Apply a function of source and rows to all cells, source by source; int64 (n,)."""
    out = np.empty(len(row), np.int64)
    for number in np.unique(source).tolist():
        mask = source == number
        out[mask] = function(number, row[mask])
    return out


class Buffer(NamedTuple):
    """A buffer: cells of a lane and an epoch that are read at once.

    Attributes
    ----------
    stretch
        Number of changes of the number of lanes so far.
    epoch, lane, number
        Epoch, lane, and number of the buffer in the lane; each from 0.
    """

    stretch: int
    epoch: int
    lane: int
    number: int


def n_batches(
    n_cells: int, n_tokens: int, longest: int, lanes: int, batch_size: int, batch_tokens: int | None
) -> tuple[int, bool]:
    """Number of batches per lane and epoch, the same for all lanes.

    Parameters
    ----------
    n_cells, n_tokens
        Cells and tokens of the epoch.
    longest
        Tokens of the longest cell.
    lanes
        Number of lanes.
    batch_size, batch_tokens
        Maximum number of cells or tokens per batch.

    Returns
    -------
    The number, and whether batches are cut by tokens. With a budget of B tokens and a longest cell of l tokens, batches
    of B - l tokens on average always fit: a batch exceeds the mean by less than l (see
    :func:`~scdiva.data.batch.deal_batches`). If the mean were below 2 l, a batch might be empty; the epoch is then cut
    into batches of B // l cells, which always fit.

    Raises
    ------
    ValueError
        If there are fewer cells than lanes.
    """
    if batch_tokens is not None:
        n = -(-n_tokens // (lanes * (batch_tokens - longest)))
        if n_tokens >= 2 * longest * lanes * n:
            return n, True
        batch_size = batch_tokens // longest
    if n_cells < lanes:
        raise ValueError(f"{n_cells} cells are too few for {lanes} batches a step.")
    # batches of one cell: some have two if the number of lanes does not divide the number of cells
    return min(-(-n_cells // (lanes * batch_size)), n_cells // lanes), False


class Remaining(NamedTuple):
    """Number of times that each cell is still to be seen in an epoch, by block: 59 million cells do not take 59 MB.

    Attributes
    ----------
    uniform
        uint8 (n_blocks,), for all cells of a block.
    mixed
        By block, uint8 (size,), for each cell of a block whose cells differ; `uniform` is not 0 there.
    """

    uniform: np.ndarray
    mixed: dict[int, np.ndarray]

    def sums(self, pool: CellPool) -> tuple[np.ndarray, np.ndarray]:
        """Cells and tokens of each block, with multiplicity."""
        sizes, tokens = pool.sizes * self.uniform, pool.tokens * self.uniform
        for block, counts in self.mixed.items():
            ids = np.arange(pool.starts[block], pool.starts[block] + len(counts))
            sizes[block], tokens[block] = counts.sum(), (pool.n_tokens(ids) * counts).sum()
        return sizes, tokens


class Epoch:
    """One epoch: blocks in random order, cut into equal parts for lanes, buffers and batches.

    Parameters
    ----------
    pool
        The cells.
    due
        Number of times that each cell is to be seen in this epoch.
    lanes
        Number of lanes.
    how
        Maximum number of cells per batch, maximum number of tokens per batch, and blocks per buffer.
    key
        Seed.

    Attributes
    ----------
    n_batches
        Batches per lane.
    """

    def __init__(
        self, pool: CellPool, due: Remaining, lanes: int, how: tuple[int, int | None, int], key: list[int]
    ) -> None:
        self.pool, self.due, self.lanes, self._key = pool, due, lanes, key
        batch_size, batch_tokens, n_blocks = how
        sizes, tokens = due.sums(pool)
        total = int(sizes.sum()), int(tokens.sum())
        self.n_batches, self.by_tokens = n_batches(*total, pool.longest, lanes, batch_size, batch_tokens)
        each = tokens if self.by_tokens else sizes
        del sizes, tokens  # free memory
        self._blocks = np.arange(len(each), dtype=np.int32)[each > 0]
        np.random.default_rng([*key, 1]).shuffle(self._blocks)
        each = each[self._blocks]
        self._ends = np.cumsum(each, dtype=np.int64)
        n_buffers = min(self.n_batches, max(1, len(self._blocks) // (lanes * n_blocks)))
        # cuts are shifted by up to half a buffer, so that the lanes of a process change buffers in turn
        cuts = (2 * lanes * np.arange(1, n_buffers)[None] + 2 * np.arange(lanes)[:, None] + 1 - lanes) * self.n_batches
        self.cuts = np.pad(cuts // (2 * lanes * n_buffers), ((0, 0), (1, 1)), constant_values=(0, self.n_batches))

    def _ids(self, position: int) -> np.ndarray:
        """Cell numbers of the block at a position of the order."""
        block = int(self._blocks[position])
        first, size = int(self.pool.starts[block]), int(self.pool.sizes[block])
        return np.repeat(np.arange(first, first + size), self.due.mixed.get(block, self.due.uniform[block]))

    def _cut(self, batch: int) -> tuple[int, int]:
        """Start of a batch if there were no buffers: position of the block, and the cell within it."""
        at = batch * int(self._ends[-1]) // (self.lanes * self.n_batches)
        position = int(np.searchsorted(self._ends, at, side="right"))
        if position == len(self._ends):
            return position, 0
        at -= int(self._ends[position - 1]) if position else 0
        if not self.by_tokens:
            return position, at
        n_tokens = self.pool.n_tokens(self._ids(position))
        return position, int(np.searchsorted(np.cumsum(n_tokens) - n_tokens, at))

    def buffer(self, lane: int, number: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Draw the cells of a buffer and of its batches.

        Returns
        -------
        Cell numbers, int64 (n,), in stored order block by block; and for each batch, indices into them.
        """
        first, last = (lane * self.n_batches + int(cut) for cut in self.cuts[lane, number : number + 2])
        (block, begin), (end_block, end) = self._cut(first), self._cut(last)
        ids = [self._ids(position) for position in range(block, end_block)]
        cells = np.concatenate([*ids, self._ids(end_block)[:end]] if end else ids)[begin:]
        rng = np.random.default_rng([*self._key, 2, lane, number])
        drawn = rng.permutation(len(cells))
        if not self.by_tokens:
            ends = np.arange(first, last + 1) * int(self._ends[-1]) // (self.lanes * self.n_batches)
            return cells, np.split(drawn, ends[1:-1] - ends[0])
        batches = deal_batches(self.pool.n_tokens(cells)[drawn], last - first)
        return cells, [drawn[batches[i]] for i in rng.permutation(last - first)]

    def left(self, done: Sequence[int]) -> Remaining:
        """Number of times that each cell is still to be seen after `done` batches of each lane."""
        due, parts = Remaining(np.zeros_like(self.due.uniform), {}), [np.zeros(0, np.int64)]
        for lane, n in enumerate(done):
            if n == self.n_batches:
                continue
            number = int(np.searchsorted(self.cuts[lane], n, side="right")) - 1
            cells, batches = self.buffer(lane, number)
            parts.append(cells[np.concatenate(batches[n - self.cuts[lane, number] :])])
            position, begin = self._cut(lane * self.n_batches + int(self.cuts[lane, number + 1]))
            last, end = self._cut((lane + 1) * self.n_batches)
            if position < last:
                parts.append(self._ids(position)[begin:])
                blocks = self._blocks[position + 1 : last]
                due.uniform[blocks] = self.due.uniform[blocks]
                begin = 0
            if end:
                parts.append(self._ids(last)[begin:end])
        due.mixed.update((block, counts) for block, counts in self.due.mixed.items() if due.uniform[block])
        ids = np.concatenate(parts)
        of = np.searchsorted(self.pool.starts, ids, side="right") - 1
        mixed_blocks, at = np.unique(of, return_inverse=True)
        counts = np.zeros((len(mixed_blocks), self.pool.sizes.max()), np.uint8)
        np.add.at(counts, (at, ids - self.pool.starts[of]), 1)
        due.uniform[mixed_blocks], sizes = 1, self.pool.sizes[mixed_blocks].tolist()
        due.mixed.update((b, row[:n]) for b, row, n in zip(mixed_blocks.tolist(), counts, sizes, strict=True))
        return due


class Order:
    """Cells of each batch of a run.

    An epoch is a pass over all cells: blocks of neighbouring cells in random order, cut into `lanes` equal parts that
    are read in parallel; batch n belongs to lane n mod `lanes`. A lane is cut into buffers of about `n_blocks` blocks,
    whose cells are permuted and divided into batches. Reading neighbouring cells together is ten times faster than
    reading single cells, and a buffer of many blocks mixes studies well. All lanes have the same number of batches per
    epoch, and no batch has cells of two epochs.

    If the number of lanes changes within an epoch, the cells that were not yet seen are dealt again as a
    separate epoch; if they are fewer than the lanes, together with the next epoch.

    Parameters
    ----------
    pool
        The cells.
    seed
        Seed.
    batch_size
        Maximum number of cells per batch; batches of an epoch differ by at most one cell. Ignored with `batch_tokens`.
    batch_tokens
        Maximum number of tokens per batch. The epoch is cut into parts with equal numbers of tokens, and the cells of a
        buffer are sorted by length and dealt (:func:`~scdiva.data.batch.deal_batches`).
    n_blocks
        Blocks per buffer.
    lanes
        First batch, ascending from 0, and number of lanes of each stretch of the run.

    Raises
    ------
    ValueError
        As :func:`n_batches`.
    """

    def __init__(
        self,
        pool: CellPool,
        seed: int,
        batch_size: int,
        batch_tokens: int | None = None,
        n_blocks: int = 64,
        lanes: Sequence[tuple[int, int]] = ((0, 1),),
    ) -> None:
        self.pool, self.seed, self.lanes = pool, seed, list(lanes)
        self._how = batch_size, batch_tokens, n_blocks
        self._dealt: tuple[tuple[int, int], Epoch] | None = None
        total = pool.n_cells, int(pool.tokens.sum()), pool.longest
        self._epoch_batches = [n_batches(*total, n, batch_size, batch_tokens)[0] for _, n in self.lanes]
        self._once = Remaining(np.ones(len(pool.sizes), np.uint8), {})
        # of each stretch: its first epoch, the cells of that epoch, and the number of its batches per lane
        self._begins = [(0, self._once, self._epoch_batches[0])]
        for stretch in range(1, len(self.lanes)):
            epoch, due = self._left(stretch)
            self._begins.append((epoch, due, 0))
            self._begins[stretch] = epoch, due, self.deal(stretch, epoch).n_batches

    def deal(self, stretch: int, epoch: int) -> Epoch:
        """Order of the cells in an epoch of a stretch. The result of the last call is cached."""
        cached = self._dealt  # read once, since the prefetching thread may replace it
        if cached is None or cached[0] != (stretch, epoch):
            cached = self._dealt = None  # free memory first
            first, due, _ = self._begins[stretch]
            rest = due if epoch == first else self._once
            dealt = Epoch(self.pool, rest, self.lanes[stretch][1], self._how, [self.seed, stretch, epoch])
            cached = self._dealt = (stretch, epoch), dealt
        return cached[1]

    def _left(self, stretch: int) -> tuple[int, Remaining]:
        """Epoch in which a stretch starts, and the number of times that each of its cells is still to be seen."""
        (first, lanes), (after, following) = self.lanes[stretch - 1 : stretch + 1]
        turns, more = divmod(after - first, lanes)
        epoch, done = self._epoch(stretch - 1, turns)
        due = self.deal(stretch - 1, epoch).left([done + (lane < more) for lane in range(lanes)])
        if due.sums(self.pool)[0].sum() < following:
            epoch, due = (
                epoch + 1,
                Remaining(due.uniform + np.uint8(1), {b: n + np.uint8(1) for b, n in due.mixed.items()}),
            )
        return epoch, due

    def _epoch(self, stretch: int, turn: int) -> tuple[int, int]:
        """Epoch of batch `turn` of a lane, and number of the batch in that epoch."""
        first, _, rest = self._begins[stretch]
        if turn < rest:
            return first, turn
        more, turn = divmod(turn - rest, self._epoch_batches[stretch])
        return first + 1 + more, turn

    def find(self, number: int) -> tuple[Buffer, int]:
        """Buffer of a batch (numbered from 0), and number of the batch in the buffer."""
        stretch = int(np.searchsorted([first for first, _ in self.lanes], number, side="right")) - 1
        first, lanes = self.lanes[stretch]
        turn, lane = divmod(number - first, lanes)
        epoch, turn = self._epoch(stretch, turn)
        cuts = self.deal(stretch, epoch).cuts[lane]
        buffer = int(np.searchsorted(cuts, turn, side="right")) - 1
        return Buffer(stretch, epoch, lane, buffer), turn - int(cuts[buffer])

    def cells_of(self, buffer: Buffer) -> tuple[np.ndarray, list[np.ndarray]]:
        """Cells of a buffer and of its batches, see :meth:`Epoch.buffer`."""
        return self.deal(buffer.stretch, buffer.epoch).buffer(buffer.lane, buffer.number)


Key = TypeVar("Key")
Item = TypeVar("Item")


class TrainingStream(IterableDataset[CellBatch]):
    """Endless training batches. Batch n depends on the order and n only.

    Each of W processes (distributed training, or workers of a data loader) takes every W-th batch. If W divides the
    number of lanes, each process reads its own lanes. The current buffer of each lane is in memory, and a thread reads
    the next one.

    Parameters
    ----------
    order
        Cells of each batch.
    start, stop
        First batch, and the batch to stop before, counted over all processes. None: never stop.
    prefetch
        Whether to read ahead in a thread; the batches are the same.
    """

    def __init__(self, order: Order, start: int = 0, stop: int | None = None, *, prefetch: bool = True) -> None:
        self.order, self.start, self.stop, self.prefetch = order, start, stop, prefetch
        self.rank, self.world_size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def batch(self, number: int) -> CellBatch:
        """Read one batch (numbered from 0)."""
        return from_ragged(*self.order.pool.read(self._cells(number)).take(slice(None)), copy=False)

    def _cells(self, number: int) -> np.ndarray:
        buffer, at = self.order.find(number)
        cells, batches = self.order.cells_of(buffer)
        return np.asarray(cells[batches[at]])

    def rows_of(self, number: int) -> list[tuple[Source, int, int]]:
        """Source, row and study of each cell of a batch; nothing is read."""
        pool = self.order.pool
        rows = zip(*(one.tolist() for one in pool.rows_of(self._cells(number))), strict=True)
        return [(pool.sources[source], row, study) for source, row, study in rows]

    def _read(self, buffer: Buffer) -> tuple[Held, list[np.ndarray]]:
        """Read the cells of a buffer; with the indices of its batches."""
        cells, batches = self.order.cells_of(buffer)
        return self.order.pool.read(cells), batches

    def _numbers(self) -> Iterator[int]:
        """Numbers of the batches of this process or worker."""
        first, step = self.start + self.rank, self.world_size
        if (worker := get_worker_info()) is not None:  # a data loader takes batches from its workers in turn
            first, step = first + worker.id * step, step * worker.num_workers
        return iter(itertools.count(first, step) if self.stop is None else range(first, self.stop, step))

    def _schedule(self) -> Iterator[tuple[Buffer, int, bool]]:
        """Buffer of each of these batches, its number there, and whether the buffer is needed for the first time."""
        present: dict[int, Buffer] = {}
        for number in self._numbers():
            buffer, at = self.order.find(number)
            yield buffer, at, present.get(buffer.lane) != buffer
            present[buffer.lane] = buffer

    def __iter__(self) -> Iterator[CellBatch]:
        schedule, ahead = itertools.tee(self._schedule())
        buffers = (_read_ahead if self.prefetch else map)(self._read, (buffer for buffer, _, first in ahead if first))
        present: dict[int, tuple[Held, list[np.ndarray]]] = {}
        for buffer, at, first in schedule:
            if first:
                present.pop(buffer.lane, None)  # free the previous buffer of the lane before reading
                present[buffer.lane] = next(buffers)
            held, batches = present[buffer.lane]
            yield from_ragged(*held.take(batches[at]), copy=False)


class ValidationBatches(IterableDataset[CellBatch]):
    """Batches for validation: the same cells in the same order every time.

    Parameters
    ----------
    pool
        The cells.
    batch_size
        Cells per batch; the last one may be smaller.
    n_cells
        Number of cells, evenly spaced over all. None: all.
    batch_tokens
        Maximum number of tokens per batch, instead of `batch_size`.
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
        """Names of the studies, and for each cell, in the order of the batches, its study as index into these names.

        Batches only say whether a study is trained on.
        """
        names: list[str] = []
        number, row, _ = self.pool.rows_of(self.chosen)
        study = np.empty(len(row), np.int64)
        for i, source in enumerate(self.pool.sources):  # the pool may have some of the studies, with numbers of its own
            study[number == i] = len(names)
            if isinstance(source, PackedCells):
                study[number == i] += source.study[row[number == i]]
            names += source.study_names if isinstance(source, PackedCells) else [source.name]
        present, numbers = np.unique(study, return_inverse=True)
        return [names[i] for i in present], numbers


def _ends_in_order(lengths: np.ndarray, budget: int) -> list[int]:
    """Ends of batches that take cells in order as long as they fit."""
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ends = [0]
    while ends[-1] < len(lengths):
        ends.append(int(np.searchsorted(before, before[ends[-1]] + budget, side="right")) - 1)
    return ends[1:]


def _read_ahead(function: Callable[[Key], Item], keys: Iterator[Key]) -> Iterator[Item]:
    """Map a function over keys in a thread, one item ahead; errors are raised where the item is used."""
    with ThreadPoolExecutor(1, "scdiva-read-ahead") as thread:
        futures = (thread.submit(function, key) for key in keys)
        for coming, _ in itertools.pairwise(
            itertools.chain(futures, [Future[Item]()])
        ):  # the next one is already being read
            yield coming.result()
