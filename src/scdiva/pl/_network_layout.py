"""Places of genes in a picture of a network: modules apart, within them what hangs together, nothing random."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

_ROOM = 0.95
"""Radius of the disc that one gene takes; genes of a component lie about 1 apart."""
_GAP_PARTS, _GAP_MODULES = 0.15, 1.6
"""Between the discs of two components of a module, and of two modules."""
_STEPS = 36
"""Directions in which a disc is put beside another, and in which a component is turned."""
_LARGE = 120
"""Genes of a component from which on its places come from springs: all pairs would be slow."""


def place_genes(weights: sp.csr_matrix, modules: NDArray[np.intp]) -> NDArray[np.float64]:
    """Give each gene a place, those of a module together.

    Each component of a module is laid out by itself (Kamada and Kawai's paths, or springs if it is large), and takes a
    disc. Discs are put side by side, the largest first, near those that they share edges with: components to modules,
    then modules to the whole. At last components turn so that edges that leave them are short.

    Parameters
    ----------
    weights
        Symmetric, nonnegative, (n, n).
    modules
        Number of the module of each gene, (n,).

    Returns
    -------
    ndarray
        (n, 2). Genes of a component lie about 1 apart.
    """
    n = weights.shape[0]
    places = np.zeros((n, 2))
    within = weights.tocoo()
    same = modules[within.row] == modules[within.col]
    inside = sp.csr_matrix((within.data[same], (within.row[same], within.col[same])), shape=(n, n))
    count, part = sp.csgraph.connected_components(inside, directed=False)
    parts = [np.flatnonzero(part == i) for i in range(count)]
    for genes in parts:
        places[genes] = _component(inside[genes][:, genes])
    radii = np.array([_radius(places[genes]) for genes in parts])

    blocks = [np.unique(part[modules == i]) for i in np.unique(modules)]
    between = _sums(weights, part, count)
    centres = np.zeros((count, 2))
    for block in blocks:
        centres[block] = pack(radii[block] + _GAP_PARTS / 2, between[np.ix_(block, block)])
    sizes = np.zeros(len(blocks))
    block_of = np.zeros(count, dtype=np.intp)
    for i, block in enumerate(blocks):
        middle, sizes[i] = _disc(centres[block], radii[block])
        centres[block] -= middle
        block_of[block] = i
    attraction = _sums(sp.csr_matrix(between), block_of, len(blocks))
    centres += pack(sizes + _GAP_MODULES / 2, attraction)[block_of]
    for genes, centre in zip(parts, centres, strict=True):
        places[genes] += centre
    _turn(places, weights, parts, centres)
    return places


def pack(radii: NDArray[np.float64], attraction: NDArray[np.float64]) -> NDArray[np.float64]:
    """Put discs side by side, the largest first, each touching another, near the middle and what attracts it.

    Parameters
    ----------
    radii
        (n,).
    attraction
        How much two discs want to be near, (n, n), symmetric, at least 0.

    Returns
    -------
    ndarray
        Centres, (n, 2), around 0; no two discs overlap.
    """
    n = len(radii)
    centres = np.zeros((n, 2))
    turn = np.linspace(0, 2 * np.pi, _STEPS, endpoint=False)
    rays = np.column_stack([np.cos(turn), np.sin(turn)])
    put: list[int] = []
    for i in sorted(range(n), key=lambda i: (-radii[i], i)):
        if put:
            there, room = centres[put], radii[put]
            tries = (there[:, None] + (room + radii[i])[:, None, None] * rays).reshape(-1, 2)
            tries = np.concatenate([tries, _corners(there, room, radii[i])])
            gaps = np.linalg.norm(tries[:, None] - there, axis=2)
            tries, gaps = (x[(gaps > (room + radii[i]) * (1 - 1e-9)).all(axis=1)] for x in (tries, gaps))
            pull = attraction[i, put]
            cost = np.linalg.norm(tries, axis=1)
            if pull.sum() > 0:
                cost = cost + 0.5 * gaps @ (pull / pull.sum())
            centres[i] = tries[int(np.argmin(np.round(cost, 6)))]  # rounded: ties fall the same way on every machine
        put.append(i)
    return centres


def _corners(centres: NDArray[np.float64], radii: NDArray[np.float64], radius: float) -> NDArray[np.float64]:
    """Give the centres at which a disc touches two others, (m, 2)."""
    a, b = np.triu_indices(len(centres), 1)
    ra, rb = radii[a] + radius, radii[b] + radius
    across = centres[b] - centres[a]
    d = np.linalg.norm(across, axis=1)
    near = d < ra + rb
    a, ra, rb, across, d = a[near], ra[near], rb[near], across[near], d[near]
    along = (ra**2 - rb**2 + d**2) / (2 * d)
    aside = np.sqrt(np.maximum(ra**2 - along**2, 0))
    unit = across / d[:, None]
    normal = np.column_stack([-unit[:, 1], unit[:, 0]])
    foot = centres[a] + along[:, None] * unit
    return np.concatenate([foot + aside[:, None] * normal, foot - aside[:, None] * normal])


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
        turn = np.arange(n) * np.pi * (3 - np.sqrt(5))  # a sunflower: even, and the same every time
        start = np.sqrt(np.arange(n) / n)[:, None] * np.column_stack([np.cos(turn), np.sin(turn)])
        hubs_first = np.argsort(-np.diff(weights.indptr), kind="stable")
        found = nx.spring_layout(
            graph, pos=dict(zip(hubs_first.tolist(), start, strict=True)), weight=None, iterations=150, seed=0
        )
    xy = np.array([found[i] for i in range(n)])
    xy = _apart(xy / np.median(cKDTree(xy).query(xy, k=2)[0][:, 1]).clip(1e-6))
    return xy - _disc(xy, np.zeros(n))[0]


def _apart(xy: NDArray[np.float64], distance: float = 0.85) -> NDArray[np.float64]:
    """Push points that are nearer than `distance` away from each other until none is, or 200 times."""
    from scipy.spatial import cKDTree

    turn = np.arange(len(xy)) * np.pi * (3 - np.sqrt(5))
    xy = xy + 1e-6 * np.column_stack([np.cos(turn), np.sin(turn)])  # two points on one place part this way
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


def _disc(centres: NDArray[np.float64], radii: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Give centre and radius of a disc around others, nearly the smallest (Badoiu and Clarkson's steps)."""
    centre = ((centres - radii[:, None]).min(axis=0) + (centres + radii[:, None]).max(axis=0)) / 2
    for step in range(2, 100):
        reach = np.linalg.norm(centres - centre, axis=1) + radii
        centre = centre + (centres[int(reach.argmax())] - centre) / step**1.5
    return centre, float((np.linalg.norm(centres - centre, axis=1) + radii).max())


def _radius(xy: NDArray[np.float64]) -> float:
    """Give the radius of the disc of a component around 0."""
    return float(np.linalg.norm(xy, axis=1).max()) + _ROOM


def _sums(weights: sp.csr_matrix, part: NDArray[np.integer], n: int) -> NDArray[np.float64]:
    """Sum the weights between parts, (n, n), the diagonal 0."""
    member = sp.csr_matrix((np.ones(len(part)), (np.arange(len(part)), part)), shape=(len(part), n))
    sums: NDArray[np.float64] = (member.T @ weights @ member).toarray()
    np.fill_diagonal(sums, 0)
    return sums


def _turn(
    places: NDArray[np.float64],
    weights: sp.csr_matrix,
    parts: Sequence[NDArray[np.intp]],
    centres: NDArray[np.float64],
) -> None:
    """Turn or mirror each component within its disc so that edges that leave it are short."""
    angle = np.linspace(0, 2 * np.pi, _STEPS, endpoint=False)
    turns = np.array([[[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]] for t in angle])
    turns = np.concatenate([turns, turns @ np.diag([1.0, -1.0])])
    for genes, centre in sorted(zip(parts, centres, strict=True), key=lambda part: -len(part[0])):
        edges = weights[genes].tocoo()
        leaves = ~np.isin(edges.col, genes)
        if len(genes) < 2 or not leaves.any():
            continue
        own = (places[genes] - centre)[edges.row[leaves]]
        ends = places[edges.col[leaves]]
        far = np.linalg.norm(centre + np.einsum("tij,ej->tei", turns, own) - ends, axis=2)
        best = turns[int(np.argmin(np.round(far @ edges.data[leaves], 6)))]
        places[genes] = centre + (places[genes] - centre) @ best.T
