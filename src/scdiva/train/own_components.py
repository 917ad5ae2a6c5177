"""Components of the user's own cells, and how much they are to count beside a model's state: chosen without labels."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scdiva._rng import step_generator
from scdiva._settings import progress_bar
from scdiva.data.corpus import take_cells
from scdiva.diffusion.thinning import Counts, chosen, counts_of, keep_counts, log_normalised
from scdiva.models.config import ScDiVaConfig
from scdiva.models.scdiva import ScDiVa
from scdiva.nn.encoder import weighted_sum
from scdiva.nn.heads import by_root_of_length
from scdiva.train.adaptation import LEAST_CELLS, AdaptationCells, encoded, means_by
from scdiva.train.linear_map import DISPERSION_OFFSET, fit_linear_map

N_DIRECTIONS = 20
"""Most own components."""
N_SPECTRUM = 60
"""Components looked at; the later half tells the level of the noise."""
N_GENES = 2000
"""Genes that they are made of; of adapted models so many by each of two choices."""
BLOCK_ROWS = 2048
"""Cells projected at once."""
WEIGHTS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, np.inf)
"""Weights of the own components that are compared; 0: the model's state alone, inf: the components alone."""
USUAL, MOST_ERRORS = 1.5, 2.0
"""The weight that is taken unless another predicts better by so many standard errors. Around the best weight the
differences are within noise: on the held-out studies of the design the best weight itself did worse than this one."""
MOST_JUDGED = 5000
"""Most cells that compare them; of more, so many are drawn."""
ENOUGH_JUDGED, MOST_SPLITS = 1000, 3
"""Fewer cells than that judge in several splits, at most three: of 300 cells a single one says little."""
SHARE = 0.8
"""Of a cell's counts, what gives it its place. With half of them cells are so shallow that the components, which are
used on whole cells, look worse than they are, and the model's state better."""
N_NEIGHBORS, LEAST_NEIGHBORS = 10, 3
"""An eighth of the cells of a batch where that is fewer."""
N_TARGETS = 500
"""Genes whose expression is predicted: of the 2,000 of the highest dispersion those of the highest variance."""


