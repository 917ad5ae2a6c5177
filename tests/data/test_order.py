"""For any cells, lanes and batches: each epoch holds every cell once, however often the number of lanes changes."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scdiva.data import sampler as module
from scdiva.data.sampler import LEFT_OUT, CellPool, Epoch, Order, Remaining

MIN_GENES, CONTEXT = 2, 9


def pool_of(sizes: list[int], block_rows: int, seed: int) -> CellPool:
    """Two sources of studies of these sizes; some cells have too few genes, and every fourth study is held out."""
    rng = np.random.default_rng(seed)
    study = np.repeat(np.arange(len(sizes)), sizes)
    numbers = np.where(np.arange(len(sizes)) % 4 == 3, LEFT_OUT, np.arange(len(sizes)))
    cut = len(study) // 2
    studies = [study[:cut].astype(np.uint16), study[cut:].astype(np.uint16)]
    sources = [SimpleNamespace(lengths=rng.integers(0, 14, len(s)).astype(np.uint16)) for s in studies]
    sources[1].lengths[:] = np.maximum(sources[1].lengths, np.arange(len(studies[1])) % 3)
    return CellPool(sources, studies, MIN_GENES, CONTEXT, block_rows, [numbers, numbers])


def batches_of(order: Order, numbers) -> list[list[int]]:
    """Cells of batches, each buffer drawn once."""
    drawn = {}
    out = []
    for number in numbers:
        buffer, at = order.find(number)
        if buffer not in drawn:
            drawn[buffer] = order.cells_of(buffer)
        cells, batches = drawn[buffer]
        out.append(cells[batches[at]].tolist())
    return out


pools = st.builds(
    pool_of,
    sizes=st.lists(st.integers(8, 60), min_size=1, max_size=5),
    block_rows=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
how = st.one_of(st.tuples(st.integers(1, 20), st.none()), st.tuples(st.just(1), st.integers(20, 90)))


@settings(max_examples=150, deadline=None)
@given(pools, how, st.integers(1, 6), st.integers(1, 7), st.integers(0, 99))
def test_every_epoch_is_every_cell_once_and_no_batch_exceeds_its_limit(pool, how, lanes, n_blocks, seed):
    assume(pool.n_cells >= lanes)
    size, tokens = how
    order = Order(pool, seed, size, batch_tokens=tokens, n_blocks=n_blocks, lanes=[(0, lanes)])
    n = order.deal(0, 0).n_batches * lanes
    batches = batches_of(order, range(2 * n))
    for epoch in (batches[:n], batches[n:]):
        assert sorted(itertools.chain.from_iterable(epoch)) == list(range(pool.n_cells))
        sizes = [len(batch) for batch in epoch]
        if tokens is None:
            assert min(sizes) >= 1
            assert max(sizes) <= min(sizes) + 1
            assert max(sizes) <= max(size, 1 + (size == 1))
        else:
            assert min(sizes) >= 1
            assert max(int(pool.n_tokens(np.array(batch)).sum()) for batch in epoch) <= tokens
    # no cell before its epoch, and a lane in one part of the order
    assert {order.find(number)[0].epoch for number in range(n)} == {0}
    assert {order.find(number)[0].lane for number in range(0, n, lanes)} == {0}


@settings(max_examples=60, deadline=None)
@given(pools, how, st.lists(st.tuples(st.integers(1, 25), st.integers(1, 5)), min_size=2, max_size=4))
def test_no_cell_is_lost_or_seen_twice_when_the_number_of_lanes_changes(pool, how, stretches):
    """Whatever part of an epoch was seen, with any number of lanes, the rest follows before the next epoch."""
    assume(pool.n_cells >= 5)
    size, tokens = how
    ends = np.cumsum([0, *(n * lanes for n, lanes in stretches)]).tolist()
    lanes = list(zip(ends, [lanes for _, lanes in stretches], strict=False))
    order = Order(pool, 3, size, batch_tokens=tokens, n_blocks=3, lanes=lanes)
    epochs: dict[int, Counter] = {}
    for number, cells in enumerate(batches_of(order, range(ends[-1]))):
        epochs.setdefault(order.find(number)[0].epoch, Counter()).update(cells)
    counts = Counter()
    for epoch in epochs.values():
        counts += epoch
    last = max(epochs)
    assert all(n <= last + 1 for n in counts.values())
    assert all(counts[cell] >= last - 1 for cell in range(pool.n_cells))
    # earlier batches do not depend on later stretches, and are reproducible
    short = Order(pool, 3, size, batch_tokens=tokens, n_blocks=3, lanes=lanes[:-1])
    assert batches_of(short, range(ends[-2])) == batches_of(order, range(ends[-2]))


def test_a_rest_is_noted_by_blocks_not_by_cells():
    """A byte for each cell of an atlas would be 59 MB for each change of the number of processes."""
    pool = pool_of([8_000, 8_000], 8, 0)
    order = Order(pool, 0, 10, n_blocks=8, lanes=[(0, 2), (500, 1), (800, 4)])
    due = order.deal(2, 0).due
    assert 0 < len(due.mixed) <= (2 + 1) * (8 + 2)
    assert due.sums(pool)[0].sum() == pool.n_cells - sum(map(len, batches_of(order, range(800))))


def test_a_rest_of_fewer_cells_than_lanes_joins_the_next_epoch():
    pool = pool_of([20, 20], 4, 1)
    n = pool.n_cells
    order = Order(pool, 0, 1, lanes=[(0, 1), (n - 2, 3)])
    batches = batches_of(order, range(n - 2 + 3 * order.deal(1, 1).n_batches))
    assert Counter(itertools.chain.from_iterable(batches)) == Counter(dict.fromkeys(range(n), 2))
    with pytest.raises(ValueError, match="too few for 90 batches a step"):
        Order(pool, 0, 4, lanes=[(0, 90)])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 50), st.integers(1, 6))
def test_lanes_change_their_buffers_in_turn(lanes, per_lane, n_blocks):
    pool = pool_of([per_lane * 8 * lanes + 8], 8, 0)
    deal = Epoch(pool, Remaining(np.ones(len(pool.sizes), np.uint8), {}), lanes, (2, None, n_blocks), [0, 0, 0])
    assert (np.diff(deal.cuts, axis=1) >= 0).all()
    assert (deal.cuts[:, 0] == 0).all()
    assert (deal.cuts[:, -1] == deal.n_batches).all()
    if deal.cuts.shape[1] > 2:
        assert (np.diff(deal.cuts[:, 1]) >= 0).all()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=3),
    block_rows=st.integers(1, 9),
    chunk=st.integers(1, 40),
    seed=st.integers(0, 999),
)
def test_blocks_are_of_one_study_and_looked_at_in_any_portions(sizes, block_rows, chunk, seed):
    rng = np.random.default_rng(seed)
    studies = [np.repeat(np.arange(len(study_sizes), dtype=np.int16), study_sizes) for study_sizes in sizes]
    numbers = [
        np.where(rng.random(len(study_sizes)) < 0.3, LEFT_OUT, 10 * i + np.arange(len(study_sizes)))
        for i, study_sizes in enumerate(sizes)
    ]
    sources = [SimpleNamespace(lengths=rng.integers(0, 9, len(study)).astype(np.uint16)) for study in studies]
    pool = CellPool(sources, studies, 2, 5, block_rows, numbers)
    expected = [
        (i, row, int(numbers[i][studies[i][row]]), min(int(source.lengths[row]), 5) + 1)
        for i, source in enumerate(sources)
        for row in range(len(studies[i]))
        if source.lengths[row] >= 2 and numbers[i][studies[i][row]] != LEFT_OUT
    ]
    assert pool.n_cells == len(expected) == int(pool.sizes.sum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        chunked = CellPool(sources, studies, 2, 5, block_rows, numbers)
    for column in ("_source", "_first", "_span", "sizes", "tokens", "starts"):
        np.testing.assert_array_equal(getattr(pool, column), getattr(chunked, column))
    if not expected:
        return
    cells = rng.permutation(len(expected))
    source, row, study = pool.rows_of(cells)
    actual = list(zip(*(one.tolist() for one in (source, row, study, pool.n_tokens(cells))), strict=True))
    assert actual == [expected[cell] for cell in cells]
    assert pool.longest == max(tokens for *_, tokens in expected)
    for start, n, tokens in zip(pool.starts, pool.sizes, pool.tokens, strict=True):
        block = expected[start : start + n]
        assert len({(i, study) for i, _, study, _ in block}) == 1
        assert sum(n_tokens for *_, n_tokens in block) == tokens
        assert n <= block_rows
