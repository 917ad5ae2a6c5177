"""New cells, drawn one at a time from what cells of a state express.

Values are drawn as counts give them: a normal distribution on the log-normalised values that counts of a cell can have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from scdiva._constants import MASK, N_SPECIAL, TARGET_SUM
from scdiva._rng import step_generator, step_seed
from scdiva._settings import progress_bar, settings
from scdiva.data.memory import InMemoryCells
from scdiva.diffusion import sample
from scdiva.generation.corrections import Matrix, shift_to
from scdiva.generation.states import Fitted, States
from scdiva.models import ScDiVa
from scdiva.models.denoiser import denoiser_of
from scdiva.models.inference import open_encoder

Ints = NDArray[np.int64]
BATCH = 64
"""Cells whose log-odds are worked out together."""
N_STEPS = 8
"""Steps in which genes are revealed where no state is given."""
_CERTAIN = 1e-7
"""Odds of a gene at least this far from certain either way: a race needs finite rates."""
N_COUNTS = 96
"""Most counts distinguished in one cell; large ones stand for those around them."""
N_MEANS, N_SPREADS = 120, 10
"""Fineness of the table of distributions: where they are centred, how wide they are."""
SPREADS = (0.1, 2.5)
_BELOW = 3.0
"""How far below log1p of a single count a distribution may be centred: nearly all of it is then at that count."""


class Order(NamedTuple):
    """Cells to draw: rows of the cells that their states come from, twice; their name; share of the second; number."""

    one: Ints
    two: Ints
    name: str
    fraction: float
    n_cells: int


class Drawn(NamedTuple):
    """Cells drawn, ragged: tokens, log-normalised values, counts; and the number of the cell that each is like."""

    indptr: Ints
    tokens: Ints
    values: NDArray[np.float32]
    counts: Ints
    source: Ints


def place_orders(orders: list[Order], rows: Ints, draw: np.random.Generator) -> list[Order]:
    """Turn rows of adata into numbers of cells that were read, and draw as many as each order asks for.

    Raises
    ------
    ValueError
        If none of the rows was read.
    """
    number = np.full(int(rows.max()) + 1, -1, dtype=np.int64)
    number[rows] = np.arange(len(rows))
    placed = []
    for order in orders:
        pools = []
        for pool in (order.one, order.two):
            own = number[pool[pool < len(number)]]
            own = own[own >= 0]
            if not len(own):
                raise ValueError(f"No cell of {order.name!r} has a gene that the model knows: nothing to start from.")
            pools.append(draw.choice(own, order.n_cells))
        placed.append(order._replace(one=pools[0], two=pools[1] if order.fraction else pools[0]))
    return placed


def draw_cells(
    fitted: Fitted,
    cells: InMemoryCells,
    states: States,
    orders: list[Order],
    fixed: dict[int, float],
    from_state: bool,
    seed: int,
    n_steps: int = N_STEPS,
) -> Drawn:
    """Draw all cells.

    Parameters
    ----------
    fitted
        What cells of a state express.
    cells, states
        Those that states, numbers of genes and depths are taken from.
    orders
        Of :func:`place_orders`.
    fixed
        Values of genes that every cell shows, by token.
    from_state
        Whether the states are given, or read from what of a cell is drawn already.
    seed
        Of all draws, with a cell's number.
    n_steps
        Steps in which genes are revealed where no states are given.
    """
    one, two, fraction, source = mixture(orders, seed)
    share = fraction[:, None].astype(np.float32)
    mixed = States(
        (1 - share) * states.state[one] + share * states.state[two],
        np.rint((1 - fraction) * states.n_genes[one] + fraction * states.n_genes[two]).astype(np.int64),
        None if states.group is None else (1 - share) * states.group[one] + share * states.group[two],
    )
    found: list[tuple[Ints, Matrix, Ints]] = []
    with progress_bar(desc="drawing cells", unit="cell", total=len(source)) as bar:
        for start in range(0, len(source), BATCH):
            numbers = np.arange(start, min(start + BATCH, len(source)))
            shown = [slice(cells.indptr[cell], cells.indptr[cell + 1]) for cell in source[numbers]]
            log_odds, values, n_genes = _expected(fitted, cells, mixed.take(numbers), shown, fixed)
            own = [cells.values[at] for at in shown]
            draws = [np.random.default_rng(step_seed(seed, int(number), "cell")) for number in numbers]
            chosen: Iterator[tuple[Ints, Matrix]]
            if from_state:
                raced = map(_race, log_odds, n_genes, draws)
                chosen = ((genes, values[i, genes]) for i, genes in enumerate(raced))
            else:
                chosen = _sampled(fitted, numbers, n_genes, own, fixed, seed, n_steps)
            for i, (genes, mean) in enumerate(chosen):
                found.append(_counted(fitted, genes, mean, own[i], fixed, draws[i]))
                bar.update()
    return gathered(found, source)


def mixture(orders: list[Order], seed: int) -> tuple[Ints, Ints, NDArray[np.float64], Ints]:
    """Say of each new cell between which two cells it lies, how far from the first, and which gives its depth.

    Parameters
    ----------
    orders
        Of :func:`place_orders`.
    seed
        Of the draw of the last, either of the two.
    """
    one, two = (np.concatenate([getattr(order, part) for order in orders]) for part in ("one", "two"))
    fraction = np.repeat([order.fraction for order in orders], [order.n_cells for order in orders])
    pick = np.random.default_rng(step_seed(seed, 0, "length")).random(len(one)) < fraction
    return one, two, fraction, np.where(pick, two, one)


def gathered(found: list[tuple[Ints, Matrix, Ints]], source: Ints) -> Drawn:
    """Join cells, each with tokens, values and counts.

    Parameters
    ----------
    found
        The cells.
    source
        Number of the cell that each is like.
    """
    parts = [np.concatenate([cell[part] for cell in found]) for part in range(3)]
    indptr = np.concatenate([[0], np.cumsum([len(cell[0]) for cell in found])])
    return Drawn(indptr, parts[0], parts[1], parts[2], source)


def _expected(
    fitted: Fitted, cells: InMemoryCells, states: States, shown: list[slice], fixed: dict[int, float]
) -> tuple[Matrix, Matrix, Ints]:
    """Work out log-odds and values `(n, n_genes)` of cells as deep as those of the data, and how many genes they show.

    The odds of genes that may not be drawn are -inf.
    """
    log_odds, values = fitted.expected(states)
    never = np.isin(fitted.genes, list(fixed))
    log_odds[:, never] = -np.inf
    for i, at in enumerate(shown):  # a cell of little depth has high values: what all of its genes share
        own = cells.values[at]
        values[i] += float(np.mean(own - values[i, np.searchsorted(fitted.genes, cells.tokens[at])]))
    n_fixed = sum(value > 0 for value in fixed.values())
    n_genes = np.clip([at.stop - at.start - n_fixed for at in shown], 1, (~never).sum() - 1)
    log_odds += shift_to(log_odds, n_genes)[:, None].astype(np.float32)
    return log_odds, values, n_genes


def _race(log_odds: Matrix, n_genes: int, draw: np.random.Generator) -> Ints:
    """Draw a number of genes, each as likely as its odds say: the first to arrive at rates -log(1 - p)."""
    p = np.clip(expit(log_odds.astype(np.float64)), 0.0, 1 - _CERTAIN)
    with np.errstate(divide="ignore"):
        arrival = draw.exponential(size=len(p)) / -np.log1p(-p)
    return np.sort(np.argpartition(arrival, n_genes - 1)[:n_genes])


def _counted(
    fitted: Fitted,
    genes: Ints,
    expected: NDArray[np.floating],
    own: Matrix,
    fixed: dict[int, float],
    draw: np.random.Generator,
) -> tuple[Ints, Matrix, Ints]:
    """Draw counts of the genes of a cell; give tokens, values, whose sum is that of the source's own, and counts."""
    counts = draw_counts(expected, fitted.corrections.spread[genes], total_count(own), draw)
    return as_cell(fitted.genes[genes], counts, own, fixed)


