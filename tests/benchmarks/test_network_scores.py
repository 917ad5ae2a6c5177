from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import average_precision_score

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from _network_metrics import auprc_ratio, early_precision

STEPS = st.integers(-3, 3).map(lambda n: n / 2)
"""Weights that tie often."""


def slow_early_precision(weights, known, k):
    """The mean over all orders in which ties may be broken."""
    found = []
    for order in itertools.permutations(range(len(weights))):
        best = sorted(order, key=lambda i: -weights[i])[:k]
        found.append(np.mean([known[i] for i in best]))
    return np.mean(found) / np.mean(known)


@st.composite
def ranking(draw, most=4):
    """Weights, known ones and candidates, of which some are known and some are not."""
    shape = (draw(st.integers(1, 2)), draw(st.integers(2, most)))
    weights = draw(arrays(float, shape, elements=STEPS))
    known, candidates = draw(arrays(bool, shape)), draw(arrays(bool, shape, fill=st.just(True)))
    candidates[0, :2], known[0, :2] = True, [True, False]
    return weights, known, candidates


@given(ranking(most=12))
@settings(deadline=None, max_examples=60)
def test_auprc_is_scikit_learns(given):
    weights, known, candidates = given
    y, w = known[candidates], weights[candidates]
    assert auprc_ratio(*given) == pytest.approx(average_precision_score(y, w) / y.mean())
    if candidates.all():
        assert auprc_ratio(weights, known) == auprc_ratio(*given)


@given(ranking(most=3), st.sampled_from([None, 1, 2, 5, 100]))
@settings(deadline=None, max_examples=60)
def test_early_precision_is_the_mean_over_ties(given, k):
    weights, known, candidates = given
    y, w = known[candidates], weights[candidates]
    best = min(k or y.sum(), len(y))
    assert early_precision(*given, k=k) == pytest.approx(slow_early_precision(w, y, best))


@given(ranking(most=12), st.randoms())
@settings(deadline=None, max_examples=30)
def test_the_order_of_genes_does_not_matter(given, random):
    rows, columns = (random.sample(range(n), n) for n in given[0].shape)
    moved = [array[rows][:, columns] for array in given]
    assert auprc_ratio(*moved) == pytest.approx(auprc_ratio(*given), rel=1e-12)
    assert early_precision(*moved) == pytest.approx(early_precision(*given), rel=1e-12)


def test_a_ranking_by_hand():
    weights = np.array([[0.9, 0.8, 0.1], [0.7, 0.7, np.nan]])
    known = np.array([[True, False, False], [True, False, True]])
    candidates = ~np.isnan(weights)
    # found after 1 of 1, and with a tie after 2 of 4; a share of 2 in 5
    assert auprc_ratio(weights, known, candidates) == pytest.approx((1 + 2 / 4) / 2 / 0.4)
    assert early_precision(weights, known, candidates) == pytest.approx(0.5 / 0.4)
    assert early_precision(weights, known, candidates, k=3) == pytest.approx((1.5 / 3) / 0.4)


def test_the_best_ranking_and_none():
    known = np.random.default_rng(0).random((5, 40)) < 0.1
    for weights, ratio in ((known.astype(float), 1 / known.mean()), (np.ones(known.shape), 1.0)):
        assert auprc_ratio(weights, known) == pytest.approx(ratio)
        assert early_precision(weights, known) == pytest.approx(ratio)
    worst = -known.astype(float) - np.random.default_rng(1).random(known.shape) / 2
    assert auprc_ratio(worst, known) < 1
    assert early_precision(-known.astype(float), known) == 0


@pytest.mark.parametrize(
    ("weights", "known", "candidates", "message"),
    [
        ([[1.0, 2.0]], [[True]], None, r"weights has shape \(1, 2\) and known \(1, 1\)"),
        ([1.0, 2.0], [True, False], None, r"known has shape \(2,\)"),
        ([[1.0, 2.0]], [[True, False]], [[True]], r"candidates \(1, 1\)"),
        ([[1.0, np.nan]], [[True, False]], None, r"1 of 2 weights are those of candidates .* number 0, 1"),
        ([[1.0, 2.0]], [[0.3, 1.0]], None, "known must hold truth values"),
        ([[1.0, 2.0]], [[True, False]], [[2, 1]], "candidates must hold truth values"),
        ([[1.0, 2.0]], [[False, False]], None, "None of 2 candidates is known"),
        ([[1.0, 2.0]], [[True, False]], [[True, False]], "All of 1 candidates are known"),
        ([[1.0, 2.0]], [[True, False]], [[False, False]], "None of 2 pairs is a candidate"),
    ],
)
def test_what_cannot_be_ranked_is_refused(weights, known, candidates, message):
    for score in (auprc_ratio, early_precision):
        with pytest.raises(ValueError, match=message):
            score(weights, known, candidates)


def test_early_precision_of_no_pairs_is_refused():
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        early_precision([[1.0, 2.0]], [[True, False]], k=0)
