"""How much of an embedding the batches explain, and the scores that papers make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ._input import batch_codes, check_coordinates, labelled, scib_metrics, scored_cells
from .neighbors import graph_connectivity, ilisi, kbet, nearest_neighbors

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def bras(embedding: ArrayLike, batch: ArrayLike, labels: ArrayLike) -> float:
    """Batch-removal-adapted silhouette [1]_, by scib-metrics.

    Within each label, one less the absolute silhouette of the batches under cosine distance, where the distance to
    other batches is the mean over all of them; averaged over the label's cells, then over labels. The silhouette
    usual before it asks for the nearest other batch, and so rewards batches that overlap in pairs.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    batch
        Batch of each cell, shape `(n_cells,)`.
    labels
        Label of each cell, shape `(n_cells,)`; cells without a label are left out.

    Returns
    -------
    The score, 0 to 1; higher is better mixed.

    Raises
    ------
    ImportError
        If scib-metrics is not installed.
    ValueError
        If a batch is missing, or no label has cells of two batches.

    References
    ----------
    .. [1] Rautenstrauch and Ohler, Shortcomings of silhouette in single-cell integration benchmarking, Nature
       Biotechnology 2025.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> round(sd.metrics.bras(z, batch, labels), 1)
    0.9
    """
    scib = scib_metrics("BRAS")
    coordinates, codes, names = _scored_batches(embedding, batch, labels)
    return float(scib.bras(coordinates, names, codes))


def silhouette_batch(embedding: ArrayLike, batch: ArrayLike, labels: ArrayLike) -> float:
    """Batch silhouette within labels, turned so that higher is better mixed, as scIB and scGPT define it.

    Within each label, the mean over cells of one less the absolute silhouette of the batches; averaged over labels.
    Labels of one batch, or with as many batches as cells, are left out. It asks for the nearest other batch only and
    moves little between mixed and separate batches: read it beside `bras`, `ilisi` and `shuffle_control`.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    batch
        Batch of each cell, shape `(n_cells,)`.
    labels
        Label of each cell, shape `(n_cells,)`; cells without a label are left out.

    Returns
    -------
    The score, 0 to 1; higher is better mixed.

    Raises
    ------
    ValueError
        If a batch is missing, or no label has cells of two batches.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> round(sd.metrics.silhouette_batch(z, batch, labels), 1)
    0.9
    """
    from sklearn.metrics import silhouette_samples

    coordinates, codes, names = _scored_batches(embedding, batch, labels)
    scores = []
    for name in np.unique(names):
        own = names == name
        if 1 < len(np.unique(codes[own])) < own.sum():
            scores.append(float(np.mean(1 - np.abs(silhouette_samples(coordinates[own], codes[own])))))
    return float(np.mean(scores))


def pcr_comparison(before: ArrayLike, after: ArrayLike, batch: ArrayLike) -> float:
    """How much less of the variance the batches explain after integration than before, by scib-metrics.

    The variance explained is that of each principal component by the batch, weighted by the component's share of
    variance (principal component regression [1]_). The score is (before - after) / before, and 0 where integration made
    it worse.

    Parameters
    ----------
    before
        Coordinates of each cell before integration, shape `(n_cells, n_dims)`; principal components, say.
    after
        Coordinates of the same cells after integration, shape `(n_cells, n_dims_after)`.
    batch
        Batch of each cell, shape `(n_cells,)`.

    Returns
    -------
    The score, 0 to 1; higher removes more.

    Raises
    ------
    ImportError
        If scib-metrics is not installed.
    ValueError
        If the two embeddings differ in cells, a batch is missing, or there are fewer than two.

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
    >>> before = z + 3 * (batch == "one")[:, None]
    >>> round(sd.metrics.pcr_comparison(before, z, batch), 1)
    1.0
    """
    if len(np.asarray(before)) != len(np.asarray(after)):
        raise ValueError(f"before has {len(np.asarray(before))} cells and after {len(np.asarray(after))}.")
    codes = batch_codes(batch, len(np.asarray(after)))
    return removed(explained(before, codes), explained(after, codes))


def explained(embedding: ArrayLike, codes: NDArray[np.integer]) -> float:
    """Share of the variance that the batches explain (principal component regression)."""
    scib = scib_metrics("the comparison of principal components")
    share = float(scib.utils.principal_component_regression(check_coordinates(embedding), codes, categorical=True))
    if not np.isfinite(share):
        raise ValueError(
            "The share of variance that the batches explain is not a number: some direction of the embedding has no "
            "variance at all. Leave constant columns out."
        )
    return share


def removed(before: float, after: float) -> float:
    """Turn two shares of explained variance into the score of `pcr_comparison`."""
    return max(0.0, (before - after) / before)


def _scored_batches(
    embedding: ArrayLike, batch: ArrayLike, labels: ArrayLike
) -> tuple[NDArray[np.floating], NDArray[np.intp], NDArray[np.str_]]:
    """Drop the cells without a label; refuse labels within which no batches can be compared."""
    codes = batch_codes(batch, len(np.asarray(labels)))
    coordinates, names = scored_cells(embedding, labels)
    codes = codes[labelled(labels)]
    if not any(1 < len(np.unique(codes[names == name])) < (names == name).sum() for name in np.unique(names)):
        raise ValueError(
            "No label has cells of two batches (and some batch twice), so that mixing within labels says nothing: "
            "batch and label are confounded. Pass coarser labels."
        )
    return coordinates, codes, names


def avg_batch(
    embedding: ArrayLike,
    batch: ArrayLike,
    labels: ArrayLike | None = None,
    *,
    before: ArrayLike | None = None,
    definition: Literal["paper", "scgpt", "scib"] = "scgpt",
) -> dict[str, float]:
    """Score how well the batches are mixed, as one of three papers does.

    A silhouette of batches says little alone: between separate batches and shuffled ones it moves by a tenth, and with
    few cells it may put the separate ones first (see `shuffle_control`). Only `"scib"` looks at neighbours' batches.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    batch
        Batch of each cell, shape `(n_cells,)`.
    labels
        Label of each cell, shape `(n_cells,)`; needed by `"scgpt"` and `"scib"`, which leave out cells without one;
        `"paper"` does without.
    before
        Coordinates of the same cells before integration, shape `(n_cells, n_dims_before)`, for instance principal
        components; needed by `"scib"`.
    definition
        `"paper"`: 1 - s, with s the mean silhouette of the batches over all cells, between -1 and 1 (scDiVa, appendix
        on integration metrics), so that batches in each other's midst score above 1.
        `"scgpt"`: mean of `silhouette_batch` and of `graph_connectivity` in that definition [1]_.
        `"scib"`: mean of `bras`, `ilisi`, `kbet` within labels, `graph_connectivity` and `pcr_comparison`: the batch
        correction of `scib_metrics.benchmark.Benchmarker` in version 0.5.10, which follows [2]_ except that BRAS
        stands where the batch silhouette stood. Neighbours are exact, found once, 90, 50 and 15 of them.

    Returns
    -------
    `avg_batch` and its parts: `asw_batch`, the turned silhouette, for `"paper"`; `asw_batch` and `graph_connectivity`
    for `"scgpt"`; `bras`, `ilisi`, `kbet`, `graph_connectivity` and `pcr` for `"scib"`. Higher is better mixed.

    Raises
    ------
    ImportError
        If `"scib"` is asked for and scib-metrics is not installed.
    ValueError
        If a batch is missing or there are fewer than two, labels or `before` are needed and not given, batch and
        label are confounded, or there are too few cells for the neighbours.

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
    >>> round(sd.metrics.avg_batch(z, batch, labels)["avg_batch"], 1)
    1.0
    """
    embedding, codes, names, before = _scored_for(definition, embedding, batch, labels, before)
    share = explained(before, codes) if before is not None else 0.0
    return _average(definition, embedding, codes, names, share)


def shuffle_control(
    embedding: ArrayLike,
    batch: ArrayLike,
    labels: ArrayLike | None = None,
    *,
    before: ArrayLike | None = None,
    definition: Literal["paper", "scgpt", "scib"] = "scgpt",
    within_labels: bool = True,
    rng: int = 0,
) -> dict[str, float]:
    """Score as `avg_batch` does, with the batches shuffled: what perfect mixing would score in this embedding.

    The cells stay where they are, so what a score lacks of this one's is due to where the batches lie. Parts that do
    not look at batches (`graph_connectivity`) are as in `avg_batch`, and the variance that batches explained before
    integration is that of the real ones.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    batch
        Batch of each cell, shape `(n_cells,)`.
    labels
        Label of each cell, shape `(n_cells,)`, as in `avg_batch`.
    before
        Coordinates before integration, as in `avg_batch`.
    definition
        As in `avg_batch`.
    within_labels
        Shuffle among the cells of each label, so that every batch keeps its composition: what can be had without
        moving a type onto another. False shuffles among all cells, as if each batch held the same types; so does a
        call without labels.
    rng
        Seed of the shuffle.

    Returns
    -------
    The keys of `avg_batch`.

    Raises
    ------
    ImportError
        If `"scib"` is asked for and scib-metrics is not installed.
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
    embedding, codes, names, before = _scored_for(definition, embedding, batch, labels, before)
    share = explained(before, codes) if before is not None else 0.0
    generator = np.random.default_rng(rng)
    groups = np.unique(names, return_inverse=True)[1] if within_labels else np.zeros_like(codes)
    shuffled = codes.copy()
    for group in range(groups.max() + 1):
        cells = np.flatnonzero(groups == group)
        shuffled[cells] = codes[generator.permutation(cells)]
    return _average(definition, embedding, shuffled, names, share)


