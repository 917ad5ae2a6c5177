"""Scores of networks beside slow obvious ones, and chance as what it is said to be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score


@pytest.fixture
def density(script):
    return script("_network_density")


@pytest.fixture
def metrics(script):
    return script("_network_metrics")


def slow_jaccard(a, b):
    return len(a & b) / len(a | b) if a | b else None


def slow_best(pairs, n):
    """The best `n` edges of {pair: weight}, without those that don't all fit."""
    edges = {pair: abs(weight) for pair, weight in pairs.items() if weight}
    return {pair for pair, size in edges.items() if sum(other >= size for other in edges.values()) <= n}


@pytest.mark.parametrize("top", [1, 10, 1000])
@pytest.mark.parametrize("levels", [1, 4, 100])
def test_stability_equals_loops(metrics, levels, top):
    """Few levels tie often; 0 is no edge, and NaN no pair."""
    rng = np.random.default_rng(levels)
    a, b = (rng.integers(-levels, levels + 1, (3, 30)) / levels for _ in range(2))
    a[rng.random(a.shape) < 0.2] = b[:, 4] = np.nan
    first, second = ({p: w for p, w in np.ndenumerate(m) if not np.isnan(w)} for m in (a, b))
    common = sorted(first.keys() & second.keys())
    by_source = []
    for source in range(3):
        rows = [{p: w for p, w in pairs.items() if p[0] == source} for pairs in (first, second)]
        by_source.append(slow_jaccard(*(slow_best(row, metrics.TOP_TARGETS) for row in rows)))
    told = [one for one in by_source if one is not None]
    jaccard = slow_jaccard(slow_best(first, top), slow_best(second, top))
    assert metrics.edge_stability(a, b, top=top) == pytest.approx({
        "spearman": spearmanr([first[p] for p in common], [second[p] for p in common]).statistic,
        "jaccard": np.nan if jaccard is None else jaccard,
        "jaccard_by_source": np.mean(told) if told else np.nan,
        "n_pairs": len(common),
    }, nan_ok=True)  # fmt: skip


def slow_early_precision(weights, known):
    """The mean over all orders in which ties may be broken."""
    best = [sorted(order, key=lambda i: -weights[i])[: sum(known)]
            for order in itertools.permutations(range(len(weights)))]  # fmt: skip
    return np.mean([np.mean(known[order]) for order in best]) / np.mean(known)


def score(metrics, weights, known, candidates, match=None, **draws):
    match = np.zeros(weights.shape[1]) if match is None else match
    draws = {"n_permutations": 1, "n_bootstrap": 1, **draws}
    return metrics.score_edges(weights, known, match=match, candidates=candidates, **draws)


@pytest.mark.parametrize("seed", range(6))
def test_ratios_are_scikit_learns_and_the_mean_over_ties(metrics, seed):
    rng = np.random.default_rng(seed)
    weights, candidates = rng.integers(-2, 3, (2, 4)) / 2, np.arange(8).reshape(2, 4) != seed
    known = rng.random((2, 4)) < 0.4
    known[0, :3] = [True, False, True]
    found = score(metrics, weights, known, candidates)
    y, w = known[candidates], weights[candidates]
    assert found["auprc_ratio"] == pytest.approx(average_precision_score(y, w) / y.mean())
    assert found["early_precision"] == pytest.approx(slow_early_precision(w, y))
    assert (found["n_known"], found["share"]) == (y.sum(), y.mean())


def test_the_null_keeps_each_sources_targets_in_every_bin(metrics):
    rng = np.random.default_rng(0)
    weights, known, candidates = rng.random((4, 50)).round(1), rng.random((4, 50)) < 0.2, rng.random((4, 50)) < 0.9
    match = rng.random(50)
    found = score(metrics, weights, known, candidates, match, n_permutations=600)
    bins = np.argsort(np.argsort(match)) // 5
    null = []
    for _ in range(600):
        permuted = known & candidates
        for source, one in itertools.product(range(4), range(10)):
            inside = np.flatnonzero((bins == one) & candidates[source])
            permuted[source, inside] = rng.permutation(permuted[source, inside])
        y = permuted[candidates]
        null.append(average_precision_score(y, weights[candidates]) / y.mean())
    spread = np.std(null) / np.sqrt(300)
    assert found["auprc_ratio_null_mean"] == pytest.approx(np.mean(null), abs=4 * spread)
    assert found["auprc_ratio_null_high"] == pytest.approx(np.quantile(null, 0.95), abs=6 * spread)
    assert found["auprc_ratio_p"] == pytest.approx(np.mean(np.array(null) >= found["auprc_ratio"]), abs=0.08)