def as_cell(tokens: Ints, counts: Ints, own: Matrix, fixed: dict[int, float]) -> tuple[Ints, Matrix, Ints]:
    """Make a cell of counts and of fixed values.

    Parameters
    ----------
    tokens, counts
        Genes that are not fixed, and their counts.
    own
        Values of the cell whose depth and sum the new one has.
    fixed
        Values of genes that every cell shows, by token.

    Returns
    -------
    Tokens, log-normalised values, whose counts add up to those of `own`, and counts.
    """
    depth, total = total_count(own), float(np.expm1(own.astype(np.float64)).sum())
    shown = np.array([token for token, value in fixed.items() if value > 0], dtype=np.int64)
    given = np.array([fixed[token] for token in shown.tolist()], dtype=np.float64)
    left = max(total - float(np.expm1(given).sum()), TARGET_SUM / depth)
    values = np.log1p(left * counts / max(counts.sum(), 1))
    fixed_counts = np.maximum(1, np.rint(np.expm1(given) * depth / TARGET_SUM)).astype(np.int64)
    return (
        np.concatenate([tokens, shown]),
        np.concatenate([values, given]).astype(np.float32),
        np.concatenate([counts, fixed_counts]),
    )


def _sampled(
    fitted: Fitted,
    numbers: Ints,
    n_genes: Ints,
    own: list[Matrix],
    fixed: dict[int, float],
    seed: int,
    n_steps: int,
) -> Iterator[tuple[Ints, Matrix]]:
    """Draw genes, and the values expected of them, step by step; as many cells at a time as there are threads."""
    shown = {token: value for token, value in fixed.items() if value > 0}
    start = torch.from_numpy(np.searchsorted(fitted.genes, list(shown))) + N_SPECIAL
    genes, given = torch.from_numpy(fitted.genes), torch.tensor(list(shown.values()))
    allowed = torch.from_numpy(~np.isin(fitted.genes, list(fixed)))  # others are shown already, or not expressed
    most = fitted.model.config.max_length - len(shown)

    def draw(model: ScDiVa, number: Tensor) -> Tensor:
        """Draw one cell: tokens and the values expected of them, `(n, 2)`."""
        at = int(number)
        length = len(shown) + int(min(n_genes[at], most))
        tokens, values = torch.full((length,), MASK, dtype=torch.int64), torch.zeros(length)
        tokens[: len(shown)], values[: len(shown)] = start, given
        cell, depth = int(numbers[at]), total_count(own[at])
        by_count = np.random.default_rng(step_seed(seed, cell, "values"))
        mean = torch.zeros(len(genes))

        def drawn(expected: Tensor, _: Tensor, which: Tensor) -> Tensor:
            mean[which] = expected.float()
            counts = draw_counts(expected.numpy(), fitted.corrections.spread[which.numpy()], depth, by_count)
            return torch.from_numpy(np.log1p(TARGET_SUM * counts / depth)).to(expected.dtype)

        made = sample(
            denoiser_of(model, genes=genes, stream=False),
            tokens,
            values,
            torch.tensor([0, length], dtype=torch.int32),
            n_steps=n_steps,
            remasking="random",
            allowed=allowed,
            draw_values=drawn,
            by_cell=True,
            generator=step_generator(seed, cell, "generate"),
        )
        new = made.tokens[len(shown) :] - N_SPECIAL
        # the values drawn on the way are drawn anew with those of the whole cell: means are what is handed on
        return torch.stack([new.float(), mean[new]], dim=1)

    with open_encoder(fitted.model, threads=settings.threads, what=draw) as encode:
        for found in encode(lambda at: (torch.tensor(at),), range(len(numbers))):
            yield found[:, 0].astype(np.int64), found[:, 1]


def total_count(values: NDArray[np.floating]) -> float:
    """Total count of a cell, taking the least of its log-normalised values above zero for a single count."""
    return float(TARGET_SUM / np.expm1(float(values.min())))


def draw_counts(
    expected: NDArray[np.floating], spread: NDArray[np.floating], depth: float, rng: np.random.Generator
) -> Ints:
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
        part = np.clip(np.divide(expected - below, step, out=np.zeros(len(expected)), where=step > 1e-12), 0, 1)
        at = np.where(chance < part, at, at - 1)
        # the mean counts for more than the spread: it is off only where no distribution of this spread has it
        reached = below + part * (above - below)
        off = np.abs(deviation[number][at] - spread) + 2 * np.abs(reached - expected)
        better = off < best
        best[better], which[better], where[better] = off[better], number, at[better]
    drawn = (p[which, where].cumsum(axis=1) < rng.random(len(expected))[:, None]).sum(axis=1)
    return np.asarray(counts[np.minimum(drawn, len(counts) - 1)], dtype=np.int64)
