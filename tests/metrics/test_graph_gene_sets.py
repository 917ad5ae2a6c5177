from __future__ import annotations

import math
from math import comb

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from scdiva.metrics import density_test, enrichment

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
    degree = rng.integers(0, 4, 40)
    given_as = csr_array(graph) if stored == "sparse" else graph
    found = density_test(given_as, members, degree=degree, n_random=2000, n_bins=40)
    seen, mean, sd, p = slow_test(graph, members, degree, 2000, rng)
    assert found["density"] == pytest.approx(seen)
    assert found["null_mean"] == pytest.approx(mean, abs=5 * sd / np.sqrt(1000))
    assert found["null_sd"] == pytest.approx(sd, rel=0.1)
    assert found["p"] == pytest.approx(p, abs=0.04)
    assert found["z"] == pytest.approx((found["density"] - found["null_mean"]) / found["null_sd"])
    assert found["n"] == 5
    assert density_test(given_as, members, degree=degree, n_random=50) != found
    assert density_test(given_as, np.isin(np.arange(40), members), degree=degree, n_random=2000, n_bins=40) == found


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
    assert density_test(graph, hubs, degree=np.ones(200))["p"] < 0.01
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
    ("graph", "members", "options", "message"),
    [
        (np.ones((2, 3)), [0, 1], {}, r"graph has shape \(2, 3\)"),
        (np.ones((3, 3)), [0], {}, "1 genes have no pairs"),
        (np.ones((3, 3)), [], {}, "members must be numbers"),
        (np.ones((3, 3)), ["A", "B"], {}, "members must be numbers"),
        (np.ones((3, 3)), [0, 3], {}, "from 0 to 2, got 0 to 3"),
        (np.ones((3, 3)), [0, -1], {}, "got -1 to 0"),
        (np.ones((3, 3)), [0, 1, 1], {}, "name 1 genes twice"),
        (np.ones((3, 3)), [True, True], {}, r"members has shape \(2,\)"),
        (np.full((3, 3), np.nan), [0, 1], {}, "None of the pairs of 2 genes"),
        (csr_array(np.full((3, 3), np.nan)), [0, 1], {}, "9 of 9 weights of graph are not finite"),
        (np.ones((3, 3)), [0, 1], {"degree": [1.0, 2.0]}, r"degree has shape \(2,\)"),
        (np.ones((3, 3)), [0, 1], {"degree": [1.0, 2.0, np.nan]}, "1 values that are not finite"),
        (np.ones((3, 3)), [0, 1], {"n_random": 0}, "n_random must be 1 or more"),
        (np.ones((3, 3)), [0, 1], {"n_bins": 0}, "n_bins must be at least 1"),
    ],
)
def test_what_has_no_density_is_refused(graph, members, options, message):
    with pytest.raises(ValueError, match=message):
        density_test(graph, members, **options)


def test_random_sets_that_were_not_measured_are_left_out():
    graph = np.full((6, 6), np.nan)
    graph[0, 1] = graph[2, 3] = 1.0
    found = density_test(graph, [0, 1], degree=np.ones(6), n_random=200)
    assert found["null_mean"] == 1.0
    assert found["p"] == 1.0
    lonely = np.full((60, 60), np.nan)
    lonely[0, 1] = 1.0
    with pytest.raises(ValueError, match=r"None of 3 random sets has a measured pair"):
        density_test(lonely, [0, 1], degree=np.ones(60), n_random=3)


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
    with pytest.raises(ValueError, match="min_genes must be 1 or more"):
        enrichment({"m": GENES}, sets, GENES, min_genes=0)
