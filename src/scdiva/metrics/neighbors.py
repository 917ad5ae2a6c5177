"""Nearest neighbours of cells, and how batches and cell types mix among them, mostly by scib-metrics (an extra)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scdiva._settings import torch_threads_kept

from ._input import batch_codes, check_coordinates, labelled, refuse_where, scib_metrics, scored_cells

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

N_NEIGHBORS = 90
"""Neighbours that LISI looks at in scib-metrics; its other scores look at fewer."""


class Neighbors(NamedTuple):
    """Nearest neighbours of each cell, nearest first; the cell itself stands in the first column.

    Parameters
    ----------
    indices
        Row numbers of the neighbours, shape `(n_cells, n_neighbors)`.
    distances
        Euclidean distances to them, of the same shape.
    """

    indices: NDArray[np.integer]
    distances: NDArray[np.floating]


def nearest_neighbors(embedding: ArrayLike, n_neighbors: int = N_NEIGHBORS) -> Neighbors:
    """Find the nearest neighbours of each cell, exactly.

    Scores that take an embedding also take what this returns, and then search no more. Give them the largest number
    that any of them needs: each looks at as many as it asks for.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    n_neighbors
        Neighbours of each cell; the cell itself counts as one, as it does in scanpy and scib-metrics.

    Returns
    -------
    Indices and Euclidean distances, each of shape `(n_cells, n_neighbors)`.

    Raises
    ------
    ValueError
        If the embedding has no two axes, or holds a value that is not finite; if there are fewer cells than
        neighbours, or fewer than two neighbours are asked for.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> sd.metrics.nearest_neighbors(z, 15).indices.shape
    (120, 15)
    """
    from sklearn.neighbors import NearestNeighbors

    coordinates = check_coordinates(embedding)
    n_cells = len(coordinates)
    if not 2 <= n_neighbors <= n_cells:
        raise ValueError(f"{n_neighbors} neighbours (at least 2) among {n_cells} cells: pass another n_neighbors.")
    distances, indices = NearestNeighbors(n_neighbors=n_neighbors - 1).fit(coordinates).kneighbors()
    own = np.arange(n_cells)[:, None]
    return Neighbors(np.hstack([own, indices]), np.hstack([np.zeros_like(distances[:, :1]), distances]))


def neighbors_of(embedding: ArrayLike | Neighbors, n_neighbors: int) -> Neighbors:
    """Give the first `n_neighbors` neighbours of each cell: of those at hand, or found now."""
    if not isinstance(embedding, Neighbors):
        return nearest_neighbors(embedding, n_neighbors)
    at_hand = embedding.indices.shape[1]
    if n_neighbors > at_hand:
        raise ValueError(
            f"{n_neighbors} neighbours of each cell are needed and {at_hand} are given: call "
            f"nearest_neighbors(embedding, {n_neighbors}), or pass the embedding."
        )
    return Neighbors(embedding.indices[:, :n_neighbors], embedding.distances[:, :n_neighbors])


def ilisi(embedding: ArrayLike | Neighbors, batch: ArrayLike, *, n_neighbors: int = N_NEIGHBORS) -> float:
    """Local inverse Simpson index of the batches [1]_, scaled as scIB does [2]_, by scib-metrics.

    Each cell's index is the effective number of batches among its neighbours, weighted by a Gaussian kernel of
    perplexity `n_neighbors // 3`. The score is its median over cells, less 1, divided by the number of batches less 1:
    0 where each cell sees one batch, 1 where it sees all in equal parts. No mixing reaches 1 with many batches or
    unequal ones: cells of eight equal batches at random score 0.6. `shuffle_control` says what can be had.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`, or their `nearest_neighbors`.
    batch
        Batch of each cell, shape `(n_cells,)`.
    n_neighbors
        Neighbours of each cell, of which the cell itself is one.

    Returns
    -------
    The scaled median, 0 to 1; higher is better mixed.

    Raises
    ------
    ImportError
        If scib-metrics is not installed.
    ValueError
        If a batch is missing or there are fewer than two, or there are fewer cells than neighbours.

    References
    ----------
    .. [1] Korsunsky et al., Fast, sensitive and accurate integration of single-cell data with Harmony, Nature Methods
       2019.
    .. [2] Luecken et al., Benchmarking atlas-level data integration in single-cell genomics, Nature Methods 2022.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> round(sd.metrics.ilisi(z, batch, n_neighbors=30), 1)
    0.9
    """
    scib = scib_metrics("iLISI")
    return float(scib.ilisi_knn(_results(neighbors_of(embedding, n_neighbors)), batch_codes(batch, _count(embedding))))


def clisi(embedding: ArrayLike | Neighbors, labels: ArrayLike, *, n_neighbors: int = N_NEIGHBORS) -> float:
    """Local inverse Simpson index of the cell types, scaled as scIB does, by scib-metrics.

    As `ilisi`, turned round: 1 where each cell sees its own type only, 0 where it sees all types in equal parts.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`, or the `nearest_neighbors` of cells that all have a label.
    labels
        Label of each cell, shape `(n_cells,)`; cells without a label are left out before neighbours are sought.
    n_neighbors
        Neighbours of each cell, of which the cell itself is one.

    Returns
    -------
    The scaled median, 0 to 1; higher keeps the types better apart.

    Raises
    ------
    ImportError
        If scib-metrics is not installed.
    ValueError
        If there are fewer than two labels or fewer cells than neighbours, or neighbours of unlabelled cells are given.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> round(sd.metrics.clisi(z, labels, n_neighbors=30), 1)
    1.0
    """
    scib = scib_metrics("cLISI")
    neighbors, names = labelled_neighbors(embedding, labels, n_neighbors)
    if len(np.unique(names)) < 2:
        raise ValueError("clisi needs cells of at least two labels; all that are labelled have the same one.")
    return float(scib.clisi_knn(_results(neighbors), names))


def kbet(
    embedding: ArrayLike | Neighbors,
    batch: ArrayLike,
    labels: ArrayLike | None = None,
    *,
    n_neighbors: int = 50,
    alpha: float = 0.05,
) -> float:
    """Share of cells around which the batches are mixed as in the whole, by a chi-square test [1]_, by scib-metrics.

    With labels the test is made within each label, on neighbours of a diffusion map of its cells, and averaged over
    labels, as scIB does; labels of fewer than ten cells or of one batch are left out. That map starts from random
    numbers, which no seed fixes, so that the last digits vary; the first call of a session compiles for half a minute.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`, or their `nearest_neighbors`.
    batch
        Batch of each cell, shape `(n_cells,)`.
    labels
        Label of each cell, shape `(n_cells,)`, each of them given; None tests over all cells.
    n_neighbors
        Neighbours of each cell, of which the cell itself is one.
    alpha
        Level below which the test rejects.

    Returns
    -------
    The share accepted, 0 to 1; higher is better mixed.

    Raises
    ------
    ImportError
        If scib-metrics is not installed.
    ValueError
        If a batch or a label is missing, there are fewer than two batches, or no label can be tested.

    References
    ----------
    .. [1] Büttner et al., A test metric for assessing single-cell RNA-seq batch correction, Nature Methods 2019.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> round(sd.metrics.kbet(z, batch, labels, n_neighbors=20), 1)
    1.0
    """
    scib = scib_metrics("kBET")
    codes = batch_codes(batch, _count(embedding))
    if labels is None:
        accepted, *_ = scib.kbet(_results(neighbors_of(embedding, n_neighbors)), codes, alpha=alpha)
        return float(accepted)
    names = _all_labelled(labels, len(codes))
    if all((names == name).sum() < 10 or len(np.unique(codes[names == name])) < 2 for name in np.unique(names)):
        raise ValueError(
            "kBET tests within labels that have ten cells and two batches, and there are none: pass labels=None to "
            "test over all cells, or coarser labels."
        )
    neighbors = neighbors_of(embedding, n_neighbors)
    with torch_threads_kept():
        return float(scib.kbet_per_label(_results(neighbors), codes, names, alpha=alpha))


def graph_connectivity(
    embedding: ArrayLike | Neighbors,
    labels: ArrayLike,
    *,
    n_neighbors: int = 15,
    definition: Literal["scgpt", "scib"] = "scib",
) -> float:
    """Share of each label's cells in the largest connected part of its neighbour graph, averaged over labels.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`, or the `nearest_neighbors` of cells that all have a label.
    labels
        Label of each cell, shape `(n_cells,)`; cells without a label are left out before neighbours are sought.
    n_neighbors
        Neighbours of each cell, of which the cell itself is one.
    definition
        `"scib"` is that of scib-metrics: parts whose cells reach each other along directed edges, from a cell to its
        neighbours. `"scgpt"` is that of the scib package, which scGPT calls: edges count in both directions, as in
        the graph of scanpy, so that the score is higher; it needs no scib-metrics.

    Returns
    -------
    The mean share, above 0 and at most 1; higher is better.

    Raises
    ------
    ImportError
        If scib-metrics is needed and not installed.
    ValueError
        If there are fewer cells than neighbours, or neighbours of unlabelled cells are given.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> sd.metrics.graph_connectivity(z, labels)
    1.0
    """
    if definition not in ("scgpt", "scib"):
        raise ValueError(f"definition is {definition!r}; it can be 'scgpt' or 'scib'.")
    scib = scib_metrics("graph connectivity") if definition == "scib" else None
    neighbors, names = labelled_neighbors(embedding, labels, n_neighbors)
    if scib is not None:
        return float(scib.graph_connectivity(_results(neighbors), names))
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    n_cells = len(names)
    bounds = np.arange(0, n_cells * n_neighbors + 1, n_neighbors)
    graph = csr_array((np.ones(n_cells * n_neighbors), neighbors.indices.ravel(), bounds), shape=(n_cells, n_cells))
    shares = []
    for name in np.unique(names):
        own = np.flatnonzero(names == name)
        _, parts = connected_components(graph[own][:, own], connection="weak")
        shares.append(np.bincount(parts).max() / len(own))
    return float(np.mean(shares))


def labelled_neighbors(
    embedding: ArrayLike | Neighbors, labels: ArrayLike, n_neighbors: int
) -> tuple[Neighbors, NDArray[np.str_]]:
    """Find neighbours among the labelled cells, and their labels."""
    if isinstance(embedding, Neighbors):
        return neighbors_of(embedding, n_neighbors), _all_labelled(labels, _count(embedding))
    coordinates, names = scored_cells(embedding, labels)
    return neighbors_of(coordinates, n_neighbors), names


def _count(embedding: ArrayLike | Neighbors) -> int:
    return len(embedding.indices) if isinstance(embedding, Neighbors) else len(np.asarray(embedding))


def _results(neighbors: Neighbors) -> Any:
    """Give neighbours in the form that scib-metrics takes."""
    from scib_metrics.nearest_neighbors import NeighborsResults

    return NeighborsResults(indices=neighbors.indices, distances=neighbors.distances)


def _all_labelled(labels: ArrayLike, n_cells: int) -> NDArray[np.str_]:
    """Give the labels as text; refuse missing ones, since neighbours cannot be left out any more."""
    names = np.asarray(labels).astype(str)
    if names.shape != (n_cells,):
        raise ValueError(f"labels has shape {names.shape}, but there are {n_cells} cells.")
    refuse_where(~labelled(labels), "cells have no label", "Leave them out before you call nearest_neighbors.")
    return names
