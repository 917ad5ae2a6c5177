"""Random subsets that match a given one, group by group, and how seldom chance does as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


def quantile_bins(values: NDArray[np.float64], n_bins: int) -> NDArray[np.intp]:
    """Give each value the number of its quantile bin. Equal values share the bin of their mean rank."""
    from scipy.stats import rankdata

    if n_bins < 1:
        raise ValueError(f"n_bins must be at least 1, got {n_bins}.")
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
