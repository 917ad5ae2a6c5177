"""What cells of a state express, fitted to a population: a model's state head, corrected gene by gene."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]

N_DIMS = 20
"""Directions of the states along which a gene may differ from what the model expects."""
RIDGE = 3.0
"""Penalty on them, in cells, where what is drawn is to vary as the cells do."""
ROUNDS = 5
"""Rounds of Newton steps; in each, cells' shifts and genes' biases take `STEPS` and the directions one."""
STEPS = 5
CHUNK = 1024
"""Genes whose Newton systems are held at once."""
_MOST = 0.5
"""Largest step of a coefficient, a bias or a shift."""
_EPS = 1e-6


class Population(NamedTuple):
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


def fit_population(
    states: NDArray[np.floating],
    log_odds: Matrix,
    values: Matrix,
    expression: Matrix,
    rng: np.random.Generator,
    ridge: float = RIDGE,
    *,
    depth_known: bool = False,
) -> Population:
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
    there = expression > 0

    odds = _fit_odds(design, log_odds, there, ridge, depth_known=depth_known)
    value, spread = _fit_values(design, values, expression, there, ridge, depth_known=depth_known)
    return Population(pca.mean_, axes, odds, value, spread)


def shift_to(log_odds: NDArray[np.floating], lengths: NDArray[np.integer], rounds: int = 30) -> NDArray[np.float64]:
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
        p = _probability(log_odds + shift[:, None])
        slope = (p * (1 - p)).sum(axis=1, dtype=np.float64)
        step = np.clip((lengths - p.sum(axis=1, dtype=np.float64)) / np.maximum(slope, _EPS), -_MOST, _MOST)
        shift += step
        if np.abs(step).max(initial=0.0) < _EPS:
            break
    return shift


def _fit_odds(design: Matrix, offset: Matrix, there: NDArray[np.bool_], ridge: float, *, depth_known: bool) -> Matrix:
    d, n_genes = design.shape[1], offset.shape[1]
    lengths, often = there.sum(axis=1), there.sum(axis=0)
    # half a cell beside those counted: a gene that all or none express keeps finite odds
    often = np.clip(often, 0.5, len(there) - 0.5)
    found = np.zeros((d + 1, n_genes), dtype=np.float32)
    shift = np.zeros(len(design))
    pairs, upper = _products(design)
    for number in range(ROUNDS + 1):
        eta = offset + design @ found[:d] + found[d]
        for _ in range(STEPS):
            if not depth_known:
                shift += shift_to(eta + shift[:, None].astype(np.float32), lengths, rounds=1)
            p = _probability(eta + shift[:, None].astype(np.float32))
            step = (often - p.sum(axis=0, dtype=np.float64)) / np.maximum((p * (1 - p)).sum(axis=0), _EPS)
            step = np.clip(step, -_MOST, _MOST).astype(np.float32)
            found[d] += step
            eta += step
        if number == ROUNDS:  # the means have the last word
            break
        p = _probability(eta + shift[:, None].astype(np.float32))
        gradient = design.T @ (there - p) - ridge * found[:d]
        step = _solve(pairs, upper, p * (1 - p), gradient, ridge)
        # of a rare gene a whole step may go far beyond the best
        found[:d] += step * np.minimum(1, _MOST / np.maximum(np.abs(step).max(axis=0, initial=0.0), _EPS))
    return found


def _fit_values(
    design: Matrix, offset: Matrix, expression: Matrix, there: NDArray[np.bool_], ridge: float, *, depth_known: bool
) -> tuple[Matrix, Matrix]:
    d, genes = design.shape[1], np.maximum(there.sum(axis=0), 1)
    found = np.zeros((d + 1, offset.shape[1]), dtype=np.float32)
    found[d], left = _biases(np.where(there, expression - offset, 0.0), there, depth_known)
    pairs, upper = _products(design)
    found[:d] = _solve(pairs, upper, there.astype(np.float32), design.T @ left, ridge)
    # cells that express a gene are not spread evenly along the directions: its mean is to be met with them
    more, left = _biases(np.where(there, left - design @ found[:d], 0.0), there, depth_known)
    found[d] += more
    spread = np.sqrt(np.square(left).sum(axis=0) / genes)
    # of a gene that one or two cells express nothing is known: as the others
    known = there.sum(axis=0) > 2
    spread[~known] = np.median(spread[known]) if known.any() else 0.0
    return found, spread.astype(np.float32)


def _biases(left: Matrix, there: NDArray[np.bool_], depth_known: bool) -> tuple[Matrix, Matrix]:
    """Take each gene's mean off, and each cell's, its depth; the genes' `(n_genes,)`, and what is left."""
    number, genes = (np.maximum(there.sum(axis=axis, dtype=np.float32), 1) for axis in (1, 0))
    bias = np.zeros(there.shape[1], dtype=np.float32)
    for step in range(STEPS + 1):
        of_gene = left.sum(axis=0) / genes
        bias += of_gene
        left = np.where(there, left - of_gene, 0.0)
        if depth_known:
            break
        if step < STEPS:
            left = np.where(there, left - (left.sum(axis=1) / number)[:, None], 0.0)
    return bias, left


def _products(design: Matrix) -> tuple[Matrix, tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Products of all pairs of columns, `(n, d (d + 1) / 2)`, and which pairs they are."""
    upper = np.triu_indices(design.shape[1])
    return design[:, upper[0]] * design[:, upper[1]], upper


def _solve(
    pairs: Matrix,
    upper: tuple[NDArray[np.intp], NDArray[np.intp]],
    weight: NDArray[np.floating],
    right: NDArray[np.floating],
    ridge: float,
) -> NDArray[np.float64]:
    """Solve `(D' diag(w_g) D + ridge) x_g = r_g` for each gene; `(d, n_genes)`."""
    d = right.shape[0]
    found = np.empty(right.shape)
    for start in range(0, right.shape[1], CHUNK):
        some = slice(start, start + CHUNK)
        flat = weight[:, some].T @ pairs
        matrix = np.zeros((len(flat), d, d))
        matrix[:, upper[0], upper[1]] = flat
        matrix[:, upper[1], upper[0]] = flat
        matrix[:, np.arange(d), np.arange(d)] += ridge
        found[:, some] = np.linalg.solve(matrix, right[:, some].T.astype(np.float64)[:, :, None])[:, :, 0].T
    return found


def _probability(log_odds: NDArray[np.floating]) -> NDArray[np.floating]:
    # scipy's expit is as exact, and takes three times as long for float32
    with np.errstate(over="ignore"):
        found: NDArray[np.floating] = 1 / (1 + np.exp(-log_odds))
    return found
