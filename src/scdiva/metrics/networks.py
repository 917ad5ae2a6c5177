"""Networks of genes: edges against known ones, hubs, how dense gene sets are, and which sets modules hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from scdiva._checks import check_least

from ._input import refuse_where, truth_values

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import ArrayLike, NDArray

SAME = 1e-9
"""Difference of the strengths of two blocks, as a share of the larger one, up to which they are the same."""
N_BINS = 10
"""Quantile bins of degree or expression within which genes stand for each other."""


def auprc_ratio(weights: ArrayLike, known: ArrayLike, candidates: ArrayLike | None = None) -> float:
    """Average precision of a ranking of pairs, beside that of a random one.

    Precision and recall are taken after all pairs of the same weight, as scikit-learn's `average_precision_score` does,
    so that no order of genes matters.

    Parameters
    ----------
    weights
        Weight of each pair, the largest first, shape `(n_sources, n_targets)`. They rank as they stand: pass their
        absolute values where the sign only distinguishes activation from repression. 0 for a pair without an edge.
    known
        Whether the pair is a known one, of the same shape.
    candidates
        Pairs that are ranked, boolean of the same shape; what is known outside of them doesn't count. Leave out pairs
        of a gene with itself. None takes all.

    Returns
    -------
    Average precision / share of the candidates that are known: 1 for a random ranking or one that ties all pairs,
    1 / share at best.

    Raises
    ------
    ValueError
        If the arrays differ in shape, a candidate's weight is not finite, or no candidate, or every one, is known.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> known = rng.random((5, 40)) < 0.2  # 5 factors, 40 targets
    >>> weights = known + rng.random((5, 40))
    >>> sd.metrics.auprc_ratio(weights, known) > 1
    True
    """
    is_known, above, upto = ranked_pairs(weights, known, candidates)
    return ratios(above[is_known], upto[is_known], len(is_known))[0]


def early_precision(
    weights: ArrayLike, known: ArrayLike, candidates: ArrayLike | None = None, k: int | None = None
) -> float:
    """Precision among the best pairs, beside that of random ones: the early precision ratio of BEELINE [1]_.

    Of pairs that tie for the last ranks each is taken with the same chance, and the expected precision returned.

    Parameters
    ----------
    weights, known, candidates
        As for :func:`auprc_ratio`.
    k
        Number of best pairs; more than there are take all. None takes the number of known candidates.

    Returns
    -------
    Precision / share of the candidates that are known: 1 for a random ranking, 1 / share at best with the `k` of None.

    Raises
    ------
    ValueError
        As :func:`auprc_ratio`; or if `k` is below 1.

    References
    ----------
    .. [1] Pratapa, Jalihal, Law, Bharadwaj & Murali, Benchmarking algorithms for gene regulatory network inference from
       single-cell transcriptomic data, Nature Methods 2020.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> known = rng.random((5, 40)) < 0.2  # 5 factors, 40 targets
    >>> weights = known + rng.random((5, 40))
    >>> sd.metrics.early_precision(weights, known, k=10) > 1
    True
    """
    check_least(k=(1 if k is None else k, 1))
    is_known, above, upto = ranked_pairs(weights, known, candidates)
    return ratios(above[is_known], upto[is_known], len(is_known), k=k)[1]


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

    weights = abs(checked_graph(csr_array(graph)))
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
    graph: Any, members: ArrayLike, *, n_random: int = 1000, rng: int | np.random.Generator = 0
) -> dict[str, float]:
    """Tell whether a set of genes is denser within than sets of genes of the same degree.

    Density is the mean weight over all ordered pairs of different genes of the set. Degree is a gene's strength, the
    sum of its absolute weights in both directions. A random set has as many genes of each tenth of the degrees as the
    set itself, without replacement; within a tenth all genes, those of the set among them, are equally likely. Genes of
    degree 0 stand for each other.

    Parameters
    ----------
    graph
        Weight of each pair, source × target, shape `(n_genes, n_genes)`: sparse, where a pair that is not stored has no
        edge and counts as 0; or dense, where NaN is a pair that was not measured and counts nowhere. The diagonal is
        not looked at.
    members
        The genes of the set: their numbers, or a boolean array of shape `(n_genes,)`.
    n_random
        Number of random sets.
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
        are in the set, one is named twice or not in the graph, none of its pairs is measured, or `n_random` is below 1.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> graph = rng.random((40, 40))
    >>> graph[:10, :10] += 2  # the first ten genes go together
    >>> sd.metrics.density_test(graph, np.arange(10), n_random=500)["p"] < 0.05
    True
    """
    weights = _without_diagonal(checked_graph(graph))
    chosen = _members(members, weights.shape[0])
    check_least(n_random=(n_random, 1))
    density = _density(weights, chosen)
    if np.isnan(density):
        raise ValueError(f"None of the pairs of {chosen.sum()} genes was measured: they have no density.")
    total = np.nansum if isinstance(weights, np.ndarray) else np.sum
    degree = np.asarray(total(abs(weights), axis=0) + total(abs(weights), axis=1))
    groups = np.zeros(len(degree), dtype=np.intp)
    groups[degree != 0] = 1 + quantile_bins(degree[degree != 0], N_BINS)
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

    check_least(min_genes=(min_genes, 1))
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


def ranked_pairs(
    weights: ArrayLike, known: ArrayLike, candidates: ArrayLike | None
) -> tuple[NDArray[np.bool_], NDArray[np.intp], NDArray[np.intp]]:
    """Rank the candidates; refuse what cannot be ranked or scored.

    Parameters
    ----------
    weights, known, candidates
        As for :func:`auprc_ratio`.

    Returns
    -------
    Of each candidate, row by row: whether it is known, how many have a larger weight, and how many this one or more.
    """
    truth, allowed = checked_pairs(known, candidates)
    given = np.asarray(weights, dtype=np.float64)
    if given.shape != truth.shape:
        raise ValueError(f"weights has shape {given.shape} and known {truth.shape}; both (n_sources, n_targets).")
    refuse_where(
        allowed & ~np.isfinite(given),
        "weights are those of candidates and not finite",
        "Leave them out of candidates, or give pairs without an edge the weight 0.",
    )
    positive, weight = truth[allowed], given[allowed]
    if positive.all() or not positive.any():
        raise ValueError(
            f"{'All' if positive.all() else 'None'} of {len(positive)} candidates {'are' if positive.all() else 'is'} "
            "known: telling known pairs from others needs both. Check that both use the same gene names."
        )
    ascending = np.sort(weight)
    above = len(weight) - np.searchsorted(ascending, weight, side="right")
    return positive, above, len(weight) - np.searchsorted(ascending, weight, side="left")


def ratios(
    above: NDArray[np.integer],
    upto: NDArray[np.integer],
    total: int,
    *,
    times: NDArray[np.integer] | None = None,
    k: int | None = None,
) -> tuple[float, float]:
    """Give the AUPRC ratio and the early precision ratio. Only known pairs are visited: recall changes nowhere else.

    Parameters
    ----------
    above, upto
        Of each known pair, how many candidates have a larger weight, and how many this or a larger one.
    total
        Number of candidates.
    times
        How often each known pair counts; None: once.
    k
        As for :func:`early_precision`.
    """
    times = np.ones(len(above), dtype=np.intp) if times is None else times
    order = np.argsort(upto)
    above, upto, times = above[order], upto[order], times[order]
    found = np.cumsum(times)
    n_known = int(found[-1])
    recalled = found[np.searchsorted(upto, upto, side="right") - 1]
    average = (times * (recalled / upto)).sum() / n_known
    best = n_known if k is None else min(k, total)
    chance = np.clip((best - above) / (upto - above), 0.0, 1.0)
    precision = (times * chance).sum() / best
    share = n_known / total
    return float(average / share), float(precision / share)


def checked_pairs(known: ArrayLike, candidates: ArrayLike | None) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Give known and allowed pairs as truth values; refuse other shapes and other numbers."""
    truth = np.asarray(known)
    allowed = np.ones(truth.shape, dtype=bool) if candidates is None else np.asarray(candidates)
    if truth.ndim != 2 or truth.shape != allowed.shape:
        raise ValueError(
            f"known has shape {truth.shape} and candidates {allowed.shape}; both must be (n_sources, n_targets)."
        )
    truth, allowed = truth_values(truth, "known"), truth_values(allowed, "candidates")
    if not allowed.any():
        raise ValueError(f"None of {allowed.size} pairs is a candidate: there is nothing to score.")
    return truth, allowed


