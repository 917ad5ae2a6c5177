"""What cells of a state express, fitted to a population: a model's state head, corrected gene by gene."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float32]

N_DIMS = 20
"""Directions of the states along which a gene may differ from what the model expects."""
RIDGE = 3.0
"""Penalty on them, in cells, where what is drawn is to vary as the cells do."""
ROUNDS = 5
"""Rounds of Newton steps; in each, cells' shifts and genes' biases take `STEPS` and the directions one."""
STEPS = 5
BLOCK, WIDER = 2**19, 16
"""Probabilities worked out together: they stay in a processor's cache; and times as many, where they are multiplied."""
_MOST = 0.5
"""Largest step of a coefficient, a bias or a shift."""
_EPS = 1e-6


class Corrections(NamedTuple):
    """Corrections to a state head, fitted to cells; see :func:`fit_population`.

    Attributes
    ----------
    mean, axes
        `(state_dim,)` and `(state_dim, d)`: directions of the states, of unit variance among the cells.
    log_odds, values
        `(d + 1, n_genes)`, what is added to the log-odds of a gene and to its value; the last row is a bias.
    spread
        `(n_genes,)`, standard deviation of a gene's value around what is expected, where it is expressed.
    """

    mean: NDArray[np.float64]
    axes: NDArray[np.float64]
    log_odds: Matrix
    values: Matrix
    spread: Matrix

    def directions(self, states: NDArray[np.floating]) -> Matrix:
        """Give the coordinates of states `(n, state_dim)` and a one, `(n, d + 1)`."""
        along = (states - self.mean) @ self.axes
        return np.concatenate([along, np.ones((len(along), 1))], axis=1).astype(np.float32)

    def added(self, states: NDArray[np.floating], log_odds: Matrix, values: Matrix) -> tuple[Matrix, Matrix]:
        """Add them to what a model expects of cells of these states, `(n, n_genes)`."""
        along = self.directions(states)
        return log_odds + along @ self.log_odds, values + along @ self.values


def fit_population(
    states: NDArray[np.floating],
    log_odds: Matrix,
    values: Matrix,
    expression: sp.csr_matrix | Matrix,
    rng: np.random.Generator,
    ridge: float = RIDGE,
    *,
    depth_known: bool = False,
    usual_spread: float | None = None,
) -> Corrections:
    r"""Correct what a model expects of genes in cells of a state, by the cells themselves.

    For each gene a logistic regression of whether a cell expresses it, with the model's log-odds as offset, on the
    leading principal components of the states, under a quadratic penalty on all but the bias; cells have a shift of
    their own, by which the odds add up to the number of genes they express (a conditional likelihood given the number,
    to first order). And a ridge regression of its value where it is expressed, with the model's value as offset. So the
    population's means are met gene by gene, and what the corpus did not teach of these cells is learned, where enough
    of them say so.

    Parameters
    ----------
    states
        `(n, state_dim)`, of complete cells.
    log_odds, values
        `(n, n_genes)`, the model's.
    expression
        `(n, n_genes)`, log-normalised; 0 where a gene is not expressed. Each cell expresses some, none all of them.
    rng
        Draws what the decomposition starts from.
    ridge
        The penalty, in cells: a coefficient to which so many cells speak is halved.
    depth_known
        Whether `log_odds` and `values` hold each cell's own shift and depth already, as they must where only some of
        the genes are fitted; else they are fitted too.
    usual_spread
        Spread of genes that one or two cells express; None: the median of the other genes.

    Returns
    -------
    The corrections.
    """
    from sklearn.decomposition import PCA

    n, dims = states.shape
    pca = PCA(max(1, min(N_DIMS, n - 1, dims)), svd_solver="randomized", random_state=int(rng.integers(2**31)))
    along = pca.fit_transform(states.astype(np.float64))
    scale = along.std(axis=0)
    kept = scale > _EPS * max(float(scale.max(initial=0.0)), _EPS)
    axes = pca.components_[kept].T / scale[kept]
    design = (along[:, kept] / scale[kept]).astype(np.float32)
    observed = sp.csr_matrix(expression)
    odds = _fit_odds(design, log_odds, observed, ridge, depth_known=depth_known)
    value, spread = _fit_values(design, values, observed, ridge, usual_spread, depth_known=depth_known)
    return Corrections(pca.mean_, axes, odds, value, spread)


def shift_to(log_odds: NDArray[np.floating], lengths: ArrayLike, rounds: int = 30) -> NDArray[np.float64]:
    """Give what to add to the log-odds of each cell so that it expresses so many genes in expectation.

    Parameters
    ----------
    log_odds
        `(n, n_genes)`; -inf for a gene that can't be expressed.
    lengths
        `(n,)`, above 0 and below the number of genes that can.
    rounds
        Newton steps.

    Returns
    -------
    float64 `(n,)`.
    """
    shift = np.zeros(len(log_odds))
    for _ in range(rounds):
        step = _towards(lengths, _probability(log_odds + shift[:, None]), axis=1)
        shift += step
        if np.abs(step).max(initial=0.0) < _EPS:
            break
    return shift


def _towards(wanted: ArrayLike, p: NDArray[np.floating], axis: int) -> NDArray[np.float64]:
    """Give the Newton step of log-odds by which probabilities add up to what is wanted."""
    slope = (p * (1 - p)).sum(axis=axis, dtype=np.float64)
    step: NDArray[np.float64] = (np.asarray(wanted) - p.sum(axis=axis, dtype=np.float64)) / np.maximum(slope, _EPS)
    return step.clip(-_MOST, _MOST)


