"""Methods of `tl.grn`: sums over the cells of each group, and edge weights computed from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scdiva._settings import one_blas_thread
from scdiva.models import ScDiVa
from scdiva.models.inference import RunConfig, embed_cells, run_cells

if TYPE_CHECKING:
    from scdiva.networks.grn import Pairs

Name = Literal["embedding", "attention", "correlation"]
Floats = NDArray[np.floating]
PRIOR_CELLS = 100
"""Pseudo-cells with mean attention, towards which targets in few cells are shrunk."""
RIDGE = 1e-3
"""Ridge penalty on the states, as a fraction of their largest variance."""
HELD_TOKENS = 16_384
"""Maximum number of tokens whose ranks wait to be added up: 75 MB for cells of 1,200 genes."""


class Method(NamedTuple):
    """A method of network inference.

    Attributes
    ----------
    sums
        Computes sums over the cells of each group: arrays whose first axis is groups.
    weights
        Computes weights, sources × targets, from the sums of one group.
    bytes_each
        Memory for each group, source and target.
    signed
        Whether negative weights are as strong as positive ones.
    """

    sums: Callable[[Pairs, RunConfig], tuple[NDArray[Any], ...]]
    weights: Callable[..., Floats]
    bytes_each: int
    signed: bool = False


# --- correlation: the baseline


def correlation_sums(pairs: Pairs, _: RunConfig) -> tuple[Floats, ...]:
    """Sum moments of log-normalised expression.

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
            # float64, because the variance of a gene that all cells express is a small part of the squares
            x = values[rows].toarray().astype(np.float64)
            s, t = x[:, pairs.sources], x[:, pairs.targets]
            n[number] += len(rows)
            for total, part in ((of_sources[number], s), (of_targets[number], t)):
                total += np.stack([part.sum(axis=0), np.square(part).sum(axis=0)])
            products[number] += s.T @ t
    return n, of_sources, of_targets, products


def correlation_weights(_: Pairs, n: Floats, of_sources: Floats, of_targets: Floats, products: Floats) -> Floats:
    """Pearson correlation of each source with each target; NaN without variance."""
    scale = []
    for total, squares in (of_sources, of_targets):
        variance = squares - total**2 / n
        scale.append(np.sqrt(np.where(variance > 1e-9 * squares, variance, np.nan)))  # below: rounding errors
    covariance = products - np.outer(of_sources[0], of_targets[0]) / n
    return np.clip(covariance / np.outer(*scale), -1, 1)


# --- attention


