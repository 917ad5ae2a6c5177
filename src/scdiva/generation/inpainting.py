"""Imputation and generation by masked diffusion, for models that predict through their transformer alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scdiva._constants import MASK, N_SPECIAL, TARGET_SUM
from scdiva._rng import step_generator, step_seed
from scdiva._running import RunConfig, row_numbers, run_cells
from scdiva._settings import progress_bar, settings, torch_threads_kept
from scdiva.data.memory import InMemoryCells
from scdiva.diffusion import sample
from scdiva.diffusion.ranks import SPREAD
from scdiva.diffusion.sampler import Predicted, predict_in_parts
from scdiva.generation.corrections import Matrix
from scdiva.generation.imputation import FEW, GENES, expected_values
from scdiva.generation.sampling import Drawn, Ints, Order, as_cell, draw_counts, gathered, mixture, total_count
from scdiva.models import ScDiVa
from scdiva.models.denoiser import denoiser_of
from scdiva.models.inference import encoded, open_encoder
from scdiva.tokenizer.serialize import score_denominator

N_PARTS = 4
"""Parts of a cell's positions that are masked in turn to impute."""
N_STEPS = 32
"""Steps in which genes are revealed to generate, as in the paper's multi-step setting."""
SHARE = 0.3
"""Share of the source cell's genes that a new cell is given."""
SPREAD_CELLS = 128
"""Cells by which the spread of values around those predicted is estimated."""


def impute_by_masking(
    model: ScDiVa,
    cells: InMemoryCells,
    rows: NDArray[np.integer],
    wanted: NDArray[np.int64],
    seed: int,
    run_config: RunConfig,
    keep_observed: bool = True,
    expressed: bool = False,
    one: NDArray[np.floating] | None = None,
) -> Iterator[tuple[NDArray[np.int64], Matrix, Matrix]]:
    """Mask a quarter of each cell's positions at a time, and predict the genes asked for there.

    Parameters
    ----------
    model
        The model.
    cells
        All of them, whole.
    rows
        Row of `adata` that each cell comes from; the masks of a cell depend on it and on `seed`.
    wanted
        Genes asked for, as positions in `cells.measured`, ascending.
    seed
        Of the masks.
    run_config
        Device and precision.
    keep_observed, expressed, one
        As for :func:`scdiva.generation.imputation.impute_genes`.

    Yields
    ------
    Some of the genes wanted `(k,)`; their values and the spread around them, float32 `(n_cells, k)`.
    """
    genes, columns = torch.from_numpy(cells.measured.astype(np.int64)), torch.from_numpy(wanted)
    most = model.config.max_length

    def ask(network: ScDiVa, tokens: Tensor, values: Tensor, _: Tensor, row: Tensor) -> Tensor:
        """Chance and value of the genes asked for in one cell, `(1, 2, k)`."""
        tokens, values, panel = tokens[:most], values[:most], genes.to(tokens.device)
        drawn = torch.randperm(len(tokens), generator=step_generator(seed, int(row), "impute"))
        part = (drawn.argsort() % min(N_PARTS, len(tokens))).to(tokens.device)
        numbers = torch.searchsorted(panel, tokens)
        found = predict_in_parts(denoiser_of(network, genes=genes), numbers + N_SPECIAL, values, part)
        return torch.stack(chance_and_value(found, numbers))[None, :, columns.to(tokens.device)]

    chance, value = np.empty((2, cells.n_cells, len(wanted)), dtype=np.float32)
    run_config = run_config._replace(what=ask, batch_size=1)
    for _, _, results in run_cells(model, cells, run_config, beside=lambda numbers: row_numbers(rows[numbers])):
        for (cell,), found in results:
            chance[cell], value[cell] = found[0]
    matrix = cells.matrix(max(int(cells.tokens.max(initial=0)), int(cells.measured.max(initial=0))) + 1).tocsc()
    for start in range(0, len(wanted), GENES):
        some = slice(start, start + GENES)
        observed = matrix[:, cells.measured[wanted[some]]].toarray()
        there, often = observed > 0, (observed > 0).sum(axis=0) + FEW
        # the mean of a gene's values is met, as far as enough cells show it
        values = value[:, some] + np.where(there, observed - value[:, some], 0).sum(axis=0) / often
        missed = np.square(np.where(there, observed - values, 0)).sum(axis=0)
        width = np.sqrt((missed + FEW * SPREAD**2) / often).astype(np.float32)
        # the transformer reads the values of visible genes, and so the depth of the cell
        depth = np.zeros(cells.n_cells, dtype=np.float32)
        mean, spread = expected_values(
            chance[:, some], values.astype(np.float32), width, depth, observed, expressed, one
        )
        kept = there & keep_observed
        yield wanted[some], np.where(kept, observed, mean), np.where(kept, 0, spread)


