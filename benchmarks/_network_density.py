"""Is a set of genes denser within than sets of genes of the same degree: what networks are scored by, beside chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from scdiva._checks import check_least
from scdiva.metrics.networks import checked_graph

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

N_BINS = 10
"""Quantile bins of degree or expression within which genes stand for each other."""


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
