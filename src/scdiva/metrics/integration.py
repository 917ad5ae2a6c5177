"""Scores of cell types and batch mixing in an embedding, as defined by the paper and scGPT."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_matrix

from scdiva._checks import check_arguments, check_choices, from_extra

from ._input import as_texts, batch_codes, check_coordinates, labelled, scored_cells

Definition = Literal["paper", "scgpt"]

RESOLUTIONS = tuple(np.arange(1, 20, 2) / 10)
"""Leiden resolutions, of which the best agreement is reported: 0.1, 0.3, ... 1.9."""
LEIDEN_NEIGHBORS = 15
"""Neighbours of each cell in the graph for clustering, without the cell itself."""
CONNECTED_NEIGHBORS = 15
"""Neighbours of each cell in the graph for connectivity, including the cell itself."""


@check_arguments
def avg_bio(
    embedding: ArrayLike, labels: ArrayLike, *, definition: Definition = "scgpt", rng: int = 0
) -> dict[str, float]:
    """Conservation of cell types in an embedding, as defined by the paper or scGPT.

    Clusters come from the Leiden algorithm [1]_ on the graph of the 15 Euclidean neighbours, at the resolution with the
    highest mutual information, as in scIB [2]_. For the scores of scIB itself use `scib_metrics.benchmark.Benchmarker`
    on the embeddings that `scdiva.tl` writes.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    labels
        Label of each cell, shape `(n_cells,)`; cells without a label are ignored.
    definition
        `"paper"`: mean of NMI, ARI and the mean silhouette of the labels, -1 to 1 (scDiVa, appendix on integration
        metrics, which does not name the clustering).
        `"scgpt"`: the same with the silhouette rescaled to 0 to 1 [3]_.
    rng
        Seed of the clustering.

    Returns
    -------
    `avg_bio` and its parts: `nmi` and `ari`, the normalised mutual information and adjusted Rand index of clusters
    against labels, and `asw`, the silhouette.

    Raises
    ------
    ImportError
        If `igraph` is not installed; it is GPL and so part of the extra `scdiva[leiden]`.
    ValueError
        If `definition` is neither of the two, there are fewer labelled cells than neighbours, or all have one label or
        each its own.

    References
    ----------
    .. [1] Traag et al., From Louvain to Leiden: guaranteeing well-connected communities, Scientific Reports 2019.
    .. [2] Luecken et al., Benchmarking atlas-level data integration in single-cell genomics, Nature Methods 2022.
    .. [3] Cui et al., scGPT: toward building a foundation model for single-cell multi-omics using generative AI, Nature
       Methods 2024.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> round(sd.metrics.avg_bio(z, labels)["avg_bio"], 1)
    1.0
    """
    from sklearn.metrics import silhouette_score

    check_choices(definition=(definition, get_args(Definition)))
    igraph = from_extra("igraph", "leiden", "Leiden clusters need igraph")
    coordinates, names = scored_cells(embedding, labels)
    if not 1 < (n_labels := len(np.unique(names))) < len(names):
        raise ValueError(
            f"agreement with clusters needs at least two labels, and some that cells share; the {len(names)} labelled "
            f"cells have {n_labels}, such as {str(names[0])!r}."
        )
    nmi, ari = _leiden_agreement(igraph, coordinates, names, rng)
    width = float(silhouette_score(coordinates, names))
    parts = {"nmi": nmi, "ari": ari, "asw": width if definition == "paper" else (width + 1) / 2}
    return {"avg_bio": float(np.mean(list(parts.values()))), **parts}


def avg_batch(
    embedding: ArrayLike, batch: ArrayLike, labels: ArrayLike | None = None, *, definition: Definition = "scgpt"
) -> dict[str, float]:
    """Mixing of batches in an embedding, as defined by the paper or scGPT.

    A silhouette of batches is hard to interpret alone: it differs by about 0.1 between separate and shuffled batches,
    and with few cells separate batches may score higher (see `shuffle_control`). Scores based on the batches of
    neighbours (iLISI, kBET, BRAS) are in `scib_metrics`.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    batch
        Batch of each cell, shape `(n_cells,)`.
    labels
        Label of each cell, shape `(n_cells,)`; required by `"scgpt"`, which ignores cells without one; not required
        by `"paper"`.
    definition
        `"paper"`: 1 - s, with s the mean silhouette of the batches over all cells, between -1 and 1 (scDiVa, appendix
        on integration metrics), above 1 where cells are closer to other batches than to their own.
        `"scgpt"` [1]_: mean of the batch silhouette within labels (the mean over a label's cells of one less the
        absolute silhouette; labels of one batch are ignored) and of graph connectivity (the share of a label's cells
        in the largest connected part of its graph of 15 neighbours), each averaged over labels.

    Returns
    -------
    `avg_batch` and its parts: `asw_batch`, from the silhouette, and for `"scgpt"` `graph_connectivity`. Higher
    values mean better mixing.

    Raises
    ------
    ValueError
        If a batch is missing or there are fewer than two, required labels are missing, batch and label are
        confounded, or there are too few cells for the neighbours.

    References
    ----------
    .. [1] Cui et al., scGPT: toward building a foundation model for single-cell multi-omics using generative AI, Nature
       Methods 2024.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> round(sd.metrics.avg_batch(z, batch, labels)["avg_batch"], 1)
    1.0
    """
    return _mixing(definition, *_scored_batches(definition, embedding, batch, labels))


@check_arguments
def shuffle_control(
    embedding: ArrayLike,
    batch: ArrayLike,
    labels: ArrayLike | None = None,
    *,
    definition: Definition = "scgpt",
    rng: int = 0,
) -> dict[str, float]:
    """`avg_batch` with shuffled batches: the score of perfect mixing in this embedding.

    Batches are shuffled among the cells of each label, so that every batch keeps its cell type composition; without
    labels, among all cells. Graph connectivity, which does not depend on the batches, is as in `avg_batch`.

    Parameters
    ----------
    embedding, batch, labels, definition
        As in `avg_batch`.
    rng
        Seed of the shuffle.

    Returns
    -------
    The keys of `avg_batch`.

    Raises
    ------
    ValueError
        As `avg_batch` does.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> sorted(sd.metrics.shuffle_control(z, batch, labels))[:2]
    ['asw_batch', 'avg_batch']
    """
    coordinates, codes, names = _scored_batches(definition, embedding, batch, labels)
    generator = np.random.default_rng(rng)
    shuffled = codes.copy()
    for name in np.unique(names):
        cells = np.flatnonzero(names == name)
        shuffled[cells] = codes[generator.permutation(cells)]
    return _mixing(definition, coordinates, shuffled, names)


def _scored_batches(
    definition: str, embedding: ArrayLike, batch: ArrayLike, labels: ArrayLike | None
) -> tuple[NDArray[np.floating], NDArray[np.intp], NDArray[np.str_]]:
    """Coordinates, batch numbers and labels of the cells that a definition scores."""
    check_choices(definition=(definition, get_args(Definition)))
    if definition == "paper":
        coordinates = check_coordinates(embedding)
        codes = batch_codes(batch, len(coordinates))
        names = np.full(codes.shape, "") if labels is None else as_texts(labels)
        if names.shape != codes.shape:
            raise ValueError(f"labels has shape {names.shape}, but there are {len(codes)} cells.")
        return coordinates, codes, names
    if labels is None:
        raise ValueError(f"definition={definition!r} scores mixing within labels: pass labels.")
    codes = batch_codes(batch, len(np.asarray(labels)))
    coordinates, names = scored_cells(embedding, labels)
    codes = codes[labelled(labels)]
    if not any(_has_silhouette(codes[names == name]) for name in np.unique(names)):
        raise ValueError(
            "No label has cells of two batches (and some batch twice), so that mixing within labels is not defined: "
            "batch and label are confounded. Pass coarser labels."
        )
    return coordinates, codes, names


def _has_silhouette(codes: NDArray[np.intp]) -> bool:
    """Whether the batches of a label's cells have a silhouette: at least two, and fewer than cells."""
    return 1 < len(np.unique(codes)) < len(codes)


