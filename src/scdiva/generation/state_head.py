"""Expression predicted by a model's state head and by its query head, and corrections to it fitted to a dataset.

`tl.generate` draws cells from the corrected predictions, and `tl.impute` computes expected values from them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import ArrayLike, NDArray

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import InMemoryCells
from scdiva.models import ScDiVa
from scdiva.models.queries import Context

Matrix = NDArray[np.float32]
Ints = NDArray[np.int64]

N_COMPONENTS = 20
"""Principal components of the cell states on which the corrections depend."""
RIDGE = 3.0
"""Penalty on their coefficients, in cells, for generation, where the variance between cells matters."""
ROUNDS, STEPS = 5, 5
"""Number of rounds of the fit, and of Newton steps of shifts and biases in each; the coefficients have one step per
round."""
BLOCK, WIDER = 2**19, 16
"""Number of probabilities per block, which fit into the cache of a processor; blocks are 16 times as large for matrix
products."""
MAX_STEP = 0.5
"""Maximum Newton step of a coefficient, a bias or a shift."""
EPS = 1e-6
MAX_VALUES = 40_000_000
"""Maximum number of values (cells × genes) in a fit; of a larger dataset, a random subset of cells is used."""
BATCH = 256
"""Cells per batch."""
CONTEXT, MIN_CONTEXT = 256, 16
"""Maximum number of context cells of a query head, and the minimum with which it was trained."""
QUERIES = 20_000
"""Queries (cells × genes) per batch of a query head."""


class States(NamedTuple):
    """Cell states and the other inputs of the heads.

    Attributes
    ----------
    state
        `(n, state_dim)`.
    n_genes
        `(n,)`, number of genes from which each state was computed.
    group
        `(n, n_groups)`, share of each cell that belongs to a group, if corrections depend on groups.
    own_row
        `(n,)`, row of the cell among the context cells; -1: none.
    """

    state: Matrix
    n_genes: Ints
    group: Matrix | None = None
    own_row: Ints | None = None

    def take(self, rows: NDArray[np.integer]) -> States:
        """Select cells."""
        return States(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def with_groups(self) -> Matrix:
        """States and groups in one matrix: the features of the corrections."""
        return self.state if self.group is None else np.concatenate([self.state, self.group], axis=1)


class Corrections(NamedTuple):
    """Corrections to a state head, see :func:`fit_corrections`.

    Attributes
    ----------
    mean, axes
        `(dim,)` and `(dim, d)`: principal components of the states, scaled to unit variance.
    log_odds, values
        `(d + 1, n_genes)`, coefficients for the log-odds and the value of each gene; the last row is the bias.
    spread
        `(n_genes,)`, standard deviation of the observed values of a gene around the predicted ones.
    """

    mean: NDArray[np.float64]
    axes: NDArray[np.float64]
    log_odds: Matrix
    values: Matrix
    spread: Matrix

    def apply(self, states: NDArray[np.floating], log_odds: Matrix, values: Matrix) -> tuple[Matrix, Matrix]:
        """Correct the log-odds and values `(n, n_genes)` that the model predicts for cells of these states."""
        components = (states - self.mean) @ self.axes
        design = np.concatenate([components, np.ones((len(components), 1))], axis=1).astype(np.float32)
        return log_odds + design @ self.log_odds, values + design @ self.values


class Fitted(NamedTuple):
    """A model's state head with corrections fitted to a dataset; `genes` are tokens, ascending."""

    model: ScDiVa
    genes: Ints
    corrections: Corrections

    def predict(self, states: States) -> tuple[Matrix, Matrix]:
        """Log-odds that cells of these states express each gene, and its value if so, `(n, n_genes)` each."""
        return self.corrections.apply(states.with_groups(), *predict(self.model, self.genes, states))


@contextlib.contextmanager
def on_cpu(model: ScDiVa) -> Iterator[None]:
    """Move a model to the CPU within the block."""
    device = next(model.parameters()).device
    try:
        model.to("cpu")
        yield
    finally:
        model.to(device)


def states_of(model: ScDiVa, cells: InMemoryCells) -> States:
    """Cell states by the set encoder, each from all genes of the cell."""
    states = np.empty((cells.n_cells, model.state_dim), dtype=np.float32)
    with torch.inference_mode():
        for rows in _batches(cells.n_cells):
            state = model.encode_anchor(*cells.take(rows, model.config.input_length).packed)
            assert state is not None
            states[rows] = state.float().numpy()
    return States(states, np.diff(cells.indptr).astype(np.int64))


