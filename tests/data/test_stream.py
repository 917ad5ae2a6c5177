"""For any cells, blocks and ranks each epoch is seen once, with and without reading ahead."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva.data.sampler import CellPool, Order, TrainingStream


class Numbered:
    """Cells whose genes all are the cell's own number: what was seen can be told."""

    def __init__(self, lengths: np.ndarray, first: int, fails_at: int | None = None) -> None:
        self.lengths, self.first, self.fails_at, self.n_reads, self.n_rows = lengths, first, fails_at, 0, 0

    @property
    def n_obs(self) -> int:
        return len(self.lengths)

    def read_ranges(self, ranges):
        self.n_reads += 1
        if self.n_reads == self.fails_at:
            raise ValueError("the file is damaged")
        rows = np.concatenate([np.arange(a, b) for a, b in ranges])
        self.n_rows += len(rows)
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


def read_by(stream: TrainingStream, rank: int, world_size: int) -> list[list[int]]:
    """Batches of one rank."""
    stream.rank, stream.world_size = rank, world_size
    return [cells_of(batch) for batch in stream]


worlds = {
    "sizes": st.lists(st.integers(8, 40), min_size=1, max_size=3),
    "block_rows": st.integers(1, 12),
    "n_blocks": st.integers(1, 6),
    "seed": st.integers(0, 99),
    "world_size": st.integers(1, 3),
    "accumulate": st.integers(1, 2),
    "batch": st.one_of(st.integers(1, 30), st.none()),
    "prefetch": st.booleans(),
}


@settings(max_examples=60, deadline=None)
@given(**worlds)
def test_ranks_together_see_each_epoch_once(sizes, block_rows, n_blocks, seed, world_size, accumulate, batch, prefetch):
    pool = pool_of(sizes, block_rows, seed)
    lanes = world_size * accumulate
    if pool.n_cells < lanes:
        return
    order = Order(
        pool, seed, batch or 1, batch_tokens=24 if batch is None else None, n_blocks=n_blocks, lanes=[(0, lanes)]
    )
    per_epoch = lanes * order.deal(0, 0).n_batches
    by_number: dict[int, list[int]] = {}
    for rank in range(world_size):
        batches = read_by(TrainingStream(order, stop=2 * per_epoch, prefetch=prefetch), rank, world_size)
        by_number |= dict(zip(range(rank, 2 * per_epoch, world_size), batches, strict=True))
    cells = [[cell for n in range(e * per_epoch, (e + 1) * per_epoch) for cell in by_number[n]] for e in range(2)]
    assert sorted(cells[0]) == sorted(cells[1]) == usable(pool)
    alone = TrainingStream(order, stop=2 * per_epoch)
    assert read_by(alone, 0, 1) == [by_number[n] for n in range(2 * per_epoch)]


@pytest.mark.parametrize("options", [{"batch_size": 20}, {"batch_size": 1, "batch_tokens": 160}])
@pytest.mark.parametrize("world_size", [1, 8])
def test_ranks_read_no_more_than_they_use(options, world_size):
    pool = pool_of([9000, 4000], 16, 3)
    order = Order(pool, 0, **options, n_blocks=8, lanes=[(0, 8)])
    per_epoch = 8 * order.deal(0, 0).n_batches
    n_batches = [len(read_by(TrainingStream(order, stop=per_epoch), rank, world_size)) for rank in range(world_size)]
    assert sum(n_batches) == per_epoch
    used = pool.n_cells + sum(int((source.lengths == 0).sum()) for source in pool.sources)
    assert sum(source.n_rows for source in pool.sources) <= 1.01 * used


def test_workers_of_a_data_loader_give_the_same_batches():
    stream = TrainingStream(Order(pool_of([60, 40], 4, 0), 0, 6, n_blocks=4, lanes=[(0, 4)]), start=1, stop=30)
    stream.rank, stream.world_size = 1, 2
    alone = [cells_of(batch) for batch in stream]
    loaded = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=2)
    assert [cells_of(batch) for batch in loaded] == alone
    assert len(alone) == 14


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("scdiva-read-ahead")]


def test_what_goes_wrong_in_the_thread_is_raised_and_no_thread_stays():
    pool = pool_of([60], 4, 0, fails_at=3)
    stream = TrainingStream(Order(pool, 0, 8, n_blocks=4))
    batches = iter(stream)
    assert cells_of(next(batches))
    assert len(readers()) == 1
    with pytest.raises(ValueError, match="the file is damaged"):
        list(batches)
    assert readers() == []


def test_a_stream_that_is_left_early_leaves_no_thread():
    pool = pool_of([60], 4, 0)
    stream = TrainingStream(Order(pool, 0, 8, n_blocks=4))
    two = iter(stream), iter(stream)
    assert [cells_of(next(one)) for one in two] == [cells_of(stream.batch(0))] * 2
    assert pool.sources[0].n_reads <= 2 * 2 + 1, "two buffers at most"
    assert len(readers()) == 2
    for one in two:
        one.close()
    assert readers() == []