def attention_sums(pairs: Pairs, run_config: RunConfig) -> tuple[NDArray[Any], ...]:
    """Sum rank-normalised attention, one cell at a time.

    Returns
    -------
    Sums of ranks, float32 (n_groups, n_sources, n_targets); cells that express each target (n_groups, n_targets); sums
    of the ranks of each source over all queries (n_groups, n_sources); and their number (n_groups,).
    """
    n_groups, n_sources, n_targets = pairs.shape
    total, n = np.zeros(pairs.shape, dtype=np.float32), np.zeros((n_groups, n_targets), dtype=np.int64)
    of_all, n_queries = np.zeros((n_groups, n_sources)), np.zeros(n_groups, dtype=np.int64)
    of_source, of_target = pairs.rows_of(pairs.sources), pairs.rows_of(pairs.targets)
    for rows, (indptr, tokens, _), results in run_cells(
        pairs.model,
        pairs.source,
        run_config._replace(what=partial(attention_ranks, layers=pairs.layers, heads=pairs.heads), batch_size=1),
        held_tokens=HELD_TOKENS,
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


def attention_weights(
    _: Pairs | None, total: NDArray[np.float32], n: NDArray[np.int64], of_all: Floats, n_queries: NDArray[np.int64]
) -> Floats:
    """Mean ranks minus those over all queries, shrunk towards 0; NaN without a cell."""
    usual = of_all / n_queries
    with np.errstate(invalid="ignore"):
        return np.where(n > 0, (total - np.outer(usual, n)) / (n + PRIOR_CELLS), np.nan)


def attention_ranks(
    model: ScDiVa,
    tokens: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    *,
    layers: tuple[int, ...] | None = None,
    heads: tuple[int, ...] | None = None,
) -> Tensor:
    r"""Rank-normalised attention between the genes of one cell.

    Attention weights (paper, eq. `mha`), without the column of `[LAT]`, are averaged over layers and heads; then the
    keys of each query are ranked and the ranks divided by their number (paper, section "Gene Regulatory Network
    Inference and Logic", rank-normalised weights), so that long and short cells count equally.

    Parameters
    ----------
    model
        The model.
    tokens, values, cu_seqlens
        One packed cell; only the first `max_length` genes are read.
    layers, heads
        Layers and heads to average over; None: all. Layers above the last are not computed.

    Returns
    -------
    float32 `(L, L)` (query, key): ranks in (0, 1], 1 for the key that the query attends to most.
    """
    max_length = model.config.max_length
    by_layer = model.attention_weights(tokens[:max_length], values[:max_length], cu_seqlens.clamp_max(max_length))
    chosen = range(model.config.n_layers) if layers is None else layers
    total: Tensor | None = None
    for layer, _, weights in by_layer:
        if layer in chosen:
            of_heads = weights if heads is None else weights[list(heads)]
            mean = of_heads[:, 1:, 1:].mean(dim=0)
            total = mean if total is None else total + mean
        if layer == max(chosen):
            break
    assert total is not None
    order = total.cpu().numpy().argsort(axis=1)  # numpy sorts rows several times faster than torch
    ranks = np.empty(order.shape, dtype=np.float32)
    np.put_along_axis(ranks, order, np.arange(1, len(order) + 1, dtype=np.float32) / len(order), axis=1)
    return torch.from_numpy(ranks)


# --- embedding: gene embeddings of the model, and covariance through the cell states


def embedding_sums(pairs: Pairs, run_config: RunConfig) -> tuple[Floats, ...]:
    """Sum moments of expression and cell states.

    Returns
    -------
    Cells (n_groups,), sums and sums of squares of expression (n_groups, 2, n_genes), sums of states (n_groups, dim),
    their products (n_groups, dim, dim), products of expression and states (n_groups, n_genes, dim).
    """
    n_groups, n_genes, width = pairs.n_groups, len(pairs.tokens), run_config.width(pairs.model)
    n, of_genes = np.zeros(n_groups), np.zeros((n_groups, 2, n_genes))
    of_states, squares = np.zeros((n_groups, width)), np.zeros((n_groups, width, width))
    products = np.zeros((n_groups, n_genes, width))
    for rows, states in embed_cells(pairs.model, pairs.source, run_config, only=pairs.group >= 0):
        first = int(rows[0])
        values = pairs.source.expression(first, int(rows[-1]) + 1)[rows - first][:, pairs.tokens].astype(np.float64)
        group = pairs.group[rows]
        for number in np.unique(group):
            x, z = values[group == number], states[group == number].astype(np.float64)
            n[number] += len(z)
            of_genes[number] += np.stack([x.sum(axis=0), x.multiply(x).sum(axis=0)]).reshape(2, -1)
            of_states[number] += z.sum(axis=0)
            squares[number] += z.T @ z
            products[number] += x.T @ z
    return n, of_genes, of_states, squares, products


@one_blas_thread()
def embedding_weights(
    pairs: Pairs, n: Floats, of_genes: Floats, of_states: Floats, squares: Floats, products: Floats
) -> Floats:
    r"""Similarity of each source and target.

    The mean of two similarities, each in standard deviations over all pairs of genes from their mean: the cosine of the
    whitened embeddings of the model (:func:`whitened`), and the covariance of the two genes' standardised expression as
    far as it is linear in the cell states.
    """
    states = of_states / n
    values, directions = np.linalg.eigh(squares / n - np.outer(states, states))
    values = np.maximum(values, 0)
    variance = of_genes[1] / n - (of_genes[0] / n) ** 2
    varies = variance > 1e-9 * of_genes[1] / n
    scale = np.where(varies, np.sqrt(np.where(varies, variance, 1.0)), np.inf)  # constant genes have no covariance
    covariance = (products / n - np.outer(of_genes[0] / n, states)) / scale[:, None]
    spread = np.where(values > 0, np.sqrt(values) / (values + RIDGE * values.max() + np.finfo(float).tiny), 0.0)
    loadings = covariance @ (directions * spread)
    # float32: a network of all genes has some 10^8 pairs
    total = np.zeros((len(pairs.sources), len(pairs.targets)), dtype=np.float32)
    for vectors in (whitened(pairs.model)[pairs.tokens], loadings):
        # mean and standard deviation of the inner products of all pairs, including those of a gene with itself
        mean = float(np.square(vectors.mean(axis=0)).sum())
        square = float(np.square(vectors.T @ vectors / len(vectors)).sum())
        if (sd := max(square - mean**2, 0.0) ** 0.5) > 0:
            scaled = (vectors / (2 * sd) ** 0.5).astype(np.float32)
            total += scaled[pairs.sources] @ scaled[pairs.targets].T - np.float32(mean / (2 * sd))
    return total


@one_blas_thread()
def whitened(model: ScDiVa) -> Floats:
    """Whitened gene embeddings of a model, normalised to length one.

    The first components represent how widely and in which kinds of cells a gene is expressed, and they dominate a plain
    cosine; after whitening all components have equal weight (Su et al. 2021).

    Parameters
    ----------
    model
        The model.

    Returns
    -------
    float64 (n_tokens, n), rows of special tokens and of genes absent from the training corpus are 0.

    References
    ----------
    .. [1] Su et al., Whitening sentence representations for better semantics and faster retrieval, arXiv 2021.
    """
    table = model.embedding.gene.weight.detach().double().cpu().numpy()
    rows = np.flatnonzero(model.seen_tokens)
    centred = table[rows] - table[rows].mean(axis=0)
    _, singular, directions = np.linalg.svd(centred, full_matrices=False)
    nonzero = singular > 1e-6 * singular[0]
    white = centred @ (directions[nonzero].T / singular[nonzero])
    length = np.linalg.norm(white, axis=1, keepdims=True)
    result = np.zeros((len(table), white.shape[1]))
    result[rows] = white / np.where(length > 0, length, 1.0)
    return result


METHODS: dict[Name, Method] = {
    "embedding": Method(embedding_sums, embedding_weights, 0),
    "attention": Method(attention_sums, attention_weights, 4),
    "correlation": Method(correlation_sums, correlation_weights, 8, signed=True),
}
