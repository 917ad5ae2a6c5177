"""The cells that `tl.generate` draws, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scdiva._constants import N_SPECIAL, TARGET_SUM
from scdiva._progress import progress_bar
from scdiva._rng import step_generator, step_seed
from scdiva._settings import settings
from scdiva.populations.corrections import shift_to
from scdiva.populations.counting import depth_of, draw_counts
from scdiva.populations.states import Fitted, States

if TYPE_CHECKING:
    from torch import Tensor

    from scdiva.models import ScDiVa
    from scdiva.train.adaptation import AdaptationCells

BATCH = 64
"""Cells whose log-odds are worked out together."""
_CERTAIN = 1e-7
"""Odds of a gene at least this far from certain either way: a race needs finite rates."""


class Order(NamedTuple):
    """Cells to draw: rows of the cells that their states come from, twice; their name; how far; how many."""

    one: NDArray[np.int64]
    two: NDArray[np.int64]
    name: str
    fraction: float
    n_cells: int


class Drawing(NamedTuple):
    """How cells are drawn, see :func:`scdiva.tl.generate`."""

    n_steps: int
    temperature: float
    use_transformer: bool
    from_state: bool


class Drawn(NamedTuple):
    """Cells drawn, ragged: tokens, log-normalised values, counts; and the number of the cell that each is like."""

    indptr: NDArray[np.int64]
    tokens: NDArray[np.int64]
    values: NDArray[np.float32]
    counts: NDArray[np.int64]
    source: NDArray[np.int64]


def place_orders(orders: list[Order], rows: NDArray[np.int64], draw: np.random.Generator) -> list[Order]:
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
    cells: AdaptationCells,
    states: States,
    orders: list[Order],
    fixed: dict[int, float],
    drawing: Drawing,
    seed: int,
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
    drawing
        How.
    seed
        Of all draws, with a cell's number.
    """
    one, two = (np.concatenate([getattr(order, part) for order in orders]) for part in ("one", "two"))
    fraction = np.repeat([order.fraction for order in orders], [order.n_cells for order in orders])
    pick = np.random.default_rng(step_seed(seed, 0, "length")).random(len(one)) < fraction
    source = np.where(pick, two, one)
    share = fraction[:, None].astype(np.float32)
    mixed = States(
        (1 - share) * states.state[one] + share * states.state[two],
        np.rint((1 - fraction) * states.n_genes[one] + fraction * states.n_genes[two]).astype(np.int64),
        None if states.group is None else (1 - share) * states.group[one] + share * states.group[two],
    )
    lengths = np.diff(cells.indptr)[source]
    gone = np.searchsorted(fitted.genes, sorted(fixed))
    never = np.zeros(len(fitted.genes), dtype=bool)
    never[gone] = True
    found: list[Cell] = []
    with progress_bar(desc="drawing cells", unit="cell", total=len(source)) as bar:
        for start in range(0, len(source), BATCH):
            some = np.arange(start, min(start + BATCH, len(source)))
            log_odds, values = fitted.expected(mixed.take(some))
            log_odds[:, never] = -np.inf
            own = [cells.values[cells.indptr[cell] : cells.indptr[cell + 1]] for cell in source[some]]
            # a cell of little depth has high values: what all of its genes share
            for i, number in enumerate(source[some]):
                genes = np.searchsorted(fitted.genes, cells.tokens[cells.indptr[number] : cells.indptr[number + 1]])
                values[i] += float(np.mean(own[i] - values[i, genes]))
            n_fixed = sum(value > 0 for value in fixed.values())
            wanted = np.clip(lengths[some] - n_fixed, 1, (~never).sum() - 1)
            log_odds += shift_to(log_odds, wanted)[:, None].astype(np.float32)
            for cell in _batch(fitted, some, mixed.take(some), log_odds, values, wanted, own, fixed, drawing, seed):
                found.append(cell)
                bar.update()
    parts = [np.concatenate([cell[part] for cell in found]) for part in range(3)]
    indptr = np.concatenate([[0], np.cumsum([len(cell[0]) for cell in found])])
    return Drawn(indptr, parts[0], parts[1], parts[2], source)


Cell = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]
"""Tokens, values and counts."""
Chosen = tuple[NDArray[np.int64], "NDArray[np.float32] | None"]
"""Genes of a cell, and the values expected of them, where they differ from what the state says."""


def _batch(
    fitted: Fitted,
    numbers: NDArray[np.int64],
    states: States,
    log_odds: NDArray[np.float32],
    values: NDArray[np.float32],
    wanted: NDArray[np.int64],
    own: list[NDArray[np.float32]],
    fixed: dict[int, float],
    drawing: Drawing,
    seed: int,
) -> Iterator[Cell]:
    draws = [np.random.default_rng(step_seed(seed, int(number), "cell")) for number in numbers]
    chosen: list[Chosen]
    if not drawing.use_transformer and drawing.from_state:
        chosen = [_race(*given) for given in zip(log_odds, wanted, draws, strict=True)]
    else:
        chosen = list(_sampled(fitted, numbers, states, log_odds, values, wanted, own, fixed, drawing, seed))
    for i, (genes, mean) in enumerate(chosen):
        mean = values[i, genes] if mean is None else mean
        yield _counted(fitted, genes, mean, own[i], fixed, draws[i])


