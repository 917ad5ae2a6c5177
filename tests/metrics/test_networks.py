from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.sparse import csr_array, csr_matrix

from scdiva.metrics import hub_scores


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
    scores = hub_scores(csr_array(weights))
    np.testing.assert_allclose(scores, power_iteration(weights), atol=1e-9)
    assert scores.max() == 1
    assert scores[7] == 0
    np.testing.assert_allclose(hub_scores(csr_array(-1e-200 * weights)), scores, rtol=1e-9)


def test_blocks_of_the_same_strength_share_the_first_place():
    """Several eigenvectors have the same eigenvalue, and a solver would return an arbitrary one."""
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
