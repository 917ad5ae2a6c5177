"""A network of attention: which genes the model reads when it reads a gene."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scdiva._running import Running, run_cells
from scdiva.models import ScDiVa
from scdiva.networks.pairs import Pairs

BYTES = 4
"""Held for each group, source and target while cells are read."""
PRIOR_CELLS = 100
"""Cells that attend as usual and stand beside those read: whether a source is there differs far more between two cells
than the share of cells that have it differs between targets, so that a few cells say little of a pair."""
_HELD_TOKENS = 16_384
"""Genes of the cells whose ranks wait to be added up: 75 MB where cells are 1,200 genes long."""


def sums(
    pairs: Pairs, running: Running
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Add up rank-normalised attention over the cells of each group, one cell at a time.

    Parameters
    ----------
    pairs
        Genes, cells and groups.
    running
        How cells are run.

    Returns
    -------
    Sums of ranks, float32 (n_groups, n_sources, n_targets); cells that hold each target (n_groups, n_targets); sums of
    the ranks of each source over all queries, whatever their gene (n_groups, n_sources); and their number (n_groups,).
    """
    n_groups, n_sources, n_targets = pairs.shape
    total, n = np.zeros(pairs.shape, dtype=np.float32), np.zeros((n_groups, n_targets), dtype=np.int64)
    of_all, n_queries = np.zeros((n_groups, n_sources)), np.zeros(n_groups, dtype=np.int64)
    of_source, of_target = pairs.rows_of(pairs.sources), pairs.rows_of(pairs.targets)
    for rows, (indptr, tokens, _), results in run_cells(
        pairs.model,
        pairs.source,
        running._replace(what=attention_ranks, batch_size=1),
        held_tokens=_HELD_TOKENS,
        only=pairs.group >= 0,
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
    _: Pairs,
    total: NDArray[np.float32],
    n: NDArray[np.int64],
    of_all: NDArray[np.float64],
    n_queries: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Give mean ranks above those of any query, drawn towards 0, from the sums of one group; NaN without a cell."""
    usual = of_all / n_queries
    with np.errstate(invalid="ignore"):
        return np.where(n > 0, (total - np.outer(usual, n)) / (n + PRIOR_CELLS), np.nan)


def attention_ranks(model: ScDiVa, tokens: Tensor, values: Tensor, cu_seqlens: Tensor) -> Tensor:
    r"""Read out how the genes of one cell attend to each other.

    Attention weights (paper, eq. `mha`), without the column of `[LAT]`, are averaged over layers and heads; then the
    keys of each query are ranked and the ranks divided by their number (paper, section "Gene Regulatory Network
    Inference and Logic", rank-normalised weights), so that long and short cells count equally.

    Parameters
    ----------
    model
        The model.
    tokens, values, cu_seqlens
        One cell, packed, of which the first `max_length` genes are read.

    Returns
    -------
    float32 `(L, L)` (query, key): ranks in (0, 1], 1 for the key that the query attends to most.
    """
    most = model.config.max_length
    by_layer = model.attention_weights(tokens[:most], values[:most], cu_seqlens.clamp_max(most))
    total = next(by_layer)[2][:, 1:, 1:].mean(dim=0)
    for _, _, of_layer in by_layer:
        total += of_layer[:, 1:, 1:].mean(dim=0)
    order = total.cpu().numpy().argsort(axis=1)  # numpy sorts rows several times faster than torch
    ranks = np.empty(order.shape, dtype=np.float32)
    np.put_along_axis(ranks, order, np.arange(1, len(order) + 1, dtype=np.float32) / len(order), axis=1)
    return torch.from_numpy(ranks)
