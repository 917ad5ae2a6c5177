"""Cells whose mean is another: the mean is met, and genes are gained and lost as counts would have it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from scdiva.perturbation.predict import shift_cells

CELLS = arrays(np.float64, (5, 3), elements=st.floats(0, 9).map(lambda x: 0.0 if x < 0.01 else x))
LEVEL = np.array([1.0, 2.0, 3.0])


def rng(seed=0):
    return np.random.default_rng(seed)


def shifted(cells, change, rng):
    return shift_cells(cells, cells.mean(axis=0) + change, LEVEL, rng)


@given(CELLS, arrays(np.float64, 3, elements=st.floats(-12, 12)), st.integers(0, 99))
def test_the_mean_is_met_and_nothing_is_below_zero(cells, change, seed):
    result = shifted(cells, change, rng(seed))
    assert (result >= 0).all()
    expected = np.maximum(cells.mean(axis=0) + change, 0)
    np.testing.assert_allclose(result.mean(axis=0), expected, rtol=1e-9, atol=1e-8)


def test_cells_that_were_drawn_from_more_meet_a_change_far_below_their_sampling_error():
    draw = rng(8)
    rate = np.concatenate([[0.0, 0.002], draw.gamma(0.5, 1.0, 198)])  # genes that few cells or none have among them
    every = np.log1p(draw.poisson(rate, (2_000, 200))).astype(float)
    change = draw.normal(scale=1e-3, size=200) * (every.mean(axis=0) > 0)
    level = np.where(every.any(axis=0), every.sum(axis=0) / np.maximum((every > 0).sum(axis=0), 1), 1.0)
    sample = every[:50]
    result = shift_cells(sample, every.mean(axis=0) + change, level, rng(9))
    moved = result.mean(axis=0) - every.mean(axis=0)
    np.testing.assert_allclose(moved, np.maximum(change, -every.mean(axis=0)), atol=1e-9)
    assert np.corrcoef(sample.mean(axis=0) - every.mean(axis=0), change)[0, 1] < 0.3  # which the cells alone don't
    assert (result >= 0).all()
    assert abs((result > 0).mean() - (every > 0).mean()) < 0.01
    common = every.mean(axis=0) > 0.3
    spread = result.std(axis=0)[common] / every.std(axis=0)[common]
    assert 0.9 < np.median(spread) < 1.1


@given(CELLS, st.integers(0, 99))
def test_no_change_changes_nothing(cells, seed):
    np.testing.assert_allclose(shifted(cells, 0.0, rng(seed)), cells, rtol=1e-12)


@pytest.mark.parametrize("fold", [0.3, 0.7, 1.5, 4.0])
def test_detection_moves_as_that_of_counts(fold):
    """The detection rate follows the mean as for Poisson counts; expression levels change little."""
    draw, n, rate = rng(1), 40_000, np.array([0.05, 0.3, 1.0])
    before, after = (draw.poisson(rate * f, (n, 3)).astype(float) for f in (1.0, fold))
    result = shift_cells(before, after.mean(axis=0), LEVEL, rng(2))
    np.testing.assert_allclose((result > 0).mean(axis=0), (after > 0).mean(axis=0), atol=0.01)
    silent = before == 0
    gains = (result > 0) & silent
    assert gains.any() == (fold > 1)
    losses = (result == 0) & ~silent
    assert losses.any() == (fold < 1)


def test_a_gene_that_no_cell_has_comes_at_its_level():
    cells = np.zeros((10, 3))
    result = shifted(cells, [0.5, 0.0, 6.0], rng())
    assert set(result[:, 0]) == {0.0, 1.0}
    assert (result[:, 0] > 0).sum() == 5
    assert not result[:, 1].any()
    np.testing.assert_array_equal(result[:, 2], 6.0)  # above its level all cells have it


def test_what_is_drawn_for_a_gene_does_not_depend_on_what_others_change():
    cells = rng(3).gamma(1.0, 1.0, (20, 3)) * (rng(4).random((20, 3)) < 0.5)
    one_gene = shifted(cells, [0.5, 0.0, 0.0], rng(5))
    all_genes = shifted(cells, [0.5, -0.3, 2.0], rng(5))
    np.testing.assert_array_equal(one_gene[:, 0], all_genes[:, 0])
    assert not np.array_equal(one_gene, shifted(cells, [0.5, 0.0, 0.0], rng(6)))
    original = cells.copy()
    shifted(cells, 1.0, rng())
    np.testing.assert_array_equal(cells, original)
