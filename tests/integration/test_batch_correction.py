"""Batch effects corrected cluster by cluster, and mutual neighbours: against loops, and on cells of known truth."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.sparse as sp
import torch
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


def spread(states, batch, kind):
    """Mean distance between batches of one type, and least distance between types."""
    n_types, n_batches = kind.max() + 1, batch.max() + 1
    centre = np.stack(
        [[states[(kind == k) & (batch == b)].mean(axis=0) for b in range(n_batches)] for k in range(n_types)]
    )
    within = [np.linalg.norm(c[a] - c[b]) for c in centre for a, b in itertools.combinations(range(n_batches), 2)]
    whole = centre.mean(axis=1)
    between = [np.linalg.norm(whole[a] - whole[b]) for a, b in itertools.combinations(range(n_types), 2)]
    return np.mean(within), np.min(between)


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
    """In each cluster weighted ridge regression, by its normal equations; only batches' coefficients are effects."""
    states, share, design, _ = parts
    ridge, expected = 0.7, np.zeros_like(states)
    monkeypatch.setattr(B, "RIDGE", ridge)
    for k in range(4):
        full = np.column_stack([np.ones(40), design])
        left, right = np.diag([0, *[ridge] * 5]).astype(float), np.zeros((6, 5))
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
        others = [i for i in range(len(x)) if i not in set(rows.tolist())]
        found = {}
        for i in rows:
            weights = []
            for k in range(n_clusters):
                size = sum(share[j, k] for j in others)
                weight = math.exp(-2 * (1 - x[i] @ centres[k]) / width)
                for b in range(n_batches):
                    if design[i, b]:
                        observed = sum(share[j, k] for j in others if design[j, b])
                        weight *= ((size * frequency[b] + 1) / (observed + 1)) ** theta[b]
                weights.append(weight)
            found[i] = np.array(weights) / sum(weights)
        for i, weights in found.items():
            share[i] = weights
    return share


def test_one_round_of_clusters_by_loops(parts, monkeypatch):
    states, share, design, _ = parts
    monkeypatch.setattr(B, "CLUSTER_ROUNDS", 1)
    monkeypatch.setattr(B, "WIDTH", 0.3)
    monkeypatch.setattr(B, "DIVERSITY", 1.5)
    blocks = np.array_split(rng(9).permutation(40), 20)
    expected = slow_cluster(states, share, design, np.full(5, 1.5), 0.3, blocks)
    given_share = share.copy()
    found = B._cluster(states, share, sp.csr_matrix(design), None, rng(9))
    np.testing.assert_allclose(found, expected, atol=1e-10)
    np.testing.assert_array_equal(share, given_share)


def test_batches_come_together_and_types_stay_apart():
    states, batch, kind = make_cells()
    before, apart = spread(unit(states), batch, kind)
    found = B.correct_batches(states, [batch], rng())
    after, still = spread(found, batch, kind)
    assert found.dtype == np.float64
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1)
    assert before > 0.3
    assert after < 0.1 * before
    assert still > 0.9 * apart
    # each cell is nearest to the centre of its own type
    centres = np.stack([found[kind == k].mean(axis=0) for k in range(3)])
    assert (np.argmax(found @ centres.T, axis=1) == kind).all()


def test_each_covariate_is_taken_out():
    """Donor and site both move cells; the correction for one leaves the other."""
    draw = rng(3)
    kind, donor, site = (part.ravel() for part in np.indices((3, 2, 2)).repeat(30, axis=-1))
    states = 4 * np.eye(6)[kind] + 0.3 * draw.normal(size=(len(kind), 6))
    states += draw.normal(size=(2, 6))[donor] + draw.normal(size=(2, 6))[site]
    before = [spread(unit(states), batch, kind)[0] for batch in (donor, site)]
    one = B.correct_batches(states, [donor], rng())
    both = B.correct_batches(states, [donor, site], rng())
    assert spread(one, donor, kind)[0] < 0.1 * before[0]
    assert spread(one, site, kind)[0] > 0.5 * before[1]
    for batch, was in zip((donor, site), before, strict=True):
        assert spread(both, batch, kind)[0] < 0.15 * was


def test_no_cluster_joins_two_labels():
    """Types that the batches hold one each of are merged without labels, and kept apart with them."""
    draw = rng(2)
    kind = np.repeat([0, 1, 2], 60)
    batch = np.where(kind == 0, 0, np.where(kind == 1, 1, np.arange(180) % 2))
    states = np.array([[4, 0.8, 0, 0], [4, -0.8, 0, 0], [0, 0, 4, 0]])[kind] + 0.3 * draw.normal(size=(180, 4))

    def apart(found):
        return np.linalg.norm(found[kind == 0].mean(axis=0) - found[kind == 1].mean(axis=0))

    merged, kept = B.correct_batches(states, [batch], rng()), B.correct_batches(states, [batch], rng(), labels=kind)
    assert apart(merged) < 0.5 * apart(unit(states))
    assert apart(kept) > 0.95 * apart(unit(states))


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
    found = np.exp(frequency)[cluster]
    for k in range(3):
        counts = np.bincount(batch[kind == k], minlength=2) + 10 * np.array([141, 161]) / 302
        np.testing.assert_allclose(found[kind == k], np.tile(counts / counts.sum(), (100, 1)))
    few, _ = B.batch_prior(states[:40], batch[:40], rng())
    assert few.shape == (1, 1)  # too few cells for clusters


