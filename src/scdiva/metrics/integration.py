"""How well clusters of an embedding agree with cell types (conservation of biology)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from ._input import batch_codes, labelled, leiden_package, refuse_trivial, scib_metrics, scored_cells
from .neighbors import N_NEIGHBORS, Neighbors, clisi, labelled_neighbors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

RESOLUTIONS = tuple(np.arange(1, 20, 2) / 10)
"""Leiden resolutions among which the best agreement is taken: 0.1, 0.3, ... 1.9."""


def leiden_agreement(
    embedding: ArrayLike | Neighbors,
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
        Coordinates of each cell, shape `(n_cells, n_dims)`, or the `nearest_neighbors` of cells that all have a label.
    labels
        Label of each cell, shape `(n_cells,)`; cells without a label are left out.
    n_neighbors
        Neighbours of each cell in the graph, besides the cell itself.
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
        If `igraph` is not installed; it is GPL and so part of the extra `scdiva[metrics]`.
    ValueError
        If there are fewer cells than neighbours, neighbours of unlabelled cells are given, or all cells have one label
        or each its own.

    References
    ----------
    .. [1] Traag et al., From Louvain to Leiden: guaranteeing well-connected communities, Scientific Reports 2019.
    .. [2] Luecken et al., Benchmarking atlas-level data integration in single-cell genomics, Nature Methods 2022.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> round(sd.metrics.leiden_agreement(z, labels, resolutions=[0.1])["nmi"], 1)
    1.0
    """
    igraph = leiden_package()
    import random

    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    neighbors, labels = labelled_neighbors(embedding, labels, n_neighbors + 1)
    refuse_trivial(labels, "agreement with clusters")
    others = neighbors.indices[:, 1:]
    sources = np.repeat(np.arange(len(others)), n_neighbors)
    graph = igraph.Graph(n=len(others), edges=np.column_stack([sources, others.ravel()])).simplify()

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

    Raises
    ------
    ValueError
        If fewer than two labels have cells, or every cell has a label of its own.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> round(sd.metrics.silhouette_label(z, labels), 1)
    0.9
    """
    from sklearn.metrics import silhouette_score

    coordinates, names = scored_cells(embedding, labels)
    refuse_trivial(names, "the silhouette")
    width = float(silhouette_score(coordinates, names))
    return (width + 1) / 2 if rescale else width


def isolated_labels(embedding: ArrayLike, labels: ArrayLike, batch: ArrayLike) -> float:
    """Rescaled silhouette of the labels that the fewest batches hold, averaged over these labels, as scib-metrics does.

    Where all labels are in all batches, all count.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    labels
        Label of each cell, shape `(n_cells,)`; cells without a label are left out.
    batch
        Batch of each cell, shape `(n_cells,)`.

    Returns
    -------
    The score, 0 to 1; higher keeps these labels better apart from all others.

    Raises
    ------
    ValueError
        If a batch is missing, or there are fewer than two; if all cells have one label, or each its own.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> batch[labels == "T"] = "one"  # T cells are in one batch only
    >>> round(sd.metrics.isolated_labels(z, labels, batch), 1)
    0.9
    """
    from sklearn.metrics import silhouette_samples

    codes = batch_codes(batch, len(np.asarray(labels)))[labelled(labels)]
    coordinates, names = scored_cells(embedding, labels)
    refuse_trivial(names, "the silhouette")
    widths = (silhouette_samples(coordinates, names) + 1) / 2
    batches = {name: len(np.unique(codes[names == name])) for name in np.unique(names)}
    fewest = min(batches.values())
    return float(np.mean([widths[names == name].mean() for name, n in batches.items() if n == fewest]))


def avg_bio(
    embedding: ArrayLike,
    labels: ArrayLike,
    *,
    batch: ArrayLike | None = None,
    definition: Literal["paper", "scgpt", "scib"] = "scgpt",
    rng: int = 0,
) -> dict[str, float]:
    """Score how well cell types are kept, as one of three papers does.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    labels
        Label of each cell, shape `(n_cells,)`; cells without a label are left out.
    batch
        Batch of each cell, shape `(n_cells,)`; needed by `"scib"` only.
    definition
        `"paper"`: mean of NMI, ARI and the mean silhouette of the labels, -1 to 1 (scDiVa, appendix on integration
        metrics, which does not name the clustering: NMI and ARI are `leiden_agreement`).
        `"scgpt"`: the same with the silhouette rescaled to 0 to 1 [1]_.
        `"scib"`: mean of the rescaled silhouette, NMI and ARI, `isolated_labels` and `clisi`, the biological
        conservation of scIB [2]_ as `scib_metrics.benchmark.Benchmarker` has it in version 0.5.10, save that clusters
        are Leiden's at the best resolution, as in [2]_, where `Benchmarker` by default takes k-means.
    rng
        Seed of the clustering.

    Returns
    -------
    `avg_bio` and its parts `nmi`, `ari` and `asw`; for `"scib"` also `isolated_labels` and `clisi`.

    Raises
    ------
    ImportError
        If `igraph`, or for `"scib"` scib-metrics, is not installed.
    ValueError
        If `definition` is none of the three, or `"scib"` gets no batches or fewer than 90 labelled cells.

    References
    ----------
    .. [1] Cui et al., scGPT: toward building a foundation model for single-cell multi-omics using generative AI, Nature
       Methods 2024.
    .. [2] Luecken et al., Benchmarking atlas-level data integration in single-cell genomics, Nature Methods 2022.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> round(sd.metrics.avg_bio(z, labels)["avg_bio"], 1)
    1.0
    """
    if definition not in ("paper", "scgpt", "scib"):
        raise ValueError(f"definition is {definition!r}; it can be 'paper', 'scgpt' or 'scib'.")
    if definition == "scib" and batch is None:
        raise ValueError("definition='scib' looks for labels that few batches hold: pass batch.")
    leiden_package()  # what is missing is said before minutes are spent on the other parts
    if definition == "scib":
        scib_metrics("definition='scib'")
    parts: dict[str, float] = {}
    neighbors: ArrayLike | Neighbors = embedding
    kept: ArrayLike = labels
    if definition == "scib" and batch is not None:
        parts["isolated_labels"] = isolated_labels(embedding, labels, batch)
        neighbors, kept = labelled_neighbors(embedding, labels, N_NEIGHBORS)
        parts["clisi"] = clisi(neighbors, kept)
    agreement = leiden_agreement(neighbors, kept, rng=rng)
    asw = silhouette_label(embedding, labels, rescale=definition != "paper")
    parts = {"nmi": agreement["nmi"], "ari": agreement["ari"], "asw": asw, **parts}
    return {"avg_bio": float(np.mean(list(parts.values()))), **parts}
