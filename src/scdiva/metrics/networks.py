"""Hubs of gene networks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._input import refuse_where


def hub_scores(graph: Any) -> NDArray[np.float64]:
    r"""Kleinberg's hub scores of the sources of a network [1]_.

    A source is a hub if its targets are also targets of other hubs. The scores are the principal eigenvector of
    :math:`|W| |W|^T`, the limit of power iteration from equal scores. Connected components are solved separately,
    because a solver would mix eigenvectors with the same eigenvalue.

    Parameters
    ----------
    graph
        Weights, source × target, shape `(n_sources, n_targets)`, sparse or dense; signs are ignored.

    Returns
    -------
    float64 `(n_sources,)`, 0 to 1: the largest is 1, or all are 0 without edges. Sources outside the component
    with the largest eigenvalue are 0.

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
    from scipy.sparse import block_array, csr_array
    from scipy.sparse.csgraph import connected_components

    weights: Any = csr_array(graph, dtype=np.float64, copy=True)
    if weights.ndim != 2 or not min(weights.shape):
        raise ValueError(f"graph has shape {weights.shape}; it must be (n_sources, n_targets).")
    weights.sum_duplicates()
    refuse_where(~np.isfinite(weights.data), "weights of graph are not finite", "Store no pair that was not measured.")
    weights = abs(weights)
    weights.eliminate_zeros()
    scores = np.zeros(weights.shape[0])
    if not weights.nnz:
        return scores
    weights = weights / weights.max()  # avoids underflow of squares
    # bipartite graph of sources and targets
    bipartite = block_array([[None, weights], [weights.T, None]]).tocsr()
    _, block = connected_components(bipartite, directed=False)
    block = block[: weights.shape[0]]
    linked = np.flatnonzero(np.diff(weights.indptr))
    order = linked[np.argsort(block[linked], kind="stable")]
    members = np.split(order, np.flatnonzero(np.diff(block[order])) + 1)
    solved = [_principal(weights[rows]) for rows in members]
    strongest = max(strength for strength, _ in solved)
    for rows, (strength, vector) in zip(members, solved, strict=True):
        if strength >= (1 - 1e-9) * strongest:  # equal up to rounding
            scores[rows] = vector * vector.sum()  # projection of equal scores
    return np.asarray(scores / scores.max())


def _principal(weights: Any) -> tuple[float, NDArray[np.float64]]:
    """Largest eigenvalue of W W^T and its non-negative eigenvector of length 1, for one component."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    n = weights.shape[0]
    if n == 1:
        return float(weights.multiply(weights).sum()), np.ones(1)
    transposed = weights.T.tocsr()
    square = LinearOperator((n, n), matvec=lambda h: weights @ (transposed @ h), dtype=np.float64)
    values, vectors = eigsh(square, k=1, which="LA", v0=np.ones(n))
    return float(values[0]), np.abs(vectors[:, 0])
