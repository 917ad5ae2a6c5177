"""Batch effects corrected cluster by cluster: against loops, and on cells of known truth."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings

from scdiva.integration import batch_correction as B


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def make_cells(n: int = 240, n_types: int = 3, n_batches: int = 2, shift: float = 1.0, seed: int = 0):
    """States around corners of length 4, each batch moved by its own step, another one for each type."""
    draw = np.random.default_rng(seed)
    kind, batch = np.arange(n) % n_types, np.arange(n) // n_types % n_batches
    step = shift * draw.normal(size=(n_types, n_batches, 6))
    states = 4 * np.eye(6)[kind] + step[kind, batch] + 0.3 * draw.normal(size=(n, 6))
    return states, batch, kind


def rng(seed: int = 0):
    return np.random.default_rng(seed)


@pytest.fixture
def parts():
    """Unit states, shares of 4 clusters, two covariates as one design, of 40 cells."""
    draw = rng(3)
    states, share = unit(draw.normal(size=(40, 5))), draw.dirichlet(np.ones(4), size=40)
    first, second = draw.integers(3, size=40), draw.integers(2, size=40)
    return states, share, np.concatenate([np.eye(3)[first], np.eye(2)[second]], axis=1), (first, second)


def test_effects_by_loops(parts, monkeypatch):
    """In each cluster weighted ridge regression; the penalty grows with the expected cells of a batch."""
    states, share, design, _ = parts
    expected = np.zeros_like(states)
    monkeypatch.setattr(B, "RIDGE", 0.7)
    monkeypatch.setattr(B, "RIDGE_SHARE", 0.3)
    for k in range(4):
        full = np.column_stack([np.ones(40), design])
        ridge = [0.7 + 0.3 * sum(share[i, k] for i in range(40)) * design[:, b].sum() / 40 for b in range(5)]
        left, right = np.diag([0.0, *ridge]), np.zeros((6, 5))
        for i in range(40):
            left += share[i, k] * np.outer(full[i], full[i])
            right += share[i, k] * np.outer(full[i], states[i])
        effect = np.linalg.inv(left) @ right
        for i in range(40):
            expected[i] += share[i, k] * design[i] @ effect[1:]
    np.testing.assert_allclose(B._effects(states, share, sp.csr_matrix(design)), expected, atol=1e-7)


def test_a_cluster_without_cells_has_no_effect(parts):
    states, share, design, _ = parts
    share[:, 2] = 0
    expected = B._effects(states, share[:, [0, 1, 3]], sp.csr_matrix(design))
    np.testing.assert_allclose(B._effects(states, share, sp.csr_matrix(design)), expected, atol=1e-12)


def slow_cluster(x, share, design, theta, width, blocks):
    """One pass over blocks of cells, number by number: a cell's own share is taken out of the tallies first."""
    share = share.copy()
    centres = unit(share.T @ x)
    n_clusters, n_batches = share.shape[1], design.shape[1]
    frequency = [sum(design[i, b] for i in range(len(x))) / len(x) for b in range(n_batches)]
    for rows in blocks:
        outside = [i for i in range(len(x)) if i not in set(rows.tolist())]
        shares = {}
        for i in rows:
            weights = []
            for k in range(n_clusters):
                size = sum(share[j, k] for j in outside)
                weight = math.exp(-2 * (1 - x[i] @ centres[k]) / width)
                for b in range(n_batches):
                    if design[i, b]:
                        observed = sum(share[j, k] for j in outside if design[j, b])
                        weight *= ((size * frequency[b] + 1) / (observed + 1)) ** theta[b]
                weights.append(weight)
            shares[i] = np.array(weights) / sum(weights)
        for i, weights in shares.items():
            share[i] = weights
    return share


def test_one_round_of_clusters_by_loops(parts, monkeypatch):
    states, share, design, _ = parts
    monkeypatch.setattr(B, "CLUSTER_ROUNDS", 1)
    monkeypatch.setattr(B, "WIDTH", 0.3)
    monkeypatch.setattr(B, "DIVERSITY", 1.5)
    blocks = np.array_split(rng(9).permutation(40), 20)
    expected = slow_cluster(states, share, design, np.full(5, 1.5), 0.3, blocks)
    share_before = share.copy()
    actual = B._cluster(states, share, sp.csr_matrix(design), None, rng(9))
    np.testing.assert_allclose(actual, expected, atol=1e-10)
    np.testing.assert_array_equal(share, share_before)


