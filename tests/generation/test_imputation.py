"""Expected values and their spread: against draws, and against what is known in closed form."""

from __future__ import annotations

import numpy as np

from scdiva.generation.imputation import Predicted, _truncated_mean, expected_values


def test_mean_and_spread_are_those_of_a_log_normal_variable_with_a_zero_beside_it():
    """Held against draws of it. What is observed is what is expected, so nothing is there to correct."""
    n, chance, value, width = 200_000, 0.3, 2.0, 0.5
    draw = np.random.default_rng(0)
    drawn = np.where(draw.random((n, 2)) < chance, draw.normal(value, width, (n, 2)), 0.0).astype(np.float32)
    predicted = np.full((n, 2), chance, dtype=np.float32), np.full((n, 2), value, dtype=np.float32)
    mean, spread = expected_values(Predicted(None, *predicted, np.full(2, width, np.float32), np.zeros(n), drawn))
    expected = np.log1p(np.expm1(drawn).mean())
    np.testing.assert_allclose(mean, expected, rtol=5e-3)
    np.testing.assert_allclose(spread, np.sqrt(np.square(drawn - expected).mean()), rtol=5e-3)


def test_counts_add_up_and_a_gene_follows_the_depth_of_cells_as_its_own_values_do():
    """One gene's values rise as those of all genes do in shallow cells, another's do not at all."""
    n, draw = 4000, np.random.default_rng(0)
    depth = draw.normal(0.3, 0.4, n)
    follows = np.array([1.0, 0.0])
    truth = 2.0 + follows * (depth - 0.3)[:, None] + 0.3 + draw.normal(0, 0.2, (n, 2))
    observed = np.where(draw.random((n, 2)) < 0.6, truth, 0).astype(np.float32)
    predicted = np.full((n, 2), 0.4, dtype=np.float32), np.full((n, 2), 2.0, dtype=np.float32)
    mean, _ = expected_values(Predicted(None, *predicted, np.full(2, 0.2, np.float32), depth, observed))
    slope = [np.polyfit(depth, mean[:, gene], 1)[0] for gene in range(2)]
    np.testing.assert_allclose(slope, follows, atol=0.1)
    np.testing.assert_allclose(np.expm1(mean).mean(axis=0), np.expm1(observed).mean(axis=0), rtol=0.01)


def test_what_is_expressed_is_a_poisson_variable_without_its_zeros():
    draw = np.random.default_rng(0)
    unit, rate = np.array([2.0, 7.0]), np.array([0.05, 0.4, 3.0])
    counts = draw.poisson(rate, (400_000, 3))
    there = [counts[:, gene][counts[:, gene] > 0].mean() for gene in range(3)]
    predicted = _truncated_mean(np.log1p(unit[:, None] * rate), unit)
    np.testing.assert_allclose(predicted, np.log1p(unit[:, None] * there), rtol=5e-3)
    of_none = _truncated_mean(np.zeros((2, 1)), unit)
    np.testing.assert_allclose(of_none[:, 0], np.log1p(unit), rtol=1e-5)
