"""New cells, drawn from a model's state head or by the reverse diffusion process of its transformer.

Values are drawn as counts: from a normal distribution restricted to the log-normalised values that counts can have.
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
from scdiva._settings import progress_bar, settings, torch_threads_kept
from scdiva.data.batch import InMemoryCells
from scdiva.diffusion import sample
from scdiva.diffusion.ranks import Ranked
from scdiva.diffusion.sampler import Denoiser
from scdiva.generation.state_head import Fitted, Ints, Matrix, States, shift_to
from scdiva.models.heads import Expected
from scdiva.models.inference import RunConfig, embed_all, open_encoder
from scdiva.models.queries import Context
from scdiva.models.scdiva import ScDiVa, ScDiVaOutput
from scdiva.tokenizer.serialize import score_denominator


# --- a model as denoiser ----------------------------------------------------------------------------------------------
def denoiser_of(
    model: ScDiVa,
    *,
    denominator: Tensor | None = None,
    rank_mask: Tensor | None = None,
    context: Context | None = None,
    own_row: Tensor | None = None,
    genes: Tensor | None = None,
    stream: bool = True,
    state: Tensor | None = None,
) -> Denoiser:
    """Denoiser of a model for :func:`scdiva.diffusion.sample` and :func:`scdiva.diffusion.log_likelihood`.

    Parameters
    ----------
    model
        In evaluation mode.
    denominator
        Divisor of the values in the ranking, float32 `(n_tokens,)`. If passed, the prior of a masked gene from its rank
        is added to its logits (:func:`scdiva.diffusion.rank_log_prior`); requires a state head, which predicts the
        values. None: no prior. The transformer uses the ranks in any case, through its rotary positions: to hide the
        ranks of masked genes, move these genes behind the visible ones.
    rank_mask
        bool `(T,)`, positions whose ranks are used in the prior: those of the input, and not those sampled since. None:
        all visible ones.
    context, own_row
        Other cells, and the rows of the predicted cells among them (:meth:`scdiva.models.QueryHead.weigh`). The query
        head then replaces the state head. The context has the columns `genes`; requires `stream=False`.
    genes
        int64 `(n,)` ascending, tokens that may be sampled, such as those of a panel. Tokens of the cells are then
        indices into these, counted from `N_SPECIAL`. None: all.
    stream
        Whether to run the transformer. Without it the state head predicts from the cell state alone: this is faster by
        orders of magnitude, and ignores dependencies between genes given the state. Without ranks, all masked genes of
        a cell then have the same prediction, and logits have one row per cell (`by_cell`).
    state
        `(B, state_dim)`, cell states from which `[LAT]` starts. None: those of the visible genes.

    Returns
    -------
    Function of packed `tokens`, `values`, `cu_seqlens` and `value_mask`.

    Raises
    ------
    ValueError
        If the model lacks a required head, or its cell state requires the transformer and `stream` is False.
    """
    if model.state_head is None and (denominator is not None or not stream):
        raise ValueError(
            "The model has no state head: it can neither use ranks nor do without the transformer. Take a model with "
            "state_head=True, as the bundled one."
        )
    if context is not None and (model.query_head is None or stream or genes is None):
        raise ValueError("context needs a model with query_head=True, stream=False, and genes.")
    if not stream and model.config.anchor == "learned":
        raise ValueError('With anchor="learned" the cell state comes from the transformer: pass stream=True.')

    candidates = None if genes is None else genes.to(next(model.parameters()).device)

    def expected_of(out: ScDiVaOutput, visible: Tensor) -> Expected:
        assert model.state_head is not None
        assert out.head_hidden is not None
        expected = model.state_head.expected(out.head_hidden, candidates)
        if context is None:
            return expected
        assert model.query_head is not None
        assert out.anchor is not None
        assert candidates is not None
        n_visible = torch.bincount(out.cells[visible], minlength=len(out.anchor))
        return Expected(
            *model.query_head.table(
                out.anchor, out.head_hidden, n_visible, candidates - N_SPECIAL, *expected, context, own_row
            )
        )

    def denoise(
        tokens: Tensor, values: Tensor, cu_seqlens: Tensor, value_mask: Tensor
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        masked, indices = tokens == MASK, tokens
        if candidates is not None:
            tokens = candidates[(indices - N_SPECIAL).clamp_min(0)].masked_fill(masked, MASK)
        visible = ~(value_mask | masked)
        out = model(tokens, values, cu_seqlens, value_mask=value_mask, anchor_state=state, use_transformer=stream)
        expected = None if model.state_head is None else expected_of(out, visible)
        ranked = None
        if denominator is not None:
            with_rank = visible if rank_mask is None else rank_mask & visible
            ranked = Ranked(tokens, values, cu_seqlens, with_rank, denominator)
        rows = masked if stream or denominator is not None else cu_seqlens[:-1].long()
        logits = model.logits(out, rows, genes=candidates, expected=expected, ranked=ranked)
        if expected is None:
            return logits, model.values(out, tokens)
        return logits, model.values(out, indices, of_genes=expected.values), expected.values

    return denoise


# --- cells ------------------------------------------------------------------------------------------------------------
BATCH = 64
"""Cells per batch of the state head."""
STEPS_STATE_HEAD, STEPS_TRANSFORMER = 8, 32
"""Default number of steps without a given state, and of the transformer (the paper's multi-step setting)."""
PROMPT_SHARE = 0.3
"""Share of the source cell's genes that are visible from the start, with `prompt="genes"`."""
SPREAD_CELLS = 128
"""Cells from which the spread of values around predicted ones is estimated."""
FEW = 10
"""Cells expressing a gene at which its own spread gets half of the weight."""
CERTAIN = 1e-7
"""Minimum distance of a probability from 1."""
N_COUNTS = 96
"""Maximum number of different counts in one cell; a large count represents those around it."""
N_MEANS, N_SPREADS = 120, 10
"""Size of the table of distributions: means and standard deviations."""
SPREADS = (0.1, 2.5)
BELOW = 3.0
"""Maximum distance of the mean of a distribution below a single count, at which nearly all probability is at that
count."""

Cell = tuple[Ints, Matrix, Ints]
"""Tokens, log-normalised values and counts of a cell."""


class Group(NamedTuple):
    """Cells to draw: their name, the rows of `adata` of the source cells, and the fraction between two groups."""

    name: str
    one: Ints
    two: Ints
    fraction: float


class Sources(NamedTuple):
    """Source cells of each new cell, which lies at `fraction` between `one` and `two`; `depth` is one of these."""

    one: Ints
    two: Ints
    fraction: NDArray[np.float64]
    depth: Ints


def choose_sources(groups: list[Group], n_cells: int, rows: Ints, seed: int, draw: np.random.Generator) -> Sources:
    """Draw the source cells of `n_cells` new cells of each group.

    Parameters
    ----------
    groups, n_cells
        The groups, and the number of new cells of each.
    rows
        Row of `adata` of each cell that was read.
    seed, draw
        Random numbers.

    Raises
    ------
    ValueError
        If no cell of a group was read.
    """
    number = np.full(int(rows.max()) + 1, -1, dtype=np.int64)
    number[rows] = np.arange(len(rows))
    ones, twos = [], []
    for group in groups:
        chosen = []
        for pool in (group.one, group.two):
            numbers = number[pool[pool < len(number)]]
            numbers = numbers[numbers >= 0]
            if not len(numbers):
                raise ValueError(f"No cell of {group.name!r} has a gene that the model knows: nothing to start from.")
            chosen.append(draw.choice(numbers, n_cells))
        ones.append(chosen[0])
        twos.append(chosen[1] if group.fraction else chosen[0])
    one, two = np.concatenate(ones), np.concatenate(twos)
    fraction = np.repeat([group.fraction for group in groups], n_cells)
    second = np.random.default_rng(step_seed(seed, 0, "length")).random(len(one)) < fraction
    return Sources(one, two, fraction, np.where(second, two, one))


def draw_by_state_head(
    fitted: Fitted,
    cells: InMemoryCells,
    states: States,
    sources: Sources,
    fixed: dict[int, float],
    from_state: bool,
    seed: int,
    n_steps: int,
) -> list[Cell]:
    """Draw cells from a state head.

    Parameters
    ----------
    fitted
        The state head, fitted to the cells.
    cells, states
        Source cells and their states.
    sources
        Source cells of each new cell.
    fixed
        Values of genes that every new cell has, by token.
    from_state
        Whether the state of the source is given, or computed from the genes drawn so far.
    seed
        Seed of all draws, together with the number of the new cell.
    n_steps
        Steps in which genes are revealed without a given state.
    """
    one, two, fraction, source = sources
    share = fraction[:, None].astype(np.float32)
    mixed = States(
        (1 - share) * states.state[one] + share * states.state[two],
        np.rint((1 - fraction) * states.n_genes[one] + fraction * states.n_genes[two]).astype(np.int64),
        None if states.group is None else (1 - share) * states.group[one] + share * states.group[two],
    )
    excluded = np.isin(fitted.genes, list(fixed))
    n_fixed = sum(value > 0 for value in fixed.values())
    new_cells: list[Cell] = []
    with progress_bar(desc="drawing cells", unit="cell", total=len(source)) as bar:
        for start in range(0, len(source), BATCH):
            numbers = np.arange(start, min(start + BATCH, len(source)))
            parts = [slice(cells.indptr[cell], cells.indptr[cell + 1]) for cell in source[numbers]]
            log_odds, values = fitted.predict(mixed.take(numbers))
            log_odds[:, excluded] = -np.inf
            for i, part in enumerate(parts):  # the depth of the source shifts all values of the cell
                difference = cells.values[part] - values[i, np.searchsorted(fitted.genes, cells.tokens[part])]
                values[i] += float(np.mean(difference))
            n_genes = np.clip([part.stop - part.start - n_fixed for part in parts], 1, (~excluded).sum() - 1)
            log_odds += shift_to(log_odds, n_genes)[:, None].astype(np.float32)
            depths = [cells.values[part] for part in parts]
            draws = [np.random.default_rng(step_seed(seed, int(number), "cell")) for number in numbers]
            chosen: Iterator[tuple[Ints, Matrix]]
            if from_state:
                genes_of = map(_draw_genes, log_odds, n_genes, draws)
                chosen = ((genes, values[i, genes]) for i, genes in enumerate(genes_of))
            else:
                chosen = _draw_in_steps(fitted, numbers, n_genes, depths, fixed, seed, n_steps)
            for (genes, mean), depth, draw in zip(chosen, depths, draws, strict=True):
                counts = draw_counts(mean, fitted.corrections.spread[genes], total_count(depth), draw)
                new_cells.append(as_cell(fitted.genes[genes], counts, depth, fixed))
                bar.update()
    return new_cells


def _draw_genes(log_odds: Matrix, n_genes: int, draw: np.random.Generator) -> Ints:
    """Draw genes without replacement: the first to arrive in a race at rates -log(1 - p)."""
    p = np.clip(expit(log_odds.astype(np.float64)), 0.0, 1 - CERTAIN)
    with np.errstate(divide="ignore"):
        arrival = draw.exponential(size=len(p)) / -np.log1p(-p)
    return np.sort(np.argpartition(arrival, n_genes - 1)[:n_genes])


def _draw_in_steps(
    fitted: Fitted,
    numbers: Ints,
    n_genes: Ints,
    depths: list[Matrix],
    fixed: dict[int, float],
    seed: int,
    n_steps: int,
) -> Iterator[tuple[Ints, Matrix]]:
    """Draw genes in steps, and predict their values from a state that is computed from the genes drawn so far."""
    visible = {token: value for token, value in fixed.items() if value > 0}
    visible_genes = torch.from_numpy(np.searchsorted(fitted.genes, list(visible))) + N_SPECIAL
    genes, visible_values = torch.from_numpy(fitted.genes), torch.tensor(list(visible.values()))
    allowed = torch.from_numpy(~np.isin(fitted.genes, list(fixed)))
    n_max = fitted.model.config.max_length - len(visible)

    def draw(model: ScDiVa, number: Tensor) -> Tensor:
        """Draw one cell: numbers of its genes and their expected values, `(n, 2)`."""
        at = int(number)
        length = len(visible) + int(min(n_genes[at], n_max))
        tokens, values = torch.full((length,), MASK, dtype=torch.int64), torch.zeros(length)
        tokens[: len(visible)], values[: len(visible)] = visible_genes, visible_values
        cell, depth = int(numbers[at]), total_count(depths[at])
        value_draw = np.random.default_rng(step_seed(seed, cell, "values"))
        mean = torch.zeros(len(genes))

        def draw_values(expected: Tensor, _: Tensor, which: Tensor) -> Tensor:
            mean[which] = expected.float()
            counts = draw_counts(expected.numpy(), fitted.corrections.spread[which.numpy()], depth, value_draw)
            return torch.from_numpy(np.log1p(TARGET_SUM * counts / depth)).to(expected.dtype)

        sampled = sample(
            denoiser_of(model, genes=genes, stream=False),
            tokens,
            values,
            torch.tensor([0, length], dtype=torch.int32),
            n_steps=n_steps,
            remasking="random",
            allowed=allowed,
            draw_values=draw_values,
            by_cell=True,
            generator=step_generator(seed, cell, "generate"),
        )
        new = sampled.tokens[len(visible) :] - N_SPECIAL
        # expected values are returned: counts are drawn once the whole cell is known
        return torch.stack([new.float(), mean[new]], dim=1)

    with open_encoder(fitted.model, threads=settings.threads, what=draw) as encode:
        for output in encode(lambda at: (torch.tensor(at),), range(len(numbers))):
            yield output[:, 0].astype(np.int64), output[:, 1]


def as_cell(tokens: Ints, counts: Ints, source: Matrix, fixed: dict[int, float]) -> Cell:
    """Combine the counts of drawn genes and the values of fixed genes into a cell.

    Parameters
    ----------
    tokens, counts
        Genes that are not fixed, and their counts.
    source
        Values of the cell that sets the depth and the sum over genes.
    fixed
        Values of fixed genes, by token; genes with value 0 are not expressed.
    """
    depth, total = total_count(source), float(np.expm1(source.astype(np.float64)).sum())
    fixed_tokens = np.array([token for token, value in fixed.items() if value > 0], dtype=np.int64)
    fixed_values = np.array([fixed[token] for token in fixed_tokens.tolist()], dtype=np.float64)
    rest = max(total - float(np.expm1(fixed_values).sum()), TARGET_SUM / depth)
    values = np.log1p(rest * counts / max(counts.sum(), 1))
    fixed_counts = np.maximum(1, np.rint(np.expm1(fixed_values) * depth / TARGET_SUM)).astype(np.int64)
    return (
        np.concatenate([tokens, fixed_tokens]),
        np.concatenate([values, fixed_values]).astype(np.float32),
        np.concatenate([counts, fixed_counts]),
    )


def draw_by_transformer(
    model: ScDiVa,
    cells: InMemoryCells,
    sources: Sources,
    fixed: dict[int, float],
    prompt: str | None,
    n_steps: int,
    seed: int,
    run_config: RunConfig,
) -> list[Cell]:
    """Draw cells by the reverse process in random order (paper, algorithm "scDiVa Inference").

    Parameters
    ----------
    model
        The model.
    cells, sources, fixed, n_steps, seed
        See :func:`draw_by_state_head`.
    prompt
        How a new cell is conditioned on its source: `"genes"`, by a share of its genes and values; `"state"`, by its
        cell state in the input of `[LAT]`; None, only by its number of genes and depth.
    run_config
        Device and precision.
    """
    one, two, fraction, source = sources
    max_length, panel = model.config.max_length, cells.measured.astype(np.int64)
    denominator = score_denominator(model.vocabulary.entropy, model.config.entropy_floor)
    genes, allowed = torch.from_numpy(panel), torch.from_numpy(~np.isin(panel, list(fixed)))
    n_allowed = int(allowed.sum()) + sum(value > 0 for value in fixed.values())

    def part_of(number: int) -> slice:
        return slice(cells.indptr[number], min(cells.indptr[number + 1], cells.indptr[number] + max_length))

    def masked_cell(at: int) -> tuple[Tensor, ...]:
        """The cell to complete: visible genes at their ranks, `MASK` elsewhere."""
        first, second = ((cells.tokens[i].astype(np.int64), cells.values[i]) for i in map(part_of, (one[at], two[at])))
        share = PROMPT_SHARE if prompt == "genes" else 0.0
        draw = np.random.default_rng(step_seed(seed, at, "prompt"))
        tokens, values, rank = prompt_of(first, second, float(fraction[at]), share, fixed, denominator, draw)
        length = round((1 - fraction[at]) * len(first[0]) + fraction[at] * len(second[0]))
        length = min(max(length, len(tokens) + 1), max_length, n_allowed)
        masked, masked_values = torch.full((length,), MASK), torch.zeros(length)
        where = torch.from_numpy(positions_of(rank[: length - 1], length))
        masked[where] = torch.from_numpy(np.searchsorted(panel, tokens[: length - 1])) + N_SPECIAL
        masked_values[where] = torch.from_numpy(values[: length - 1])
        return masked, masked_values, torch.tensor([0, length], dtype=torch.int32), torch.tensor(at), states[at][None]

    def complete(
        network: ScDiVa, tokens: Tensor, values: Tensor, bounds: Tensor, number: Tensor, state: Tensor
    ) -> Tensor:
        """Complete one cell: numbers of its genes, and counts, `(L, 2)`."""
        at = int(number)
        depth = total_count(cells.values[part_of(source[at])])
        draw = np.random.default_rng(step_seed(seed, at, "values"))

        def draw_values(expected: Tensor, _: Tensor, which: Tensor) -> Tensor:
            counts = draw_counts(expected.float().cpu().numpy(), spread[which.cpu().numpy()], depth, draw)
            return torch.from_numpy(np.log1p(TARGET_SUM * counts / depth)).to(expected)

        sampled = sample(
            denoiser_of(network, genes=genes, state=state if state.shape[1] else None),
            tokens,
            values,
            bounds,
            n_steps=n_steps,
            remasking="random",
            allowed=allowed.to(tokens.device),
            draw_values=draw_values,
            generator=step_generator(seed, at, "generate"),
        )
        numbers, visible = (sampled.tokens - N_SPECIAL).cpu().numpy(), (tokens != MASK).cpu().numpy()
        ordered = values_in_order(sampled.values.cpu().numpy(), visible, denominator[panel[numbers]])
        counts = np.maximum(np.rint(np.expm1(ordered) * depth / TARGET_SUM), 1)
        return torch.from_numpy(np.stack([numbers, counts], axis=1))

    drawn = []
    device, precision = run_config.device, run_config.precision
    with (
        open_encoder(model, device=device, precision=precision, threads=settings.threads, what=complete) as encode,
        progress_bar(desc="drawing cells", unit="cell", total=len(one)) as bar,
    ):
        with torch_threads_kept(1):
            spread, states = value_spread(model, cells, seed), torch.zeros(len(one), 0)
            if prompt == "state":
                unique_sources, inverse = np.unique(np.concatenate([one, two]), return_inverse=True)
                at_both = embed_all(
                    model, cells.subset(unique_sources, max_length), RunConfig(None, device, "fp32", "state")
                )
                of_both = torch.from_numpy(at_both)[inverse].view(2, len(one), -1)
                share = torch.from_numpy(fraction).float()[:, None]
                states = (1 - share) * of_both[0] + share * of_both[1]
        for at, output in enumerate(encode(masked_cell, range(len(one)))):
            tokens = panel[output[:, 0].astype(np.int64)]
            free = ~np.isin(tokens, list(fixed))
            source_values = cells.values[cells.indptr[source[at]] : cells.indptr[source[at] + 1]]
            drawn.append(as_cell(tokens[free], output[free, 1].astype(np.int64), source_values, fixed))
            bar.update()
    return drawn


def prompt_of(
    first: tuple[Ints, Matrix],
    second: tuple[Ints, Matrix],
    fraction: float,
    share: float,
    fixed: dict[int, float],
    denominator: NDArray[np.floating],
    draw: np.random.Generator,
) -> tuple[Ints, Matrix, NDArray[np.float64]]:
    """Choose the visible genes of a new cell.

    Parameters
    ----------
    first, second
        Tokens and values of the two source cells, by rank.
    fraction
        Where the new cell lies between the first (0) and the second (1).
    share
        Share of their genes that stay visible: `share * (1 - fraction)` of the first and the rest of the second.
    fixed
        Values of fixed genes by token; genes with value 0 are not visible.
    denominator
        `(n_tokens,)`, by which values are divided to rank genes.
    draw
        Random numbers.

    Returns
    -------
    Tokens and values by decreasing score, and their relative ranks, 0 to 1, ascending. The rank of a fixed gene is that
    of its score among the first cell's scores.
    """
    score = first[1] / denominator[first[0]]
    visible_fixed = [(token, value) for token, value in fixed.items() if value > 0]
    tokens = np.array([token for token, _ in visible_fixed], dtype=np.int64)
    values = np.array([value for _, value in visible_fixed], dtype=np.float32)
    rank = np.array([(score > value / denominator[token]).mean() for token, value in visible_fixed])
    for (genes, gene_values), part in ((first, 1 - fraction), (second, fraction)):
        chosen = draw.permutation(len(genes))[: round(share * part * len(genes))]
        chosen = chosen[~np.isin(genes[chosen], [*fixed, *tokens.tolist()])]
        tokens, values = np.concatenate([tokens, genes[chosen]]), np.concatenate([values, gene_values[chosen]])
        rank = np.concatenate([rank, (chosen + 0.5) / len(genes)])
    order = np.lexsort((tokens, -values / denominator[tokens]))
    return tokens[order], values[order], np.sort(rank)


def values_in_order(
    values: NDArray[np.floating], visible: NDArray[np.bool_], denominator: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Adjust values such that the scores, value / denominator, decrease with the rank.

    The value head predicts the value at a rank for any gene, and genes are ordered by their scores, so the scores are
    regressed on the ranks (isotonic regression). Values that are `visible` do not change.
    """
    from sklearn.isotonic import isotonic_regression

    weight = np.where(visible, 1e6, 1.0)
    score = isotonic_regression(values / denominator, sample_weight=weight, increasing=False)
    return np.where(visible, values, score * denominator)


def positions_of(rank: NDArray[np.float64], length: int) -> Ints:
    """Positions of genes with these relative ranks, ascending, in a cell of `length` genes; none twice."""
    number = np.arange(len(rank))
    at = np.maximum.accumulate((rank * length).astype(np.int64) - number) + number
    return np.asarray(np.minimum(at, length - len(rank) + number), dtype=np.int64)


def value_spread(model: ScDiVa, cells: InMemoryCells, seed: int) -> NDArray[np.float64]:
    """Standard deviation of the values of each gene around the predicted ones, `(n_genes,)`.

    Half of the positions of up to 128 cells are masked. The spread of a rarely expressed gene is near the overall one.
    """
    genes, max_length = torch.from_numpy(cells.measured.astype(np.int64)), model.config.max_length
    draw = np.random.default_rng(step_seed(seed, 0, "spread"))
    total, number = np.zeros((2, len(genes)))
    device = next(model.parameters()).device
    with torch.inference_mode():
        denoise = denoiser_of(model, genes=genes)
        for cell in draw.permutation(cells.n_cells)[:SPREAD_CELLS]:
            tokens, values, bounds = cells.take(np.array([cell]), max_length).to(device).packed
            masked = torch.from_numpy(draw.random(len(tokens)) < 0.5).to(device)
            which = torch.searchsorted(genes.to(device), tokens)
            hidden = (which + N_SPECIAL).masked_fill(masked, MASK)
            _, predicted, *of_genes = denoise(hidden, values.masked_fill(masked, 0.0), bounds, masked)
            predicted = predicted[masked] + (of_genes[0][0, which[masked]] if of_genes else 0.0)
            error = (values[masked] - predicted).square().double().cpu().numpy()
            np.add.at(total, which[masked].cpu().numpy(), error)
            np.add.at(number, which[masked].cpu().numpy(), 1)
    overall = total.sum() / max(number.sum(), 1)
    return np.asarray(np.sqrt((total + FEW * overall) / (number + FEW)))


def total_count(values: NDArray[np.floating]) -> float:
    """Total count of a cell, if its smallest log-normalised value above zero is a single count."""
    return float(TARGET_SUM / np.expm1(float(values.min())))


def draw_counts(
    expected: NDArray[np.floating], spread: NDArray[np.floating], depth: float, rng: np.random.Generator
) -> Ints:
    r"""Draw counts of 1 or more whose log-normalised values have these means and standard deviations.

    With :math:`v_k = \log(1 + 10^4 k / N)`, the count k has the probability
    :math:`\propto (v_{k+1} - v_{k-1}) \exp(-(v_k - a)^2 / 2 s^2)`: a normal density where counts are dense. a and s are
    chosen from a table such that mean and standard deviation are nearest to the requested ones. An expected value below
    that of a single count, or a spread below that of counting noise, is replaced by the nearest possible one.

    Parameters
    ----------
    expected, spread
        `(n,)`, log-normalised.
    depth
        N, the cell's total count.
    rng
        Random numbers.

    Returns
    -------
    int64 `(n,)`.
    """
    if not len(expected):
        return np.zeros(0, dtype=np.int64)
    largest = max(2.0, 2.0 * depth * float(np.expm1(np.clip(expected, 0, 12)).max()) / TARGET_SUM)
    counts = np.unique(np.round(np.geomspace(1, largest, N_COUNTS)))
    value = np.log1p(TARGET_SUM * counts / depth)
    width = np.gradient(value)
    centre = np.linspace(value[0] - BELOW, value[-1], N_MEANS)
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
        # one of two neighbouring distributions at random, so that the mean is met
        below, above = mean[number][at - 1], mean[number][at]
        step = above - below
        part = np.clip(np.divide(expected - below, step, out=np.zeros(len(expected)), where=step > 1e-12), 0, 1)
        at = np.where(chance < part, at, at - 1)
        # the mean has more weight than the spread: it is missed only if no distribution of this spread has it
        reached = below + part * (above - below)
        error = np.abs(deviation[number][at] - spread) + 2 * np.abs(reached - expected)
        better = error < best
        best[better], which[better], where[better] = error[better], number, at[better]
    drawn = (p[which, where].cumsum(axis=1) < rng.random(len(expected))[:, None]).sum(axis=1)
    return np.asarray(counts[np.minimum(drawn, len(counts) - 1)], dtype=np.int64)
