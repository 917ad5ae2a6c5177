"""Scores of networks that only benchmarks take: edges that come back, and known ones beside what chance finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from _network_density import N_BINS, matched_subsets, p_value, quantile_bins

from scdiva._checks import check_least
from scdiva.metrics._input import refuse_where, truth_values
from scdiva.metrics.networks import checked_graph

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

TOP_TARGETS = 20
"""Targets of each source that `edge_stability` compares."""


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
    """
    from scipy.stats import spearmanr

    first, second = checked_graph(a, "a"), checked_graph(b, "b")
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


def matched_null(
    known: ArrayLike,
    match: ArrayLike,
    *,
    candidates: ArrayLike | None = None,
    n_bins: int = N_BINS,
    n_permutations: int = 1000,
    rng: int | np.random.Generator = 0,
) -> Iterator[NDArray[np.bool]]:
    """Exchange the known targets of each source for similar random ones, such as equally expressed.

    Each source keeps its number of targets in every quantile bin of `match`; within a bin each of its candidates, the
    known ones among them, is as likely as any other. What a score has beyond these owes nothing to how many targets a
    source has, nor to how well targets are expressed.

    Parameters
    ----------
    known
        Whether the pair is a known one, shape `(n_sources, n_targets)`.
    match
        What random targets share with known ones, such as mean expression, shape `(n_targets,)`.
    candidates
        Pairs that may be taken, as for :func:`auprc_ratio`; known ones outside are left out.
    n_bins
        Quantile bins of `match`, over the targets of all candidates; equal values share a bin. Within a bin targets
        still differ, most in the last one, so that a score may owe something to `match` where bins are wide: take more
        bins as long as each holds many more targets than known ones.
    n_permutations
        Number of permutations.
    rng
        Seed, or a generator, which goes on.

    Returns
    -------
    An iterator over boolean arrays of the shape of `known`. Seldom are all wanted at once.

    Raises
    ------
    ValueError
        If shapes differ, `match` is not finite for the target of a candidate, there are no candidates, or `n_bins` is
        below 1.
    """
    truth, allowed = checked_pairs(known, candidates)
    candidate = np.flatnonzero(allowed)
    source, target = np.nonzero(allowed)
    groups = _groups(source, target, match, truth.shape, n_bins)
    subsets = matched_subsets(truth.ravel()[candidate], groups, n_permutations, np.random.default_rng(rng))

    def spread() -> Iterator[NDArray[np.bool_]]:
        for subset in subsets:
            permuted = np.zeros(truth.size, dtype=bool)
            permuted[candidate[subset]] = True
            yield permuted.reshape(truth.shape)

    return spread()


