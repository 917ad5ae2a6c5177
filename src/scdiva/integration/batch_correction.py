"""Batch correction (Harmony) and batch frequencies among similar cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.linalg import splu
from scipy.special import softmax

Matrix = NDArray[np.float64]

CELLS_PER_CLUSTER = 30
MOST_CLUSTERS = 100
N_BLOCKS = 20
"""Blocks of cells whose memberships are updated together."""
CLUSTER_ROUNDS = 20
TOLERANCE = 1e-4
PRIOR_CLUSTERS, CELLS_PER_PRIOR = 10, 50
"""Maximum number of clusters for batch frequencies, and minimum mean number of cells of one."""
PRIOR_CELLS = 10.0
"""Pseudo-counts of a cluster, distributed as the batches of all cells."""
DIVERSITY = 2.0
"""Weight θ of the penalty on clusters in which a batch is more frequent than expected."""
WIDTH = 0.1
"""σ, softness of the clusters, in units of squared distance on the sphere."""
RIDGE, RIDGE_SHARE = 1.0, 0.2
"""λ, penalty on the effect of a batch within a cluster: a number of cells, and a share of the expected number."""
ROUNDS = 2
"""Number of corrections, each with clusters of its own."""
INTERCEPT_RIDGE = 1e-9
"""Penalty on the intercept of a cluster, in cells, so that an empty cluster has no effects."""


def correct_batches(
    states: NDArray[Any], batches: list[NDArray[Any]], rng: np.random.Generator, *, labels: NDArray[Any] | None = None
) -> Matrix:
    r"""Correct batch effects, cluster by cluster (Harmony; Korsunsky et al. 2019).

    Cells belong to soft clusters on the unit sphere, with a penalty on clusters of few batches:

    .. math::

        R_{ik} \propto e^{-2 (1 - Y_k^\top z_i) / \sigma} \prod_b \left(\frac{E_{kb} + 1}{O_{kb} + 1}\right)^{\theta}

    with O the observed and E the expected number of cells of batch b in cluster k. In each cluster a ridge regression
    on the batches, with an intercept and the penalty :math:`1 + 0.2 E_{kb}` on the effect :math:`W_{kb}`, makes a
    smaller correction for a batch with few cells in the cluster, in absolute number or compared with the expected
    number. The corrected state is :math:`z_i - \sum_k R_{ik} W_{k b(i)}`. It is corrected a second time, with new
    clusters.

    Parameters
    ----------
    states
        `(n_cells, dim)`.
    batches
        One array or more of batch numbers from 0, `(n_cells,)` each: batch covariates.
    rng
        Random generator of the initial clusters and of the order of cells.
    labels
        Number of each cell's label from 0, -1 for none, `(n_cells,)`. Each cluster then has one label, and labelled
        cells belong only to clusters of their label, so no correction merges two labels. Other cells join any.

    Returns
    -------
    Corrected states of length 1, float64 `(n_cells, dim)`.
    """
    corrected = _unit(np.asarray(states, dtype=np.float64))
    n_clusters = int(np.clip(round(len(corrected) / CELLS_PER_CLUSTER), 2, MOST_CLUSTERS))
    design = sp.hstack([_indicators(batch) for batch in batches], format="csr")
    for _ in range(ROUNDS):
        centres, allowed = _first_clusters(corrected, labels, n_clusters, rng)
        share = _cluster(corrected, _memberships(corrected, centres, allowed), design, allowed, rng)
        corrected = _unit(corrected - _effects(corrected, share, design))
    return corrected


def batch_prior(
    corrected: NDArray[Any], batch: NDArray[Any], rng: np.random.Generator
) -> tuple[Matrix, NDArray[np.int64]]:
    """Log frequencies of the batches among similar cells.

    Parameters
    ----------
    corrected
        States without batch effects, `(n_cells, dim)`.
    batch
        Batch numbers from 0, `(n_cells,)`.
    rng
        Random generator for the clustering of similar cells (at most 10 clusters).

    Returns
    -------
    Log frequencies in each cluster, float64 `(n_clusters, n_batches)`, and the cluster of each cell, `(n_cells,)`.
    """
    from sklearn.cluster import KMeans

    k = int(np.clip(len(corrected) // CELLS_PER_PRIOR, 1, PRIOR_CLUSTERS))
    cluster = KMeans(k, n_init=1, random_state=int(rng.integers(2**31))).fit_predict(corrected)
    counts = np.zeros((k, int(batch.max()) + 1))
    np.add.at(counts, (cluster, batch), 1)
    counts += PRIOR_CELLS * (counts.sum(axis=0) + 1) / (counts.sum() + counts.shape[1])
    return np.log(counts / counts.sum(axis=1, keepdims=True)), cluster.astype(np.int64)


def _indicators(batch: NDArray[Any]) -> sp.csr_matrix:
    """One-hot encode the batches as a sparse matrix, float64 `(n_cells, n_batches)`."""
    n = len(batch)
    return sp.csr_matrix((np.ones(n), batch, np.arange(n + 1)), shape=(n, int(batch.max()) + 1))


def _unit(x: Matrix) -> Matrix:
    unit: Matrix = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    return unit


def _first_clusters(
    states: Matrix, labels: NDArray[Any] | None, n_clusters: int, rng: np.random.Generator
) -> tuple[Matrix, Matrix | None]:
    """Centres by k-means within labels, and which clusters a cell may join, 1 or 0 (None: any)."""
    from sklearn.cluster import KMeans

    def centres_of(x: Matrix, k: int) -> Matrix:
        clusters = KMeans(min(k, len(x)), n_init=1, max_iter=25, random_state=int(rng.integers(2**31))).fit(x)
        return _unit(clusters.cluster_centers_.astype(np.float64))

    if labels is None or (labels < 0).all():
        return centres_of(states, n_clusters), None
    counts = np.bincount(labels[labels >= 0])
    parts, label_of = [], []
    for label in np.flatnonzero(counts):
        part = centres_of(states[labels == label], max(1, round(n_clusters * counts[label] / counts.sum())))
        parts.append(part)
        label_of.append(np.full(len(part), label))
    if (labels < 0).any():  # types without labelled cells
        parts.append(centres_of(states[labels < 0], max(1, n_clusters // 4)))
        label_of.append(np.full(len(parts[-1]), -1))
    allowed = (labels[:, None] == np.concatenate(label_of)) | (labels[:, None] < 0)
    return np.concatenate(parts), allowed.astype(np.float64)


def _memberships(x: Matrix, centres: Matrix, allowed: Matrix | None) -> Matrix:
    logits = -2 * (1 - x @ centres.T) / WIDTH
    if allowed is not None:
        logits = np.where(allowed > 0, logits, -np.inf)
    memberships: Matrix = softmax(logits, axis=1)
    return memberships


def _cluster(
    x: Matrix, share: Matrix, design: sp.csr_matrix, allowed: Matrix | None, rng: np.random.Generator
) -> Matrix:
    """Memberships by soft k-means with the penalty on clusters of few batches."""
    share, frequency = share.copy(), np.asarray(design.mean(axis=0)).reshape(-1, 1)
    centres = _unit(share.T @ x)
    for _ in range(CLUSTER_ROUNDS):
        near = _memberships(x, centres, allowed)
        observed, size = design.T @ share, share.sum(axis=0)
        for rows in np.array_split(rng.permutation(len(x)), N_BLOCKS):
            batches = design[rows]
            observed -= batches.T @ share[rows]
            size -= share[rows].sum(axis=0)
            # log penalty of each batch and cluster
            penalty = DIVERSITY * (np.log(np.maximum(frequency * size, 0) + 1) - np.log(np.maximum(observed, 0) + 1))
            weight = batches @ penalty
            updated = near[rows] * np.exp(weight - weight.max(axis=1, keepdims=True))
            share[rows] = updated / np.maximum(updated.sum(axis=1, keepdims=True), 1e-300)
            observed += batches.T @ share[rows]
            size += share[rows].sum(axis=0)
        before, centres = centres, _unit(share.T @ x)
        if np.abs(centres - before).max() < TOLERANCE:
            break
    return share


def _effects(states: Matrix, share: Matrix, design: sp.csr_matrix) -> Matrix:
    """Batch effects of each cell: by cluster, ridge regression on the batches, without the intercept."""
    full = sp.hstack([np.ones((len(states), 1)), design], format="csr")
    expected = np.outer(share.sum(axis=0), np.asarray(design.mean(axis=0)))
    added = np.zeros_like(states)
    for k in range(share.shape[1]):
        weighted = full.multiply(share[:, k : k + 1]).tocsr()
        penalty = sp.diags_array([INTERCEPT_RIDGE, *(RIDGE + RIDGE_SHARE * expected[k])])
        effect = splu(sp.csc_matrix(weighted.T @ full + penalty)).solve(weighted.T @ states)
        effect[0] = 0.0
        added += weighted @ effect
    return added
