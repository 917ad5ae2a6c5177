from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva.data.order import BlockShuffle


def stream(order: BlockShuffle, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(epoch, block, cell within the block) of positions start to stop."""
    out = []
    for epoch, buffer, first, last in order.spans(start, stop):
        cells = order.permutation(epoch, buffer)[first:last]
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