def score_edges(
    weights: ArrayLike,
    known: ArrayLike,
    *,
    match: ArrayLike,
    candidates: ArrayLike | None = None,
    n_bins: int = N_BINS,
    n_permutations: int = 1000,
    n_bootstrap: int = 1000,
    rng: int | np.random.Generator = 0,
) -> dict[str, float]:
    """Score a network against known edges, with an interval and beside what chance scores.

    Parameters
    ----------
    weights, known
        As for :func:`auprc_ratio`.
    match
        What the null's targets share with the known ones, such as mean expression, shape `(n_targets,)`.
    candidates
        Pairs that are ranked, as for :func:`auprc_ratio`.
    n_bins, n_permutations
        Of the null, as for :func:`matched_null`.
    n_bootstrap
        Resamples of the sources, whole rows with replacement, since the targets of one source aren't independent. Few
        sources make an interval too narrow: in a simulation of 60 it held the truth in 90% of cases.
    rng
        Seed, or a generator, which goes on.

    Returns
    -------
    `auprc_ratio` and `early_precision`; of each `_low` and `_high`, its 95% bootstrap interval (NaN for a single
    source; resamples without a known pair are left out); `_null_mean` and `_null_high`, mean and 95th percentile of the
    null; and `_p`, (1 + permutations that score as high) / (1 + permutations). `n_known` pairs, `n_sources` and
    `n_targets`, all among the candidates; and `share`, the share of candidates that are known.

    Raises
    ------
    ValueError
        As :func:`auprc_ratio` and :func:`matched_null`; or if a number of draws is below 1.
    """
    if min(n_permutations, n_bootstrap) < 1:
        raise ValueError(f"n_permutations and n_bootstrap must be 1 or more, got {n_permutations} and {n_bootstrap}.")
    is_known, above, upto = ranked_pairs(weights, known, candidates)
    allowed = checked_pairs(known, candidates)[1]
    row, target = np.nonzero(allowed)
    source = np.unique(row, return_inverse=True)[1]
    groups = _groups(source, target, match, allowed.shape, n_bins)
    random = np.random.default_rng(rng)

    def of(chosen: NDArray[np.bool_]) -> tuple[float, float]:
        return ratios(above[chosen], upto[chosen], len(chosen))

    null = np.array([of(subset) for subset in matched_subsets(is_known, groups, n_permutations, random)])
    ranked = source[np.argsort(-np.asarray(weights, dtype=np.float64)[allowed], kind="stable")]
    resampled = _bootstrap(is_known, above, upto, source, ranked, n_bootstrap, random)
    found = dict(zip(("auprc_ratio", "early_precision"), of(is_known), strict=True))
    scores: dict[str, float] = {}
    for column, (name, seen) in enumerate(found.items()):
        low, high = np.quantile(resampled[:, column], (0.025, 0.975)) if len(resampled) else (np.nan, np.nan)
        scores |= {
            name: seen,
            f"{name}_low": float(low),
            f"{name}_high": float(high),
            f"{name}_null_mean": float(null[:, column].mean()),
            f"{name}_null_high": float(np.quantile(null[:, column], 0.95)),
            f"{name}_p": p_value(null[:, column], seen),
        }
    return scores | {
        "n_known": int(is_known.sum()),
        "n_sources": int(source.max()) + 1,
        "n_targets": len(np.unique(target)),
        "share": float(is_known.mean()),
    }


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


def _groups(
    source: NDArray[np.intp], target: NDArray[np.intp], match: ArrayLike, shape: tuple[int, ...], n_bins: int
) -> NDArray[np.intp]:
    """Give each candidate the number of its source and bin; refuse a `match` of another shape or not finite."""
    values = np.asarray(match, dtype=np.float64)
    if values.shape != shape[1:]:
        raise ValueError(f"match has shape {values.shape}, but there are {shape[1]} targets.")
    scored = np.unique(target)
    bad = scored[~np.isfinite(values[scored])]
    if len(bad):
        raise ValueError(
            f"match is not finite for {len(bad)} of {len(scored)} targets (the first is number {bad[0]}). Leave them "
            "out of candidates."
        )
    bins = np.zeros(shape[1], dtype=np.intp)
    bins[scored] = quantile_bins(values[scored], n_bins)
    return source * n_bins + bins[target]


def times_drawn(
    is_known: NDArray[np.bool_],
    above: NDArray[np.intp],
    upto: NDArray[np.intp],
    source: NDArray[np.intp],
    ranked: NDArray[np.intp],
    times: NDArray[np.integer],
) -> tuple[float, float]:
    """Both ratios, each source counted as many times as given; `ranked` is the source of each pair, the best first."""
    counted = np.concatenate([[0], np.cumsum(times[ranked])])
    taken = is_known & (times[source] > 0)
    return ratios(counted[above[taken]], counted[upto[taken]], int(counted[-1]), times=times[source[taken]])


def _bootstrap(
    is_known: NDArray[np.bool_],
    above: NDArray[np.intp],
    upto: NDArray[np.intp],
    source: NDArray[np.intp],
    ranked: NDArray[np.intp],
    n: int,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Both ratios of `n` resamples of the sources, less those that drew no known pair; none for a single source."""
    n_sources = int(source.max()) + 1
    if n_sources < 2:
        return np.empty((0, 2))
    has_known = np.bincount(source[is_known], minlength=n_sources) > 0
    drawn = rng.multinomial(n_sources, np.full(n_sources, 1 / n_sources), size=n)
    pairs = is_known, above, upto, source, ranked
    return np.array([times_drawn(*pairs, times) for times in drawn if times[has_known].any()]).reshape(-1, 2)


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
    """
    check_least(k=(1 if k is None else k, 1))
    is_known, above, upto = ranked_pairs(weights, known, candidates)
    return ratios(above[is_known], upto[is_known], len(is_known), k=k)[1]


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
