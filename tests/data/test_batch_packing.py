from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva.data.batch import deal_batches, fill_batches

lengths_of_cells = st.lists(st.integers(0, 60), max_size=120).map(lambda cells: np.array(cells, dtype=np.int32))


def realistic(n: int, median: float, seed: int = 0) -> np.ndarray:
    """Genes per cell as droplet data have them, with [LAT], none longer than the model reads."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 0.45, n)
    return np.clip(drawn, 20, 1200).astype(np.int64) + 1


@settings(max_examples=100, deadline=None)
@given(lengths_of_cells, st.integers(1, 200))
def test_filled_batches_hold_every_cell_once_within_the_budget(lengths, budget):
    batches = fill_batches(lengths, budget)
    assert sorted(np.concatenate([*batches, []]).tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert lengths[batch].sum() <= budget or len(batch[lengths[batch] > 0]) == 1
        assert (np.diff(lengths[batch]) <= 0).all()  # so cells of equal length are neighbours
        for length in np.unique(lengths[batch]):
            assert (np.diff(batch[lengths[batch] == length]) > 0).all()
    again = fill_batches(lengths.copy(), budget)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


@settings(max_examples=60, deadline=None)
@given(lengths_of_cells, st.integers(1, 200))
def test_no_cell_left_over_would_have_fitted_into_an_earlier_batch(lengths, budget):
    batches = fill_batches(lengths, budget)
    for number, batch in enumerate(batches):
        later = np.concatenate([*batches[number + 1 :], []]).astype(int)
        if len(later):
            assert lengths[batch].sum() + lengths[later].min() > budget


@pytest.mark.parametrize("median", [300, 600, 900])
@pytest.mark.parametrize("budget", [8192, 32768])
def test_batches_of_a_window_are_nearly_full(median, budget):
    lengths = realistic(4096, median)
    filled = [lengths[batch].sum() / budget for batch in fill_batches(lengths, budget)]
    assert np.mean(filled) >= 0.97
    assert min(filled[:-1]) >= 0.9


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
    batches = deal_batches(lengths, 110)
    tokens = np.array([lengths[batch].sum() for batch in batches])
    assert tokens.max() - tokens.min() <= 0.02 * tokens.mean()
    medians = [np.median(lengths[batch]) for batch in batches]
    assert np.ptp(medians) < 0.25 * np.median(lengths)  # sorted batches differ by far more than their median


def test_impossible_calls_are_refused():
    with pytest.raises(ValueError, match="budget must be at least 1, got 0"):
        fill_batches(np.array([3]), 0)


@pytest.mark.parametrize("max_cells", [1, 3, 7])
def test_a_batch_holds_no_more_cells_than_asked_for(max_cells):
    lengths = np.random.default_rng(0).integers(0, 50, 101)
    batches = fill_batches(lengths, 200, max_cells)
    assert max(map(len, batches)) == max_cells
    assert max(lengths[batch].sum() for batch in batches) <= 200
    assert sorted(np.concatenate(batches)) == list(range(101))
    with pytest.raises(ValueError, match="max_cells must be at least 1, got 0"):
        fill_batches(lengths, 200, 0)