def _scored_for(
    definition: str, embedding: ArrayLike, batch: ArrayLike, labels: ArrayLike | None, before: ArrayLike | None
) -> tuple[NDArray[np.floating], NDArray[np.intp], NDArray[np.str_], NDArray[np.floating] | None]:
    """Check what a definition is given, and leave out cells that it does not score and inputs that it does not read."""
    if definition not in ("paper", "scgpt", "scib"):
        raise ValueError(f"definition is {definition!r}; it can be 'paper', 'scgpt' or 'scib'.")
    if definition == "scib":
        scib_metrics("definition='scib'")
    if definition == "paper":
        coordinates = check_coordinates(embedding)
        codes = batch_codes(batch, len(coordinates))
        names = np.full(codes.shape, "") if labels is None else np.asarray(labels).astype(str)
        if names.shape != codes.shape:
            raise ValueError(f"labels has shape {names.shape}, but there are {len(codes)} cells.")
        return coordinates, codes, names, None
    if labels is None:
        raise ValueError(f"definition={definition!r} scores mixing within labels: pass labels.")
    coordinates, codes, names = _scored_batches(embedding, batch, labels)
    if definition == "scgpt":
        return coordinates, codes, names, None
    if before is None:
        raise ValueError(
            "definition='scib' compares with the embedding before integration: pass before, such as principal "
            "components, or another definition."
        )
    keep, earlier = labelled(labels), np.asarray(before)
    if len(earlier) != len(keep):
        raise ValueError(f"before has {len(earlier)} cells and embedding {len(keep)}.")
    return coordinates, codes, names, earlier[keep]


def _average(
    definition: str,
    coordinates: NDArray[np.floating],
    codes: NDArray[np.intp],
    names: NDArray[np.str_],
    explained_before: float,
) -> dict[str, float]:
    """Take the parts of one definition, and their mean."""
    if definition == "paper":
        from sklearn.metrics import silhouette_score

        parts = {"asw_batch": 1 - float(silhouette_score(coordinates, codes))}
    elif definition == "scgpt":
        parts = {
            "asw_batch": silhouette_batch(coordinates, codes, names),
            "graph_connectivity": graph_connectivity(coordinates, names, definition="scgpt"),
        }
    else:
        neighbors = nearest_neighbors(coordinates)
        parts = {
            "bras": bras(coordinates, codes, names),
            "ilisi": ilisi(neighbors, codes),
            "kbet": kbet(neighbors, codes, names),
            "graph_connectivity": graph_connectivity(neighbors, names),
            "pcr": removed(explained_before, explained(coordinates, codes)),
        }
    return {"avg_batch": float(np.mean(list(parts.values()))), **parts}
