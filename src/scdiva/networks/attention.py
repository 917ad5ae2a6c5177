"""A network of attention: which genes the model reads when it reads a gene."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scdiva._running import Running
    from scdiva.networks.pairs import Pairs

PRIOR_CELLS = 100
"""Cells that attend as usual and stand beside those read: whether a source is there differs far more between two cells
than the share of cells that have it differs between targets, so that a few cells say little of a pair."""
_HELD_TOKENS = 16_384
"""Genes of the cells whose ranks wait to be added up: 75 MB where cells are 1,200 genes long."""


def sums(
    pairs: Pairs,
    chosen: NDArray[np.bool_],
    running: Running,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Add up rank-normalised attention over the cells of each group, one cell at a time.

    Parameters
    ----------
    pairs
        Genes, cells and groups.
    chosen
        bool (n_obs,), cells to run.
    running
        How.
    layers, heads
        As for :func:`scdiva.networks.read_outs.attention_ranks`.

    Returns
    -------
    Sums of ranks, float32 (n_groups, n_sources, n_targets); cells that hold each target (n_groups, n_targets); sums of
    the ranks of each source over all queries, whatever their gene (n_groups, n_sources); and their number (n_groups,).
    """
    from scdiva._running import run_cells
    from scdiva.networks.read_outs import attention_ranks

    n_groups, n_sources, n_targets = pairs.shape
    total, n = np.zeros(pairs.shape, dtype=np.float32), np.zeros((n_groups, n_targets), dtype=np.int64)
    of_all, n_queries = np.zeros((n_groups, n_sources)), np.zeros(n_groups, dtype=np.int64)
    of_source, of_target = pairs.places(pairs.sources), pairs.places(pairs.targets)
    reading = running._replace(what=attention_ranks(layers, heads), batch_size=1)
    for rows, (indptr, tokens, _), results in run_cells(
        pairs.model, pairs.source, reading, held_tokens=_HELD_TOKENS, only=chosen
    ):
        for (cell,), ranks in results:
            genes = tokens[indptr[cell] : indptr[cell + 1]][: len(ranks)]
            keys, queries = np.flatnonzero(of_source[genes] >= 0), np.flatnonzero(of_target[genes] >= 0)
            sources, targets = of_source[genes[keys]], of_target[genes[queries]]
            group = pairs.group[rows[cell]]
            total[group][np.ix_(sources, targets)] += ranks.T[np.ix_(keys, queries)]  # from key to query
            n[group][targets] += 1
            of_all[group][sources] += ranks[:, keys].sum(axis=0)
            n_queries[group] += len(ranks)
    return total, n, of_all, n_queries


def weights(
    total: NDArray[np.float32], n: NDArray[np.int64], of_all: NDArray[np.float64], n_queries: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Give mean ranks above those of any query, drawn towards 0, from the sums of one group; NaN without a cell."""
    usual = of_all / n_queries
    with np.errstate(invalid="ignore"):
        return np.where(n > 0, (total - np.outer(usual, n)) / (n + PRIOR_CELLS), np.nan)