def test_a_resampled_source_counts_as_often_as_it_was_drawn(metrics, monkeypatch):
    rng = np.random.default_rng(1)
    weights, known, candidates = rng.random((4, 30)).round(1), rng.random((4, 30)) < 0.2, rng.random((4, 30)) < 0.9
    for times in ([1, 1, 1, 1], [0, 2, 1, 1], [3, 0, 0, 1]):
        rows = np.repeat(np.arange(4), times)
        whole = score(metrics, weights[rows], known[rows], candidates[rows])
        with monkeypatch.context() as patch:
            drawn = metrics.times_drawn
            patch.setattr(metrics, "times_drawn", lambda *of, t=times, d=drawn: d(*of[:-1], np.array(t)))
            found = score(metrics, weights, known, candidates)
        for name in ("auprc_ratio", "early_precision"):
            assert found[f"{name}_low"] == found[f"{name}_high"] == pytest.approx(whole[name])
    assert np.isnan(score(metrics, weights[:1], known[:1], candidates[:1])["auprc_ratio_low"])  # of a single source


def test_what_cannot_be_ranked_is_refused(metrics):
    for weights, known, said in (
        (np.full((2, 3), np.nan), np.eye(2, 3) > 0, "6 weights"),
        (np.eye(2, 3), np.eye(2, 3) > 2, "0 of 6"),
    ):
        with pytest.raises(ValueError, match=said):
            score(metrics, weights, known, np.ones((2, 3), dtype=bool))


def slow_density(graph, genes):
    """The mean over pairs that were measured; None if none was."""
    weights = [graph[i][j] for i in genes for j in genes if i != j and not np.isnan(graph[i][j])]
    return sum(weights) / len(weights) if weights else None


@pytest.mark.parametrize("unmeasured", [0.0, 0.2])
def test_density_equals_loops(density, unmeasured):
    """Beside random sets of the same tenths of degree, by numpy's own choice without replacement."""
    rng = np.random.default_rng(0)
    graph = rng.normal(size=(40, 40)) * (rng.random((40, 40)) < 0.5)
    members = np.array([3, 7, 11, 30, 31])
    graph[np.ix_(members, members)] += 0.2
    graph[rng.random((40, 40)) < unmeasured] = np.nan
    found = density.density_test(graph, members, n_random=2000)
    size = np.where(np.eye(40, dtype=bool) | np.isnan(graph), 0.0, np.abs(graph))
    groups = np.argsort(np.argsort(size.sum(axis=0) + size.sum(axis=1))) // 4
    seen, null = slow_density(graph, members), []
    for _ in range(1000):
        some = [
            rng.choice(np.flatnonzero(groups == one), sum(groups[members] == one), False)
            for one in set(groups[members])
        ]
        null.append(slow_density(graph, np.concatenate(some)))
    assert found["density"] == pytest.approx(seen)
    assert found["null_mean"] == pytest.approx(np.mean(null), abs=5 * np.std(null) / np.sqrt(600))
    assert found["null_sd"] == pytest.approx(np.std(null), rel=0.1)
    assert found["p"] == pytest.approx(np.mean([one >= seen for one in null]), abs=0.04)
    assert found["z"] == pytest.approx((found["density"] - found["null_mean"]) / found["null_sd"])


def test_genes_without_edges_stand_for_each_other(density):
    """Of 1,000 genes 20 are in the graph; random sets must not be made of those that are not."""
    graph = np.zeros((1000, 1000))
    graph[:20, :20] = 1.0
    found = density.density_test(graph, np.arange(3), n_random=100)
    assert found["density"] == found["null_mean"] == found["p"] == 1.0
    with pytest.raises(ValueError, match="3 genes"):
        density.density_test(np.full((6, 6), np.nan), np.arange(3), n_random=5)


def test_random_scores_have_uniform_p_values(metrics, density):
    rng = np.random.default_rng(3)
    known, everything, graph = rng.random((5, 60)) < 0.1, np.ones((5, 60), dtype=bool), rng.normal(size=(50, 50))
    of_edges = [score(metrics, rng.random((5, 60)), known, everything, np.arange(60.0), n_permutations=60, rng=rng)
                for _ in range(60)]  # fmt: skip
    of_sets = [density.density_test(graph, rng.permutation(50)[:6], n_random=60, rng=rng) for _ in range(80)]
    for p in (*([one[f"{name}_p"] for one in of_edges] for name in ("auprc_ratio", "early_precision")),
              [one["p"] for one in of_sets]):  # fmt: skip
        assert 0.3 < np.mean(p) < 0.7
        assert np.mean(np.array(p) <= 0.1) < 0.25
