"""Expected expression of genes in each cell, predicted while these genes are masked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from scdiva._constants import N_SPECIAL, TARGET_SUM
from scdiva._rng import step_generator, step_seed
from scdiva._settings import progress_bar
from scdiva.data.batch import InMemoryCells
from scdiva.diffusion.ranks import SPREAD
from scdiva.diffusion.sampler import PartPredictions, predict_in_parts
from scdiva.generation.sampling import denoiser_of
from scdiva.generation.state_head import (
    BATCH,
    CONTEXT,
    QUERIES,
    Ints,
    Matrix,
    context_of,
    depth_of,
    expression_of,
    fit_corrections,
    fit_state_head,
    fitting_rows,
    predict,
    states_of,
)
from scdiva.models import ScDiVa
from scdiva.models.inference import RunConfig, row_numbers, run_cells
from scdiva.models.reader import MAX_CONTEXT, cells_of_rows, gene_codes, study_of

GENES = 256
"""Genes per block of results."""
N_FOLDS = 10
"""Parts of the genes that are masked in turn, with a state head."""
N_PARTS = 4
"""Parts of each cell's positions that are masked in turn, through the transformer."""
RIDGE = 100.0
"""Penalty on the corrections, in cells. The error of held-out counts decreases up to 300 on PBMC and on the cells of
Kang et al., and up to 30 on simulated cells. For generation, where variance matters, 3 is better."""
N_FREQUENT = 2000
"""Most frequently expressed genes, by which the depth of a cell is estimated."""
FEW = 10
"""Cells expressing a gene at which its observed mean, and its slope with depth, get half of the weight."""
LEAST_COUNT = 1e-6
"""Minimum expected count: below it the mean of a zero-truncated Poisson variable no longer depends on it."""


class Predicted(NamedTuple):
    """Predictions of k genes in n cells.

    Attributes
    ----------
    genes
        `(k,)`, positions of the genes in `cells.measured`.
    chance, value
        `(n, k)`, probability that each cell expresses a gene, and its log-normalised value if so.
    width
        `(k,)`, standard deviation of observed values around `value`.
    depth
        `(n,)`, mean difference of each cell's values from the predicted ones.
    observed
        `(n, k)`, log-normalised.
    reader
        `(n, k)`, logarithm of one plus the expected counts per 10,000 by the model's reader; None without one.
    """

    genes: Ints
    chance: Matrix
    value: Matrix
    width: Matrix
    depth: Matrix
    observed: Matrix
    reader: Matrix | None = None


