from __future__ import annotations

import itertools
import math
from math import comb

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.sparse import csr_array, csr_matrix
from sklearn.metrics import average_precision_score

from scdiva.metrics import auprc_ratio, density_test, early_precision, enrichment, hub_scores
from scdiva.metrics.networks import quantile_bins

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


def test_bins_hold_as_many_and_ties_stay_together():
    assert np.bincount(quantile_bins(np.random.default_rng(0).normal(size=100), 10)).tolist() == [10] * 10
    assert quantile_bins(np.array([0.0, 2, 0, 0, 0, 2]), 2).tolist() == [0, 1, 0, 0, 0, 1]
    assert quantile_bins(np.array([2.0, 2, 0, 0, 2, 2]), 2).tolist() == [1, 1, 0, 0, 1, 1]
    assert np.ptp(quantile_bins(np.full(7, 3.0), 10)) == 0
    assert quantile_bins(np.arange(3.0), 10).tolist() == [1, 5, 8]


def power_iteration(weights, n=20_000):
    """Kleinberg's own: authorities and hubs in turn, from equal scores."""
    weights = abs(weights)
    hubs = np.ones(len(weights))
    if not weights.any():
        return np.zeros(len(weights))
    for _ in range(n):
        new = weights @ (weights.T @ hubs)
        new /= new.max()
        if np.abs(new - hubs).max() < 1e-14:
            break
        hubs = new
    return new


@given(arrays(np.int8, st.tuples(st.integers(1, 5), st.integers(1, 5)), elements=st.integers(-2, 2)))
@settings(deadline=None, max_examples=100)
def test_hubs_are_those_of_power_iteration(weights):
    expected = power_iteration(weights.astype(float))
    for graph in (weights.astype(np.float32), csr_array(weights), csr_matrix(weights)):
        np.testing.assert_allclose(hub_scores(graph), expected, atol=1e-5)


def test_hubs_of_a_real_size():
    rng = np.random.default_rng(0)
    weights = rng.gamma(0.5, size=(300, 200)) * (rng.random((300, 200)) < 0.05)
    weights[7] = 0
    found = hub_scores(csr_array(weights))
    np.testing.assert_allclose(found, power_iteration(weights), atol=1e-9)
    assert found.max() == 1
    assert found[7] == 0
    np.testing.assert_allclose(hub_scores(csr_array(-1e-200 * weights)), found, rtol=1e-9)


def test_blocks_of_the_same_strength_share_the_first_place():
    """One vector of many with the same eigenvalue, which a solver alone would pick at random."""
    np.testing.assert_array_equal(hub_scores(np.eye(30)[:, ::-1]), 1.0)
    two = np.kron(np.eye(2), [[1.0, 1.0], [1.0, 0.0]])
    np.testing.assert_allclose(hub_scores(two), power_iteration(two))
    assert (hub_scores(np.diag([1.0, 1.0, 0.5])) == [1, 1, 0]).all()


def test_hubs_of_no_edges_and_of_no_graph():
    np.testing.assert_array_equal(hub_scores(csr_array((4, 4))), 0.0)
    np.testing.assert_array_equal(hub_scores(np.zeros((4, 4))), 0.0)
    with pytest.raises(ValueError, match=r"1 of 3 weights of graph are not finite"):
        hub_scores([[1.0, np.nan], [0.0, 1.0]])
    with pytest.raises(ValueError, match=r"graph has shape \(0, 3\)"):
        hub_scores(np.ones((0, 3)))


GENES = [f"G{i}" for i in range(12)]


def slow_density(graph, genes):
    """The mean over pairs in plain loops; None for one that was not measured."""
    weights = [graph[i][j] for i in genes for j in genes if i != j and not math.isnan(graph[i][j])]
    return sum(weights) / len(weights)


def slow_test(graph, members, groups, n, rng):
    """Random sets of the same bins, by numpy's own choice without replacement."""
    seen = slow_density(graph, members)
    null = []
    for _ in range(n):
        genes = []
        for group in np.unique(groups):
            inside = np.flatnonzero(groups == group)
            genes += rng.choice(inside, sum(groups[m] == group for m in members), replace=False).tolist()
        null.append(slow_density(graph, genes))
    return seen, np.mean(null), np.std(null), (1 + sum(d >= seen - 1e-12 for d in null)) / (1 + n)


