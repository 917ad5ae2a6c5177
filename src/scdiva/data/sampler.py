"""Training batches: cells of several studies in blocks, dealt into batches by the seed and the batch number alone."""

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
"""Study number of cells that a pool leaves out."""
CHUNK = 1 << 16
"""Cells that are looked at at once when blocks are made."""


class Held(NamedTuple):
    """Cells as they were read, with where each of them lies: to bring them in order would copy them.

    Attributes
    ----------
    parts
        Tokens and values of what was read at once.
    part, start, length, study
        int64 (n,) of each cell: its part, where it starts there, its number of genes, its study.
    """

    parts: list[tuple[np.ndarray, np.ndarray]]
    part: np.ndarray
    start: np.ndarray
    length: np.ndarray
    study: np.ndarray

    def take(self, rows: np.ndarray | slice) -> Cells:
        """Copy some of the cells.

        Parameters
        ----------
        rows
            int, numbers of the cells, or a slice; one at least.
        """
        start, length = self.start[rows], self.length[rows]
        where = list(zip(self.part[rows].tolist(), start.tolist(), (start + length).tolist(), strict=True))
        # of the types of a batch at once, which would copy them otherwise
        tokens = np.concatenate([self.parts[p][0][a:b] for p, a, b in where], dtype=np.int64)
        values = np.concatenate([self.parts[p][1][a:b] for p, a, b in where], dtype=np.float32)
        return np.concatenate([[0], length]).cumsum(), tokens, values, self.study[rows]