def predict_by_state_head(
    model: ScDiVa, cells: InMemoryCells, requested: Ints, seed: int, unit: NDArray[np.floating] | None = None
) -> Iterator[Predicted]:
    """Predict genes while a tenth of all genes is masked at a time.

    Parameters
    ----------
    model
        With a state head, on the CPU.
    cells
        All cells, complete.
    requested
        Genes to impute, as positions in `cells.measured`, ascending.
    seed
        Seed of the parts of genes, the context cells, and the cells to which corrections are fitted.
    unit
        Value of one count in each cell before the logarithm, `(n,)`: the model's reader, if it has one, then predicts
        counts. None: it is not used.
    """
    n, measured, draw = cells.n_cells, cells.measured.astype(np.int64), np.random.default_rng(seed)
    fold = draw.permutation(np.arange(len(measured)) % N_FOLDS)
    shuffled = draw.permutation(n)
    context_rows = np.sort(shuffled[:CONTEXT])
    context_cells, own_row = cells.subset(context_rows), np.full(n, -1)
    own_row[context_rows] = np.arange(len(context_rows))

    complete_states = states_of(model, cells)
    n_expressing = np.bincount(cells.tokens, minlength=int(measured.max()) + 1)[measured]
    frequent = np.sort(measured[np.argsort(-n_expressing, kind="stable")[:N_FREQUENT]])
    of_frequent = fit_state_head(model, cells, complete_states, draw, frequent, RIDGE)
    odds, depth = depth_of(of_frequent, cells, complete_states)

    rows = fitting_rows(n, len(measured) // N_FOLDS, draw)
    folds = [number for number in range(N_FOLDS) if (fold[requested] == number).any()]
    for number in progress_bar(folds, desc="imputing", unit="part of the genes"):
        part = requested[fold[requested] == number]
        genes = measured[part]
        visible = cells.keeping(~np.isin(cells.tokens, measured[fold == number]))
        states = states_of(model, visible)._replace(own_row=own_row)
        if model.query_head is None:
            log_odds, value = predict(model, genes, states)
        else:
            context = context_of(model, context_cells, complete_states.take(context_rows), genes)
            log_odds, value = predict(model, genes, states, context)
            # In three held-out studies the query head's values were far better in one (cells compared with nuclei) and
            # worse in two, so the mean of both heads is used.
            value = np.float32(0.5) * (value + predict(model, genes, states)[1])
        observed = expression_of(cells, genes)
        log_counts, unmasked = None, measured[fold != number]
        if unit is not None and model.reader is not None and len(unmasked):
            visible_genes = np.random.default_rng(step_seed(seed, number, "reader")).permutation(unmasked)
            log_counts = read_counts(
                model, visible, visible_genes, genes, observed, unit, np.sort(shuffled[:MAX_CONTEXT])
            )
        corrections = fit_corrections(
            states.state[rows],
            (log_odds + odds[:, None])[rows],
            (value + depth[:, None])[rows],
            observed[rows],
            # a generator for each part, so that its result does not depend on the other parts
            np.random.default_rng(step_seed(seed, number, "impute")),
            RIDGE,
            depth_known=True,
            default_spread=float(np.median(of_frequent.corrections.spread)),
        )
        log_odds, value = corrections.apply(states.state, log_odds, value)
        chance = expit(log_odds + odds[:, None])
        for start in range(0, len(part), GENES):
            block = slice(start, start + GENES)
            yield Predicted(
                part[block],
                chance[:, block],
                value[:, block],
                corrections.spread[block],
                depth,
                observed[:, block].toarray(),
                None if log_counts is None else log_counts[:, block],
            )


@torch.inference_mode()
def read_counts(
    model: ScDiVa,
    visible: InMemoryCells,
    visible_genes: Ints,
    genes: Ints,
    observed: sp.csr_matrix,
    unit: NDArray[np.floating],
    context: NDArray[np.integer],
) -> Matrix:
    """Predict genes by the model's reader: logarithm of one plus the expected counts per 10,000, `(n, k)`.

    Parameters
    ----------
    model
        With a reader, on the CPU.
    visible
        Cells without the masked genes.
    visible_genes
        Tokens of all genes that are not masked, in random order: the first ones of each cell become tokens.
    genes, observed
        Tokens of k masked genes and their log-normalised expression in the complete cells.
    unit
        Value of one count in each cell before the logarithm.
    context
        Rows of the context cells.
    """
    assert model.anchor is not None
    assert model.reader is not None
    table = gene_codes(model.anchor.table.weight)
    values, codes, queried = (
        expression_of(visible, visible_genes),
        table[torch.from_numpy(visible_genes)],
        table[torch.from_numpy(genes)],
    )
    total = torch.from_numpy(TARGET_SUM / unit).float()
    counts = torch.from_numpy((np.expm1(observed[context].toarray()) / unit[context, None]).astype(np.float32)).round()
    study = study_of(torch.from_numpy(values[context].toarray()), codes, counts, total[context])
    own_row = torch.full((visible.n_cells,), -1)
    own_row[context] = torch.arange(len(context))
    result = np.empty((visible.n_cells, len(genes)), dtype=np.float32)
    step = min(BATCH, max(1, QUERIES // len(genes)))
    for start in range(0, visible.n_cells, step):
        part = slice(start, start + step)
        cells = cells_of_rows(study, values[part], codes, total[part])
        log_rate, _ = model.reader(cells, queried, study, own_row[part])
        result[part] = torch.log1p(TARGET_SUM * log_rate.clamp_max(0).exp()).numpy()
    return result


def expected_values(
    predicted: Predicted, expressed: bool = False, unit: NDArray[np.floating] | None = None
) -> tuple[Matrix, Matrix]:
    """Expected value of each gene in each cell and the spread around it, `(n, k)` each.

    In shallow cells the values of expressed genes are high, because one count is a large share of the cell. This holds
    for genes with few counts and not for abundant ones, so each gene has its own slope with depth. The expected counts
    of a gene add up to the observed ones. With a reader, the result is the mean of both predictions, log-normalised,
    scaled to the same expected counts.

    Parameters
    ----------
    predicted
        Predictions of these genes.
    expressed
        Whether to return a gene's value if it is expressed, instead of its expectation.
    unit
        For count data, the value of one count in each cell before the logarithm, `(n,)`: the value of an expressed gene
        is then the mean of a zero-truncated Poisson variable.
    """
    _, chance, value, width, depth, observed, log_counts = predicted
    detected = observed > 0
    n_expressing = detected.sum(axis=0)
    mean_depth = depth.mean()
    deviation = (depth - mean_depth)[:, None].astype(np.float32)
    value = value + np.float32(mean_depth)
    prior = FEW * np.square(deviation).mean() + 1e-9
    slope = (np.where(detected, observed - value, 0) * deviation).sum(axis=0) + prior
    slope /= (detected * np.square(deviation)).sum(axis=0) + prior
    value = np.maximum(value + slope * deviation, 0)

    half_variance = np.square(width) / 2  # heads predict the logarithm of a log-normal variable
    counts = np.expm1(observed).sum(axis=0) + chance.sum(axis=0)
    change = np.log(counts / (chance * np.exp(value + half_variance)).sum(axis=0))
    value = np.maximum(value + n_expressing / (n_expressing + FEW) * change, 0)
    mean = np.log1p(chance * np.expm1(value + half_variance))
    if log_counts is not None:
        combined = np.expm1((mean + log_counts) / 2)
        mean = np.log1p(combined * (np.expm1(mean).sum(axis=0) / combined.sum(axis=0)))
    if not expressed:
        spread = np.sqrt(chance * (np.square(width) + np.square(value - mean)) + (1 - chance) * np.square(mean))
        return mean, spread
    mean = value if unit is None else _truncated_mean(mean, unit)
    return mean, np.sqrt(np.square(width) + np.square(value - mean))


def _truncated_mean(mean: Matrix, unit: NDArray[np.floating]) -> Matrix:
    """Mean of a Poisson variable without its zeros, from its mean with them, both log-normalised."""
    rate = np.maximum(np.expm1(mean) / unit[:, None], LEAST_COUNT)
    return np.asarray(np.log1p(unit[:, None] * rate / -np.expm1(-rate)), dtype=np.float32)


def predict_by_transformer(
    model: ScDiVa, cells: InMemoryCells, rows: NDArray[np.integer], requested: Ints, seed: int, run_config: RunConfig
) -> Iterator[Predicted]:
    """Predict genes while a quarter of each cell's positions is masked at a time.

    Parameters
    ----------
    model, cells, requested
        See :func:`predict_by_state_head`; the model needs no state head.
    rows
        Row of `adata` of each cell. The masks of a cell depend on it and on `seed`.
    seed
        Seed of the masks.
    run_config
        Device and precision.
    """
    genes, columns = torch.from_numpy(cells.measured.astype(np.int64)), torch.from_numpy(requested)
    max_length = model.config.max_length

    def of_cell(network: ScDiVa, tokens: Tensor, values: Tensor, _: Tensor, row: Tensor) -> Tensor:
        """Probability and value of the requested genes in one cell, `(1, 2, k)`."""
        tokens, values, panel = tokens[:max_length], values[:max_length], genes.to(tokens.device)
        order = torch.randperm(len(tokens), generator=step_generator(seed, int(row), "impute"))
        part = (order.argsort() % min(N_PARTS, len(tokens))).to(tokens.device)
        numbers = torch.searchsorted(panel, tokens)
        predicted = predict_in_parts(denoiser_of(network, genes=genes), numbers + N_SPECIAL, values, part)
        return torch.stack(chance_and_value(predicted, numbers))[None, :, columns.to(tokens.device)]

    chance, value = np.empty((2, cells.n_cells, len(requested)), dtype=np.float32)
    run_config = run_config._replace(what=of_cell, batch_size=1)
    for _, _, results in run_cells(model, cells, run_config, beside=lambda numbers: row_numbers(rows[numbers])):
        for (cell,), predicted in results:
            chance[cell], value[cell] = predicted[0]
    observed_all = expression_of(cells, cells.measured.astype(np.int64)[requested]).tocsc()
    depth = np.zeros(cells.n_cells, dtype=np.float32)  # the transformer infers it from the values of visible genes
    for start in range(0, len(requested), GENES):
        block = slice(start, start + GENES)
        observed = observed_all[:, block].toarray()
        detected = observed > 0
        weight = detected.sum(axis=0) + FEW
        # values are shifted to the observed mean of the gene, as far as enough cells express it
        shifted = value[:, block] + np.where(detected, observed - value[:, block], 0).sum(axis=0) / weight
        error = np.square(np.where(detected, observed - shifted, 0)).sum(axis=0)
        width = np.sqrt((error + FEW * SPREAD**2) / weight).astype(np.float32)
        yield Predicted(requested[block], chance[:, block], shifted.astype(np.float32), width, depth, observed)


def chance_and_value(predicted: PartPredictions, genes: Tensor) -> tuple[Tensor, Tensor]:
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
        Predictions for each position of the cell.
    genes
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
    p_masked = number.clamp_max(1.0)
    chance = p_masked / (share + (1 - share) * p_masked)
    hidden = torch.ones_like(p[:n_parts], dtype=torch.bool)
    hidden[:, genes] = part == torch.arange(n_parts, device=part.device)[:, None]
    chance = (chance * hidden).sum(dim=0) / hidden.sum(dim=0)
    least = torch.finfo(p.dtype).tiny
    value = (total * hidden).sum(dim=0).clamp_min(0) / (number * hidden).sum(dim=0).clamp_min(least)
    return chance, value