@pytest.mark.parametrize("stored", ["dense", "sparse", "unmeasured"])
def test_density_equals_loops(stored):
    rng = np.random.default_rng(0)
    graph = rng.normal(size=(40, 40)) * (rng.random((40, 40)) < 0.5)
    members = np.array([3, 7, 11, 30, 31])
    graph[np.ix_(members, members)] += 0.2
    if stored == "unmeasured":
        graph[rng.random((40, 40)) < 0.2] = np.nan
    given_as = csr_array(graph) if stored == "sparse" else graph
    found = density_test(given_as, members, n_random=2000)
    off = np.where(np.eye(40, dtype=bool) | np.isnan(graph), 0.0, np.abs(graph))
    bins = quantile_bins(off.sum(axis=0) + off.sum(axis=1), 10)
    seen, mean, sd, p = slow_test(graph, members, bins, 2000, rng)
    assert found["density"] == pytest.approx(seen)
    assert found["null_mean"] == pytest.approx(mean, abs=5 * sd / np.sqrt(1000))
    assert found["null_sd"] == pytest.approx(sd, rel=0.1)
    assert found["p"] == pytest.approx(p, abs=0.04)
    assert found["z"] == pytest.approx((found["density"] - found["null_mean"]) / found["null_sd"])
    assert found["n"] == 5
    assert density_test(given_as, members, n_random=50) != found
    assert density_test(given_as, np.isin(np.arange(40), members), n_random=2000) == found


def test_absent_pairs_are_zero_and_those_not_measured_are_not():
    graph = np.zeros((4, 4))
    graph[0, 1] = graph[2, 3] = 1.0
    np.fill_diagonal(graph, 5.0)
    assert density_test(csr_array(graph), [0, 1], n_random=5)["density"] == 0.5
    graph[1, 0] = np.nan
    assert density_test(graph, [0, 1], n_random=5)["density"] == 1.0


def test_hubs_are_not_denser_than_hubs():
    """A set of hubs is dense because they are hubs; a clique is dense beyond its degree."""
    rng = np.random.default_rng(1)
    pull = np.where(np.arange(200) < 60, 3.0, 0.5)
    graph = (rng.random((200, 200)) < 0.05 * np.outer(pull, pull)).astype(float)
    hubs, clique = np.arange(10), np.arange(100, 110)
    assert slow_test(graph, hubs, np.zeros(200), 200, rng)[3] < 0.01
    assert density_test(graph, hubs)["p"] > 0.02
    graph[np.ix_(clique, clique)] = 1.0
    found = density_test(csr_array(graph), clique)
    assert found["p"] == pytest.approx(1 / 1001)
    assert found["z"] > 5


def test_genes_without_edges_stand_for_each_other():
    """Of 1,000 genes 20 are in the graph; random sets must not be made of those that are not."""
    graph = np.zeros((1000, 1000))
    graph[:20, :20] = 1.0
    found = density_test(csr_array(graph), [0, 1, 2], n_random=100)
    assert found["density"] == found["null_mean"] == 1.0
    assert found["p"] == 1.0
    assert np.isnan(found["z"])


def test_random_sets_have_uniform_p_values():
    rng = np.random.default_rng(2)
    graph = rng.normal(size=(50, 50))
    p = np.array([density_test(graph, rng.permutation(50)[:6], n_random=60, rng=rng)["p"] for _ in range(80)])
    assert 0.35 < p.mean() < 0.65
    assert (p <= 0.1).mean() < 0.25


@pytest.mark.parametrize(
    ("graph", "members", "message"),
    [
        (np.ones((2, 3)), [0, 1], r"graph has shape \(2, 3\)"),
        (np.ones((3, 3)), [0], "1 genes have no pairs"),
        (np.ones((3, 3)), [], "members must be numbers"),
        (np.ones((3, 3)), ["A", "B"], "members must be numbers"),
        (np.ones((3, 3)), [0, 3], "numbers from 0 to 2; 1 of 2 are"),
        (np.ones((3, 3)), [0, -1], "numbers from 0 to 2; 1 of 2 are"),
        (np.ones((3, 3)), [0, 1, 1], "different numbers"),
        (np.ones((3, 3)), [True, True], r"a boolean array \(3,\), not bool \(2,\)"),
        (np.full((3, 3), np.nan), [0, 1], "None of the pairs of 2 genes"),
        (np.array([[1.0, np.inf], [1.0, 1.0]]), [0, 1], "1 of 4 weights of graph are not finite"),
        (csr_array(np.full((3, 3), np.nan)), [0, 1], "9 of 9 weights of graph are not finite"),
    ],
)
def test_what_has_no_density_is_refused(graph, members, message):
    with pytest.raises(ValueError, match=message):
        density_test(graph, members)


