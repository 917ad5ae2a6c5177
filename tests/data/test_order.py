from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva.data.order import BlockShuffle


def stream(order: BlockShuffle, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(epoch, block, cell within the block) of positions start to stop."""
    out = []
    for epoch, buffer, cells in order.locate(start, stop):
        blocks = order.buffers(epoch)[0][buffer]
        inside = [(epoch, int(block), i) for block in blocks for i in range(order.block_sizes[block])]
        out += [inside[cell] for cell in cells]
    return out


orders = st.builds(
    BlockShuffle,
    block_sizes=st.lists(st.integers(1, 6), min_size=1, max_size=9).map(tuple),
    seed=st.integers(0, 1000),
    n_blocks=st.integers(1, 10),
)


@settings(max_examples=60, deadline=None)
@given(orders)
def test_every_epoch_is_a_permutation_of_all_cells(order):
    everything = sorted((block, i) for block, size in enumerate(order.block_sizes) for i in range(size))
    seen = stream(order, 0, 3 * order.n_cells)
    for epoch in range(3):
        cells = seen[epoch * order.n_cells : (epoch + 1) * order.n_cells]
        assert {e for e, _, _ in cells} == {epoch}
        assert sorted((block, i) for _, block, i in cells) == everything


@settings(max_examples=60, deadline=None)
@given(orders, st.integers(0, 80), st.integers(0, 40))
def test_any_part_of_the_stream_can_be_had_alone(order, start, n):
    assert stream(order, start, start + n) == stream(order, 0, start + n)[start:]


@settings(max_examples=60, deadline=None)
@given(orders, st.integers(1, 30))
def test_windows_hold_every_buffer_once_and_enough_cells(order, least):
    windows = order.windows(1, least)
    starts = order.buffers(1)[1]
    assert [buffer for window in windows for buffer in window] == list(range(len(starts) - 1))
    sizes = [int(starts[window.stop] - starts[window.start]) for window in windows]
    assert len(sizes) == 1 or min(sizes) >= least
    largest = int(np.diff(starts).max())
    assert max(sizes) < 2 * least + largest


def test_order_differs_between_seeds_and_epochs_and_mixes_blocks():
    order = BlockShuffle((16,) * 12, 0, 6)
    first = stream(order, 0, 192)
    assert first == stream(BlockShuffle((16,) * 12, 0, 6), 0, 192)
    assert first != stream(BlockShuffle((16,) * 12, 1, 6), 0, 192)
    assert [cell[1:] for cell in first] != [cell[1:] for cell in stream(order, 192, 384)]
    assert len({block for _, block, _ in first[:32]}) > 3
    assert np.mean([len({block for _, block, _ in first[i : i + 16]}) for i in range(0, 96, 16)]) > 4


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="n_blocks must be at least 1"):
        BlockShuffle((1,), 0, 0)
    with pytest.raises(ValueError, match="no cells to shuffle"):
        BlockShuffle((), 0)


weighted = st.builds(
    lambda cells, seed, n_blocks: BlockShuffle(
        tuple(size for size, _ in cells), seed, n_blocks, tuple(times for _, times in cells)
    ),
    cells=st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from([0.25, 1.0, 1.5, 2.0, 0.1, 3.7])), min_size=10, max_size=30
    ),
    seed=st.integers(0, 1000),
    n_blocks=st.integers(1, 10),
)


def epochs(order: BlockShuffle, n: int) -> list[list[int]]:
    """Blocks of each epoch."""
    return [np.concatenate(order.buffers(epoch)[0]).tolist() for epoch in range(n)]


@settings(max_examples=60, deadline=None)
@given(weighted, st.integers(0, 40), st.integers(1, 60))
def test_a_weighted_stream_is_one_order_wherever_it_is_entered(order, start, n):
    fresh = BlockShuffle(order.block_sizes, order.seed, order.n_blocks, order.times)
    assert stream(fresh, start, start + n) == stream(order, 0, start + n)[start:]
    expected = []
    for epoch, blocks in enumerate(epochs(order, 2)):
        expected.append(sorted((epoch, block, i) for block in blocks for i in range(order.block_sizes[block])))
    lengths = [len(one) for one in expected]
    seen = stream(order, 0, sum(lengths))
    assert [sorted(seen[: lengths[0]]), sorted(seen[lengths[0] :])] == expected


@settings(max_examples=60, deadline=None)
@given(weighted)
def test_each_run_of_blocks_is_drawn_as_often_as_it_should_be(order):
    times = np.array(order.times)
    for blocks in epochs(order, 3):
        drawn = np.bincount(blocks, minlength=len(times))
        apart = np.cumsum(drawn) - np.cumsum(times)
        assert np.ptp(np.append(apart, 0)) < 1 + 1e-6


def test_fractions_hold_on_average():
    order = BlockShuffle((1,) * 8, 5, 4, (0.25,) * 4 + (1.0, 2.0, 1.5, 1.5))
    n = 2000
    drawn = np.bincount(np.concatenate(epochs(order, n)), minlength=8) / n
    np.testing.assert_allclose(drawn, order.times, atol=5 * np.sqrt(0.25 / n))
    assert drawn[4] == 1
    assert drawn[5] == 2


def test_weights_of_one_change_nothing():
    sizes = (3, 5, 2, 4, 4, 1)
    plain, ones = BlockShuffle(sizes, 7, 2), BlockShuffle(sizes, 7, 2, (1.0,) * 6)
    assert stream(plain, 0, 60) == stream(ones, 0, 60)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((1.0,), "for each block"), ((1.0, 0.0), "above zero"), ((1.0, float("inf")), "finite"),
        ((0.1, 0.2), r"would hold 0\.3 blocks"),
    ],
)  # fmt: skip
def test_impossible_times_are_refused(times, said):
    with pytest.raises(ValueError, match=said):
        BlockShuffle((2, 2), 0, 4, times)
