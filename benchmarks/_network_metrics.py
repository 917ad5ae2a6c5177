"""Scores of networks that only benchmarks take: edges that come back, and known ones beside what chance finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from _network_density import N_BINS, matched_subsets, p_value, quantile_bins

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOP_TARGETS = 20
"""Targets of each source that `edge_stability` compares."""


def edge_stability(a: NDArray[Any], b: NDArray[Any], *, top: int) -> dict[str, float]:
    """Compare two graphs of the same genes, such as those of two halves of the cells.

    The best edges are those of the largest absolute weight. Pairs of weight 0 are no edges; and where several tie for
    the last ranks, none of them is taken, so that graphs that rank no edges agree on none.

    Parameters
    ----------
    a, b
        Weight of each pair, shape `(n_sources, n_targets)`; NaN is a pair that was not measured, or none to compare,
        such as a gene with itself.
    top
        Number of best edges; more than there are take all.

    Returns
    -------
    `spearman`, rank correlation of the weights over the pairs that both have, NaN where there are fewer than two or
    those of one are all equal; `jaccard`, common edges / all edges among the `top` best of each; and
    `jaccard_by_source`, the same for the best `TOP_TARGETS` of each source, averaged over the sources that have edges
    (NaN where there are none); and `n_pairs` that both have.
    """
    from scipy.stats import spearmanr

    n_sources, n_targets = a.shape
    pairs_a, pairs_b = (np.flatnonzero(~np.isnan(graph)) for graph in (a, b))
    w_a, w_b = a.ravel()[pairs_a], b.ravel()[pairs_b]
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
        "jaccard": _jaccard(_best(pairs_a, w_a, top), _best(pairs_b, w_b, top)),
        "jaccard_by_source": float(scored.mean()) if len(scored) else np.nan,
        "n_pairs": len(common),
    }


def score_edges(
    weights: NDArray[Any],
    known: NDArray[np.bool_],
    *,
    match: NDArray[Any],
    candidates: NDArray[np.bool_],
    n_permutations: int = 1000,
    n_bootstrap: int = 1000,
    rng: int | np.random.Generator = 0,
) -> dict[str, float]:
    """Score a network against known edges, with an interval and beside what chance scores.

    `auprc_ratio` is the average precision of the ranking, after all pairs of the same weight as scikit-learn's
    `average_precision_score` takes it, / the share of the candidates that are known: 1 for a random ranking or one that
    ties all pairs, 1 / share at best. `early_precision` is the precision among the best pairs, as many as are known,
    / that share: the early precision ratio of BEELINE [1]_. Of pairs that tie for the last ranks each is taken with the
    same chance, and the expected precision returned.

    The null exchanges the known targets of each source for similar random ones: each source keeps its number of targets
    in every quantile bin of `match`, and within a bin each of its candidates, the known ones among them, is as likely
    as any other. What a score has beyond these owes nothing to how many targets a source has, nor to how well targets
    are expressed.

    Parameters
    ----------
    weights
        Weight of each pair, the largest first, shape `(n_sources, n_targets)`. They rank as they stand: pass their
        absolute values where the sign only distinguishes activation from repression. 0 for a pair without an edge.
    known
        Whether the pair is a known one, of the same shape.
    match
        What the null's targets share with the known ones, such as mean expression, shape `(n_targets,)`; equal values
        share a bin, and bins are over the targets of all candidates.
    candidates
        Pairs that are ranked, of the same shape; what is known outside of them doesn't count.
    n_permutations
        Draws of the null.
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
        If a candidate's weight, or the `match` of its target, is not finite; if no candidate, or every one, is known.

    References
    ----------
    .. [1] Pratapa, Jalihal, Law, Bharadwaj & Murali, Benchmarking algorithms for gene regulatory network inference from
       single-cell transcriptomic data, Nature Methods 2020.
    """
    row, target = np.nonzero(candidates)
    is_known, weight = known[candidates], np.asarray(weights, dtype=np.float64)[candidates]
    if is_known.all() or not is_known.any():
        raise ValueError(f"{is_known.sum()} of {len(is_known)} candidates are known: telling them apart needs both.")
    scored = np.unique(target)
    bad = np.count_nonzero(~np.isfinite(weight)), np.count_nonzero(~np.isfinite(match[scored]))
    if any(bad):
        raise ValueError(f"{bad[0]} weights and the match of {bad[1]} targets are not finite: no candidates.")
    ascending = np.sort(weight)
    above, upto = (len(weight) - np.searchsorted(ascending, weight, side=side) for side in ("right", "left"))
    source = np.unique(row, return_inverse=True)[1]
    bins = np.zeros(candidates.shape[1], dtype=np.intp)
    bins[scored] = quantile_bins(match[scored], N_BINS)
    random = np.random.default_rng(rng)

    def of(chosen: NDArray[np.bool_]) -> tuple[float, float]:
        return ratios(above[chosen], upto[chosen], len(chosen))

    subsets = matched_subsets(is_known, source * N_BINS + bins[target], n_permutations, random)
    null = np.array([of(subset) for subset in subsets])
    ranked = source[np.argsort(-weight, kind="stable")]
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
        "n_targets": len(scored),
        "share": float(is_known.mean()),
    }


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


def ratios(
    above: NDArray[np.integer],
    upto: NDArray[np.integer],
    total: int,
    *,
    times: NDArray[np.integer] | None = None,
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
    """
    times = np.ones(len(above), dtype=np.intp) if times is None else times
    order = np.argsort(upto)
    above, upto, times = above[order], upto[order], times[order]
    found = np.cumsum(times)
    n_known = int(found[-1])
    recalled = found[np.searchsorted(upto, upto, side="right") - 1]
    average = (times * (recalled / upto)).sum() / n_known
    chance = np.clip((n_known - above) / (upto - above), 0.0, 1.0)
    precision = (times * chance).sum() / n_known
    share = n_known / total
    return float(average / share), float(precision / share)
