"""What a gene graph tells of its sources, and how much of it comes back in another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._input import check_graph

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOP_TARGETS = 20
"""Targets of each source that `edge_stability` compares."""
SAME = 1e-9
"""Difference of the strengths of two blocks, as a share of the larger one, up to which they are the same."""


def edge_stability(a: Any, b: Any, *, top: int | None = None) -> dict[str, float]:
    """Compare two graphs of the same genes, such as those of two halves of the cells.

    The best edges are those of the largest absolute weight. Pairs of weight 0 are no edges; and where several tie for
    the last places, none of them is taken, so that graphs that tell no edges apart agree on none.

    Parameters
    ----------
    a, b
        Weight of each pair, shape `(n_sources, n_targets)`: sparse, or dense with NaN where a pair was not measured.
        The diagonal of square ones, a gene with itself, is left out.
    top
        Number of best edges; more than there are take all. None takes `TOP_TARGETS` for each source.

    Returns
    -------
    `spearman`, rank correlation of the weights over the pairs that both have (stored, or not NaN), NaN where there are
    fewer than two or those of one are all equal; `jaccard`, common edges / all edges among the `top` best of each; and
    `jaccard_by_source`, the same for the best `TOP_TARGETS` of each source, averaged over the sources that have edges
    (NaN where there are none); `n_pairs` that both have; and `top`.

    Raises
    ------
    ValueError
        If shapes differ, values are not finite (NaN in a dense graph aside), or `top` is below 1.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> graph = rng.random((40, 40))
    >>> graph[:10, :10] += 2  # the first ten genes go together
    >>> sd.metrics.edge_stability(graph, graph, top=100)["jaccard"]
    1.0
    """
    from scipy.stats import spearmanr

    first, second = check_graph(a, "a"), check_graph(b, "b")
    if first.shape != second.shape:
        raise ValueError(f"a has shape {first.shape} and b {second.shape}; both must be of the same genes.")
    if top is not None and top < 1:
        raise ValueError(f"top must be 1 or more, got {top}.")
    n_sources, n_targets = first.shape
    n_best = TOP_TARGETS * n_sources if top is None else top
    (pairs_a, w_a), (pairs_b, w_b) = _stored(first), _stored(second)
    common, in_a, in_b = np.intersect1d(pairs_a, pairs_b, assume_unique=True, return_indices=True)
    varies = len(common) > 1 and np.ptp(w_a[in_a]) > 0 and np.ptp(w_b[in_b]) > 0
    starts = np.arange(n_sources + 1) * n_targets
    rows_a, rows_b = np.searchsorted(pairs_a, starts), np.searchsorted(pairs_b, starts)
    by_source = []
    for i in range(n_sources):
        row_a, row_b = slice(*rows_a[i : i + 2]), slice(*rows_b[i : i + 2])
        best_a = _best(pairs_a[row_a], w_a[row_a], TOP_TARGETS)
        by_source.append(_jaccard(best_a, _best(pairs_b[row_b], w_b[row_b], TOP_TARGETS)))
    scored = np.array(by_source)[~np.isnan(by_source)]
    return {
        "spearman": float(spearmanr(w_a[in_a], w_b[in_b]).statistic) if varies else np.nan,
        "jaccard": _jaccard(_best(pairs_a, w_a, n_best), _best(pairs_b, w_b, n_best)),
        "jaccard_by_source": float(scored.mean()) if len(scored) else np.nan,
        "n_pairs": len(common),
        "top": n_best,
    }


def hub_scores(graph: Any) -> NDArray[np.float64]:
    r"""Score each source as a hub, one that points to what other hubs point to as well [1]_.

    The scores :math:`h` are the principal eigenvector of :math:`|W| |W|^T`, to which repeated steps from equal scores
    lead. Its blocks, sources that share targets directly or through others, are solved one by one: each has one such
    vector, which a solver given several of the same strength would mix at random.

    Parameters
    ----------
    graph
        Weight of each pair, source × target, shape `(n_sources, n_targets)`, sparse or dense; signs are dropped.

    Returns
    -------
    float64 `(n_sources,)`, 0 to 1: the largest is 1, or all are 0 if there are no edges. Sources outside of the
    strongest block are 0.

    Raises
    ------
    ValueError
        If the graph has another number of axes or holds values that are not finite.

    References
    ----------
    .. [1] Kleinberg, Authoritative sources in a hyperlinked environment, Journal of the ACM 1999.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> graph = rng.random((40, 40))
    >>> graph[:10, :10] += 2  # the first ten genes go together
    >>> sd.metrics.hub_scores(graph).shape
    (40,)
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    weights = abs(csr_array(check_graph(graph, "graph", missing=False)))
    weights.eliminate_zeros()
    scores = np.zeros(weights.shape[0])
    if not weights.nnz:
        return scores
    weights = weights / weights.max()  # squares of tiny weights would be lost
    _, block = connected_components(_bipartite(weights), directed=False)
    block = block[: weights.shape[0]]
    linked = np.flatnonzero(np.diff(weights.indptr))
    order = linked[np.argsort(block[linked], kind="stable")]
    members = np.split(order, np.flatnonzero(np.diff(block[order])) + 1)
    solved = [_principal(weights[rows]) for rows in members]
    strongest = max(strength for strength, _ in solved)
    for rows, (strength, vector) in zip(members, solved, strict=True):
        if strength >= (1 - SAME) * strongest:
            scores[rows] = vector * vector.sum()  # its share in equal scores
    found: NDArray[np.float64] = scores / scores.max()
    return found


def _principal(weights: Any) -> tuple[float, NDArray[np.float64]]:
    """Give the largest eigenvalue of W W^T and its vector, of length 1 and nowhere negative, for one block."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    n = weights.shape[0]
    if n == 1:
        return float(weights.multiply(weights).sum()), np.ones(1)
    transposed = weights.T.tocsr()
    square = LinearOperator((n, n), matvec=lambda h: weights @ (transposed @ h), dtype=np.float64)
    values, vectors = eigsh(square, k=1, which="LA", v0=np.ones(n))
    return float(values[0]), np.abs(vectors[:, 0])


def _bipartite(weights: Any) -> Any:
    """Graph of sources and then targets, in which a source that is a target too stands twice."""
    from scipy.sparse import block_array

    return block_array([[None, weights], [weights.T, None]]).tocsr()


def _stored(matrix: Any) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Give the number and weight of each pair that a graph has, in ascending order; not of a gene with itself."""
    n_sources, n_targets = matrix.shape
    if isinstance(matrix, np.ndarray):
        row, col = np.nonzero(~np.isnan(matrix))
        weight = matrix[row, col]
    else:
        coo = matrix.tocoo()
        row, col, weight = coo.row, coo.col, coo.data
    off = row != col if n_sources == n_targets else np.ones(len(row), dtype=bool)
    return row[off].astype(np.int64) * n_targets + col[off], weight[off]


def _best(pairs: NDArray[np.int64], weights: NDArray[np.float64], n: int) -> NDArray[np.int64]:
    """Pairs of the `n` largest absolute weights, less those of 0 and those that tie with the first one left out."""
    size = np.abs(weights)
    cut = np.partition(size, len(size) - n - 1)[len(size) - n - 1] if len(size) > n else 0.0
    return pairs[size > cut]


def _jaccard(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """Share of the pairs of both in those of either; NaN if there are none."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    either = len(a) + len(b) - common
    return common / either if either else np.nan
