"""Mutual neighbours against their definition, and what is drawn of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva.train import batch_correction as M


def some_cells(n=60, n_batches=3):
    """Cells of batches of unlike sizes, in one cloud."""
    draw = np.random.default_rng(2)
    return draw.normal(size=(n, 4)), np.sort((n_batches * draw.random(n) ** 2).astype(np.int64))


def found(states, batch, k, seed=0):
    return M.mutual_neighbors(states, [batch], k, np.random.default_rng(seed))


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


def test_pairs_cross_batches_and_are_mutual():
    states, batch = some_cells()
    pairs = found(states, batch, 5).toarray()
    assert not pairs[batch[:, None] == batch[None, :]].any()
    np.testing.assert_array_equal(pairs, pairs.T)
    assert found(states, np.zeros(60, dtype=np.int64), 5).nnz == 0  # one batch


def test_batches_of_several_covariates_are_those_together():
    """Cells that differ in one covariate only can be partners; those that agree in both cannot."""
    states, one = some_cells()
    other = np.arange(60) % 2
    pairs = M.mutual_neighbors(states, [one, other], 5, np.random.default_rng(0)).toarray()
    np.testing.assert_array_equal(pairs, slow_pairs(states, 2 * one + other, 5))
    assert pairs[one[:, None] == one[None, :]].any()
    assert pairs[other[:, None] == other[None, :]].any()


def test_a_kind_that_one_batch_alone_has_finds_no_partner():
    """A kind far away names cells of the other batch, but those have nearer ones."""
    draw = np.random.default_rng(1)
    states = draw.normal(size=(90, 3)) + np.repeat([[0.0], [0.0], [50.0]], 30, axis=0)
    pairs = found(states, np.repeat([0, 1, 1], 30), 5)
    paired = np.diff(pairs.indptr) > 0
    assert not paired[60:].any()
    assert paired[:60].mean() > 0.7


def test_of_many_cells_some_are_searched(monkeypatch):
    states, batch = some_cells()
    monkeypatch.setattr(M, "MOST_CELLS", 30)
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
    drawn = M.draw_partners(pairs, np.repeat([several, none], 3000), generator)
    assert (drawn[3000:] == -1).all()
    seen, times = np.unique(drawn[:3000], return_counts=True)
    np.testing.assert_array_equal(seen, np.flatnonzero(pairs.toarray()[several]))
    np.testing.assert_allclose(times / 3000, 1 / counts[several], atol=0.05)
    rows = np.arange(60)[::-1]
    one, two = (M.draw_partners(pairs, rows, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(one, two)
    paired = (one >= 0).numpy()
    np.testing.assert_array_equal(paired, counts[rows] > 0)
    assert pairs.toarray()[rows[paired], one.numpy()[paired]].all()
    assert len(M.draw_partners(pairs, rows[:0], generator)) == 0