def _batches(n_cells: int) -> list[Ints]:
    return [np.arange(start, min(start + BATCH, n_cells)) for start in range(0, n_cells, BATCH)]


def expression_of(cells: InMemoryCells, genes: Ints) -> sp.csr_matrix:
    """Log-normalised expression of genes, given by their tokens: float32 CSR `(n_cells, n_genes)`."""
    return cells.matrix(max(int(cells.tokens.max(initial=0)), int(genes.max(initial=0))) + 1)[:, genes]


def context_of(model: ScDiVa, cells: InMemoryCells, states: States, genes: Ints) -> Context:
    """Context of a query head, on the CPU: the states of complete cells and their expression of the genes."""
    head, values = model.state_head, torch.from_numpy(expression_of(cells, genes).toarray())
    assert head is not None
    state, n_genes = torch.from_numpy(states.state), torch.from_numpy(states.n_genes)
    with torch.inference_mode():
        mean = head(state, n_genes).mean(dim=0, keepdim=True)
        log_odds = head.log_odds(mean, torch.from_numpy(genes - N_SPECIAL))[0]
    return Context(state, n_genes, values, (values > 0).to(values.dtype), log_odds)


@torch.inference_mode()
def predict(model: ScDiVa, genes: Ints, states: States, context: Context | None = None) -> tuple[Matrix, Matrix]:
    """Uncorrected log-odds and values of genes, by the state head, or by the query head if there is a context."""
    head, numbers = model.state_head, torch.from_numpy(genes - N_SPECIAL)
    assert head is not None
    state, n_genes = torch.from_numpy(states.state), torch.from_numpy(states.n_genes)
    head_hidden = head(state, n_genes)
    log_odds, values = head.log_odds(head_hidden, numbers).float(), head.values(head_hidden, numbers).float()
    if context is not None:
        assert model.query_head is not None
        own_row = None if states.own_row is None else torch.from_numpy(states.own_row)
        step = max(1, QUERIES // max(len(genes), 1))
        for start in range(0, len(state), step):
            part = slice(start, start + step)
            log_odds[part], values[part] = model.query_head.table(
                state[part], head_hidden[part], n_genes[part], numbers, log_odds[part], values[part], context,
                own_row=None if own_row is None else own_row[part],
            )  # fmt: skip
    return log_odds.numpy(), values.numpy()


def fit_state_head(
    model: ScDiVa,
    cells: InMemoryCells,
    states: States,
    rng: np.random.Generator,
    genes: Ints | None = None,
    ridge: float = RIDGE,
) -> Fitted:
    """Fit corrections of a model's state head to cells.

    Parameters
    ----------
    model
        On the CPU; not changed.
    cells, states
        The cells and their states.
    rng
        Draws the cells that are used, if there are too many, and the start of the decomposition.
    genes
        Tokens, ascending; None: all measured genes.
    ridge
        Penalty on the corrections, in cells.
    """
    genes = cells.measured.astype(np.int64) if genes is None else genes
    rows = fitting_rows(cells.n_cells, len(genes), rng)
    used, observed = states.take(rows), expression_of(cells.subset(rows), genes)
    predicted = predict(model, genes, used)
    return Fitted(model, genes, fit_corrections(used.with_groups(), *predicted, observed, rng, ridge))


def fitting_rows(n_cells: int, n_genes: int, rng: np.random.Generator) -> NDArray[np.integer]:
    """Rows of the cells that corrections are fitted to: all, or a random subset if there are too many."""
    rows, n_max = np.arange(n_cells), max(2, MAX_VALUES // max(n_genes, 1))
    return rows if n_cells <= n_max else np.sort(rng.choice(rows, n_max, replace=False))


def depth_of(fitted: Fitted, cells: InMemoryCells, states: States) -> tuple[Matrix, Matrix]:
    """Depth of each cell: mean difference of its log-odds and of its values from those predicted, `(n,)` each."""
    odds, values = np.empty((2, cells.n_cells), dtype=np.float32)
    for rows in _batches(cells.n_cells):
        observed = expression_of(cells.subset(rows), fitted.genes).toarray()
        log_odds, expected = fitted.predict(states.take(rows))
        number = (observed > 0).sum(axis=1)
        odds[rows] = shift_to(log_odds, np.clip(number, 0.5, observed.shape[1] - 0.5))
        values[rows] = np.where(observed > 0, observed - expected, 0).sum(axis=1) / np.maximum(number, 1)
    return odds, values


def fit_corrections(
    states: NDArray[np.floating],
    log_odds: Matrix,
    values: Matrix,
    expression: sp.csr_matrix | Matrix,
    rng: np.random.Generator,
    ridge: float = RIDGE,
    *,
    depth_known: bool = False,
    default_spread: float | None = None,
) -> Corrections:
    r"""Fit corrections of predicted log-odds and values to a dataset, gene by gene.

    For each gene, whether a cell expresses it is fitted by logistic regression on the leading principal components of
    the states, with the model's log-odds as offset and a quadratic penalty on all coefficients but the bias. Each cell
    has a shift of its log-odds, by which its expected number of expressed genes equals the observed one (a conditional
    likelihood given the number, to first order). The values of expressed genes are fitted by ridge regression with the
    model's values as offset. So the means of the dataset are met gene by gene. States that are all equal have no
    components, and only biases are fitted.

    Parameters
    ----------
    states
        `(n, dim)`, of complete cells.
    log_odds, values
        `(n, n_genes)`, predicted by the model.
    expression
        `(n, n_genes)`, log-normalised; 0 if a gene is not expressed. Each cell expresses some genes, none all of them.
    rng
        Draws the start of the decomposition.
    ridge
        Penalty, in cells: a coefficient that is supported by as many cells is halved.
    depth_known
        Whether `log_odds` and `values` contain the shift and depth of each cell, as they must if only some of the
        genes are fitted. False: both are fitted.
    default_spread
        Spread of genes that fewer than three cells express. None: the median of the other genes.
    """
    from sklearn.decomposition import PCA

    n, dim = states.shape
    pca = PCA(max(1, min(N_COMPONENTS, n - 1, dim)), svd_solver="randomized", random_state=int(rng.integers(2**31)))
    with np.errstate(invalid="ignore"):  # equal states have no variance, and sklearn divides by it
        components = pca.fit_transform(states.astype(np.float64))
    scale = components.std(axis=0)
    varying = scale > EPS * max(float(scale.max(initial=0.0)), EPS)
    design = (components[:, varying] / scale[varying]).astype(np.float32)
    observed = sp.csr_matrix(expression)
    odds = _fit_odds(design, log_odds, observed, ridge, depth_known)
    value, spread = _fit_values(design, values, observed, ridge, depth_known, default_spread)
    return Corrections(pca.mean_, pca.components_[varying].T / scale[varying], odds, value, spread)


def shift_to(log_odds: NDArray[np.floating], lengths: ArrayLike) -> NDArray[np.float64]:
    """Shift of each cell's log-odds by which its expected number of expressed genes equals a given number.

    Parameters
    ----------
    log_odds
        `(n, n_genes)`; -inf for a gene that cannot be expressed.
    lengths
        `(n,)`, above 0 and below the number of genes that can be expressed.

    Returns
    -------
    float64 `(n,)`.
    """
    shift = np.zeros(len(log_odds))
    for _ in range(30):
        step = _newton_step(_sigmoid(log_odds + shift[:, None]), lengths)
        shift += step
        if np.abs(step).max(initial=0.0) < EPS:
            break
    return shift


def _newton_step(p: NDArray[np.floating], lengths: ArrayLike) -> NDArray[np.float64]:
    """Newton step of each cell's shift, from the probabilities `(n, n_genes)` at the present one."""
    slope = (p * (1 - p)).sum(axis=1, dtype=np.float64)
    step: NDArray[np.float64] = (np.asarray(lengths) - p.sum(axis=1, dtype=np.float64)) / np.maximum(slope, EPS)
    return step.clip(-MAX_STEP, MAX_STEP)


def _fit_odds(design: Matrix, offset: Matrix, observed: sp.csr_matrix, ridge: float, depth_known: bool) -> Matrix:
    """Coefficients and biases `(d + 1, n_genes)` of the penalised logistic regressions."""
    (n, d), n_genes = design.shape, offset.shape[1]
    lengths = observed.getnnz(axis=1)
    # half a cell more or less: a gene that no cell or every cell expresses has finite odds
    n_expressing = np.clip(observed.getnnz(axis=0), 0.5, n - 0.5)
    coefficients, shift = np.zeros((d + 1, n_genes), dtype=np.float32), np.zeros((n, 1), dtype=np.float32)
    pairs = _column_products(design)
    observed_sums = (_indicator(observed).T @ design).T
    step = max(1, BLOCK // n_genes)
    blocks, wide_blocks = ([slice(i, i + size) for i in range(0, n, size)] for size in (step, WIDER * step))

    def probability(rows: slice) -> Matrix:
        return _sigmoid(log_odds[rows] + coefficients[d] + shift[rows])

    for number in range(ROUNDS + 1):
        log_odds = offset + design @ coefficients[:d]
        for _ in range(STEPS):
            expected, slope = np.zeros((2, n_genes))
            for rows in blocks:
                if not depth_known:
                    shift[rows, 0] += _newton_step(probability(rows), lengths[rows])
                p = probability(rows)
                expected += p.sum(axis=0, dtype=np.float64)
                slope += (p * (1 - p)).sum(axis=0)
            coefficients[d] += np.clip((n_expressing - expected) / np.maximum(slope, EPS), -MAX_STEP, MAX_STEP)
        if number == ROUNDS:  # the biases are fitted last, so that the means are met
            break
        expected_sums, weights = np.zeros((d, n_genes)), np.zeros((n_genes, pairs.shape[1]))
        for rows in wide_blocks:
            p = probability(rows)
            expected_sums += design[rows].T @ p
            weights += (p * (1 - p)).T @ pairs[rows]
        change = _solve(weights, observed_sums - expected_sums - ridge * coefficients[:d], ridge)
        # a full Newton step of a rare gene may overshoot
        coefficients[:d] += change * np.minimum(1, MAX_STEP / np.maximum(np.abs(change).max(axis=0, initial=0.0), EPS))
    return coefficients


def _fit_values(
    design: Matrix,
    offset: Matrix,
    observed: sp.csr_matrix,
    ridge: float,
    depth_known: bool,
    default_spread: float | None,
) -> tuple[Matrix, Matrix]:
    """Coefficients and biases `(d + 1, n_genes)` of the ridge regressions, and the residual standard deviations."""
    d, n_expressing = design.shape[1], observed.getnnz(axis=0)
    entries = observed.tocoo()
    cell, gene = entries.row, entries.col
    coefficients = np.zeros((d + 1, offset.shape[1]), dtype=np.float32)
    coefficients[d], residual = _centred(entries, entries.data - offset[cell, gene], depth_known)
    sums = (sp.csr_matrix((residual, (cell, gene)), shape=observed.shape).T @ design).T
    coefficients[:d] = _solve(_indicator(observed).T @ _column_products(design), sums, ridge)
    # the components have no mean of zero over the cells that express a gene, so the biases change
    change, residual = _centred(entries, residual - (design @ coefficients[:d])[cell, gene], depth_known)
    coefficients[d] += change
    spread = np.sqrt(np.bincount(gene, np.square(residual), len(n_expressing)) / np.maximum(n_expressing, 1))
    has_estimate = n_expressing > 2
    if default_spread is None:
        default_spread = float(np.median(spread[has_estimate])) if has_estimate.any() else 0.0
    spread[~has_estimate] = default_spread
    return coefficients, spread.astype(np.float32)


def _centred(
    entries: sp.coo_matrix, residual: NDArray[np.float64], depth_known: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean residual of each gene, and the residuals without it and, unless known, without the depth of each cell."""
    cell, gene, shape = entries.row, entries.col, entries.shape
    n_of_cell, n_of_gene = np.maximum(entries.getnnz(axis=1), 1), np.maximum(entries.getnnz(axis=0), 1)
    bias = np.zeros(shape[1])
    for step in range(1 if depth_known else STEPS + 1):
        if step:
            residual = residual - (np.bincount(cell, residual, shape[0]) / n_of_cell)[cell]
        mean = np.bincount(gene, residual, shape[1]) / n_of_gene
        bias += mean
        residual = residual - mean[gene]
    return bias, residual


def _indicator(observed: sp.csr_matrix) -> sp.csr_matrix:
    return sp.csr_matrix((np.ones(observed.nnz, np.float32), observed.indices, observed.indptr), shape=observed.shape)


def _column_products(design: Matrix) -> Matrix:
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


def _sigmoid(log_odds: NDArray[np.floating]) -> NDArray[np.floating]:
    # as exact as scipy's expit, and several times as fast for float32
    return torch.from_numpy(log_odds).sigmoid_().numpy()
