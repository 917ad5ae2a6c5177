"""Corrections fitted to a population: known ones are found, and its means are met gene by gene."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from scipy.special import expit, logit

from scdiva.generation import state_head
from scdiva.generation.state_head import fit_corrections, shift_to

N_CELLS, N_GENES, STATE = 500, 60, 4


class Simulated(NamedTuple):
    states: np.ndarray
    log_odds: np.ndarray
    values: np.ndarray
    expression: np.ndarray
    odds_along: np.ndarray
    values_along: np.ndarray


def simulate(seed: int = 0, n_cells: int = N_CELLS, effect: float = 1.0) -> Simulated:
    """Cells in which genes depend on the state by more than a model's log-odds and values say."""
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(n_cells, STATE)) @ np.diag([2.0, 1.0, 1.0, 0.5]) + 3.0
    offset = rng.normal(size=(n_cells, N_GENES)).astype(np.float32)
    values = rng.uniform(1.0, 3.0, size=(n_cells, N_GENES)).astype(np.float32)
    standard = (states - states.mean(axis=0)) / states.std(axis=0)
    odds_along = effect * (standard @ rng.normal(size=(STATE, N_GENES)) + rng.normal(size=N_GENES))
    values_along = effect * (standard @ rng.normal(scale=0.3, size=(STATE, N_GENES)))
    expressed = rng.random((n_cells, N_GENES)) < expit(offset + odds_along)
    expressed[:, 0], expressed[:, 1] = True, False  # each cell expresses some genes and not all
    noise = rng.normal(scale=0.2, size=(n_cells, N_GENES))
    expression = np.where(expressed, np.maximum(values + values_along + noise, 0.01), 0.0).astype(np.float32)
    return Simulated(states, offset, values, expression, odds_along, values_along)


@pytest.fixture(scope="module")
def fitted():
    simulated = simulate()
    return simulated, fit_corrections(
        simulated.states, simulated.log_odds, simulated.values, simulated.expression, np.random.default_rng(0)
    )


def design_of(corrections, states) -> np.ndarray:
    """Components of the states, and a column of ones for the bias."""
    return np.concatenate([(states - corrections.mean) @ corrections.axes, np.ones((len(states), 1))], axis=1)


def centred(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x - (x * weight).sum(axis=0) / weight.sum(axis=0)


def test_directions_have_unit_variance(fitted):
    simulated, corrections = fitted
    along = design_of(corrections, simulated.states)
    np.testing.assert_allclose(along[:, :-1].mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(np.cov(along[:, :-1].T, bias=True), np.eye(STATE), atol=1e-3)
    assert (along[:, -1] == 1).all()


def test_known_dependences_are_found(fitted):
    """Of log-odds and values, gene by gene; what all genes share is the cell's own shift and not theirs."""
    simulated, corrections = fitted
    along, one = design_of(corrections, simulated.states), np.ones((N_CELLS, 1))
    for actual, true in ((corrections.log_odds, simulated.odds_along), (corrections.values, simulated.values_along)):
        actual, true = (along @ actual)[:, 2:], true[:, 2:]
        actual, true = (x - x.mean(axis=1, keepdims=True) for x in (actual, true))
        actual, true = centred(actual, one), centred(true, one)
        correlation = (actual * true).sum() / np.sqrt((actual**2).sum() * (true**2).sum())
        assert correlation > 0.95
        assert 0.8 < (actual * true).sum() / (true**2).sum() < 1.1  # shrunk a little by the penalty


def test_how_often_each_gene_is_expressed_is_met(fitted):
    simulated, corrections = fitted
    expressed = simulated.expression > 0
    log_odds = simulated.log_odds + design_of(corrections, simulated.states) @ corrections.log_odds
    expected = expit(log_odds + shift_to(log_odds, expressed.sum(axis=1))[:, None]).mean(axis=0)
    np.testing.assert_allclose(expected, expressed.mean(axis=0), atol=0.01)


def test_mean_values_are_met_where_genes_are_expressed(fitted):
    """But for what all genes of a cell share, which is its depth."""
    simulated, corrections = fitted
    expressed = simulated.expression > 0
    left = np.where(
        expressed,
        simulated.expression - simulated.values - design_of(corrections, simulated.states) @ corrections.values,
        0,
    )
    left -= expressed * (left.sum(axis=1) / expressed.sum(axis=1))[:, None]
    means = (left.sum(axis=0) / np.maximum(expressed.sum(axis=0), 1))[expressed.sum(axis=0) > 50]
    assert len(means) > 40
    np.testing.assert_allclose(means, 0, atol=0.03)


def test_the_spread_is_that_of_the_noise(fitted):
    simulated, corrections = fitted
    often = (simulated.expression > 0).sum(axis=0) > 50
    np.testing.assert_allclose(np.median(corrections.spread[often]), 0.2, rtol=0.1)
    # expressed by none
    assert corrections.spread[1] == pytest.approx(np.median(corrections.spread[np.arange(N_GENES) != 1]))


def test_a_model_that_is_right_is_hardly_corrected():
    simulated = simulate(effect=0.0)
    corrections = fit_corrections(
        simulated.states, simulated.log_odds, simulated.values, simulated.expression, np.random.default_rng(0)
    )
    assert np.abs(corrections.log_odds[:, 2:]).mean() < 0.15
    assert np.abs(corrections.values[:, 2:]).mean() < 0.03


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # shares of no variance
def test_small_populations_are_shrunk():
    """With few cells of one state, only the detection rate of each gene is learned."""
    simulated = simulate(n_cells=6)
    states = np.ones_like(simulated.states)
    corrections = fit_corrections(
        states, simulated.log_odds, simulated.values, simulated.expression, np.random.default_rng(0)
    )
    assert corrections.axes.shape == (STATE, 0)
    assert corrections.log_odds.shape == (1, N_GENES)
    assert all(np.isfinite(part).all() for part in corrections)


def test_cells_in_blocks_are_the_same(fitted, monkeypatch):
    simulated, expected = fitted
    monkeypatch.setattr(state_head, "BLOCK", 7 * N_GENES)
    actual = fit_corrections(
        simulated.states, simulated.log_odds, simulated.values, simulated.expression, np.random.default_rng(0)
    )
    np.testing.assert_allclose(actual.log_odds, expected.log_odds, atol=1e-4)
    np.testing.assert_allclose(actual.values, expected.values, atol=1e-4)


def test_shifts_give_each_cell_its_number_of_genes():
    rng = np.random.default_rng(1)
    log_odds = rng.normal(scale=4, size=(30, 50))
    log_odds[:, :10] = -np.inf
    lengths = rng.integers(1, 40, size=30)
    shift = shift_to(log_odds, lengths)
    np.testing.assert_allclose(expit(log_odds + shift[:, None]).sum(axis=1), lengths, rtol=1e-5)
    # of equal odds it is known in closed form
    for n, length in itertools.product([8, 20], [1, 5]):
        single = shift_to(np.full((1, n), 0.7), np.array([length]))
        assert single[0] == pytest.approx(logit(length / n) - 0.7, abs=1e-6)