def quantile_bins(values: NDArray[np.float64], n_bins: int) -> NDArray[np.intp]:
    """Give each value the number of its quantile bin. Equal values share the bin of their mean rank."""
    from scipy.stats import rankdata

    check_least(n_bins=(n_bins, 1))
    found: NDArray[np.intp] = np.floor((rankdata(values) - 0.5) * n_bins / len(values)).astype(np.intp)
    return found


def matched_subsets(
    chosen: NDArray[np.bool_], groups: NDArray[np.integer], n: int, rng: np.random.Generator
) -> Iterator[NDArray[np.bool_]]:
    """Yield `n` subsets, each uniform among those that hold as many items of every group as `chosen` does.

    Items are drawn with replacement until enough differ, which is the same as without. Where more than half of a group
    is chosen, those left out are drawn, so that this ends soon.
    """
    _, group, size = np.unique(groups, return_inverse=True, return_counts=True)
    item = np.argsort(group, kind="stable")
    start = np.cumsum(size) - size
    n_chosen = np.bincount(group[chosen], minlength=len(size))
    flip = 2 * n_chosen > size
    wanted = np.where(flip, size - n_chosen, n_chosen)
    for _ in range(n):
        drawn = np.zeros(len(group), dtype=bool)
        missing = wanted
        while missing.any():
            of = np.repeat(np.arange(len(size)), missing)
            drawn[item[start[of] + rng.integers(size[of])]] = True
            missing = wanted - np.bincount(group[drawn], minlength=len(size))
        yield drawn ^ flip[group]