def chance_and_value(predicted: Predicted, shown: Tensor) -> tuple[Tensor, Tensor]:
    r"""Probability that a cell expresses each gene, and its value if so, from predictions at masked positions.

    A part of the cell, a share s of its positions, is masked. With :math:`p_i(g)` the probability of gene g at masked
    position i and :math:`v_i` the value predicted there,

    .. math::

        m_g = \sum_i p_i(g), \qquad c_g = \frac{m_g}{s + (1 - s)\, m_g}, \qquad
        \mu_g = \frac{\sum_i p_i(g)\, v_i}{\sum_i p_i(g)}

    :math:`m_g` is the probability that g is among the masked genes given that it is not among the visible ones, so by
    Bayes' theorem :math:`c_g` is the probability that the cell expresses g, given the visible genes and the number of
    all genes. Both are means over the parts in which g was not visible: all parts for a gene that was not detected,
    and its own part for one that was.

    Parameters
    ----------
    predicted
        Of the cell.
    shown
        int64 `(L,)`, number of the gene at each position.

    Returns
    -------
    :math:`c_g` and :math:`\mu_g`, `(n_genes,)` each.
    """
    part, n_parts = predicted.part, int(predicted.part.max()) + 1
    p = predicted.logits.softmax(dim=1)
    empty = p.new_zeros(n_parts, p.shape[1])
    number, total = empty.index_add(0, part, p), empty.index_add(0, part, p * predicted.values.clamp_min(0)[:, None])
    if predicted.gene_values is not None:
        total = total + number * predicted.gene_values
    share = (torch.bincount(part, minlength=n_parts) / len(part))[:, None]
    there = number.clamp_max(1.0)
    chance = there / (share + (1 - share) * there)
    hidden = torch.ones_like(p[:n_parts], dtype=torch.bool)
    hidden[:, shown] = part == torch.arange(n_parts, device=part.device)[:, None]
    chance = (chance * hidden).sum(dim=0) / hidden.sum(dim=0)
    least = torch.finfo(p.dtype).tiny
    value = (total * hidden).sum(dim=0).clamp_min(0) / (number * hidden).sum(dim=0).clamp_min(least)
    return chance, value