def own_directions(cells: AdaptationCells, n_tokens: int, most: int, genes: np.ndarray | None = None) -> Tensor:
    r"""Principal components within batches, above the noise and shrunk by it, centred (:func:`centred`).

    Each is scaled by :math:`\sqrt{(\lambda - \lambda_0) / \lambda}` with :math:`\lambda_0` the median of the later of
    60 eigenvalues.

    Parameters
    ----------
    cells
        What they are fitted to.
    n_tokens
        Rows of the table.
    most
        Most components.
    genes
        Tokens that they are made of, ascending; None: the 2,000 of the highest dispersion.

    Returns
    -------
    `(n_tokens, m)` with m at most `most`; m = 0 where the cells are too few.
    """
    n = min(N_SPECTRUM, len(cells.measured) // 2, (cells.n_cells - cells.n_batches) // 2)
    if n < 4:
        return torch.zeros(n_tokens, 0)
    n_genes, fitted_to = N_GENES, cells
    if genes is not None:
        n_genes, fitted_to = len(genes), replace(cells.keeping(np.isin(cells.tokens, genes)), measured=genes)
    corpus = _as_corpus(fitted_to, n_tokens)
    found = fit_linear_map(corpus, n, n_genes=n_genes, study_power=0.0, spectral_power=0.0, fewer=True)
    noise = np.median(found.explained[len(found.explained) // 2 :])
    signal = 1 - noise / found.explained[: min(most, len(found.explained) // 2)]
    kept = signal > 0
    own = torch.from_numpy(found.weight[:, : len(signal)][:, kept] * np.sqrt(signal[kept]).astype(np.float32))
    return centred(own, cells) if kept.any() else own


def _as_corpus(cells: AdaptationCells, n_tokens: int) -> Any:
    """Give cells, each batch a study, as what :func:`fit_linear_map` reads."""
    measured = np.zeros((cells.n_batches, n_tokens), dtype=bool)
    measured[:, cells.measured] = True
    ragged = cells.indptr, cells.tokens, cells.values
    return SimpleNamespace(
        n_tokens=n_tokens,
        study=cells.batch,
        study_names=list(map(str, range(cells.n_batches))),
        measured=measured,
        read=lambda start, stop: take_cells(ragged, np.arange(start, stop)),
    )


def components_of(cells: AdaptationCells, n_tokens: int) -> Tensor:
    r"""Components for the join, of :func:`variable_genes`: `(n_tokens, m)`, m = 0 of few cells.

    Left out are those that fewer than 20 cells make, or an eighth of them where that is less: with x the coordinates,
    :math:`(\sum x^2)^2 / \sum x^4` is the number of cells that a component has its variance from. One that follows an
    outlier or two pulls cells apart that belong together.
    """
    own = own_directions(cells, n_tokens, N_DIRECTIONS, variable_genes(cells, n_tokens))
    square = np.square(_by_root_of_length(own, cells))
    return own[:, np.square(square.sum(axis=0)) / np.square(square).sum(axis=0) >= min(LEAST_CELLS, cells.n_cells // 8)]


def variable_genes(cells: AdaptationCells, n_tokens: int) -> np.ndarray:
    """Tokens of the genes that vary most by either of two measures, ascending.

    2,000 of the highest dispersion, and scanpy's 2,000, of the highest among genes of similar expression. Components of
    one choice are better on some of the held-out studies, of the other on others, and of both nearly as good as the
    better on all.
    """
    if len(cells.measured) <= N_GENES:
        return cells.measured
    import scanpy as sc
    from anndata import AnnData

    adata = AnnData(cells.matrix(n_tokens)[:, cells.measured].astype(np.float32))
    sc.pp.highly_variable_genes(adata, n_top_genes=N_GENES)
    return np.union1d(dispersed_genes(cells, n_tokens)[0], cells.measured[np.flatnonzero(adata.var["highly_variable"])])


def centred(table: Tensor, cells: AdaptationCells) -> Tensor:
    """Centre a projection for cells of any depth, without a bias.

    Of each measured gene the mean cell's coordinates are taken off, by the gene's share of a cell's total: a cell with
    half of the total loses half of the mean, and its direction is kept.
    """
    total = float(cells.values.sum(dtype=np.float64)) / cells.n_cells
    table = table.clone()
    table[cells.measured] -= (project(table, cells).mean(dim=0) / total).to(table)
    return table


def project(table: Tensor, cells: AdaptationCells) -> Tensor:
    """Coordinates of the cells, float64 `(n_cells, k)`."""
    parts, cpu = [], table.cpu()
    for start in range(0, cells.n_cells, BLOCK_ROWS):
        batch = cells.take(np.arange(start, min(start + BLOCK_ROWS, cells.n_cells)))
        parts.append(weighted_sum(cpu, batch.tokens, batch.values, batch.cu_seqlens).double())
    return torch.cat(parts)


class Agreement(NamedTuple):
    """How well neighbours predict expression at each of `WEIGHTS`.

    Attributes
    ----------
    found
        `(len(WEIGHTS),)`, mean correlation of prediction and expression.
    error
        `(len(WEIGHTS),)`, standard error over genes of how far each lies below the best.
    n_cells
        How many cells judged them.
    """

    found: np.ndarray
    error: np.ndarray
    n_cells: int

    @property
    def chosen(self) -> int:
        """Number of the weight that is taken: that nearest to `USUAL` of those within `MOST_ERRORS` of the best."""
        if not self.n_cells:
            return 0
        with np.errstate(divide="ignore"):
            distance = np.abs(np.log(np.asarray(WEIGHTS) / USUAL))
        close = self.found.max() - self.found <= MOST_ERRORS * self.error
        best = np.arange(len(WEIGHTS)) == self.found.argmax()
        return int(np.lexsort((-self.found, np.where(close | best, distance, np.nan)))[0])


def compare_weights(model: ScDiVa, cells: AdaptationCells, seed: int) -> Agreement:
    """Compare weights of own components beside a model's state, by what neighbours predict of counts not seen.

    Each cell's counts are split at random (count splitting; Batson, Royer & Webber 2019; Neufeld et al. 2024). Four
    fifths of them give a cell its state and its position among the components; of the last fifth, the mean of its 10
    nearest neighbours within the batch predicts its own. The components are fitted to other cells, in two folds: fitted
    to the same ones they would know of what is predicted.

    Parameters
    ----------
    model
        Not changed.
    cells
        At least two.
    seed
        Of the splits, the folds, and the draw where there are many cells.

    Returns
    -------
    The correlation of prediction and expression within batches, mean over genes, folds and splits, for each weight. 0
    for all, and the model's state alone chosen, where the cells are too few for components.
    """
    rng = np.random.default_rng([seed, 0])
    if cells.n_cells > MOST_JUDGED:
        cells = cells.subset(np.sort(rng.choice(cells.n_cells, MOST_JUDGED, replace=False)))
    found, number = [], 0
    n_splits = min(MOST_SPLITS, -(-ENOUGH_JUDGED // cells.n_cells))
    for split in progress_bar(range(n_splits), desc="comparing weights", unit="split"):
        shown, hidden, kept = _split(cells, step_generator(seed, split, "split"))
        fold, number = rng.permutation(len(kept)) % 2, len(kept)
        for part in (0, 1):
            judged = np.flatnonzero(fold == part)
            of_fold = _compared(model, cells.subset(kept[fold != part]), shown.subset(judged), hidden.subset(judged))
            found += [] if of_fold is None else [of_fold]
    if not found:
        return Agreement(np.zeros(len(WEIGHTS)), np.zeros(len(WEIGHTS)), 0)
    by_gene = np.concatenate(found, axis=1)
    below = by_gene[by_gene.mean(axis=1).argmax()] - by_gene
    # splits are of the same cells and add no independent genes
    return Agreement(by_gene.mean(axis=1), below.std(axis=1) / np.sqrt(by_gene.shape[1] / n_splits), number)


def _compared(
    model: ScDiVa, others: AdaptationCells, shown: AdaptationCells, hidden: AdaptationCells
) -> np.ndarray | None:
    """Agreement of weights and genes, by cells of which two parts are given; None if the others have no components."""
    n_tokens = model.config.n_tokens
    own = components_of(others, n_tokens)
    if not own.shape[1] or shown.n_cells < 2:
        return None
    state, components = (
        x / max(spread_within(x, shown.batch), 1e-12)
        for x in (encoded(model, shown).double().numpy(), _by_root_of_length(own, shown))
    )
    genes, variance = dispersed_genes(others, n_tokens)
    genes = np.sort(genes[np.argsort(-variance, kind="stable")[:N_TARGETS]])
    target = torch.from_numpy(hidden.matrix(n_tokens)[:, genes].toarray()).float()
    return _predicted_by_neighbors(state, components, target, shown.batch)


def sampled(model: ScDiVa, cells: AdaptationCells) -> tuple[AdaptationCells, Tensor]:
    """Take at most 5,000 of the cells, evenly, and encode them: the cells and their states."""
    some = cells.subset(np.arange(0, cells.n_cells, -(-cells.n_cells // MOST_JUDGED)))
    return some, encoded(model, some)


@torch.no_grad()
def with_own_components(
    model: ScDiVa, cells: AdaptationCells, weight: float, sample: tuple[AdaptationCells, Tensor] | None = None
) -> ScDiVa:
    """Copy a model, with components of these cells beside its state.

    Parameters
    ----------
    model
        Not changed; components that it has of other cells are left behind.
    cells
        What they are fitted to.
    weight
        Their spread within batches, in units of the state's; inf: they stand alone, 0: there are none.
    sample
        From :func:`sampled`, what the state's spread is that of; None: made here.
    """
    c, default = model.config, ScDiVaConfig()
    own = components_of(cells, c.n_tokens) if weight else torch.zeros(c.n_tokens, 0)
    config = replace(c, adapted="no", adapted_dim=default.adapted_dim, adapted_scale=default.adapted_scale)
    if own.shape[1]:
        scale = 1 / max(spread_within(_by_root_of_length(own, cells), cells.batch), 1e-12)
        if not np.isinf(weight):
            some, states = sample or sampled(model, cells)
            scale *= weight * spread_within(states.double().numpy(), some.batch)
        config = replace(
            c, adapted="own" if np.isinf(weight) else "joined", adapted_dim=own.shape[1], adapted_scale=scale
        )
    new = ScDiVa(config, generator=step_generator(0, 0, "own"))
    known = {name: value for name, value in model.state_dict().items() if not name.startswith("own.")}
    new.load_state_dict(known | {name: value for name, value in new.state_dict().items() if name.startswith("own.")})
    if hasattr(model, "vocabulary"):
        new.vocabulary = model.vocabulary
    if new.own is not None:
        new.own.table.weight.copy_(own)
    return new.to(next(model.parameters()).device).eval()


def _by_root_of_length(table: Tensor, cells: AdaptationCells) -> np.ndarray:
    """Coordinates of the cells, each cell's divided by the square root of their length."""
    return by_root_of_length(project(table, cells)).numpy()


def spread_within(x: np.ndarray, batch: np.ndarray) -> float:
    """Root of the summed variance within batches."""
    within = x - means_by(x, batch, int(batch.max()) + 1)[batch]
    return float(np.sqrt(np.square(within).sum() / len(x)))


def _split(cells: AdaptationCells, generator: torch.Generator) -> tuple[AdaptationCells, AdaptationCells, np.ndarray]:
    """Part the counts of each cell in two; without cells of which a part is empty, and the numbers of the others."""
    tokens, bounds = torch.from_numpy(cells.tokens).long(), torch.from_numpy(cells.indptr)
    whole = counts_of(torch.from_numpy(cells.values), bounds)
    one = keep_counts(whole, bounds, torch.full(tokens.shape, SHARE), generator)
    other = Counts(whole.of_token - one.of_token, whole.of_cell - one.of_cell)
    parts = []
    for part in (one, other):
        there = part.of_token > 0
        kept, ends = chosen(tokens, bounds, there)
        values = log_normalised(part, bounds)[there]
        parts.append(replace(cells, indptr=ends.numpy(), tokens=kept.numpy(), values=values.numpy()))
    rows = np.flatnonzero((np.diff(parts[0].indptr) > 0) & (np.diff(parts[1].indptr) > 0))
    return parts[0].subset(rows), parts[1].subset(rows), rows


def dispersed_genes(cells: AdaptationCells, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the 2,000 genes of the highest dispersion, as tokens, highest first, and their variances."""
    matrix = cells.matrix(n_tokens).astype(np.float64)
    mean = np.asarray(matrix.mean(axis=0)).ravel()
    variance = np.asarray(matrix.multiply(matrix).mean(axis=0)).ravel() - mean**2
    genes = np.argsort(-variance / np.maximum(mean, DISPERSION_OFFSET), kind="stable")[:N_GENES]
    genes = genes[variance[genes] > 0]
    return genes, variance[genes]


def _predicted_by_neighbors(state: np.ndarray, components: np.ndarray, target: Tensor, batch: np.ndarray) -> np.ndarray:
    """Correlation of each gene with the mean of a cell's neighbours, `(len(WEIGHTS), n_genes)`."""
    sums = torch.zeros(len(WEIGHTS), 3, target.shape[1], dtype=torch.float64)
    for number in np.unique(batch):
        rows = np.flatnonzero(batch == number)
        near = min(N_NEIGHBORS, max(LEAST_NEIGHBORS, len(rows) // 8), len(rows) - 1)
        if near < 1:
            continue
        near_state, near_own = (torch.from_numpy(part[rows]).float() for part in (state, components))
        near_state, near_own = (torch.cdist(x, x).square_().fill_diagonal_(torch.inf) for x in (near_state, near_own))
        of_batch = target[rows]
        truth = of_batch - of_batch.mean(dim=0)
        for index, weight in enumerate(WEIGHTS):
            joined = near_own if np.isinf(weight) else near_state + weight**2 * near_own if weight else near_state
            nearest = joined.topk(near, dim=1, largest=False).indices
            mean = F.embedding_bag(nearest, of_batch, mode="mean")
            mean = mean - mean.mean(dim=0)
            sums[index] += torch.stack([(a * b).sum(dim=0) for a, b in ((mean, truth), (mean, mean), (truth, truth))])
    scale = (sums[:, 1] * sums[:, 2]).sqrt()
    return torch.where(scale > 0, sums[:, 0] / scale.clamp_min(1e-12), 0.0).numpy()
