from __future__ import annotations

from math import comb

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.sparse import csr_array, csr_matrix

from scdiva.metrics import enrichment, hub_scores

GENES = [f"G{i}" for i in range(12)]
named = st.sets(st.sampled_from([*GENES, "elsewhere"]), min_size=1)


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
    with pytest.raises(ValueError, match="1 of 3 weights of graph"):
        hub_scores([[1.0, np.nan], [0.0, 1.0]])
    with pytest.raises(ValueError, match=r"graph has shape \(0, 3\)"):
        hub_scores(np.ones((0, 3)))


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
    with pytest.raises(ValueError, match=r"1 of 2 modules.*12 .*'m1'"):
        enrichment({"m0": ["G1"], "m1": ["ENSG1"]}, sets, GENES)
    with pytest.raises(ValueError, match="0 of 0 modules"):
        enrichment({}, sets, GENES)
    with pytest.raises(ValueError, match=r"1 gene sets .*7 to 500"):
        enrichment({"m": GENES}, sets, GENES, min_genes=7)
    with pytest.raises(ValueError, match="min_genes must be at least 1"):
        enrichment({"m": GENES}, sets, GENES, min_genes=0)
