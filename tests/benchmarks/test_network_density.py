from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from _network_density import density_test, quantile_bins


def test_bins_hold_as_many_and_ties_stay_together():
    assert np.bincount(quantile_bins(np.random.default_rng(0).normal(size=100), 10)).tolist() == [10] * 10
    assert quantile_bins(np.array([0.0, 2, 0, 0, 0, 2]), 2).tolist() == [0, 1, 0, 0, 0, 1]
    assert quantile_bins(np.array([2.0, 2, 0, 0, 2, 2]), 2).tolist() == [1, 1, 0, 0, 1, 1]
    assert np.ptp(quantile_bins(np.full(7, 3.0), 10)) == 0
    assert quantile_bins(np.arange(3.0), 10).tolist() == [1, 5, 8]


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