def p_value(null: NDArray[np.float64], seen: float) -> float:
    """Share of random scores, the one seen among them, that are as high; sums may differ in their last digits."""
    as_high = null >= seen - 1e-12 * max(1.0, abs(seen))
    return float((1 + as_high.sum()) / (1 + len(null)))


def checked_graph(graph: Any, name: str = "graph") -> Any:
    """Give a graph as float64, CSR without duplicates or dense; refuse values that are not finite, but NaN if dense."""
    from scipy.sparse import csr_array, issparse

    sparse = issparse(graph)
    matrix: Any = csr_array(graph, dtype=np.float64, copy=True) if sparse else np.asarray(graph, dtype=np.float64)
    if matrix.ndim != 2 or not min(matrix.shape):
        raise ValueError(f"{name} has shape {matrix.shape}; it must be (n_sources, n_targets).")
    if sparse:
        matrix.sum_duplicates()
    values = matrix.data if sparse else matrix
    bad = ~np.isfinite(values) if sparse else np.isinf(values)
    refuse_where(bad, f"weights of {name} are not finite", "Store no pair that was not measured.")
    return matrix


def _without_diagonal(weights: Any) -> Any:
    """Drop the weight of each gene with itself: no edge where pairs are stored, not measured in a dense graph."""
    from scipy.sparse import csr_array

    if weights.shape[0] != weights.shape[1]:
        raise ValueError(f"graph has shape {weights.shape}; it must be (n_genes, n_genes).")
    if isinstance(weights, np.ndarray):
        return np.where(np.eye(len(weights), dtype=bool), np.nan, weights)
    coo = weights.tocoo()
    off = coo.row != coo.col
    return csr_array((coo.data[off], (coo.row[off], coo.col[off])), shape=weights.shape)


def _members(members: ArrayLike, n_genes: int) -> NDArray[np.bool_]:
    """Mark the genes of a set; refuse numbers that name none, and one gene alone."""
    given = np.asarray(members)
    numbers = np.flatnonzero(given) if given.dtype == np.bool_ and given.shape == (n_genes,) else given
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError(
            f"members must be numbers of genes or a boolean array ({n_genes},), not {given.dtype} {given.shape}."
        )
    chosen = np.isin(np.arange(n_genes), numbers)
    if chosen.sum() != len(numbers):
        raise ValueError(
            f"members must be different numbers from 0 to {n_genes - 1}; {chosen.sum()} of {len(given)} are."
        )
    if chosen.sum() < 2:
        raise ValueError(f"{chosen.sum()} genes have no pairs; a density needs two.")
    return chosen


def _density(weights: Any, chosen: NDArray[np.bool_]) -> float:
    """Mean weight over the ordered pairs of a set; NaN if none of them was measured."""
    genes = np.flatnonzero(chosen)
    if not isinstance(weights, np.ndarray):
        return float(weights[genes][:, genes].sum() / (len(genes) * (len(genes) - 1)))
    within = weights[np.ix_(genes, genes)]
    measured = within[~np.isnan(within)]
    return float(measured.mean()) if len(measured) else np.nan


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