def _fit_odds(design: Matrix, offset: Matrix, observed: sp.csr_matrix, ridge: float, *, depth_known: bool) -> Matrix:
    (n, d), n_genes = design.shape, offset.shape[1]
    lengths = observed.getnnz(axis=1)
    # half a cell beside those counted: a gene that all or none express keeps finite odds
    often = np.clip(observed.getnnz(axis=0), 0.5, n - 0.5)
    found, shift = np.zeros((d + 1, n_genes), dtype=np.float32), np.zeros((n, 1), dtype=np.float32)
    pairs = _products(design)
    of_observed = (_ones(observed).T @ design).T
    step = max(1, BLOCK // n_genes)
    # products of pairs, genes x pairs, are larger than any cache: seldom added up
    blocks, wide = ([slice(start, start + size) for start in range(0, n, size)] for size in (step, WIDER * step))

    def probability(rows: slice) -> Matrix:
        return _probability(eta[rows] + found[d] + shift[rows])

    for number in range(ROUNDS + 1):
        eta = offset + design @ found[:d]
        for _ in range(STEPS):
            expected, slope = np.zeros((2, n_genes))
            for rows in blocks:
                if not depth_known:
                    shift[rows, 0] += _towards(lengths[rows], probability(rows), axis=1)
                p = probability(rows)
                expected += p.sum(axis=0, dtype=np.float64)
                slope += (p * (1 - p)).sum(axis=0)
            found[d] += np.clip((often - expected) / np.maximum(slope, _EPS), -_MOST, _MOST)
        if number == ROUNDS:  # the means have the last word
            break
        of_expected, weights = np.zeros((d, n_genes)), np.zeros((n_genes, pairs.shape[1]))
        for rows in wide:
            p = probability(rows)
            of_expected += design[rows].T @ p
            weights += (p * (1 - p)).T @ pairs[rows]
        change = _solve(weights, of_observed - of_expected - ridge * found[:d], ridge)
        # of a rare gene a whole step may go far beyond the best
        found[:d] += change * np.minimum(1, _MOST / np.maximum(np.abs(change).max(axis=0, initial=0.0), _EPS))
    return found


def _fit_values(
    design: Matrix,
    offset: Matrix,
    observed: sp.csr_matrix,
    ridge: float,
    usual_spread: float | None,
    *,
    depth_known: bool,
) -> tuple[Matrix, Matrix]:
    d, n_cells = design.shape[1], observed.getnnz(axis=0)
    at = observed.tocoo()
    cell, gene = at.row, at.col
    found = np.zeros((d + 1, offset.shape[1]), dtype=np.float32)
    found[d], left = _biases(at, at.data - offset[cell, gene], depth_known)
    of_left = (sp.csr_matrix((left, (cell, gene)), shape=observed.shape).T @ design).T
    found[:d] = _solve(_ones(observed).T @ _products(design), of_left, ridge)
    # cells that express a gene are not spread evenly along the directions: its mean is to be met with them
    more, left = _biases(at, left - (design @ found[:d])[cell, gene], depth_known)
    found[d] += more
    spread = np.sqrt(np.bincount(gene, np.square(left), len(n_cells)) / np.maximum(n_cells, 1))
    # of a gene that one or two cells express nothing is known: as the others
    known = n_cells > 2
    if usual_spread is None:
        usual_spread = float(np.median(spread[known])) if known.any() else 0.0
    spread[~known] = usual_spread
    return found, spread.astype(np.float32)


def _biases(
    at: sp.coo_matrix, left: NDArray[np.float64], depth_known: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Take each gene's mean off the observed values, or what is left of them, and each cell's, its depth.

    Returns
    -------
    The genes' means `(n_genes,)`, and what is left of each value.
    """
    cell, gene, shape = at.row, at.col, at.shape
    number, genes = np.maximum(at.getnnz(axis=1), 1), np.maximum(at.getnnz(axis=0), 1)
    bias = np.zeros(shape[1])
    for step in range(1 if depth_known else STEPS + 1):
        if step:
            left = left - (np.bincount(cell, left, shape[0]) / number)[cell]
        of_gene = np.bincount(gene, left, shape[1]) / genes
        bias += of_gene
        left = left - of_gene[gene]
    return bias, left


def _ones(observed: sp.csr_matrix) -> sp.csr_matrix:
    """Give where genes are expressed, as float32."""
    return sp.csr_matrix((np.ones(observed.nnz, np.float32), observed.indices, observed.indptr), shape=observed.shape)


def _products(design: Matrix) -> Matrix:
    """Products of all pairs of columns, `(n, d (d + 1) / 2)`, in the order of `numpy.triu_indices`."""
    one, two = np.triu_indices(design.shape[1])
    return design[:, one] * design[:, two]


def _solve(weights: NDArray[np.floating], right: NDArray[np.floating], ridge: float) -> NDArray[np.float64]:
    """Solve `(D' diag(w_g) D + ridge) x_g = r_g` for each gene, given `D' diag(w_g) D` by pairs; `(d, n_genes)`."""
    d = len(right)
    matrix = np.zeros((len(weights), d, d))
    one, two = np.triu_indices(d)
    matrix[:, one, two] = matrix[:, two, one] = weights
    matrix[:, np.arange(d), np.arange(d)] += ridge
    return np.asarray(np.linalg.solve(matrix, right.T[:, :, None])[:, :, 0].T, dtype=np.float64)


def _probability(log_odds: NDArray[np.floating]) -> NDArray[np.floating]:
    # torch's, in place: as exact as scipy's expit and several times as fast for float32
    return torch.from_numpy(log_odds).sigmoid_().numpy()
