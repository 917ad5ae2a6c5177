"""A network of what the model knows of two genes, and of how they go with the states of these cells."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scdiva import _constants as C
from scdiva._running import Running, run_cells
from scdiva.models import ScDiVa
from scdiva.networks.pairs import Pairs

BYTES = 0
"""Held for each group, source and target while cells are read: moments of genes and states are enough."""
RIDGE = 1e-3
"""Of the largest variance of the states: directions in which cells hardly differ say nothing of a gene."""


def sums(pairs: Pairs, running: Running) -> tuple[NDArray[np.float64], ...]:
    """Add up moments of expression and cell states over the cells of each group.

    Parameters
    ----------
    pairs
        Genes, cells and groups.
    running
        How cells are run.

    Returns
    -------
    Cells (n_groups,), sums and sums of squares of expression (n_groups, 2, n_genes), sums of states (n_groups, dim),
    their products (n_groups, dim, dim), products of expression and states (n_groups, n_genes, dim).
    """
    n_groups, n_genes, width = pairs.n_groups, len(pairs.tokens), running.width(pairs.model)
    n, of_genes = np.zeros(n_groups), np.zeros((n_groups, 2, n_genes))
    of_states, squares = np.zeros((n_groups, width)), np.zeros((n_groups, width, width))
    products = np.zeros((n_groups, n_genes, width))
    for rows, _, results in run_cells(pairs.model, pairs.source, running, only=pairs.group >= 0):
        states = np.empty((len(rows), width))
        for cells, found in results:
            states[cells] = found
        first = int(rows[0])
        values = pairs.source.expression(first, int(rows[-1]) + 1)[rows - first][:, pairs.tokens].astype(np.float64)
        group = pairs.group[rows]
        for number in np.unique(group):
            x, z = values[group == number], states[group == number]
            n[number] += len(z)
            of_genes[number] += np.stack([x.sum(axis=0), x.multiply(x).sum(axis=0)]).reshape(2, -1)
            of_states[number] += z.sum(axis=0)
            squares[number] += z.T @ z
            products[number] += x.T @ z
    return n, of_genes, of_states, squares, products


def weights(
    pairs: Pairs,
    n: NDArray[np.float64],
    of_genes: NDArray[np.float64],
    of_states: NDArray[np.float64],
    squares: NDArray[np.float64],
    products: NDArray[np.float64],
) -> NDArray[np.float64]:
    r"""Give the similarity of each source and target from the sums of one group.

    The mean of two similarities, each in standard deviations over all pairs of genes from their mean: the cosine of the
    whitened embeddings of the model (:func:`whitened`), and the covariance of the two genes' standardised expression as
    far as it is linear in the cell states.

    Returns
    -------
    float64 (n_sources, n_targets).
    """
    states = of_states / n
    values, directions = np.linalg.eigh(squares / n - np.outer(states, states))
    values = np.maximum(values, 0)
    variance = of_genes[1] / n - (of_genes[0] / n) ** 2
    varies = variance > 1e-9 * of_genes[1] / n
    scale = np.where(varies, np.sqrt(np.where(varies, variance, 1.0)), np.inf)  # what does not vary goes with nothing
    covariance = (products / n - np.outer(of_genes[0] / n, states)) / scale[:, None]
    spread = np.where(values > 0, np.sqrt(values) / (values + RIDGE * values.max() + np.finfo(float).tiny), 0.0)
    loadings = covariance @ (directions * spread)
    total = np.zeros((len(pairs.sources), len(pairs.targets)))
    for vectors in (whitened(pairs.model)[pairs.tokens], loadings):
        mean, sd = _moments(vectors)
        if sd > 0:
            total += (vectors[pairs.sources] @ vectors[pairs.targets].T - mean) / (2 * sd)
    return total


def whitened(model: ScDiVa) -> NDArray[np.float64]:
    """Whiten the gene embeddings of a model, and bring each to length one.

    The first directions of such a table hold how widely a gene is expressed and in which kinds of cells, and outweigh
    the rest in a plain cosine; whitening lets all directions count equally (Su et al. 2021).

    Parameters
    ----------
    model
        The model.

    Returns
    -------
    float64 (n_tokens, n), rows of special tokens and of genes that the model has not seen are 0.

    References
    ----------
    .. [1] Su et al., Whitening sentence representations for better semantics and faster retrieval, arXiv 2021.
    """
    table = model.embedding.gene.weight.detach().double().cpu().numpy()
    rows = np.flatnonzero(seen_tokens(model))
    centred = table[rows] - table[rows].mean(axis=0)
    _, singular, directions = np.linalg.svd(centred, full_matrices=False)
    kept = singular > 1e-6 * singular[0]
    white = centred @ (directions[kept].T / singular[kept])
    length = np.linalg.norm(white, axis=1, keepdims=True)
    result = np.zeros((len(table), white.shape[1]))
    result[rows] = white / np.where(length > 0, length, 1.0)
    return result


def seen_tokens(model: ScDiVa) -> NDArray[np.bool_]:
    """Say which tokens are genes of the model's corpus: bool (n_tokens,)."""
    return np.concatenate([np.zeros(C.N_SPECIAL, bool), model.vocabulary.table["entropy"].notna().to_numpy()])


def _moments(vectors: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation of the inner products of all pairs of rows, a row with itself among them."""
    mean = float(np.square(vectors.mean(axis=0)).sum())
    square = float(np.square(vectors.T @ vectors / len(vectors)).sum())
    return mean, max(square - mean**2, 0.0) ** 0.5
