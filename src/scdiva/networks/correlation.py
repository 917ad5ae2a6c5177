"""A network of correlations: what every other method is to be compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scdiva._running import Running
from scdiva.networks.pairs import Pairs

BYTES = 8
"""Held for each group, source and target while cells are read."""


def sums(pairs: Pairs, _: Running) -> tuple[NDArray[np.float64], ...]:
    """Add up moments of log-normalised expression over the cells of each group.

    Parameters
    ----------
    pairs
        Genes, cells and groups.

    Returns
    -------
    Cells (n_groups,); sums and sums of squares of sources (n_groups, 2, n_sources) and of targets; sums of products
    (n_groups, n_sources, n_targets).
    """
    n_groups, n_sources, n_targets = pairs.shape
    n = np.zeros(n_groups)
    of_sources, of_targets = np.zeros((n_groups, 2, n_sources)), np.zeros((n_groups, 2, n_targets))
    products = np.zeros(pairs.shape)
    for first, block in pairs.source.expression_blocks():
        values = block[:, pairs.tokens]
        for number in range(n_groups):
            rows = np.flatnonzero(pairs.group[first : first + block.shape[0]] == number)
            if not len(rows):
                continue
            # in float64: of a gene that all cells express the variance is a small part of the squares
            x = values[rows].toarray().astype(np.float64)
            s, t = x[:, pairs.sources], x[:, pairs.targets]
            n[number] += len(rows)
            for total, part in ((of_sources[number], s), (of_targets[number], t)):
                total += np.stack([part.sum(axis=0), np.square(part).sum(axis=0)])
            products[number] += s.T @ t
    return n, of_sources, of_targets, products


def weights(
    _: Pairs,
    n: NDArray[np.float64],
    of_sources: NDArray[np.float64],
    of_targets: NDArray[np.float64],
    products: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Give Pearson's correlation of each source with each target from the sums of one group; NaN without variance."""
    scale = []
    for total, squares in (of_sources, of_targets):
        variance = squares - total**2 / n
        scale.append(np.sqrt(np.where(variance > 1e-9 * squares, variance, np.nan)))  # the rest is rounding
    covariance = products - np.outer(of_sources[0], of_targets[0]) / n
    return np.clip(covariance / np.outer(*scale), -1, 1)
