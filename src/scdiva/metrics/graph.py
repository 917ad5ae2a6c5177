"""Gene graphs: hubs, edges that come back in another graph, how dense gene sets are, and which sets modules hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ._input import check_graph
from ._matched import matched_subsets, p_value, quantile_bins

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import ArrayLike, NDArray

TOP_TARGETS = 20
"""Targets of each source that `edge_stability` compares."""
SAME = 1e-9
"""Difference of the strengths of two blocks, as a share of the larger one, up to which they are the same."""


def edge_stability(a: Any, b: Any, *, top: int | None = None) -> dict[str, float]:
    """Compare two graphs of the same genes, such as those of two halves of the cells.

    The best edges are those of the largest absolute weight. Pairs of weight 0 are no edges; and where several tie for
    the last ranks, none of them is taken, so that graphs that rank no edges agree on none.

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


def density_test(
    graph: Any,
    members: ArrayLike,
    *,
    degree: ArrayLike | None = None,
    n_random: int = 1000,
    n_bins: int = 10,
    rng: int | np.random.Generator = 0,
) -> dict[str, float]:
    """Tell whether a set of genes is denser within than sets of genes of the same degree.

    Density is the mean weight over all ordered pairs of different genes of the set. A random set has as many genes of
    each bin of degree as the set itself, without replacement; within a bin all genes, those of the set among them, are
    equally likely. Genes of degree 0 are a bin of their own.

    Parameters
    ----------
    graph
        Weight of each pair, source × target, shape `(n_genes, n_genes)`: sparse, where a pair that is not stored has no
        edge and counts as 0; or dense, where NaN is a pair that was not measured and counts nowhere. The diagonal is
        not looked at.
    members
        The genes of the set: their numbers, or a boolean array of shape `(n_genes,)`.
    degree
        What random sets are matched by, shape `(n_genes,)`. None takes a gene's strength: the sum of its absolute
        weights in both directions.
    n_random
        Number of random sets.
    n_bins
        Quantile bins of the degrees that are not 0; equal degrees share a bin.
    rng
        Seed, or a generator, which goes on.

    Returns
    -------
    `density`; `null_mean` and `null_sd` over the random sets; `z`, (density - mean) / sd, NaN where they don't vary;
    `p`, (1 + random sets that are as dense) / (1 + random sets); and `n`, the number of genes in the set. Random sets
    without a measured pair are left out.

    Raises
    ------
    ValueError
        If the graph is not square or holds values that are not finite (NaN in a dense one aside), fewer than two genes
        are in the set, one is named twice or not in the graph, none of its pairs is measured, `degree` is of another
        length or not finite, or `n_random` or `n_bins` is below 1.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> graph = rng.random((40, 40))
    >>> graph[:10, :10] += 2  # the first ten genes go together
    >>> sd.metrics.density_test(graph, np.arange(10), n_random=100, n_bins=1)["p"] < 0.05
    True
    """
    weights = _without_diagonal(check_graph(graph, "graph"))
    n_genes = weights.shape[0]
    chosen = _members(members, n_genes)
    if n_random < 1:
        raise ValueError(f"n_random must be 1 or more, got {n_random}.")
    groups = _degree_bins(_strength(weights) if degree is None else degree, n_genes, n_bins)
    density = _density(weights, chosen)
    if np.isnan(density):
        raise ValueError(f"None of the pairs of {chosen.sum()} genes was measured: they have no density.")
    subsets = matched_subsets(chosen, groups, n_random, np.random.default_rng(rng))
    drawn = np.array([_density(weights, subset) for subset in subsets])
    null = drawn[~np.isnan(drawn)]
    if not len(null):
        raise ValueError(f"None of {n_random} random sets has a measured pair: there is nothing to compare with.")
    mean, sd = float(null.mean()), float(null.std())
    varies = sd > 1e-12 * max(1.0, abs(mean))
    return {
        "density": density,
        "null_mean": mean,
        "null_sd": sd,
        "z": (density - mean) / sd if varies else np.nan,
        "p": p_value(null, density),
        "n": int(chosen.sum()),
    }