def _race(log_odds: NDArray[np.float32], wanted: int, draw: np.random.Generator) -> tuple[NDArray[np.int64], None]:
    """Draw a number of genes, each as likely as its odds say: the first to arrive at rates -log(1 - p)."""
    from scipy.special import expit

    p = np.clip(expit(log_odds.astype(np.float64)), 0.0, 1 - _CERTAIN)
    with np.errstate(divide="ignore"):
        arrival = draw.exponential(size=len(p)) / -np.log1p(-p)
    return np.sort(np.argpartition(arrival, wanted - 1)[:wanted]), None


def _counted(
    fitted: Fitted,
    genes: NDArray[np.int64],
    expected: NDArray[np.floating],
    own: NDArray[np.float32],
    fixed: dict[int, float],
    draw: np.random.Generator,
) -> Cell:
    """Draw counts of the genes of a cell; values are relative to their sum, as those of the source are to its own."""
    depth, total = depth_of(own), float(np.expm1(own.astype(np.float64)).sum())
    counts = draw_counts(expected, fitted.population.spread[genes], depth, draw)
    shown = np.array([token for token, value in fixed.items() if value > 0], dtype=np.int64)
    given = np.array([fixed[token] for token in shown.tolist()], dtype=np.float64)
    left = max(total - float(np.expm1(given).sum()), TARGET_SUM / depth)
    values = np.log1p(left * counts / max(counts.sum(), 1))
    fixed_counts = np.maximum(1, np.rint(np.expm1(given) * depth / TARGET_SUM)).astype(np.int64)
    tokens = np.concatenate([fitted.genes[genes], shown])
    return (
        tokens,
        np.concatenate([values, given]).astype(np.float32),
        np.concatenate([counts, fixed_counts]),
    )


def _sampled(
    fitted: Fitted,
    numbers: NDArray[np.int64],
    states: States,
    log_odds: NDArray[np.float32],
    values: NDArray[np.float32],
    wanted: NDArray[np.int64],
    own: list[NDArray[np.float32]],
    fixed: dict[int, float],
    drawing: Drawing,
    seed: int,
) -> Iterator[Chosen]:
    """Draw by the sampler, a cell a call, as many at a time as there are threads."""
    import torch

    from scdiva.models.inference import open_encoder

    most = fitted.model.config.max_length

    def given(at: int) -> tuple[Tensor, ...]:
        shown = [(token, value) for token, value in fixed.items() if value > 0]
        length = len(shown) + int(min(wanted[at], most - len(shown)))
        bounds = torch.tensor([0, length], dtype=torch.int32)
        start = torch.tensor([[token, value] for token, value in shown], dtype=torch.float32).reshape(-1, 2)
        prompt = (torch.from_numpy(part[at : at + 1].copy()) for part in (states.state, log_odds, values))
        spread = torch.tensor([depth_of(own[at])], dtype=torch.float64)
        return (torch.empty(length), start, bounds, torch.tensor(int(numbers[at])), *prompt, spread)

    with open_encoder(fitted.model, threads=settings.threads, what=_drawn_by(fitted, fixed, drawing, seed)) as encode:
        for found in encode(given, range(len(numbers))):
            genes = np.searchsorted(fitted.genes, found[:, 0].astype(np.int64))
            # the values drawn on the way are drawn anew with those of the whole cell: means are what is handed on
            yield genes, found[:, 1]


def _drawn_by(fitted: Fitted, fixed: dict[int, float], drawing: Drawing, seed: int) -> Callable[..., Tensor]:
    """Make a read-out that draws one cell: tokens and the values expected of them, `(n, 2)`."""
    import torch

    from scdiva._constants import MASK
    from scdiva.diffusion import sample
    from scdiva.models.denoiser import Prompt, denoiser_of

    tokens_of = torch.from_numpy(fitted.genes)
    spread = fitted.population.spread
    place = np.full(int(fitted.genes.max()) + 1, -1)
    place[fitted.genes] = np.arange(len(fitted.genes))
    allowed = torch.ones(fitted.model.config.n_genes, dtype=torch.bool)
    allowed[[token - N_SPECIAL for token in fixed]] = False  # shown already, or not expressed

    def draw(
        model: ScDiVa, blank: Tensor, start: Tensor, bounds: Tensor, number: Tensor, state: Tensor, log_odds: Tensor,
        values: Tensor, depth: Tensor,
    ) -> Tensor:  # fmt: skip
        tokens = torch.full((len(blank),), MASK, dtype=torch.int64)
        shown = torch.zeros(len(blank))
        tokens[: len(start)], shown[: len(start)] = start[:, 0].long(), start[:, 1]
        prompt = Prompt(state, log_odds, values) if drawing.from_state else None
        generator = step_generator(seed, int(number), "generate")
        by_count = np.random.default_rng(step_seed(seed, int(number), "values"))
        mean = torch.zeros(int(fitted.genes.max()) + 1)

        def drawn(expected: Tensor, cells: Tensor, genes: Tensor) -> Tensor:
            mean[genes + N_SPECIAL] = expected.float()
            width = spread[place[(genes + N_SPECIAL).numpy()]]
            counts = draw_counts(expected.numpy(), width, float(depth), by_count)
            return torch.from_numpy(np.log1p(TARGET_SUM * counts / float(depth))).to(expected.dtype)

        made = sample(
            denoiser_of(model, prompt=prompt, genes=tokens_of, stream=drawing.use_transformer),
            tokens,
            shown,
            bounds,
            n_steps=drawing.n_steps,
            remasking="random",
            temperature=drawing.temperature,
            allowed=allowed,
            draw_values=drawn,
            generator=generator,
        )
        new = made.tokens[len(start) :]
        return torch.stack([new.float(), mean[new]], dim=1)

    return draw