def _mixing(
    definition: str, coordinates: NDArray[np.floating], codes: NDArray[np.intp], names: NDArray[np.str_]
) -> dict[str, float]:
    """Parts of one definition, and their mean."""
    from sklearn.metrics import silhouette_samples, silhouette_score

    if definition == "paper":
        parts = {"asw_batch": 1 - float(silhouette_score(coordinates, codes))}
    else:
        widths = [
            float(np.mean(1 - np.abs(silhouette_samples(coordinates[of_label], codes[of_label]))))
            for name in np.unique(names)
            if _has_silhouette(codes[of_label := names == name])
        ]
        parts = {"asw_batch": float(np.mean(widths)), "graph_connectivity": _graph_connectivity(coordinates, names)}
    return {"avg_batch": float(np.mean(list(parts.values()))), **parts}


def _neighbours(coordinates: NDArray[np.floating], n: int) -> csr_matrix:
    """Graph of each cell's n nearest other cells, exact, `(n_cells, n_cells)`."""
    from sklearn.neighbors import NearestNeighbors

    if n >= len(coordinates):
        raise ValueError(f"{n} neighbours of each cell are needed, and only {len(coordinates)} cells can be scored.")
    return NearestNeighbors(n_neighbors=n).fit(coordinates).kneighbors_graph()


def _graph_connectivity(coordinates: NDArray[np.floating], names: NDArray[np.str_]) -> float:
    """Mean over labels of the share of cells in the largest connected component of their undirected graph."""
    from scipy.sparse.csgraph import connected_components

    graph = _neighbours(coordinates, CONNECTED_NEIGHBORS - 1)
    shares = []
    for name in np.unique(names):
        of_label = np.flatnonzero(names == name)
        _, component = connected_components(graph[of_label][:, of_label], connection="weak")
        shares.append(np.bincount(component).max() / len(of_label))
    return float(np.mean(shares))


def _leiden_agreement(
    igraph: ModuleType, coordinates: NDArray[np.floating], names: NDArray[np.str_], rng: int
) -> tuple[float, float]:
    """NMI and ARI of Leiden clusters against labels, at the resolution of the highest NMI."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    edges = np.column_stack(_neighbours(coordinates, LEIDEN_NEIGHBORS).nonzero())
    graph = igraph.Graph(n=len(coordinates), edges=edges).simplify()
    # by default igraph uses Python's global random state
    igraph.set_random_number_generator(random.Random(rng))
    try:
        clusters = [
            graph.community_leiden(objective_function="modularity", resolution=resolution, n_iterations=2).membership
            for resolution in RESOLUTIONS
        ]
    finally:
        igraph.set_random_number_generator(random)
    scores = [normalized_mutual_info_score(names, one) for one in clusters]
    best = int(np.argmax(scores))
    return float(scores[best]), float(adjusted_rand_score(names, clusters[best]))
