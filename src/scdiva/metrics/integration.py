"""How well clusters of an embedding agree with cell types (conservation of biology)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from .annotation import _scored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

RESOLUTIONS = tuple(np.arange(1, 20, 2) / 10)
"""Leiden resolutions among which the best agreement is taken: 0.1, 0.3, ... 1.9."""


def leiden_agreement(
    embedding: ArrayLike,
    labels: ArrayLike,
    *,
    n_neighbors: int = 15,
    resolutions: Sequence[float] = RESOLUTIONS,
    rng: int = 0,
) -> dict[str, float]:
    """Normalised mutual information and adjusted Rand index of Leiden clusters against labels.

    Clusters come from the Leiden algorithm [1]_ on the Euclidean `n_neighbors` graph, at the resolution with the
    highest mutual information, as scIB does [2]_.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    labels
        Label of each cell, shape `(n_cells,)`; cells without a label are left out.
    n_neighbors
        Neighbours of each cell in the graph.
    resolutions
        Resolutions tried.
    rng
        Seed of the clustering.

    Returns
    -------
    `nmi`, `ari` (at most 1) and `resolution`, the one chosen.

    Raises
    ------
    ImportError
        If `igraph` is not installed; it is GPL and so part of the extra `scdiva[bench]`.

    References
    ----------
    .. [1] Traag et al., From Louvain to Leiden: guaranteeing well-connected communities, Scientific Reports 2019.
    .. [2] Luecken et al., Benchmarking atlas-level data integration in single-cell genomics, Nature Methods 2022.
    """
    try:
        import igraph
    except ImportError as error:
        raise ImportError("Leiden clusters need igraph: pip install 'scdiva[bench]'") from error
    import random

    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
    from sklearn.neighbors import NearestNeighbors

    embedding, labels = _scored(embedding, labels)
    n_cells = len(labels)
    neighbors = NearestNeighbors(n_neighbors=n_neighbors).fit(embedding).kneighbors(return_distance=False)
    sources = np.repeat(np.arange(n_cells), n_neighbors)
    graph = igraph.Graph(n=n_cells, edges=np.column_stack([sources, neighbors.ravel()])).simplify()

    # igraph draws from Python's generator unless given one of its own; the user's global state stays untouched.
    igraph.set_random_number_generator(random.Random(rng))
    try:
        partitions = {
            resolution: graph.community_leiden(
                objective_function="modularity", resolution=resolution, n_iterations=2
            ).membership
            for resolution in resolutions
        }
    finally:
        igraph.set_random_number_generator(random)
    nmi = {r: normalized_mutual_info_score(labels, partition) for r, partition in partitions.items()}
    best = max(nmi, key=lambda resolution: nmi[resolution])
    return {
        "nmi": float(nmi[best]),
        "ari": float(adjusted_rand_score(labels, partitions[best])),
        "resolution": float(best),
    }


def silhouette_label(embedding: ArrayLike, labels: ArrayLike, *, rescale: bool = True) -> float:
    """Mean silhouette width of the labels (Rousseeuw 1987).

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    labels
        Label of each cell, shape `(n_cells,)`; cells without a label are left out.
    rescale
        Return `(s + 1) / 2`, between 0 and 1, as scIB and scGPT do, rather than `s` as the paper does.

    Returns
    -------
    The (rescaled) mean silhouette.
    """
    from sklearn.metrics import silhouette_score

    width = float(silhouette_score(*_scored(embedding, labels)))
    return (width + 1) / 2 if rescale else width


def average_bio(
    embedding: ArrayLike, labels: ArrayLike, *, definition: Literal["paper", "scgpt"] = "scgpt", rng: int = 0
) -> dict[str, float]:
    """Mean of NMI, ARI and label silhouette (paper, appendix on integration metrics, Avg-Bio).

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    labels
        Label of each cell, shape `(n_cells,)`; cells without a label are left out.
    definition
        `"scgpt"` takes the silhouette rescaled to 0..1, `"paper"` as it is.
    rng
        Seed of the clustering.

    Returns
    -------
    `average_bio` and its parts `nmi`, `ari`, `asw`.

    Raises
    ------
    ImportError
        If `igraph` is not installed.
    """
    if definition not in ("paper", "scgpt"):
        raise ValueError(f"definition is {definition!r}; it can be 'paper' or 'scgpt'.")
    agreement = leiden_agreement(embedding, labels, rng=rng)
    asw = silhouette_label(embedding, labels, rescale=definition == "scgpt")
    parts = {"nmi": agreement["nmi"], "ari": agreement["ari"], "asw": asw}
    return {"average_bio": float(np.mean(list(parts.values()))), **parts}
