"""Counts drawn for expected values: their means and spreads, and where these cannot be met."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from scdiva.generation.sampling import draw_counts, total_count

N = 20_000


@pytest.mark.parametrize(
    ("depth", "mean", "spread"),
    [(1e4, 1.5, 0.5), (1e4, 2.5, 0.6), (1e4, 1.1, 0.4), (2e3, 2.4, 0.5), (2e3, 3.5, 0.3), (5e4, 1.0, 0.4)],
)
def test_means_and_spreads_are_met(depth, mean, spread):
    counts = draw_counts(np.full(N, mean), np.full(N, spread), depth, np.random.default_rng(0))
    values = np.log1p(1e4 * counts / depth)
    assert values.mean() == pytest.approx(mean, abs=0.05)
    assert values.std() == pytest.approx(spread, abs=0.1)


def test_each_gene_has_its_own_mean():
    expected = np.tile([0.8, 1.5, 2.2, 3.0], N // 4)
    counts = draw_counts(expected, np.full(N, 0.4), 1e4, np.random.default_rng(0))
    values = np.log1p(counts).reshape(-1, 4).mean(axis=0)
    np.testing.assert_allclose(values, [0.8, 1.5, 2.2, 3.0], atol=0.06)


def test_below_a_single_count_nearly_all_are_single():
    counts = draw_counts(np.full(N, 0.2), np.full(N, 0.1), 1e4, np.random.default_rng(0))
    assert (counts == 1).mean() > 0.95


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 9), st.floats(0, 4)), max_size=30),
    st.floats(1e2, 1e6),
    st.integers(0, 99),
)
def test_every_count_is_one_or_more(asked, depth, seed):
    expected, spread = np.array(asked).reshape(-1, 2).T
    counts = draw_counts(expected, spread, depth, np.random.default_rng(seed))
    assert counts.dtype == np.int64
    assert counts.shape == expected.shape
    assert (counts >= 1).all()


def test_draws_are_a_function_of_the_source():
    expected = np.linspace(0.5, 4, 200)
    one, again, other = (
        draw_counts(expected, np.full(200, 0.5), 5e3, np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert (one == again).all()
    assert (one != other).any()


@given(st.lists(st.integers(1, 500), min_size=1, max_size=50), st.integers(50, 100_000))
def test_depth_is_that_of_which_the_least_value_is_one_count(counts, depth):
    values = np.log1p(1e4 * np.array([1, *counts]) / depth)
    assert total_count(values) == pytest.approx(depth)
