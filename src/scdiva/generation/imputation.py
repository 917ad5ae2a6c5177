"""Expected values of genes in each cell, predicted while these genes are masked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from scdiva._rng import step_seed
from scdiva._settings import progress_bar
from scdiva.data.memory import InMemoryCells
from scdiva.generation.corrections import Matrix, fit_population
from scdiva.generation.states import CONTEXT, context_of, depth_of, drawn, expression_of, fit_to, predicted, states_of
from scdiva.models import ScDiVa

GENES = 256
"""Genes whose expected values are worked out together."""
N_FOLDS = 10
"""Parts of the genes that are masked in turn."""
RIDGE = 100.0
"""Penalty on corrections to what the model expects, in cells. The error of held-out counts falls up to 300 on PBMC and
on Kang's cells, and up to 30 on toy cells, unlike any it saw. To generate, where variance counts, 3 is better."""
KNOWN = 2000
"""Genes, those found in most cells, by which the depth of a cell is estimated."""
FEW = 10
"""Cells that show a gene, at which half of what they say of its mean, and of its values in shallow cells, is taken."""
LEAST_COUNT = 1e-6
"""Expected counts below this are taken for it: what is expected of one that is there no longer depends on it."""


def impute_genes(
    model: ScDiVa,
    cells: InMemoryCells,
    wanted: NDArray[np.int64],
    seed: int,
    keep_observed: bool = True,
    expressed: bool = False,
    one: NDArray[np.floating] | None = None,
) -> Iterator[tuple[NDArray[np.int64], Matrix, Matrix]]:
    """Mask a tenth of the genes at a time, and predict those of them that are asked for.

    Parameters
    ----------
    model
        With a state head, on the CPU.
    cells
        All of them, whole.
    wanted
        Genes asked for, as positions in `cells.measured`, ascending.
    seed
        Of the parts of genes and of the cells that are fitted to or read.
    keep_observed
        Whether observed values stay what they are, with a spread of 0.
    expressed
        Whether a gene's value where it is expressed is given, in place of its expectation.
    one
        Of cells of counts what one count is, before the logarithm, `(n_cells,)`: what is expressed is then a Poisson
        variable that is not zero.

    Yields
    ------
    Some of the genes wanted `(k,)`; their values and the spread around them, float32 `(n_cells, k)`.
    """
    n, measured, draw = cells.n_cells, cells.measured.astype(np.int64), np.random.default_rng(seed)
    fold = draw.permutation(np.arange(len(measured)) % N_FOLDS)
    around = np.sort(draw.permutation(n)[:CONTEXT])
    cells_around, among = cells.subset(around), np.full(n, -1)
    among[around] = np.arange(len(around))

    whole = states_of(model, cells)
    often = np.bincount(cells.tokens, minlength=int(measured.max()) + 1)[measured]
    known = np.sort(measured[np.argsort(-often, kind="stable")[:KNOWN]])
    of_known = fit_to(model, cells, whole, draw, known, RIDGE)
    odds, depth = depth_of(of_known, cells, whole)

    rows = drawn(n, len(measured) // N_FOLDS, draw)
    asked = [number for number in range(N_FOLDS) if (fold[wanted] == number).any()]
    for number in progress_bar(asked, desc="imputing", unit="part of the genes"):
        part = wanted[fold[wanted] == number]
        genes = measured[part]
        others = cells.keeping(~np.isin(cells.tokens, measured[fold == number]))
        states = states_of(model, others)._replace(own=among)
        context = None if model.query_head is None else context_of(model, cells_around, whole.take(around), genes)
        log_odds, value = predicted(model, genes, states, context)
        if context is not None:
            # Of values the mean of both heads: of three studies held out the query head's were far better in one, of
            # cells beside nuclei, and worse in two.
            value = np.float32(0.5) * (value + predicted(model, genes, states)[1])
        observed = expression_of(cells, genes)
        fitted = fit_population(
            states.state[rows],
            (log_odds + odds[:, None])[rows],
            (value + depth[:, None])[rows],
            observed[rows],
            # of its own, so that parts left out change nothing of the others
            np.random.default_rng(step_seed(seed, number, "impute")),
            RIDGE,
            depth_known=True,
            usual_spread=float(np.median(of_known.corrections.spread)),
        )
        log_odds, value = fitted.added(states.state, log_odds, value)
        chance = expit(log_odds + odds[:, None])
        for start in range(0, len(part), GENES):
            some = slice(start, start + GENES)
            shown = observed[:, some].toarray()
            found = expected_values(chance[:, some], value[:, some], fitted.spread[some], depth, shown, expressed, one)
            kept = (shown > 0) & keep_observed
            yield part[some], np.where(kept, shown, found[0]), np.where(kept, 0, found[1])


def expected_values(
    chance: Matrix,
    value: Matrix,
    width: Matrix,
    depth: Matrix,
    observed: Matrix,
    expressed: bool = False,
    one: NDArray[np.floating] | None = None,
) -> tuple[Matrix, Matrix]:
    """Combine the probability that genes are expressed and their values there to expected values and their spread.

    Values of the genes that a shallow cell shows are high, for one count is a large share of it: so it is of genes of
    few counts, not of abundant ones, and each gene has a slope of its own. And the expected counts of a gene add up to
    those observed.

    Parameters
    ----------
    chance, value
        `(n, k)`, probability that each cell expresses a gene, and its log-normalised value if so.
    width
        `(k,)`, standard deviation of observed values around `value`.
    depth
        `(n,)`, by how much the values of each cell lie above those predicted.
    observed
        `(n, k)`, log-normalised.
    expressed, one
        As for :func:`impute_genes`.

    Returns
    -------
    Expected values, or those of genes that are expressed, and standard deviations around them, `(n, k)` each.
    """
    there = observed > 0
    often = there.sum(axis=0)
    mean_depth = depth.mean()
    beyond = (depth - mean_depth)[:, None].astype(np.float32)
    value = value + np.float32(mean_depth)
    least = FEW * np.square(beyond).mean() + 1e-9
    slope = (np.where(there, observed - value, 0) * beyond).sum(axis=0) + least
    slope /= (there * np.square(beyond)).sum(axis=0) + least
    value = np.maximum(value + slope * beyond, 0)

    # the mean of a log-normal variable, of which the logarithm is what a head predicts
    more = np.square(width) / 2
    counted = np.expm1(observed).sum(axis=0) + chance.sum(axis=0)
    raised = np.log(counted / (chance * np.exp(value + more)).sum(axis=0))
    # of a gene that few cells show, its counts say little
    value = np.maximum(value + often / (often + FEW) * raised, 0)
    mean = np.log1p(chance * np.expm1(value + more))
    if not expressed:
        spread = np.sqrt(chance * (np.square(width) + np.square(value - mean)) + (1 - chance) * np.square(mean))
        return mean, spread
    mean = value if one is None else _where_counted(mean, one)
    return mean, np.sqrt(np.square(width) + np.square(value - mean))


def _where_counted(mean: Matrix, one: NDArray[np.floating]) -> Matrix:
    """Give what a gene of these expected values shows where it has a count at all: Poisson without its zeros."""
    unit = one[:, None]
    rate = np.maximum(np.expm1(mean) / unit, LEAST_COUNT)
    return np.asarray(np.log1p(unit * rate / -np.expm1(-rate)), dtype=np.float32)