@settings(max_examples=15, deadline=None)
@given(n=st.integers(2, 40), n_batches=st.integers(1, 5), labelled=st.booleans(), seed=st.integers(0, 2**16))
def test_any_cells_get_a_state_of_length_one(n, n_batches, labelled, seed):
    """Few cells, batches of one cell, batches that hold none, cells alike, a cell at the origin."""
    draw = rng(seed)
    states = draw.normal(size=(n, 4))
    states[: n // 2] = states[0]
    batch, labels = draw.integers(n_batches, size=n), draw.integers(-1, 3, size=n) if labelled else None
    found = B.correct_batches(states, [batch], draw, labels=labels)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1)


def some_cells(n=60, n_batches=3):
    """Cells of batches of unlike sizes, in one cloud."""
    draw = np.random.default_rng(2)
    return draw.normal(size=(n, 4)), np.sort((n_batches * draw.random(n) ** 2).astype(np.int64))


def found(states, batch, k, seed=0):
    return B.mutual_neighbors(states, [batch], k, np.random.default_rng(seed))


def slow_pairs(states, batch, k):
    """Of every two cells of two batches: whether fewer than k cells of the other's batch are nearer, both ways."""
    pairs = np.zeros((len(states), len(states)), dtype=bool)
    for i, x in enumerate(states):
        for j, y in enumerate(states):
            if batch[i] == batch[j]:
                continue
            apart = np.linalg.norm(x - y)
            of_i = sum(np.linalg.norm(x - z) < apart for z in states[batch == batch[j]])
            of_j = sum(np.linalg.norm(y - z) < apart for z in states[batch == batch[i]])
            pairs[i, j] = of_i < k and of_j < k
    return pairs


@pytest.mark.parametrize("k", [1, 4, 15])
def test_pairs_are_those_of_the_definition(k):
    states, batch = some_cells()
    assert np.bincount(batch).min() < 15 < np.bincount(batch).max()  # one batch has fewer cells than are asked for
    pairs = found(states, batch, k)
    np.testing.assert_array_equal(pairs.toarray(), slow_pairs(states, batch, k))
    assert pairs.dtype == bool
    assert 0 < pairs.nnz < (batch[:, None] != batch[None, :]).sum()
    order = np.random.default_rng(0).permutation(60)  # cells need not be sorted by batch
    np.testing.assert_array_equal(found(states[order], batch[order], k).toarray(), pairs.toarray()[order][:, order])


def test_batches_of_several_covariates_are_those_together():
    """Cells that differ in one covariate only can be partners; those that agree in both cannot."""
    states, one = some_cells()
    other = np.arange(60) % 2
    pairs = B.mutual_neighbors(states, [one, other], 5, np.random.default_rng(0)).toarray()
    np.testing.assert_array_equal(pairs, slow_pairs(states, 2 * one + other, 5))
    assert pairs[one[:, None] == one[None, :]].any()
    assert pairs[other[:, None] == other[None, :]].any()


def test_of_many_batches_each_is_compared_with_some(monkeypatch):
    monkeypatch.setattr(B, "MOST_BATCHES", 4)
    draw = np.random.default_rng(1)
    states, batch = draw.normal(size=(90, 4)), np.arange(90) % 9
    pairs = found(states, batch, 4).toarray()
    np.testing.assert_array_equal(pairs, pairs.T)
    compared = np.array([[pairs[np.ix_(batch == a, batch == b)].any() for b in range(9)] for a in range(9)])
    assert (compared.sum(axis=1) == 4).all()
    of_compared = slow_pairs(states, batch, 4) & compared[np.ix_(batch, batch)]
    np.testing.assert_array_equal(pairs, of_compared)
    assert not np.array_equal(found(states, batch, 4, 1).toarray(), pairs)


def test_of_many_cells_some_are_searched(monkeypatch):
    states, batch = some_cells()
    monkeypatch.setattr(B, "MOST_CELLS", 30)
    one, again, other = (found(states, batch, 4, seed) for seed in (0, 0, 1))
    drawn = np.sort(np.random.default_rng(0).permutation(60)[:30])
    expected = np.zeros((60, 60), dtype=bool)
    expected[np.ix_(drawn, drawn)] = slow_pairs(states[drawn], batch[drawn], 4)
    np.testing.assert_array_equal(one.toarray(), expected)
    assert (one != again).nnz == 0
    assert (one != other).nnz > 0


def test_partners_are_drawn_evenly_from_those_that_a_cell_has():
    states, batch = some_cells()
    pairs = found(states, batch, 3)
    counts = np.diff(pairs.indptr)
    several, none = int(counts.argmax()), int(counts.argmin())
    assert counts[several] > 2
    assert counts[none] == 0
    generator = torch.Generator().manual_seed(0)
    drawn = B.draw_partners(pairs, np.repeat([several, none], 3000), generator)
    assert (drawn[3000:] == -1).all()
    seen, times = np.unique(drawn[:3000], return_counts=True)
    np.testing.assert_array_equal(seen, np.flatnonzero(pairs.toarray()[several]))
    np.testing.assert_allclose(times / 3000, 1 / counts[several], atol=0.05)
    rows = np.arange(60)[::-1]
    one, two = (B.draw_partners(pairs, rows, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(one, two)
    paired = (one >= 0).numpy()
    np.testing.assert_array_equal(paired, counts[rows] > 0)
    assert pairs.toarray()[rows[paired], one.numpy()[paired]].all()
    assert len(B.draw_partners(pairs, rows[:0], generator)) == 0
