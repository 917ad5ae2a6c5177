"""For any cells, blocks and ranks each epoch is seen once, with and without reading ahead."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva.data import stream as module
from scdiva.data.order import BlockShuffle
from scdiva.data.stream import CellPool, TrainingStream


class Numbered:
    """Cells whose genes all are the cell's own number: what was seen can be told."""

    def __init__(self, lengths: np.ndarray, first: int, fails_at: int | None = None) -> None:
        self.lengths, self.first, self.fails_at, self.n_reads = lengths, first, fails_at, 0

    @property
    def n_obs(self) -> int:
        return len(self.lengths)

    def read_ranges(self, ranges):
        self.n_reads += 1
        if self.n_reads == self.fails_at:
            raise ValueError("the file is damaged")
        rows = np.concatenate([np.arange(a, b) for a, b in ranges])
        indptr = np.concatenate([[0], np.cumsum(self.lengths[rows])])
        tokens = np.repeat(rows + self.first, self.lengths[rows])
        return indptr, tokens.astype(np.int32), (tokens * 2).astype(np.float32)

    def close(self):
        pass


def pool_of(sizes: list[int], block_rows: int, seed: int, **options) -> CellPool:
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    sources = [Numbered(rng.integers(0, 9, n), int(start), **options) for n, start in zip(sizes, starts, strict=False)]
    sources[0].lengths[0] = 3  # one cell is there
    return CellPool(sources, [np.full(n, i) for i, n in enumerate(sizes)], 1, 7, block_rows)


def usable(pool: CellPool) -> list[int]:
    return [s.first + int(row) for s in pool.sources for row in np.flatnonzero(s.lengths)]


def cells_of(batch) -> list[int]:
    ends = batch.cu_seqlens.numpy()
    tokens, values = batch.tokens.numpy(), batch.values.numpy()
    for a, b in itertools.pairwise(ends):
        assert 0 < b - a <= 7
        assert len(set(tokens[a:b])) == 1
    np.testing.assert_array_equal(values, 2 * tokens)
    return tokens[ends[:-1]].tolist()


def seen_by(stream: TrainingStream, rank: int, world_size: int) -> list[list[int]]:
    """Batches of one rank."""
    stream.rank, stream.world_size = rank, world_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW", 20)
        return [cells_of(batch) for batch in stream]


worlds = {
    "sizes": st.lists(st.integers(1, 40), min_size=1, max_size=3),
    "block_rows": st.integers(1, 12),
    "n_blocks": st.integers(1, 6),
    "seed": st.integers(0, 99),
    "world_size": st.integers(1, 3),
    "batch": st.one_of(st.integers(1, 30), st.none()),
    "prefetch": st.booleans(),
}


@settings(max_examples=60, deadline=None)
@given(**worlds)
def test_ranks_together_see_each_epoch_once(sizes, block_rows, n_blocks, seed, world_size, batch, prefetch):
    pool = pool_of(sizes, block_rows, seed)
    order = BlockShuffle(pool.block_sizes, seed, n_blocks)
    options = {"batch_tokens": 24} if batch is None else {}
    whole = TrainingStream(pool, order, batch or 1, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW", 20)
        if batch is None:
            ends = np.cumsum([int(whole._dealt_before(epoch, 24)[1][-1]) for epoch in range(2)])
            n_batches = int(ends[-1])
        else:
            n_batches = -(-2 * pool.n_cells // batch)
    steps = -(-n_batches // world_size) + 1
    by_number: dict[int, list[int]] = {}
    for rank in range(world_size):
        stream = TrainingStream(pool, order, batch or 1, max_steps=steps, prefetch=prefetch, **options)
        seen = seen_by(stream, rank, world_size)
        assert len(seen) == steps
        by_number |= {step * world_size + rank: cells for step, cells in enumerate(seen)}
    assert sorted(by_number) == list(range(steps * world_size))
    cells = [cell for number in range(steps * world_size) for cell in by_number[number]]
    for epoch in range(2):
        assert sorted(cells[epoch * pool.n_cells : (epoch + 1) * pool.n_cells]) == usable(pool)
    if batch is not None:  # the very permutation of the order
        drawn = [
            usable_in(pool, order.buffers(epoch)[0][buffer])[order.permutation(epoch, buffer)[first:last]]
            for epoch, buffer, first, last in order.spans(0, len(cells))
        ]
        assert cells == np.concatenate(drawn).tolist()
    else:
        assert len([c for number in range(ends[0]) for c in by_number[number]]) == pool.n_cells


def usable_in(pool: CellPool, blocks: np.ndarray) -> np.ndarray:
    return np.concatenate([pool.sources[n].first + rows for n, rows in (pool.blocks[block] for block in blocks)])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.booleans(), st.integers(0, 30))
def test_reading_ahead_changes_no_byte(batch_size, tokens, start):
    options = {"start_step": start, "max_steps": start + 25, "batch_tokens": 30 if tokens else None}
    got = []
    for prefetch in (True, False):
        pool = pool_of([50, 3, 40], 4, 5)
        order = BlockShuffle(pool.block_sizes, 1, 3)
        stream = TrainingStream(pool, order, batch_size, prefetch=prefetch, **options)
        got.append([[part.numpy().tobytes() for part in (*b.packed, b.study)] for b in stream])
        assert got[-1] == [
            [part.numpy().tobytes() for part in (*b.packed, b.study)]
            for b in map(stream.batch, range(start, start + 25))
        ]
    assert got[0] == got[1]


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("scdiva-read-ahead")]


def test_what_goes_wrong_in_the_thread_is_raised_and_no_thread_stays():
    pool = pool_of([60], 4, 0, fails_at=3)
    stream = TrainingStream(pool, BlockShuffle(pool.block_sizes, 0, 4), 8)
    batches = iter(stream)
    assert cells_of(next(batches))
    assert len(readers()) == 1
    with pytest.raises(ValueError, match="the file is damaged"):
        list(batches)
    assert readers() == []


def test_a_stream_that_is_left_early_leaves_no_thread():
    pool = pool_of([60], 4, 0)
    stream = TrainingStream(pool, BlockShuffle(pool.block_sizes, 0, 4), 8)
    two = iter(stream), iter(stream)
    assert [cells_of(next(one)) for one in two] == [cells_of(stream.batch(0))] * 2
    assert len(readers()) == 2
    for one in two:
        one.close()
    assert readers() == []


def test_two_buffers_are_read_at_most_ahead_of_use():
    pool = pool_of([400], 4, 0)
    order = BlockShuffle(pool.block_sizes, 0, 5)
    batches = iter(TrainingStream(pool, order, 5))
    next(batches)
    batches.close()
    assert pool.sources[0].n_reads <= 2