def test_no_random_sets_are_refused():
    with pytest.raises(ValueError, match="n_random must be at least 1"):
        density_test(np.ones((3, 3)), [0, 1], n_random=0)


def test_random_sets_that_were_not_measured_are_left_out():
    graph = np.full((6, 6), np.nan)
    graph[0, 1] = graph[2, 3] = 1.0
    found = density_test(graph, [0, 1], n_random=200)
    assert found["null_mean"] == 1.0
    assert found["p"] == 1.0
    pairs = np.full((60, 60), np.nan)
    pairs[np.arange(0, 60, 2), np.arange(1, 60, 2)] = 1.0
    with pytest.raises(ValueError, match=r"None of 3 random sets has a measured pair"):
        density_test(pairs, [0, 1], n_random=3)


def slow_tail(n_universe, n_set, n_module, overlap):
    """The chance of `overlap` or more, counted out."""
    ways = sum(
        comb(n_set, k) * comb(n_universe - n_set, n_module - k) for k in range(overlap, min(n_set, n_module) + 1)
    )
    return ways / comb(n_universe, n_module)


def slow_adjusted(p):
    """Benjamini and Hochberg's step-up, by its definition."""
    order = sorted(p)
    return [min(1.0, *(q * len(p) / (i + 1) for i, q in enumerate(order) if q >= own)) for own in p]


named = st.sets(st.sampled_from([*GENES, "elsewhere"]), min_size=1)


@given(
    st.lists(named, min_size=1, max_size=3),
    st.lists(named, min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(4, 12),
)
@settings(deadline=None, max_examples=60)
def test_enrichment_is_counted_out(modules, sets, smallest, largest):
    modules = {f"m{i}": genes | {"G0"} for i, genes in enumerate(modules)}
    sets = {f"s{i}": genes for i, genes in enumerate(sets)} | {"four": set(GENES[:4])}
    found = enrichment(modules, sets, GENES, min_genes=smallest, max_genes=largest)
    tested = [name for name, genes in sets.items() if smallest <= len(genes - {"elsewhere"}) <= largest]
    assert len(found) == len(modules) * len(tested)
    for row in found.itertuples():
        module, genes = modules[row.module] - {"elsewhere"}, sets[row.gene_set] - {"elsewhere"}
        assert row.gene_set in tested
        assert (row.n_module, row.n_set, row.n_overlap) == (len(module), len(genes), len(module & genes))
        assert row.p == pytest.approx(slow_tail(12, len(genes), len(module), len(module & genes)))
        assert row.fold == pytest.approx(len(module & genes) * 12 / len(module) / len(genes))
        assert row.genes == ",".join(sorted(module & genes))
    assert found["padj"].tolist() == pytest.approx(slow_adjusted(found["p"].tolist()))
    assert found["padj"].is_monotonic_increasing
    assert found["p"].between(0, 1).all()


def test_an_enrichment_by_hand():
    found = enrichment(
        {"0": ["A", "B", "C", "C"], "1": ["D", "E", "not measured"]},
        {"abc": ["A", "B", "C", "also not"], "small": ["A"], "large": list("ABCDEFGH")},
        background=list("ABCDEFGHIJ"),
        min_genes=2,
        max_genes=7,
    )
    expected = pd.DataFrame(
        {
            "module": ["0", "1"],
            "gene_set": ["abc", "abc"],
            "n_module": [3, 2],
            "n_set": [3, 3],
            "n_overlap": [3, 0],
            "fold": [10 / 3, 0.0],
            "p": [1 / 120, 1.0],
            "padj": [2 / 120, 1.0],
            "genes": ["A,B,C", ""],
        }
    )
    pd.testing.assert_frame_equal(found, expected)


def test_what_cannot_be_enriched_is_refused():
    sets = {"s": GENES[:6]}
    with pytest.raises(ValueError, match=r"1 of 2 modules have no gene among the 12 .*'m1'"):
        enrichment({"m0": ["G1"], "m1": ["ENSG1"]}, sets, GENES)
    with pytest.raises(ValueError, match="0 of 0 modules"):
        enrichment({}, sets, GENES)
    with pytest.raises(ValueError, match=r"None of 1 gene sets .* has 7 to 500 of the"):
        enrichment({"m": GENES}, sets, GENES, min_genes=7)
    with pytest.raises(ValueError, match="min_genes must be at least 1"):
        enrichment({"m": GENES}, sets, GENES, min_genes=0)
