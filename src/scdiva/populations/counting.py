"""Values as counts give them: a normal distribution on the log-normalised values that counts of a cell can have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scdiva._constants import TARGET_SUM

N_COUNTS = 96
"""Most counts distinguished in one cell; large ones stand for those around them."""
N_MEANS, N_SPREADS = 120, 10
"""Fineness of the table of distributions: where they are centred, how wide they are."""
SPREADS = (0.1, 2.5)
_SMALL = 1e-12
_BELOW = 3.0
"""How far below log1p of a single count a distribution may be centred: nearly all of it is then at that count."""


def depth_of(values: NDArray[np.floating]) -> float:
    """Total count of a cell, taking the least of its log-normalised values above zero for a single count."""
    return float(TARGET_SUM / np.expm1(float(values.min())))


def draw_counts(
    expected: NDArray[np.floating], spread: NDArray[np.floating], depth: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    r"""Draw counts of 1 or more whose log-normalised values have these means and standard deviations.

    With :math:`v_k = \log(1 + 10^4 k / N)`, the count k has the probability
    :math:`\propto (v_{k+1} - v_{k-1}) \exp(-(v_k - a)^2 / 2 s^2)`: a normal density where counts are dense. a and s are
    taken from a table such that mean and standard deviation are nearest to what is asked for. Of a value that is
    expected below that of a single count, or of a spread below what counting alone gives, the nearest there is.

    Parameters
    ----------
    expected, spread
        `(n,)`, log-normalised.
    depth
        N, the cell's total count.
    rng
        Source of the draws.

    Returns
    -------
    int64 `(n,)`.
    """
    if not len(expected):
        return np.zeros(0, dtype=np.int64)
    most = max(2.0, 2.0 * depth * float(np.expm1(np.clip(expected, 0, 12)).max()) / TARGET_SUM)
    counts = np.unique(np.round(np.geomspace(1, most, N_COUNTS)))
    value = np.log1p(TARGET_SUM * counts / depth)
    width = np.gradient(value)
    centre = np.linspace(value[0] - _BELOW, value[-1], N_MEANS)
    spreads = np.geomspace(*SPREADS, N_SPREADS)
    log_p = -0.5 * ((value - centre[:, None]) / spreads[:, None, None]) ** 2 + np.log(width)
    p = np.exp(log_p - log_p.max(axis=2, keepdims=True))
    p /= p.sum(axis=2, keepdims=True)
    mean = p @ value
    deviation = np.sqrt(np.maximum(p @ value**2 - mean**2, 0))
    best, which, where = np.full(len(expected), np.inf), np.zeros(len(expected), int), np.zeros(len(expected), int)
    chance = rng.random(len(expected))
    for number in range(N_SPREADS):
        at = np.clip(np.searchsorted(mean[number], expected), 1, N_MEANS - 1)
        # between two distributions by chance, so that the mean is met
        below, above = mean[number][at - 1], mean[number][at]
        step = above - below
        part = np.clip(np.divide(expected - below, step, out=np.zeros(len(expected)), where=step > _SMALL), 0, 1)
        at = np.where(chance < part, at, at - 1)
        # the mean counts for more than the spread: it is off only where no distribution of this spread has it
        reached = below + part * (above - below)
        off = np.abs(deviation[number][at] - spread) + 2 * np.abs(reached - expected)
        better = off < best
        best[better], which[better], where[better] = off[better], number, at[better]
    drawn = (p[which, where].cumsum(axis=1) < rng.random(len(expected))[:, None]).sum(axis=1)
    found: NDArray[np.int64] = counts[np.minimum(drawn, len(counts) - 1)].astype(np.int64)
    return found
