from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva.data.batch import deal_batches, fill_batches, from_ragged

lengths_of_cells = st.lists(st.integers(0, 60), max_size=120).map(lambda cells: np.array(cells, dtype=np.int32))


def test_ragged_cells_become_a_batch():
    tokens, values = np.int32([5, 3, 9]), np.float32([2, 1, 4])
    batch = from_ragged(np.int64([10, 12, 12, 13]), tokens, values, study=[0, 1, 1])
    assert batch.n_cells == 3
    values[:] = 0
    expected = {"tokens": [5, 3, 9], "values": [2, 1, 4], "cu_seqlens": [0, 2, 2, 3], "study": [0, 1, 1]}
    types = torch.int64, torch.float32, torch.int32, torch.int64
    for (name, numbers), dtype in zip(expected.items(), types, strict=True):
        part = getattr(batch, name)
        assert (part.tolist(), part.dtype) == (numbers, dtype)
        assert getattr(batch.to("meta"), name).device.type == "meta"
    assert from_ragged(np.int64([0, 1]), np.int32([5]), np.float32([2])).to("cpu").study is None
    for wrong in ([0, 2], [0, 2, 1]):
        with pytest.raises(ValueError, match=r"indptr spans \d positions.*1 tokens.*1 values"):
            from_ragged(np.int64(wrong), np.int32([5]), np.float32([2]))


def realistic(n: int, median: float) -> np.ndarray:
    """Genes per cell as droplet data have them, with [LAT], none longer than the model reads."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), 0.45, n)
    return np.clip(drawn, 20, 1200).astype(np.int64) + 1


@settings(max_examples=100, deadline=None)
@given(lengths_of_cells, st.integers(1, 200), st.none() | st.integers(1, 9))
def test_filled_batches_hold_every_cell_once_within_the_budget(lengths, budget, max_cells):
    batches = fill_batches(lengths, budget, max_cells)
    assert sorted(np.concatenate([*batches, []]).tolist()) == list(range(len(lengths)))
    for number, batch in enumerate(batches):
        assert lengths[batch].sum() <= budget or len(batch[lengths[batch] > 0]) == 1
        assert max_cells is None or len(batch) <= max_cells
        assert (np.diff(lengths[batch]) <= 0).all()  # so cells of equal length are neighbours
        for length in np.unique(lengths[batch]):
            assert (np.diff(batch[lengths[batch] == length]) > 0).all()
        later = np.concatenate([*batches[number + 1 :], []]).astype(int)
        if len(later) and len(batch) != max_cells:  # no cell that follows would have fitted
            assert lengths[batch].sum() + lengths[later].min() > budget
    again = fill_batches(lengths.copy(), budget, max_cells)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


@pytest.mark.parametrize("budget", [8192, 32768])
def test_batches_of_a_window_are_nearly_full(budget):
    lengths = realistic(4096, 600)
    filled = [lengths[batch].sum() / budget for batch in fill_batches(lengths, budget)]
    assert np.mean(filled) >= 0.97
    assert min(filled[:-1]) >= 0.9
    for name, wrong in (("budget", (0,)), ("max_cells", (200, 0))):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            fill_batches(lengths, *wrong)


@settings(max_examples=200, deadline=None)
@given(lengths_of_cells.filter(len), st.data())
def test_dealt_batches_hold_every_cell_once_and_differ_by_one_cell_at_most(lengths, data):
    n = data.draw(st.integers(1, len(lengths)))
    batches = deal_batches(lengths, n)
    assert len(batches) == n
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    sizes, tokens = [len(batch) for batch in batches], [int(lengths[batch].sum()) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    assert max(tokens) - min(tokens) <= lengths.max()
    assert max(tokens) <= lengths.sum() / n + lengths.max() * (n - 1) / n
    for batch in batches:
        assert (np.diff(batch) > 0).all()


def test_dealt_batches_are_alike():
    lengths = realistic(4096, 900)
    tokens = np.array([lengths[batch].sum() for batch in deal_batches(lengths, 110)])
    assert tokens.max() - tokens.min() <= 0.02 * tokens.mean()
