"""Places of genes in a picture of a network: modules apart, within them what hangs together, nothing random.

networkx lays out each connected component; it has nothing that puts components and modules side by side.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

_ROOM = 0.95
"""Radius of the disc that one gene takes; genes of a component lie about 1 apart."""
_GAP_PARTS, _GAP_MODULES = 0.15, 1.6
"""Between the discs of two components of a module, and of two modules."""
_STEPS = 72
"""Directions in which a disc is put beside another."""
_LARGE = 120
"""Genes of a component from which on its places come from springs: all pairs would be slow."""


def place_genes(weights: sp.csr_matrix, modules: NDArray[np.intp]) -> NDArray[np.float64]:
    """Give each gene a place, those of a module together.

    Genes of a module that hang together are laid out by the lengths of the ways between them (Kamada and Kawai), or,
    where they are many, by springs (Fruchterman and Reingold) that start from a fixed spiral. Such components take
    discs, which are put side by side within their module, and modules side by side in the picture, each near what it
    has most weight with.

    Parameters
    ----------
    weights
        Sizes of the weights, symmetric, (n, n).
    modules
        Module of each gene, (n,).

    Returns
    -------
    ndarray
        Places, (n, 2); the nearest genes are about 1 apart.
    """
    edges = weights.tocoo()
    same = modules[edges.row] == modules[edges.col]
    within = sp.csr_matrix((edges.data[same], (edges.row[same], edges.col[same])), shape=weights.shape)
    _, part = sp.csgraph.connected_components(within, directed=False)
    places = np.zeros((len(modules), 2))
    for genes in _members(part):
        places[genes] = _component(within[genes][:, genes])
    # a component in its module, then a module in the picture
    of_part = modules[np.unique(part, return_index=True)[1]]
    centres = _side_by_side(places, weights, part, of_part, _GAP_PARTS)
    places += centres[part]
    for genes in _members(modules):
        places[genes] -= _middle(places[genes])
    module = np.unique(modules, return_inverse=True)[1]
    return places + _side_by_side(places, weights, module, np.zeros(module.max() + 1), _GAP_MODULES)[module]


def _side_by_side(
    places: NDArray[np.float64], weights: sp.csr_matrix, disc: NDArray[np.intp], group: NDArray[np.generic], gap: float
) -> NDArray[np.float64]:
    """Give centres of the discs that genes are in, (n_discs, 2), those of a group side by side."""
    radii = np.array([np.linalg.norm(places[genes], axis=1).max() for genes in _members(disc)]) + _ROOM + gap / 2
    member = sp.csr_matrix((np.ones(len(disc)), (np.arange(len(disc)), disc)))
    attraction = (member.T @ weights @ member).toarray()
    centres = np.zeros((len(radii), 2))
    for discs in _members(group):
        centres[discs] = pack(radii[discs], attraction[np.ix_(discs, discs)])
    return centres


def pack(radii: NDArray[np.float64], attraction: NDArray[np.float64]) -> NDArray[np.float64]:
    """Put discs side by side, the largest first, each touching another, near the middle and what attracts it.

    Parameters
    ----------
    radii
        Of the discs, (n,).
    attraction
        Between discs, symmetric, (n, n).

    Returns
    -------
    ndarray
        Centres, (n, 2).
    """
    turn = np.linspace(0, 2 * np.pi, _STEPS, endpoint=False)
    rays = np.column_stack([np.cos(turn), np.sin(turn)])
    centres = np.zeros((len(radii), 2))
    put: list[int] = []
    for i in np.argsort(-radii, kind="stable"):
        if put:
            apart = radii[put] + radii[i]
            tries = (centres[put][:, None] + apart[:, None, None] * rays).reshape(-1, 2)
            gaps = np.linalg.norm(tries[:, None] - centres[put], axis=2)
            free = (gaps > apart * (1 - 1e-9)).all(axis=1)
            pull = attraction[i, put] / max(attraction[i, put].sum(), 1e-12)
            cost = np.linalg.norm(tries, axis=1) + 0.5 * gaps @ pull
            # rounded: ties fall the same way on every machine
            centres[i] = tries[free][int(np.argmin(cost[free].round(6)))]
        put.append(int(i))
    return centres


def _component(weights: sp.csr_matrix) -> NDArray[np.float64]:
    """Lay out genes that hang together around 0, the nearest neighbours about 1 apart, (n, 2)."""
    import networkx as nx
    from scipy.spatial import cKDTree

    n = weights.shape[0]
    if n < 3:
        return np.column_stack([np.arange(n) - (n - 1) / 2, np.zeros(n)])
    graph = nx.from_scipy_sparse_array(weights)
    if n < _LARGE:
        found = nx.kamada_kawai_layout(graph, weight=None)
    else:
        hubs_first = np.argsort(-np.diff(weights.indptr), kind="stable")
        start = np.sqrt(np.arange(n) / n)[:, None] * _spiral(n)
        found = nx.spring_layout(
            graph, pos=dict(zip(hubs_first.tolist(), start, strict=True)), weight=None, iterations=150, seed=0
        )
    xy = np.array([found[i] for i in range(n)])
    xy = _apart(xy / np.median(cKDTree(xy).query(xy, k=2)[0][:, 1]).clip(1e-6))
    return xy - _middle(xy)


def _apart(xy: NDArray[np.float64], distance: float = 0.85) -> NDArray[np.float64]:
    """Push points that are nearer than `distance` away from each other until none is, or 200 times."""
    from scipy.spatial import cKDTree

    xy = xy + 1e-6 * _spiral(len(xy))  # two points on one place part this way
    for _ in range(200):
        a, b = cKDTree(xy).query_pairs(0.999 * distance, output_type="ndarray").T
        if not len(a):
            break
        gap = xy[b] - xy[a]
        size = np.linalg.norm(gap, axis=1, keepdims=True)
        push = 0.25 * (distance - size) / size * gap
        np.add.at(xy, a, -push)
        np.add.at(xy, b, push)
    return xy


def _spiral(n: int) -> NDArray[np.float64]:
    """Give directions by the golden angle, as of a sunflower's seeds: even, and the same every time, (n, 2)."""
    turn = np.arange(n) * np.pi * (3 - np.sqrt(5))
    return np.column_stack([np.cos(turn), np.sin(turn)])


def _middle(xy: NDArray[np.float64]) -> NDArray[np.float64]:
    """Give the middle of the extent of points, (2,)."""
    middle: NDArray[np.float64] = (xy.min(axis=0) + xy.max(axis=0)) / 2
    return middle


def _members(label: NDArray[np.generic]) -> list[NDArray[np.intp]]:
    """Give the positions of each label, in the order of labels."""
    return [np.flatnonzero(label == value) for value in np.unique(label)]
