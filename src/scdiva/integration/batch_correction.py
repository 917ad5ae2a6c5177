"""Batch correction of cell states (Harmony), and mutual nearest neighbours across batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import splu
from scipy.special import softmax
from torch import Tensor

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
RIDGE = 0.1
"""λ, penalty on the effect of a batch within a cluster, in cells."""
MOST_CELLS = 20_000
"""Maximum number of cells among which pairs are searched; the time of the exact search grows with its square."""
MOST_BATCHES = 20
"""Maximum number of other batches in which a cell's nearest neighbours are searched."""
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
    on the batches, with an intercept, gives the effect :math:`W_{kb}`; the corrected state is
    :math:`z_i - \sum_k R_{ik} W_{k b(i)}`. There is one round of correction: ten rounds merged distinct types that are
    rare in single batches.

    Parameters
    ----------
    states
        `(n_cells, dim)`.
    batches
        One array or more of batch numbers from 0, `(n_cells,)` each: batch covariates.
    rng
        Of the first clusters and of the order of cells.
    labels
        Number of each cell's label from 0, -1 for none, `(n_cells,)`. Each cluster then has one label, and labelled
        cells belong only to clusters of their label, so no correction merges two labels. Other cells join any.

    Returns
    -------
    Corrected states of length 1, float64 `(n_cells, dim)`.
    """
    start = _unit(np.asarray(states, dtype=np.float64))
    n_clusters = int(np.clip(round(len(start) / CELLS_PER_CLUSTER), 2, MOST_CLUSTERS))
    design = sp.hstack([_indicators(batch) for batch in batches], format="csr")
    centres, allowed = _first_clusters(start, labels, n_clusters, rng)
    share = _cluster(start, _memberships(start, centres, allowed), design, allowed, rng)
    return _unit(start - _effects(start, share, design))


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
        Of the clusters, at most 10, that similar cells share.

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


def mutual_neighbors(
    states: NDArray[Any], batches: list[NDArray[Any]], n_neighbors: int, rng: np.random.Generator
) -> sp.csr_matrix:
    """Mutual nearest neighbours between batches (Haghverdi et al. 2018).

    Parameters
    ----------
    states
        `(n_cells, dim)`; the distance is Euclidean.
    batches
        One array or more of batch numbers, `(n_cells,)` each: batch covariates, whose combinations are the batches.
    n_neighbors
        Nearest cells in each other batch; all cells of a batch that has fewer.
    rng
        Of the subsample if there are more than 20,000 cells, the others of which have no pair, and of the 20 other
        batches in which neighbours are searched if there are more.

    Returns
    -------
    bool `(n_cells, n_cells)`, symmetric: whether two cells are mutual neighbours.
    """
    from sklearn.neighbors import NearestNeighbors

    n = len(states)
    drawn = np.arange(n) if n <= MOST_CELLS else np.sort(rng.permutation(n)[:MOST_CELLS])
    states = states[drawn]
    names, batch = np.unique(np.stack(batches)[:, drawn], axis=1, return_inverse=True)
    n_batches = names.shape[1]
    # a random circle of batches: each is compared with those before and after it, so that pairs are symmetric
    position = rng.permutation(n_batches)[batch.ravel()]
    pairs = [(np.zeros(0, dtype=np.int64),) * 2]
    for at in range(n_batches):
        distance = np.abs(position - at)
        distance = np.minimum(distance, n_batches - distance)
        inside, outside = (
            np.flatnonzero(distance == 0),
            np.flatnonzero((distance > 0) & (distance <= MOST_BATCHES // 2)),
        )
        if len(outside):
            k = min(n_neighbors, len(inside))
            index = NearestNeighbors(n_neighbors=k).fit(states[inside])
            near = index.kneighbors(states[outside], return_distance=False)
            pairs.append((np.repeat(drawn[outside], k), drawn[inside[near.ravel()]]))
    cells, nearest = (np.concatenate(column) for column in zip(*pairs, strict=True))
    graph = sp.csr_matrix((np.ones(len(cells), dtype=bool), (cells, nearest)), shape=(n, n))
    return graph.multiply(graph.T).tocsr()


def draw_partners(pairs: sp.csr_matrix, rows: NDArray[Any], generator: torch.Generator) -> Tensor:
    """Draw one mutual neighbour of each cell, uniformly; int64 `(n,)`, -1 for a cell without any.

    Parameters
    ----------
    pairs
        From :func:`mutual_neighbors`.
    rows
        Cells, `(n,)`.
    generator
        CPU generator.
    """
    counts = np.diff(pairs.indptr)[rows]
    drawn = (torch.rand(len(rows), generator=generator, dtype=torch.float64).numpy() * counts).astype(np.int64)
    partners = np.full(len(rows), -1, dtype=np.int64)
    paired = counts > 0
    partners[paired] = pairs.indices[pairs.indptr[rows[paired]] + drawn[paired]]
    return torch.from_numpy(partners)


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
    penalty = sp.diags_array([INTERCEPT_RIDGE, *np.full(design.shape[1], RIDGE)])
    added = np.zeros_like(states)
    for k in range(share.shape[1]):
        weighted = full.multiply(share[:, k : k + 1]).tocsr()
        effect = splu(sp.csc_matrix(weighted.T @ full + penalty)).solve(weighted.T @ states)
        effect[0] = 0.0
        added += weighted @ effect
    return added
