"""Nearest neighbours of cells, found once and shared by the scores that rest on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._input import check_coordinates

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
