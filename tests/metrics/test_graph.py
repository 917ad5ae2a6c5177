from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.sparse import coo_array, csr_array, csr_matrix
from scipy.stats import spearmanr

from scdiva.metrics import edge_stability, hub_scores
from scdiva.metrics.graph import TOP_TARGETS

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
    with pytest.raises(ValueError, match=r"1 of 4 weights of graph are not finite"):
        hub_scores([[1.0, np.nan], [0.0, 1.0]])
    with pytest.raises(ValueError, match=r"graph has shape \(0, 3\)"):
        hub_scores(np.ones((0, 3)))