class CellPool:
    """The usable cells of several studies, counted through, in blocks of neighbours.

    Of a block only its source, first and last row are kept, 28 bytes with what is counted, 26 MB for 59 M cells. Its
    rows are found again from the lengths and studies of its source, which may be mapped into memory.

    Parameters
    ----------
    sources
        Opened studies, or one packed corpus.
    studies
        For each source, the study of each of its cells, int (n_obs,).
    min_genes
        Cells with fewer known genes are left out.
    context
        Genes kept per cell, the first of its ranking.
    block_rows
        Cells of a block. No block spans two studies.
    numbers
        For each source, int (n_studies,), the number that each of its studies gets; cells of a study that gets
        :data:`LEFT_OUT` are not of this pool. None: those of `studies` themselves.

    Attributes
    ----------
    n_cells
        Their number.
    sizes, tokens
        int32 (n_blocks,), cells and tokens (with `[LAT]` of each cell) of each block.
    starts
        int64 (n_blocks,), the number in the pool of each block's first cell.
    longest
        Tokens of the longest cell; 0 if there is none.
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
        columns = [array(kind) for kind in "iIiii"]  # 32 bits, and they grow in place
        for number in range(len(self.sources)):
            for blocks in self._blocks(number, block_rows):
                for column, some in zip(columns, blocks, strict=True):
                    column.frombytes(some.astype(column.typecode).tobytes())
        self._source, self._first, self._span, self.sizes, self.tokens = map(np.asarray, columns)
        self.starts = np.cumsum(self.sizes, dtype=np.int64) - self.sizes
        self.n_cells = int(self.sizes.sum())

    def _usable(self, number: int, start: int, stop: int) -> np.ndarray:
        """Rows of a source that are of this pool, between two."""
        kept = self._lengths[number][start:stop] >= self.min_genes
        return start + np.flatnonzero(kept & (self._study(number, slice(start, stop)) != LEFT_OUT))

    def _study(self, number: int, rows: np.ndarray | slice) -> np.ndarray:
        study = self.studies[number][rows]
        return study if self.numbers is None else self.numbers[number][study]

    def _length(self, number: int, rows: np.ndarray | slice) -> np.ndarray:
        return np.minimum(self._lengths[number][rows].astype(np.int64), self.context)

    def _blocks(self, number: int, block_rows: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Make the blocks of a source: of each its source, first row, rows from there, cells and tokens."""
        n_obs = len(self._lengths[number])
        rows = np.zeros(0, np.int64)
        for start in range(0, n_obs, CHUNK):
            rows = np.concatenate([rows, self._usable(number, start, min(start + CHUNK, n_obs))])
            if not len(rows):
                continue
            # No block spans two studies: then a packed corpus gives the very stream that its files give.
            runs = np.concatenate([[0], np.flatnonzero(np.diff(self.studies[number][rows])) + 1, [len(rows)]])
            n = -(-np.diff(runs) // block_rows)
            bounds = np.repeat(runs[:-1] - block_rows * (np.cumsum(n) - n), n) + block_rows * np.arange(n.sum())
            bounds = np.append(bounds, len(rows))
            if start + CHUNK < n_obs and bounds[-1] - bounds[-2] < block_rows:  # the next rows may belong to it
                bounds = bounds[:-1]
            firsts, lasts, waiting = rows[bounds[:-1]], rows[bounds[1:] - 1], rows[bounds[-1] :]
            n_tokens = self._length(number, rows) + 1
            self.longest = max(self.longest, int(n_tokens.max()))
            before = np.concatenate([[0], np.cumsum(n_tokens)])[bounds]
            yield np.full(len(firsts), number), firsts, lasts + 1 - firsts, np.diff(bounds), np.diff(before)
            rows = waiting

    def _find(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block, source and row of cells."""
        block = np.searchsorted(self.starts, cells, side="right") - 1
        found, at = np.unique(block, return_inverse=True)
        where = zip(self._source[found].tolist(), self._first[found].tolist(), self._span[found].tolist(), strict=True)
        rows = np.concatenate([self._usable(number, first, first + span) for number, first, span in where])
        before = np.cumsum(self.sizes[found]) - self.sizes[found]
        return block, self._source[block], rows[(before - self.starts[found])[at] + cells]

    def rows_of(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Say where cells lie, without reading them.

        Parameters
        ----------
        cells
            Their numbers in the pool, int (n,); one at least.

        Returns
        -------
        int (n,) of each the number of its source, its row there, and the number of its study.
        """
        _, source, row = self._find(cells)
        return source, row, _each(self._study, source, row)

    def n_tokens(self, cells: np.ndarray) -> np.ndarray:
        """Count the tokens of cells, `[LAT]` with them; nothing is read.

        An upper bound: where a file has two columns of one gene, they become one token.

        Parameters
        ----------
        cells
            As for :meth:`rows_of`.

        Returns
        -------
        int64 (n,).
        """
        _, source, row = self._find(cells)
        return _each(self._length, source, row) + 1

    def read(self, cells: np.ndarray) -> Held:
        """Read cells, in the order of the files, many of one file at once.

        Parameters
        ----------
        cells
            As for :meth:`rows_of`. Of each block all that lies between the first and the last of them is read.

        Returns
        -------
        The cells, in the order asked for.
        """
        block, source, row = self._find(cells)
        order = np.lexsort((row, source))
        bounds = np.concatenate([[0], np.flatnonzero(np.diff(block[order])) + 1, [len(cells)]])
        first, stop, of = row[order[bounds[:-1]]], row[order[bounds[1:] - 1]] + 1, source[order[bounds[:-1]]]
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        part, start, length = np.empty((3, len(cells)), np.int64)
        # of one source, and of a limited number of rows
        changes = np.diff(of) | np.diff(np.cumsum(stop - first) // BLOCK_ROWS)
        for a, b in itertools.pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(of)]):
            ranges = list(zip(first[a:b].tolist(), stop[a:b].tolist(), strict=True))
            indptr, tokens, values = self.sources[of[a]].read_ranges(ranges)
            mine = order[bounds[a] : bounds[b]]
            before = np.cumsum(stop[a:b] - first[a:b]) - stop[a:b]  # rows read before, less the row that comes first
            at = row[mine] + np.repeat(before, np.diff(bounds[a : b + 1]))
            part[mine], start[mine] = len(parts), indptr[at]
            length[mine] = np.minimum(indptr[at + 1] - indptr[at], self.context)
            parts.append((tokens, values))
        return Held(parts, part, start, length, _each(self._study, source, row))


def _each(what: Callable[[int, np.ndarray], np.ndarray], source: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Find one value for each cell, source by source."""
    out = np.empty(len(row), np.int64)
    for number in np.unique(source).tolist():
        mine = source == number
        out[mine] = what(number, row[mine])
    return out


class Buffer(NamedTuple):
    """Cells that are read at once: one of the buffers of a lane in an epoch.

    Attributes
    ----------
    stretch
        How often the number of lanes had changed.
    epoch, lane, number
        Epoch, lane of the batches, and number of the buffer in the lane; each from 0.
    """

    stretch: int
    epoch: int
    lane: int
    number: int


def n_batches(
    n_cells: int, n_tokens: int, longest: int, lanes: int, batch_size: int, batch_tokens: int | None
) -> tuple[int, bool]:
    """Count the batches that a lane has in an epoch, the same in all lanes.

    Parameters
    ----------
    n_cells, n_tokens
        Cells of the epoch and their tokens.
    longest
        Tokens of the longest cell.
    lanes
        Parts of the epoch.
    batch_size, batch_tokens
        Most cells of a batch; or most tokens.

    Returns
    -------
    The number, and whether the epoch is cut by tokens. With a budget of B tokens and a longest cell of l, batches of
    B - l tokens in the mean are sure to fit: cells that are dealt in turn exceed the mean by less than l (see
    :func:`~scdiva.data.batch.deal_batches`). Where the mean would be below 2 l, a batch might stay empty; then the
    epoch is cut by cells, B // l to a batch, which fit whatever their length.

    Raises
    ------
    ValueError
        If the budget is below two of the longest cells, or there are fewer cells than lanes.
    """
    if batch_tokens is not None:
        if batch_tokens < 2 * longest:
            raise ValueError(f"a cell has {longest} tokens, and batch_tokens={batch_tokens} is below two of them.")
        n = -(-n_tokens // (lanes * (batch_tokens - longest)))
        if n_tokens >= 2 * longest * lanes * n:
            return n, True
        batch_size = batch_tokens // longest
    if n_cells < lanes:
        raise ValueError(f"{n_cells} cells are too few for {lanes} batches a step.")
    # of batches of one cell, a few must hold two where the lanes don't divide the cells
    return min(-(-n_cells // (lanes * batch_size)), n_cells // lanes), False


class Due(NamedTuple):
    """How often each cell is to be seen in an epoch, block by block: one byte a cell would be 59 MB of an atlas.

    Attributes
    ----------
    whole
        uint8 (n_blocks,), for all cells of a block.
    mixed
        By its number, uint8 (size,), for each cell of a block whose cells differ; there `whole` is not 0.
    """

    whole: np.ndarray
    mixed: dict[int, np.ndarray]

    def sums(self, pool: CellPool) -> tuple[np.ndarray, np.ndarray]:
        """Count the cells and tokens of each block, each cell as often as it is due.

        Parameters
        ----------
        pool
            The cells.
        """
        sizes, tokens = pool.sizes * self.whole, pool.tokens * self.whole
        for block, counts in self.mixed.items():
            ids = np.arange(pool.starts[block], pool.starts[block] + len(counts))
            sizes[block], tokens[block] = counts.sum(), (pool.n_tokens(ids) * counts).sum()
        return sizes, tokens


class Deal:
    """An epoch, its blocks in random order, cut into equal parts for lanes, buffers and batches.

    Parameters
    ----------
    pool
        The cells.
    due
        How often each cell is to be seen in this epoch.
    lanes
        Parts that are read side by side.
    how
        Most cells, or most tokens, of a batch, and blocks of a buffer.
    key
        Seed of the draws.

    Attributes
    ----------
    n_batches
        Batches of each lane.
    """

    def __init__(self, pool: CellPool, due: Due, lanes: int, how: tuple[int, int | None, int], key: list[int]) -> None:
        self.pool, self.due, self.lanes, self._key = pool, due, lanes, key
        batch_size, batch_tokens, n_blocks = how
        sizes, tokens = due.sums(pool)
        total = int(sizes.sum()), int(tokens.sum())
        self.n_batches, self.by_tokens = n_batches(*total, pool.longest, lanes, batch_size, batch_tokens)
        each = tokens if self.by_tokens else sizes
        del sizes, tokens  # before more is taken
        self._blocks = np.arange(len(each), dtype=np.int32)[each > 0]
        np.random.default_rng([*key, 1]).shuffle(self._blocks)
        each = each[self._blocks]
        self._ends = np.cumsum(each, dtype=np.int64)
        n_buffers = min(self.n_batches, max(1, len(self._blocks) // (lanes * n_blocks)))
        # The lanes of a process change buffers in turn: a cut between two is moved by up to half of a buffer.
        cuts = (2 * lanes * np.arange(1, n_buffers)[None] + 2 * np.arange(lanes)[:, None] + 1 - lanes) * self.n_batches
        self.cuts = np.pad(cuts // (2 * lanes * n_buffers), ((0, 0), (1, 1)), constant_values=(0, self.n_batches))

    def _ids(self, place: int) -> np.ndarray:
        """Numbers of the cells of a block, given its place in the order."""
        block = int(self._blocks[place])
        first, size = int(self.pool.starts[block]), int(self.pool.sizes[block])
        return np.repeat(np.arange(first, first + size), self.due.mixed.get(block, self.due.whole[block]))

    def _cut(self, batch: int) -> tuple[int, int]:
        """Find where a batch would begin without buffers: place of the block, number of the cell within it."""
        at = batch * int(self._ends[-1]) // (self.lanes * self.n_batches)
        place = int(np.searchsorted(self._ends, at, side="right"))
        if place == len(self._ends):
            return place, 0
        at -= int(self._ends[place - 1]) if place else 0
        if not self.by_tokens:
            return place, at
        n_tokens = self.pool.n_tokens(self._ids(place))
        return place, int(np.searchsorted(np.cumsum(n_tokens) - n_tokens, at))

    def buffer(self, lane: int, number: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Draw which cells are in a buffer, and in which batch.

        Parameters
        ----------
        lane, number
            Of the buffer.

        Returns
        -------
        Numbers of its cells, int64 (n,), in stored order block by block; and for each batch which of these it holds.
        """
        first, last = (lane * self.n_batches + int(cut) for cut in self.cuts[lane, number : number + 2])
        (block, begin), (end_block, end) = self._cut(first), self._cut(last)
        ids = [self._ids(place) for place in range(block, end_block)]
        cells = np.concatenate([*ids, self._ids(end_block)[:end]] if end else ids)[begin:]
        rng = np.random.default_rng([*self._key, 2, lane, number])
        drawn = rng.permutation(len(cells))
        if not self.by_tokens:
            ends = np.arange(first, last + 1) * int(self._ends[-1]) // (self.lanes * self.n_batches)
            return cells, np.split(drawn, ends[1:-1] - ends[0])
        batches = deal_batches(self.pool.n_tokens(cells)[drawn], last - first)
        return cells, [drawn[batches[i]] for i in rng.permutation(last - first)]

    def left(self, done: Sequence[int]) -> Due:
        """Count how often each cell is still to be seen.

        Parameters
        ----------
        done
            Batches that each lane has had.
        """
        due, some = Due(np.zeros_like(self.due.whole), {}), [np.zeros(0, np.int64)]
        for lane, n in enumerate(done):
            if n == self.n_batches:
                continue
            number = int(np.searchsorted(self.cuts[lane], n, side="right")) - 1
            cells, batches = self.buffer(lane, number)
            some.append(cells[np.concatenate(batches[n - self.cuts[lane, number] :])])
            place, begin = self._cut(lane * self.n_batches + int(self.cuts[lane, number + 1]))
            last, end = self._cut((lane + 1) * self.n_batches)
            if place < last:
                some.append(self._ids(place)[begin:])
                blocks = self._blocks[place + 1 : last]
                due.whole[blocks] = self.due.whole[blocks]
                begin = 0
            if end:
                some.append(self._ids(last)[begin:end])
        due.mixed.update((block, counts) for block, counts in self.due.mixed.items() if due.whole[block])
        ids = np.concatenate(some)
        of = np.searchsorted(self.pool.starts, ids, side="right") - 1
        found, at = np.unique(of, return_inverse=True)
        counts = np.zeros((len(found), self.pool.sizes.max()), np.uint8)
        np.add.at(counts, (at, ids - self.pool.starts[of]), 1)
        due.whole[found], sizes = 1, self.pool.sizes[found].tolist()
        due.mixed.update((b, row[:n]) for b, row, n in zip(found.tolist(), counts, sizes, strict=True))
        return due


class Order:
    """Which cells each batch of a run holds.

    Every epoch is all cells, each once: blocks of neighbouring cells in random order, cut into `lanes` equal parts,
    which are read side by side: batch n is of lane n mod `lanes`. A lane is cut into buffers of about `n_blocks`
    blocks, whose cells are permuted and dealt into batches. Reading neighbours together is an order of magnitude faster
    than reading cells one by one, a buffer of many blocks mixes studies well, and whoever reads all batches of a lane
    reads each of its cells once. All lanes have the same number of batches in an epoch, and no batch is of two epochs.

    When the number of lanes changes within an epoch, its cells that were not seen yet are dealt anew, as an epoch of
    their own; should there be fewer of them than lanes, together with the next epoch.

    Parameters
    ----------
    pool
        The cells.
    seed
        Seed of all draws.
    batch_size
        Most cells of a batch; the batches of an epoch differ by one cell at most. Without effect if `batch_tokens` is
        given.
    batch_tokens
        Most tokens of a batch. An epoch is then cut into parts of equal numbers of tokens, and the cells of a buffer
        are sorted by length and dealt (:func:`~scdiva.data.batch.deal_batches`).
    n_blocks
        Blocks of a buffer.
    lanes
        Number of the first batch of each stretch of the run, ascending from 0, and its number of lanes.

    Raises
    ------
    ValueError
        If there are no cells; and as :func:`n_batches` does.
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
        if not pool.n_cells:
            raise ValueError("there are no cells to shuffle.")
        self.pool, self.seed, self.lanes = pool, seed, list(lanes)
        self._how = batch_size, batch_tokens, n_blocks
        self._dealt: tuple[tuple[int, int], Deal] | None = None
        total = pool.n_cells, int(pool.tokens.sum()), pool.longest
        self._whole = [n_batches(*total, n, batch_size, batch_tokens)[0] for _, n in self.lanes]
        self._once = Due(np.ones(len(pool.sizes), np.uint8), {})
        # of each stretch: the epoch it begins with, the cells of that, batches of a lane until the next
        self._begins = [(0, self._once, self._whole[0])]
        for stretch in range(1, len(self.lanes)):
            epoch, due = self._left(stretch)
            self._begins.append((epoch, due, 0))
            self._begins[stretch] = epoch, due, self.deal(stretch, epoch).n_batches

    def deal(self, stretch: int, epoch: int) -> Deal:
        """Draw an epoch; the one that was asked for last is kept.

        Parameters
        ----------
        stretch, epoch
            As in :class:`Buffer`.
        """
        kept = self._dealt  # once, as the thread that reads ahead may replace it
        if kept is None or kept[0] != (stretch, epoch):
            kept = self._dealt = None  # goes before the next comes
            first, due, _ = self._begins[stretch]
            rest = due if epoch == first else self._once
            found = Deal(self.pool, rest, self.lanes[stretch][1], self._how, [self.seed, stretch, epoch])
            kept = self._dealt = (stretch, epoch), found
        return kept[1]

    def _left(self, stretch: int) -> tuple[int, Due]:
        """Find what the stretch before left: the epoch, and how often each cell is to be seen."""
        (first, lanes), (after, following) = self.lanes[stretch - 1 : stretch + 1]
        turns, more = divmod(after - first, lanes)
        epoch, done = self._epoch(stretch - 1, turns)
        due = self.deal(stretch - 1, epoch).left([done + (lane < more) for lane in range(lanes)])
        if due.sums(self.pool)[0].sum() < following:
            epoch, due = epoch + 1, Due(due.whole + np.uint8(1), {b: n + np.uint8(1) for b, n in due.mixed.items()})
        return epoch, due

    def _epoch(self, stretch: int, turn: int) -> tuple[int, int]:
        """Find the epoch of the batches that are number `turn` of their lanes, and which of its batches they are."""
        first, _, rest = self._begins[stretch]
        if turn < rest:
            return first, turn
        more, turn = divmod(turn - rest, self._whole[stretch])
        return first + 1 + more, turn

    def find(self, number: int) -> tuple[Buffer, int]:
        """Find a batch.

        Parameters
        ----------
        number
            Of the batch, from 0.

        Returns
        -------
        Its buffer, and which of the buffer's batches it is.
        """
        stretch = int(np.searchsorted([first for first, _ in self.lanes], number, side="right")) - 1
        first, lanes = self.lanes[stretch]
        turn, lane = divmod(number - first, lanes)
        epoch, turn = self._epoch(stretch, turn)
        cuts = self.deal(stretch, epoch).cuts[lane]
        buffer = int(np.searchsorted(cuts, turn, side="right")) - 1
        return Buffer(stretch, epoch, lane, buffer), turn - int(cuts[buffer])

    def cells_of(self, buffer: Buffer) -> tuple[np.ndarray, list[np.ndarray]]:
        """Draw which cells are in a buffer, and in which batch: see :meth:`Deal.buffer`."""
        return self.deal(buffer.stretch, buffer.epoch).buffer(buffer.lane, buffer.number)


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
