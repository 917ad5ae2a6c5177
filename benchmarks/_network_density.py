"""Is a set of genes denser within than sets of genes of the same degree: what networks are scored by, beside chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

N_BINS = 10
"""Quantile bins of degree or expression within which genes stand for each other."""


def density_test(
    graph: NDArray[Any], members: NDArray[np.integer], *, n_random: int = 1000, rng: int | np.random.Generator = 0
) -> dict[str, float]:
    """Tell whether a set of genes is denser within than sets of genes of the same degree.

    Density is the mean weight over all ordered pairs of different genes of the set. Degree is a gene's strength, the
    sum of its absolute weights in both directions. A random set has as many genes of each tenth of the degrees as the
    set itself, without replacement; within a tenth all genes, those of the set among them, are equally likely. Genes of
    degree 0 stand for each other.

    Parameters
    ----------
    graph
        Weight of each pair, source × target, shape `(n_genes, n_genes)`; NaN is a pair that was not measured and counts
        nowhere. The diagonal is not looked at.
    members
        Numbers of the genes of the set.
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
        If none of the pairs of the set, or of all random sets, is measured.
    """
    weights = np.where(np.eye(len(graph), dtype=bool), np.nan, np.asarray(graph, dtype=np.float64))
    chosen = np.isin(np.arange(len(weights)), members)
    density = _density(weights, chosen)
    degree = np.nansum(abs(weights), axis=0) + np.nansum(abs(weights), axis=1)
    groups = np.zeros(len(degree), dtype=np.intp)
    groups[degree != 0] = 1 + quantile_bins(degree[degree != 0], N_BINS)
    subsets = matched_subsets(chosen, groups, n_random, np.random.default_rng(rng))
    drawn = np.array([_density(weights, subset) for subset in subsets])
    null = drawn[~np.isnan(drawn)]
    if np.isnan(density) or not len(null):
        raise ValueError(f"None of the pairs of {chosen.sum()} genes, or of {n_random} random sets, was measured.")
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


def quantile_bins(values: NDArray[np.float64], n_bins: int) -> NDArray[np.intp]:
    """Give each value the number of its quantile bin. Equal values share the bin of their mean rank."""
    from scipy.stats import rankdata

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


def _density(weights: NDArray[Any], chosen: NDArray[np.bool_]) -> float:
    """Mean weight over the ordered pairs of a set; NaN if none of them was measured."""
    within = weights[np.ix_(chosen, chosen)]
    measured = within[~np.isnan(within)]
    return float(measured.mean()) if len(measured) else np.nan