def enrichment(
    modules: Mapping[str, Iterable[str]],
    gene_sets: Mapping[str, Iterable[str]],
    background: Iterable[str],
    *,
    min_genes: int = 5,
    max_genes: int = 500,
) -> pd.DataFrame:
    """Test which gene sets are over-represented in which modules.

    Parameters
    ----------
    modules
        Genes of each module. A gene named twice counts once, here as in gene sets.
    gene_sets
        Genes of each set.
    background
        All genes that could have been in a module, such as those of the graph; others are dropped from modules and
        sets.
    min_genes, max_genes
        Sets with fewer or more genes in the background are not tested.

    Returns
    -------
    A row for each module and each tested set, those without a common gene too, the smallest p first: `module`,
    `gene_set`, `n_module` and `n_set` (genes in the background), `n_overlap`, `fold` (n_overlap over what chance is
    expected to give), `p` (hypergeometric: chance of `n_overlap` or more), `padj` (Benjamini-Hochberg over all rows),
    and `genes`, the common ones, by name, with commas between.

    Raises
    ------
    ValueError
        If there are no modules, a module has no gene in the background, no set has `min_genes` to `max_genes` there, or
        `min_genes` is below 1.

    Examples
    --------
    >>> import scdiva as sd
    >>> genes = [f"g{i}" for i in range(100)]
    >>> found = sd.metrics.enrichment({"module": genes[:20]}, {"set": genes[:15]}, genes)
    >>> bool(found["padj"].iloc[0] < 0.01)
    True
    """
    import pandas as pd
    from scipy.stats import false_discovery_control, hypergeom

    if min_genes < 1:
        raise ValueError(f"min_genes must be 1 or more, got {min_genes}.")
    universe = set(background)
    in_modules = {str(name): set(genes) & universe for name, genes in modules.items()}
    in_sets = {str(name): set(genes) & universe for name, genes in gene_sets.items()}
    empty = [name for name, genes in in_modules.items() if not genes]
    if empty or not in_modules:
        raise ValueError(
            f"{len(empty)} of {len(in_modules)} modules have no gene among the {len(universe)} of the background"
            f"{f' (the first is {empty[0]!r})' if empty else ''}. All must use the same gene names."
        )
    tested = {name: genes for name, genes in in_sets.items() if min_genes <= len(genes) <= max_genes}
    if not tested:
        raise ValueError(
            f"None of {len(in_sets)} gene sets (first: {next(iter(in_sets), None)!r}) has {min_genes} to {max_genes} "
            f"of the {len(universe)} genes of the background (first: {min(universe, default=None)!r}): do both use the "
            "same names? In tl.enrich_modules, gene_symbols= names the column of adata.var with those of the sets."
        )
    rows = []
    for module, genes in in_modules.items():
        for name, others in tested.items():
            common = genes & others
            rows.append((module, name, len(genes), len(others), len(common), ",".join(sorted(common))))
    frame = pd.DataFrame(rows, columns=["module", "gene_set", "n_module", "n_set", "n_overlap", "genes"])
    expected = frame["n_module"] * frame["n_set"] / len(universe)
    frame.insert(5, "fold", frame["n_overlap"] / expected)
    frame.insert(6, "p", hypergeom.sf(frame["n_overlap"] - 1, len(universe), frame["n_set"], frame["n_module"]))
    frame["p"] = frame["p"].clip(0.0, 1.0)  # a sum of chances may pass 1 in its last digit
    frame.insert(7, "padj", false_discovery_control(frame["p"]))
    return frame.sort_values(["padj", "p", "module", "gene_set"], kind="stable", ignore_index=True)


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


def _without_diagonal(weights: Any) -> Any:
    """Drop the weight of each gene with itself: no edge where pairs are stored, not measured in a dense graph."""
    from scipy.sparse import csr_array, issparse

    if weights.shape[0] != weights.shape[1]:
        raise ValueError(f"graph has shape {weights.shape}; it must be (n_genes, n_genes).")
    if not issparse(weights):
        weights = weights.copy()
        np.fill_diagonal(weights, np.nan)
        return weights
    coo = weights.tocoo()
    off = coo.row != coo.col
    return csr_array((coo.data[off], (coo.row[off], coo.col[off])), shape=weights.shape)


def _members(members: ArrayLike, n_genes: int) -> NDArray[np.bool_]:
    """Mark the genes of a set; refuse numbers that name none, and one gene alone."""
    given = np.asarray(members)
    chosen = np.zeros(n_genes, dtype=bool)
    if given.dtype == np.bool_:
        if given.shape != (n_genes,):
            raise ValueError(f"members has shape {given.shape}, but there are {n_genes} genes.")
        chosen |= given
    else:
        if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
            raise ValueError(f"members must be numbers of genes or a boolean array, not {given.dtype} {given.shape}.")
        if len(given) and not (given.min() >= 0 and given.max() < n_genes):
            raise ValueError(f"members must be from 0 to {n_genes - 1}, got {given.min()} to {given.max()}.")
        if len(np.unique(given)) < len(given):
            raise ValueError(f"members name {len(given) - len(np.unique(given))} genes twice.")
        chosen[given] = True
    if chosen.sum() < 2:
        raise ValueError(f"{chosen.sum()} genes have no pairs; a density needs two.")
    return chosen


def _strength(weights: Any) -> NDArray[np.float64]:
    """Sum of the absolute weights of each gene in both directions."""
    size = abs(weights)
    total = np.nansum if isinstance(weights, np.ndarray) else np.sum
    return np.asarray(total(size, axis=0) + total(size, axis=1))


def _degree_bins(degree: ArrayLike, n_genes: int, n_bins: int) -> NDArray[np.intp]:
    """Quantile bins of the degrees that are not 0, after bin 0 for those that are."""
    values = np.asarray(degree, dtype=np.float64)
    if values.shape != (n_genes,) or not np.isfinite(values).all():
        raise ValueError(
            f"degree has shape {values.shape} and {(~np.isfinite(values)).sum()} values that are not finite; it must "
            f"be ({n_genes},), all finite."
        )
    bins = np.zeros(n_genes, dtype=np.intp)
    linked = values != 0
    if linked.any():
        bins[linked] = 1 + quantile_bins(values[linked], n_bins)
    return bins


def _density(weights: Any, chosen: NDArray[np.bool_]) -> float:
    """Mean weight over the ordered pairs of a set; NaN if none of them was measured."""
    genes = np.flatnonzero(chosen)
    if not isinstance(weights, np.ndarray):
        return float(weights[genes][:, genes].sum() / (len(genes) * (len(genes) - 1)))
    within = weights[np.ix_(genes, genes)]
    measured = within[~np.isnan(within)]
    return float(measured.mean()) if len(measured) else np.nan