def test_a_batch_with_few_cells_in_a_cluster_is_corrected_less(monkeypatch):
    """One type; a batch of 100 cells and one of 4, each moved by the same step from a third."""
    batch = np.repeat([0, 1, 2], [400, 100, 4])
    step = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 1]])[batch]
    states = np.array([4, 0, 0]) + step + 0.05 * rng(1).normal(size=(504, 3))

    def distances():
        corrected = B.correct_batches(states, [batch], rng())
        centres = [corrected[batch == b].mean(axis=0) for b in range(3)]
        return [np.linalg.norm(centre - centres[0]) for centre in centres[1:]]

    large, small = distances()  # 0.24 before
    assert large < 0.05
    assert small > 0.1
    monkeypatch.setattr(B, "RIDGE", 0.1)
    monkeypatch.setattr(B, "RIDGE_SHARE", 0.0)
    assert distances()[1] < 0.05


def test_no_cluster_joins_two_labels():
    """Types that the batches hold one each of are merged without labels, and kept apart with them."""
    draw = rng(2)
    kind = np.repeat([0, 1, 2], 60)
    batch = np.where(kind == 0, 0, np.where(kind == 1, 1, np.arange(180) % 2))
    states = np.array([[4, 0.8, 0, 0], [4, -0.8, 0, 0], [0, 0, 4, 0]])[kind] + 0.3 * draw.normal(size=(180, 4))

    def apart(corrected):
        return np.linalg.norm(corrected[kind == 0].mean(axis=0) - corrected[kind == 1].mean(axis=0))

    merged, separate = B.correct_batches(states, [batch], rng()), B.correct_batches(states, [batch], rng(), labels=kind)
    assert apart(merged) < 0.5 * apart(unit(states))
    assert apart(separate) > 0.95 * apart(unit(states))


def test_labels_with_gaps_and_no_label_at_all():
    states, batch, kind = make_cells()
    with_gaps = B.correct_batches(states, [batch], rng(), labels=2 * kind)
    np.testing.assert_allclose(with_gaps, B.correct_batches(states, [batch], rng(), labels=kind))
    none = B.correct_batches(states, [batch], rng(), labels=np.full(240, -1))
    np.testing.assert_array_equal(none, B.correct_batches(states, [batch], rng()))


def test_the_prior_counts_batches_among_cells_alike(monkeypatch):
    """Clusters are the types here; each count starts from 10 cells that are dealt as all cells are."""
    monkeypatch.setattr(B, "PRIOR_CLUSTERS", 3)
    kind = np.repeat(np.arange(3), 100)
    batch = np.array([0] * 90 + [1] * 10 + [0] * 50 + [1] * 50 + [1] * 100)
    states = np.eye(3)[kind] + 1e-3 * rng().normal(size=(300, 3))
    frequency, cluster = B.batch_prior(states, batch, rng(3))
    assert frequency.shape == (3, 2)
    actual = np.exp(frequency)[cluster]
    for k in range(3):
        counts = np.bincount(batch[kind == k], minlength=2) + 10 * np.array([141, 161]) / 302
        np.testing.assert_allclose(actual[kind == k], np.tile(counts / counts.sum(), (100, 1)))
    small, _ = B.batch_prior(states[:40], batch[:40], rng())
    assert small.shape == (1, 1)  # too few cells for clusters


@settings(max_examples=15, deadline=None)
@given(n=st.integers(2, 40), n_batches=st.integers(1, 5), labelled=st.booleans(), seed=st.integers(0, 2**16))
def test_any_cells_get_a_state_of_length_one(n, n_batches, labelled, seed):
    """Few cells, batches of one cell, batches that hold none, cells alike, a cell at the origin."""
    draw = rng(seed)
    states = draw.normal(size=(n, 4))
    states[: n // 2] = states[0]
    batch, labels = draw.integers(n_batches, size=n), draw.integers(-1, 3, size=n) if labelled else None
    corrected = B.correct_batches(states, [batch], draw, labels=labels)
    assert np.isfinite(corrected).all()
    np.testing.assert_allclose(np.linalg.norm(corrected, axis=1), 1)