def draw_by_diffusion(
    model: ScDiVa,
    cells: InMemoryCells,
    orders: list[Order],
    fixed: dict[int, float],
    prompt: str | None,
    n_steps: int,
    seed: int,
    run_config: RunConfig,
) -> Drawn:
    """Draw cells by the reverse process: paper, algorithm "scDiVa Inference", in random order.

    Parameters
    ----------
    model
        The model.
    cells
        Those that new cells are like.
    orders
        Of :func:`scdiva.generation.sampling.place_orders`.
    fixed
        Values of genes that every cell shows, by token; of 0, genes that none shows.
    prompt
        What a new cell is given of its source: `"genes"`, a share of its genes and values; `"state"`, its state, from
        which `[LAT]` starts; None, nothing but its number of genes and its depth.
    n_steps
        Steps in which the other genes are revealed.
    seed
        Of all draws, with a cell's number.
    run_config
        Device and precision.
    """
    one, two, fraction, source = mixture(orders, seed)
    most, panel = model.config.max_length, cells.measured.astype(np.int64)
    denominator = score_denominator(model.vocabulary.entropy, model.config.entropy_floor)
    genes, allowed = torch.from_numpy(panel), torch.from_numpy(~np.isin(panel, list(fixed)))
    n_allowed = int(allowed.sum()) + sum(value > 0 for value in fixed.values())

    def cell_of(number: int) -> tuple[Ints, Matrix]:
        at = slice(cells.indptr[number], min(cells.indptr[number + 1], cells.indptr[number] + most))
        return cells.tokens[at].astype(np.int64), cells.values[at]

    def start(at: int) -> tuple[Tensor, ...]:
        """Make the cell to complete: what is visible at its ranks, `MASK` elsewhere."""
        first, second = cell_of(one[at]), cell_of(two[at])
        share = SHARE if prompt == "genes" else 0.0
        draw = np.random.default_rng(step_seed(seed, at, "prompt"))
        shown = prompt_of(first, second, float(fraction[at]), share, fixed, denominator, draw)
        length = round((1 - fraction[at]) * len(first[0]) + fraction[at] * len(second[0]))
        length = min(max(length, len(shown[0]) + 1), most, n_allowed)
        tokens, values = torch.full((length,), MASK), torch.zeros(length)
        where = torch.from_numpy(places(shown[2][: length - 1], length))
        tokens[where] = torch.from_numpy(np.searchsorted(panel, shown[0][: length - 1])) + N_SPECIAL
        values[where] = torch.from_numpy(shown[1][: length - 1])
        return tokens, values, torch.tensor([0, length], dtype=torch.int32), torch.tensor(at), states[at][None]

    def complete(
        network: ScDiVa, tokens: Tensor, values: Tensor, bounds: Tensor, number: Tensor, state: Tensor
    ) -> Tensor:
        """Complete one cell: numbers of its genes, and counts, `(L, 2)`."""
        at = int(number)
        depth, draw = total_count(cell_of(source[at])[1]), np.random.default_rng(step_seed(seed, at, "values"))

        def drawn(expected: Tensor, _: Tensor, which: Tensor) -> Tensor:
            counts = draw_counts(expected.float().cpu().numpy(), spread[which.cpu().numpy()], depth, draw)
            return torch.from_numpy(np.log1p(TARGET_SUM * counts / depth)).to(expected)

        made = sample(
            denoiser_of(network, genes=genes, state=state if state.shape[1] else None),
            tokens,
            values,
            bounds,
            n_steps=n_steps,
            remasking="random",
            allowed=allowed.to(tokens.device),
            draw_values=drawn,
            generator=step_generator(seed, at, "generate"),
        )
        numbers, shown = (made.tokens - N_SPECIAL).cpu().numpy(), (tokens != MASK).cpu().numpy()
        ordered = values_in_order(made.values.cpu().numpy(), shown, denominator[panel[numbers]])
        counts = np.maximum(np.rint(np.expm1(ordered) * depth / TARGET_SUM), 1)
        return torch.from_numpy(np.stack([numbers, counts], axis=1))

    found = []
    device, precision = run_config.device, run_config.precision
    with (
        open_encoder(model, device=device, precision=precision, threads=settings.threads, what=complete) as encode,
        progress_bar(desc="drawing cells", unit="cell", total=len(one)) as bar,
    ):
        with torch_threads_kept(1):
            spread, states = value_spread(model, cells, seed), torch.zeros(len(one), 0)
            if prompt == "state":
                wanted, place = np.unique(np.concatenate([one, two]), return_inverse=True)
                of_both = encoded(model, cells.subset(wanted, most))[place].view(2, len(one), -1)
                share = torch.from_numpy(fraction).float()[:, None]
                states = (1 - share) * of_both[0] + share * of_both[1]
        for at, made in enumerate(encode(start, range(len(one)))):
            tokens = panel[made[:, 0].astype(np.int64)]
            free = ~np.isin(tokens, list(fixed))
            own = cells.values[cells.indptr[source[at]] : cells.indptr[source[at] + 1]]
            found.append(as_cell(tokens[free], made[free, 1].astype(np.int64), own, fixed))
            bar.update()
    return gathered(found, source)


