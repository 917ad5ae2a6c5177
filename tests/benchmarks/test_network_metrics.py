from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.sparse import coo_array, csr_array, csr_matrix
from scipy.stats import chi2, spearmanr
from sklearn.metrics import average_precision_score

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from _network_density import quantile_bins
    from _network_metrics import (
        TOP_TARGETS,
        auprc_ratio,
        early_precision,
        edge_stability,
        matched_null,
        ranked_pairs,
        score_edges,
        times_drawn,
    )

STEPS = st.integers(-4, 4).map(lambda n: n / 4)
"""Weights that tie often; 0 is no edge."""


def slow_jaccard(a, b):
    return len(a & b) / len(a | b) if a | b else None


def slow_best(pairs, n):
    """The best `n` edges of {pair: weight}, without those that don't all fit."""
    edges = {pair: abs(weight) for pair, weight in pairs.items() if weight}
    return {pair for pair, size in edges.items() if sum(other >= size for other in edges.values()) <= n}


def slow_stability(a, b, top):
    """Dictionaries of pairs, compared one by one."""
    square = a.shape[0] == a.shape[1]
    first, second = (
        {p: w for p, w in np.ndenumerate(m) if not np.isnan(w) and not (square and p[0] == p[1])} for m in (a, b)
    )
    common = sorted(first.keys() & second.keys())
    w_a, w_b = [first[p] for p in common], [second[p] for p in common]
    by_source = []
    for source in range(len(a)):
        rows = [{p: w for p, w in pairs.items() if p[0] == source} for pairs in (first, second)]
        by_source.append(slow_jaccard(*(slow_best(row, TOP_TARGETS) for row in rows)))
    told = [j for j in by_source if j is not None]
    jaccard = slow_jaccard(slow_best(first, top), slow_best(second, top))
    return {
        "spearman": spearmanr(w_a, w_b).statistic if len(set(w_a)) > 1 and len(set(w_b)) > 1 else np.nan,
        "jaccard": np.nan if jaccard is None else jaccard,
        "jaccard_by_source": np.mean(told) if told else np.nan,
        "n_pairs": len(common),
        "top": top,
    }


def as_sparse(dense):
    """Store the pairs that are not NaN, zeros among them, in no order."""
    row, col = np.nonzero(~np.isnan(dense))
    turned = np.argsort(-col, kind="stable")
    return coo_array((dense[row, col][turned], (row[turned], col[turned])), shape=dense.shape)


@st.composite
def two_graphs(draw):
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 30)))
    graphs = [draw(arrays(float, shape, elements=STEPS)) for _ in range(2)]
    for graph in graphs:
        graph[draw(arrays(bool, shape, elements=st.booleans(), fill=st.just(False)))] = np.nan
    return graphs


@given(two_graphs(), st.sampled_from([1, 3, 10, 1000]))
@settings(deadline=None, max_examples=60)
def test_stability_equals_loops(graphs, top):
    expected = slow_stability(*graphs, top)
    for given_as in (np.asarray, as_sparse):
        found = edge_stability(*map(given_as, graphs), top=top)
        assert found == pytest.approx(expected, nan_ok=True)


def test_stability_by_hand():
    a = np.array([[0.0, 3.0, -2.0, 0.5], [1.0, 0.0, 0.0, 0.0]])
    b = np.array([[0.0, 2.0, 0.1, -0.5], [0.0, 0.0, 1.0, 0.0]])
    found = edge_stability(a, b, top=2)
    # best two of a: (0, 1) and (0, 2); of b: (0, 1) and (1, 2)
    assert found["jaccard"] == pytest.approx(1 / 3)
    # the first source has the same three targets, the second none in common
    assert found["jaccard_by_source"] == pytest.approx(0.5)
    assert (found["n_pairs"], found["top"]) == (8, 2)
    assert edge_stability(a, b)["top"] == 2 * TOP_TARGETS


def test_a_graph_is_itself_and_no_other():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 60, 60))
    same = edge_stability(csr_array(a), csr_matrix(a))
    assert [same[k] for k in ("spearman", "jaccard", "jaccard_by_source")] == pytest.approx([1, 1, 1])
    assert same["n_pairs"] == 60 * 59
    other = edge_stability(a, b)
    assert abs(other["spearman"]) < 0.1
    # a third of the pairs is taken from each at random: 1/9 in common of 5/9
    assert other["jaccard"] == pytest.approx(0.2, abs=0.05)
    assert other["jaccard_by_source"] == pytest.approx(0.2, abs=0.05)


def test_graphs_that_tell_nothing_apart_agree_on_nothing():
    for graph in (np.ones((3, 50)), np.zeros((3, 50))):
        found = edge_stability(graph, graph, top=10)
        assert np.isnan([found[k] for k in ("spearman", "jaccard", "jaccard_by_source")]).all()
    assert edge_stability(csr_array((3, 5)), csr_array((3, 5)))["n_pairs"] == 0


def test_the_diagonal_of_a_square_graph_is_left_out():
    a = np.array([[1.0, 0.2, 0.3], [0.4, 1.0, 0.6], [0.7, 0.8, 1.0]])
    without = np.where(np.eye(3, dtype=bool), np.nan, a)
    other = a[::-1, ::-1]
    assert edge_stability(a, other, top=2) == edge_stability(without, other, top=2)


def test_what_cannot_be_compared_is_refused():
    one = np.ones((2, 3))
    with pytest.raises(ValueError, match=r"a has shape \(2, 3\) and b \(3, 2\)"):
        edge_stability(one, one.T)
    with pytest.raises(ValueError, match="1 of 6 weights of b are not finite"):
        edge_stability(one, np.where(np.arange(6).reshape(2, 3) == 4, np.inf, 1.0))
    with pytest.raises(ValueError, match="1 of 2 weights of a are not finite"):
        edge_stability(csr_array([[np.nan, 1.0]]), one)
    with pytest.raises(ValueError, match="top must be 1 or more"):
        edge_stability(one, one, top=0)
    with pytest.raises(ValueError, match=r"a has shape \(3,\)"):
        edge_stability(one[0], one[0])


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
    rng = np.random.default_rng(1)
    weights, known, candidates = rng.random((4, 30)).round(1), rng.random((4, 30)) < 0.2, rng.random((4, 30)) < 0.9
    source = np.nonzero(candidates)[0]
    ranked = source[np.argsort(-weights[candidates], kind="stable")]
    for times in ([1, 1, 1, 1], [0, 2, 1, 1], [3, 0, 0, 1], [0, 0, 4, 0]):
        rows = np.repeat(np.arange(4), times)
        written_out = weights[rows], known[rows], candidates[rows]
        expected = (auprc_ratio(*written_out), early_precision(*written_out))
        found = times_drawn(*ranked_pairs(weights, known, candidates), source, ranked, np.array(times))
        assert found == pytest.approx(expected)


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
