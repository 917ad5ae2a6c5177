"""The order in which training sees cells: a pure function of the seed and the number of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scdiva.data.batch import deal_batches
from scdiva.data.pool import CellPool


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