def prompt_of(
    first: tuple[Ints, Matrix],
    second: tuple[Ints, Matrix],
    fraction: float,
    share: float,
    fixed: dict[int, float],
    denominator: NDArray[np.floating],
    draw: np.random.Generator,
) -> tuple[Ints, Matrix, NDArray[np.float64]]:
    """Choose the genes that a new cell shows from the start.

    Parameters
    ----------
    first, second
        Tokens and values by rank of the two cells between which it lies.
    fraction
        How far from the first, 0 to 1.
    share
        Share of their genes that it shows: of the first `share * (1 - fraction)`, of the second the rest.
    fixed
        Values of other genes by token; those of 0 are not shown.
    denominator
        By which values are divided to rank genes, `(n_tokens,)`.
    draw
        Chooses the genes.

    Returns
    -------
    Tokens and values by falling score, and their relative ranks, 0 to 1, ascending. A fixed gene has the rank that its
    score has among the first cell's.
    """
    score = first[1] / denominator[first[0]]
    kept = [(token, value) for token, value in fixed.items() if value > 0]
    tokens = np.array([token for token, _ in kept], dtype=np.int64)
    values = np.array([value for _, value in kept], dtype=np.float32)
    rank = np.array([(score > value / denominator[token]).mean() for token, value in kept])
    for (own, own_values), part in ((first, 1 - fraction), (second, fraction)):
        some = draw.permutation(len(own))[: round(share * part * len(own))]
        some = some[~np.isin(own[some], [*fixed, *tokens.tolist()])]
        tokens, values = np.concatenate([tokens, own[some]]), np.concatenate([values, own_values[some]])
        rank = np.concatenate([rank, (some + 0.5) / len(own)])
    order = np.lexsort((tokens, -values / denominator[tokens]))
    return tokens[order], values[order], np.sort(rank)


def values_in_order(
    values: NDArray[np.floating], shown: NDArray[np.bool_], denominator: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Make values of a cell's genes by rank such that their scores, value / denominator, fall with the rank.

    The value head predicts the value at a rank whatever gene is drawn there. Genes are ordered by their scores, so the
    scores are regressed on the ranks (isotonic regression, in which values that were `shown` do not move).
    """
    from sklearn.isotonic import isotonic_regression

    weight = np.where(shown, 1e6, 1.0)
    score = isotonic_regression(values / denominator, sample_weight=weight, increasing=False)
    return np.where(shown, values, score * denominator)


def places(rank: NDArray[np.float64], length: int) -> Ints:
    """Give positions of genes of these relative ranks, ascending, in a cell of so many genes; none twice."""
    number = np.arange(len(rank))
    at = np.maximum.accumulate((rank * length).astype(np.int64) - number) + number
    return np.asarray(np.minimum(at, length - len(rank) + number), dtype=np.int64)


def value_spread(model: ScDiVa, cells: InMemoryCells, seed: int) -> NDArray[np.float64]:
    """Estimate the standard deviation of each gene's values around those predicted, `(n_genes,)`.

    Half of the positions of up to 128 cells are masked. A gene seen in few cells has about the spread of all.
    """
    genes, most = torch.from_numpy(cells.measured.astype(np.int64)), model.config.max_length
    draw = np.random.default_rng(step_seed(seed, 0, "spread"))
    total, number = np.zeros((2, len(genes)))
    device = next(model.parameters()).device
    with torch.inference_mode():
        denoise = denoiser_of(model, genes=genes)
        for cell in draw.permutation(cells.n_cells)[:SPREAD_CELLS]:
            tokens, values, bounds = cells.take(np.array([cell]), most).to(device).packed
            masked = torch.from_numpy(draw.random(len(tokens)) < 0.5).to(device)
            which = torch.searchsorted(genes.to(device), tokens)
            asked = (which + N_SPECIAL).masked_fill(masked, MASK)
            _, predicted, *of_genes = denoise(asked, values.masked_fill(masked, 0.0), bounds, masked)
            predicted = predicted[masked] + (of_genes[0][0, which[masked]] if of_genes else 0.0)
            missed = (values[masked] - predicted).square().double().cpu().numpy()
            np.add.at(total, which[masked].cpu().numpy(), missed)
            np.add.at(number, which[masked].cpu().numpy(), 1)
    usual = total.sum() / max(number.sum(), 1)
    return np.asarray(np.sqrt((total + FEW * usual) / (number + FEW)))
