from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chi2
from sklearn.metrics import average_precision_score

from scdiva.metrics import auprc_ratio, early_precision, matched_null, score_edges
from scdiva.metrics._matched import quantile_bins

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
        ([[1.0, np.nan]], [[True, False]], None, r"1 of 2 candidates have weights .* number 0, 1"),
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
    with pytest.raises(ValueError, match="k must be 1 or more, got 0"):
        early_precision([[1.0, 2.0]], [[True, False]], k=0)


@given(st.integers(1, 4), st.integers(2, 30), st.integers(1, 5), st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_a_permuted_source_keeps_its_targets_in_every_bin(n_sources, n_targets, n_bins, seed):
    rng = np.random.default_rng(seed)
    shape = (n_sources, n_targets)
    known, candidates = rng.random(shape) < rng.random(), rng.random(shape) < 0.8
    candidates[:, 0] = True
    match = rng.integers(0, 6, n_targets).astype(float)
    match[~candidates.any(axis=0)] = np.nan
    scored = candidates.any(axis=0)
    bins = np.zeros(n_targets, dtype=int)
    bins[scored] = quantile_bins(match[scored], n_bins)
    for permuted in matched_null(known, match, candidates=candidates, n_bins=n_bins, n_permutations=3, rng=seed):
        assert permuted.dtype == bool
        assert not (permuted & ~candidates).any()
        for source in range(n_sources):
            for b in range(n_bins):
                assert permuted[source, bins == b].sum() == (known & candidates)[source, bins == b].sum()


@pytest.mark.parametrize("n_known", [1, 2, 3])
def test_every_matched_set_is_as_likely(n_known):
    """Of 4 alike targets, all sets of the size known turn up equally often (chi-squared, p > 0.001)."""
    known = np.array([[True] * n_known + [False] * (4 - n_known) + [True, False]])
    match = np.array([1.0, 1.0, 1.0, 1.0, 9.0, 9.0])
    drawn = [tuple(p[0]) for p in matched_null(known, match, n_bins=2, n_permutations=3000, rng=0)]
    sets, counts = np.unique([d[:4] for d in drawn], axis=0, return_counts=True)
    expected = 3000 / len(list(itertools.combinations(range(4), n_known)))
    assert len(sets) == 3000 / expected
    assert ((counts - expected) ** 2 / expected).sum() < chi2.isf(0.001, len(sets) - 1)
    assert {sum(d[4:]) for d in drawn} == {1}


def test_the_null_repeats_and_goes_on():
    known = np.random.default_rng(0).random((4, 30)) < 0.3
    match = np.arange(30.0)
    one, same, other = (list(matched_null(known, match, n_permutations=5, rng=s)) for s in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (np.array(one) != np.array(other)).any()
    rng = np.random.default_rng(1)
    np.testing.assert_array_equal(list(matched_null(known, match, n_permutations=5, rng=rng)), one)
    assert (np.array(list(matched_null(known, match, n_permutations=5, rng=rng))) != np.array(one)).any()


def test_bins_hold_as_many_and_ties_stay_together():
    assert np.bincount(quantile_bins(np.random.default_rng(0).normal(size=100), 10)).tolist() == [10] * 10
    assert quantile_bins(np.array([0.0, 2, 0, 0, 0, 2]), 2).tolist() == [0, 1, 0, 0, 0, 1]
    assert quantile_bins(np.array([2.0, 2, 0, 0, 2, 2]), 2).tolist() == [1, 1, 0, 0, 1, 1]
    assert np.ptp(quantile_bins(np.full(7, 3.0), 10)) == 0
    assert quantile_bins(np.arange(3.0), 10).tolist() == [1, 5, 8]


def test_a_null_needs_something_to_match_by():
    known = np.array([[True, False]])
    with pytest.raises(ValueError, match=r"match has shape \(1,\), but there are 2 targets"):
        matched_null(known, [1.0])
    with pytest.raises(ValueError, match=r"match is not finite for 1 of 2 targets \(the first is number 1\)"):
        matched_null(known, [1.0, np.nan])
    with pytest.raises(ValueError, match="n_bins must be at least 1"):
        matched_null(known, [1.0, 2.0], n_bins=0)


def slow_score_edges(weights, known, match, candidates, n_permutations, rng):
    """The null by scikit-learn, permutation by permutation."""
    scores = []
    for permuted in matched_null(known, match, candidates=candidates, n_permutations=n_permutations, rng=rng):
        y, w = permuted[candidates], weights[candidates]
        scores.append(average_precision_score(y, w) / y.mean())
    return np.array(scores)


def test_scores_of_edges_are_those_of_their_parts():
    rng = np.random.default_rng(0)
    weights, known, candidates = rng.random((6, 50)).round(1), rng.random((6, 50)) < 0.1, rng.random((6, 50)) < 0.9
    match = rng.random(50)
    found = score_edges(weights, known, match=match, candidates=candidates, n_permutations=40, n_bootstrap=20, rng=3)
    null = slow_score_edges(weights, known, match, candidates, 40, 3)
    seen = auprc_ratio(weights, known, candidates)
    assert found["auprc_ratio"] == seen
    assert found["auprc_ratio_null_mean"] == pytest.approx(null.mean())
    assert found["auprc_ratio_null_high"] == pytest.approx(np.quantile(null, 0.95))
    assert found["auprc_ratio_p"] == pytest.approx((1 + (null >= seen - 1e-9).sum()) / 41)
    assert found["early_precision"] == early_precision(weights, known, candidates)
    assert found["n_known"] == (known & candidates).sum()
    assert (found["n_sources"], found["n_targets"]) == (6, 50)
    assert found["share"] == pytest.approx(known[candidates].mean())
    assert all(type(value) in (float, int) for value in found.values())


def test_a_resampled_source_counts_as_often_as_it_was_drawn():
    from scdiva.metrics.grn import _pairs, _scores

    rng = np.random.default_rng(1)
    weights, known, candidates = rng.random((4, 30)).round(1), rng.random((4, 30)) < 0.2, rng.random((4, 30)) < 0.9
    pairs = _pairs(weights, known, candidates)
    for times in ([1, 1, 1, 1], [0, 2, 1, 1], [3, 0, 0, 1], [0, 0, 4, 0]):
        rows = np.repeat(np.arange(4), times)
        written_out = weights[rows], known[rows], candidates[rows]
        expected = (auprc_ratio(*written_out), early_precision(*written_out))
        assert _scores(pairs, pairs.known, times=np.array(times)) == pytest.approx(expected)


def test_the_interval_holds_the_truth_and_the_null_knows_expression():
    """Weights that follow a target's expression alone are above chance, but not above targets so expressed."""
    rng = np.random.default_rng(2)
    expression = rng.gamma(1.0, size=200)
    known = rng.random((30, 200)) < 0.05 * expression
    by_expression = np.tile(expression, (30, 1)) + 0.1 * rng.random((30, 200))
    alone = score_edges(by_expression, known, match=expression, n_bins=40, n_permutations=200, n_bootstrap=200)
    assert alone["auprc_ratio_low"] > 1.2
    assert alone["auprc_ratio_p"] > 0.01
    assert alone["early_precision_p"] > 0.01
    told = score_edges(by_expression + known, known, match=expression, n_bins=40, n_permutations=200, n_bootstrap=200)
    for name in ("auprc_ratio", "early_precision"):
        assert told[f"{name}_low"] < told[name] < told[f"{name}_high"]
        assert told[f"{name}_null_mean"] < told[f"{name}_null_high"] < told[f"{name}_low"]
        assert told[f"{name}_p"] == pytest.approx(1 / 201)
    flat = score_edges(by_expression, known, match=np.ones(200), n_permutations=200, n_bootstrap=2)
    assert flat["auprc_ratio_null_mean"] == pytest.approx(1.0, abs=0.1)
    assert flat["auprc_ratio_p"] == pytest.approx(1 / 201)


def test_random_weights_have_uniform_p_values():
    rng = np.random.default_rng(3)
    known = rng.random((5, 60)) < 0.1
    found = [
        score_edges(rng.random((5, 60)), known, match=np.arange(60.0), n_permutations=60, n_bootstrap=1, rng=rng)
        for _ in range(60)
    ]
    for name in ("auprc_ratio", "early_precision"):
        p = np.array([scores[f"{name}_p"] for scores in found])
        assert 0.3 < p.mean() < 0.7
        assert (p <= 0.1).mean() < 0.25


def test_a_single_source_has_no_interval():
    weights, known = np.random.default_rng(4).random((2, 30)), np.arange(60).reshape(2, 30) < 5
    one = score_edges(weights[:1], known[:1], match=np.arange(30.0), n_permutations=5, n_bootstrap=5)
    assert np.isnan(one["auprc_ratio_low"])
    assert np.isnan(one["early_precision_high"])
    two = score_edges(weights, known, match=np.arange(30.0), n_permutations=5, n_bootstrap=50)
    assert np.isfinite(two["auprc_ratio_low"])  # resamples of the source without known targets alone are left out
    with pytest.raises(ValueError, match="n_permutations and n_bootstrap must be 1 or more, got 0 and 5"):
        score_edges(weights, known, match=np.arange(30.0), n_permutations=0, n_bootstrap=5)
