"""What reconstruction.py does with single cells: masked genes, and counts that were taken away."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import scipy.sparse as sp
import torch
from _grn_sets import log_normalised
from scipy.stats import rankdata

import scdiva as sd
from scdiva import _constants as C
from scdiva._constants import N_SPECIAL
from scdiva._running import how_to_run, open_for
from scdiva.data.genes import column_tokens, columns_of
from scdiva.diffusion import values_at_ranks
from scdiva.metrics import marginal_recall, value_spearman
from scdiva.models import ScDiVa
from scdiva.models.denoiser import denoiser_of
from scdiva.tl._reconstruct import _around as around_cells
from scdiva.tokenizer.serialize import score_denominator

TYPE = "cell_type"
UNLABELLED = "unlabelled"
LEAST_CELLS = 10
"""Cells that express a gene, but for the part `masked`, which takes all genes that the model knows."""
HIDDEN, TEST = 0.3, 0.2
HOLES = 0.1
NEIGHBORS, COMPONENTS, DIFFUSED = 30, 50, 3
MOST_HELD_OUT = 300
LEAST_RATE = 1e-6
"""Genes with most entries held out, over which the correlation per gene is averaged."""


class Sizes(NamedTuple):
    """Cells of a set that slow arms are given."""

    hidden: int
    """Test cells filled in at one step, for each seed."""
    steps: int
    """Test cells filled in in several steps."""
    generated: int
    """Cells drawn with the transformer."""
    alone: int
    """Cells drawn without a state to start from."""
    likely: int
    """Cells of each kind whose likelihood is bounded."""


@dataclass
class Work:
    """A set: counts of the genes that a model knows, with types, and what was made of it already."""

    name: str
    adata: ad.AnnData
    model: ScDiVa
    sizes: Sizes
    held: dict[Any, Any] = field(default_factory=dict)

    def split(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of training cells, and of test cells in random order: always the same ones."""
        order = np.random.default_rng(0).permutation(self.adata.n_obs)
        n_test = round(TEST * len(order))
        return np.sort(order[n_test:]), order[:n_test]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made under this key, or made now."""
        if key not in self.held:
            self.held[key] = make()
        return self.held[key]


class Cell(NamedTuple):
    """A cell that was filled in: columns of its genes and their values by falling score, and which were hidden."""

    genes: np.ndarray
    values: np.ndarray
    hidden: np.ndarray


def prepared(adata: ad.AnnData, model: ScDiVa, most: int | None = None) -> ad.AnnData:
    """Counts of cells that have a type, and of genes that the model knows, a column each; always the same cells.

    Of several columns of one gene that with most counts is taken; of more cells than `most`, so many random ones.
    """
    tokens = column_tokens(adata.var, model.vocabulary)
    columns = columns_of(tokens, np.asarray(adata.X.sum(axis=0)).ravel())
    columns = np.sort(columns[columns >= 0])
    types = adata.obs[TYPE].astype(str).to_numpy()
    rows = np.flatnonzero(adata.obs[TYPE].notna().to_numpy() & (types != UNLABELLED))
    if most is not None and len(rows) > most:
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:most])
    counts = sp.csr_matrix(adata.X, dtype=np.float32)[rows][:, columns]
    found = ad.AnnData(counts, var=adata.var.iloc[columns].copy())
    found.obs_names = adata.obs_names[rows]
    # a repeat such as "TAP2.1" is known only beside the gene that it repeats
    lost = column_tokens(found.var, model.vocabulary) < 0
    symbols = model.vocabulary.symbols[tokens[columns] - N_SPECIAL]
    found.var_names = np.where(lost, symbols, found.var_names)
    found.obs[TYPE] = types[rows]
    return found[found.X.getnnz(axis=1) > 0].copy()


def often(adata: ad.AnnData) -> ad.AnnData:
    """The same cells with the genes that ten of them express."""
    return adata[:, adata.X.getnnz(axis=0) >= LEAST_CELLS].copy()


def means(scores: Sequence[tuple[float, ...]], names: Sequence[str]) -> dict[str, float]:
    """Mean over cells of each score, without those that are not defined."""
    return {name: float(np.nanmean(column)) for name, column in zip(names, zip(*scores, strict=True), strict=True)}


# masked genes


def filled(work: Work, seed: int, n_cells: int, **how: Any) -> tuple[ad.AnnData, float]:
    """Test cells with 30% of their genes, or another share, hidden and filled in, and the seconds that a cell took."""
    some = work.adata[work.split()[1][:n_cells]].copy()
    begun = time.perf_counter()
    sd.tl.reconstruct(some, work.model, rng=seed, **{"mask_ratio": HIDDEN, "use_ranks": True, **how})
    return some, (time.perf_counter() - begun) / some.n_obs


def at_one_step(work: Work, seed: int, use_ranks: bool = True) -> tuple[ad.AnnData, float]:
    """The same at one step, made once."""
    key = "one step", seed, use_ranks
    return work.once(key, lambda: filled(work, seed, work.sizes.hidden, use_ranks=use_ranks))


def cells_of(adata: ad.AnnData) -> list[Cell]:
    """Read the layers that `tl.reconstruct` wrote."""
    true, place, hidden = (adata.layers[f"{C.RECONSTRUCTED}_{ending}"] for ending in (C.TRUE, C.TRUE_RANK, C.MASKED))
    found = []
    for row in range(adata.n_obs):
        part = slice(*place.indptr[row : row + 2])
        order = np.argsort(place.data[part])
        genes = place.indices[part][order]
        values = true[row].toarray().ravel()[genes]
        found.append(Cell(genes.astype(np.int64), values, hidden[row].toarray().ravel()[genes].astype(bool)))
    return found


def hidden_cells(work: Work, seed: int) -> list[Cell]:
    """Test cells and what is hidden of them: a seed's masks are the same however they are filled in."""
    return work.once(("cells", seed), lambda: cells_of(at_one_step(work, seed)[0]))


def context_for(work: Work, n_cells: int) -> tuple[Any, dict[int, int]]:
    """The test cells that `tl.reconstruct` reads beside each; None where the model has no query head."""
    _, source, _ = open_for(work.model, work.adata[work.split()[1][:n_cells]], how_to_run(1, None, None))
    return around_cells(work.model, source, source.measured_tokens.astype(np.int64), 0) or (None, {})


def values_told(work: Work, cells: list[Cell], use_ranks: bool) -> list[np.ndarray]:
    """Our values of masked genes, given which genes they are."""
    model = work.model
    tokens = column_tokens(work.adata.var, model.vocabulary).astype(np.int64)
    measured = torch.from_numpy(np.sort(tokens))
    denominator = torch.from_numpy(score_denominator(model.vocabulary.entropy, model.config.entropy_floor))
    context, among = (None, {}) if use_ranks else context_for(work, len(cells))
    found = []
    with torch.inference_mode():
        for number, cell in enumerate(cells):
            own = torch.tensor([among.get(number, -1)])
            denoise = denoiser_of(model, genes=measured, context=context, own=own, stream=use_ranks)
            genes, hidden = torch.from_numpy(tokens[cell.genes]), torch.from_numpy(cell.hidden)
            values, bounds = torch.from_numpy(cell.values).float(), torch.tensor([0, len(genes)], dtype=torch.int32)
            order = torch.arange(len(genes))
            if not use_ranks:  # behind the visible ones, in the order of the vocabulary
                order = torch.argsort(torch.where(hidden, genes + len(genes), order), stable=True)
            genes, hidden, values = genes[order], hidden[order], values[order]
            numbers = torch.searchsorted(measured, genes) + N_SPECIAL
            expected = denoise(numbers, values.masked_fill(hidden, 0.0), bounds, hidden)[1]
            expected = torch.where(hidden, expected, values)
            if use_ranks:
                expected = values_at_ranks(genes, expected, hidden, ~hidden, bounds, denominator)
            found.append(
                torch.empty_like(expected).index_copy_(0, order, expected)[torch.from_numpy(cell.hidden)].numpy()
            )
    return found


def value_scores(cells: list[Cell], predictions: list[np.ndarray]) -> dict[str, float]:
    """Rank correlation and error of the values of masked genes, cell by cell, mean over cells."""
    scores = []
    for cell, predicted in zip(cells, predictions, strict=True):
        true = cell.values[cell.hidden]
        scores.append((value_spearman(true, predicted), float(np.sqrt(np.mean((true - predicted) ** 2)))))
    return means(scores, ("known_spearman", "known_rmse"))


def of_ours(adata: ad.AnnData, seconds: float) -> dict[str, float]:
    """What `tl.reconstruct` says of itself."""
    scores = adata.uns[C.UNS][C.RECONSTRUCTED]["scores"]
    kept = ("masked_recall", "masked_match", "l_dist", "l_dist_chance", "coverage", "bleu", "value_spearman")
    # without masked genes those of masked ones are not defined
    return {"n_cells": adata.n_obs, "seconds_per_cell": seconds,
            **{name: scores[name] for name in kept if np.isfinite(scores[name])}}  # fmt: skip


def ours_at_one_step(work: Work, seed: int, use_ranks: bool) -> dict[str, float]:
    adata, seconds = at_one_step(work, seed, use_ranks)
    cells = hidden_cells(work, seed)
    return {**of_ours(adata, seconds), **value_scores(cells, values_told(work, cells, use_ranks))}


def known_of_training(work: Work, by_type: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share of the training cells that express a gene, and its mean value there, of each group; each cell's group."""
    train = work.split()[0]
    values = work.once("values", lambda: log_normalised(work.adata))
    names = work.adata.obs[TYPE].to_numpy() if by_type else np.zeros(work.adata.n_obs, dtype=int)
    kinds, group = np.unique(names, return_inverse=True)
    there = np.stack([values[train[group[train] == kind]].getnnz(axis=0) for kind in range(len(kinds))])
    total = np.stack([np.asarray(values[train[group[train] == k]].sum(axis=0)).ravel() for k in range(len(kinds))])
    cells = np.bincount(group[train], minlength=len(kinds))[:, None]
    overall = total.sum(axis=0) / np.maximum(there.sum(axis=0), 1)
    return there / np.maximum(cells, 1), np.where(there > 0, total / np.maximum(there, 1), overall), group


def of_training_cells(work: Work, seed: int, by_type: bool) -> dict[str, float]:
    """The genes most frequent in training cells, overall or of the true type, and their mean values there."""
    share, value, group = known_of_training(work, by_type)
    cells, rows = hidden_cells(work, seed), work.split()[1][: work.sizes.hidden]
    recall, predictions = [], []
    for cell, kind in zip(cells, group[rows], strict=True):
        hidden = cell.genes[cell.hidden]
        recall.append((marginal_recall(hidden, cell.genes[~cell.hidden], share[kind]),))
        predictions.append(value[kind][hidden])
    return {"n_cells": len(cells), **means(recall, ("masked_recall",)), **value_scores(cells, predictions)}


def in_steps(n_steps: int) -> Callable[[Work, int], dict[str, float]]:
    def run(work: Work, seed: int) -> dict[str, float]:
        return of_ours(*filled(work, seed, work.sizes.steps, n_steps=n_steps))

    return run


MASKED: dict[str, tuple[Callable[[Work, int], dict], int]] = {
    "ours": (lambda work, seed: ours_at_one_step(work, seed, True), 3),
    "ours_no_places": (lambda work, seed: ours_at_one_step(work, seed, False), 3),
    "marginals": (lambda work, seed: of_training_cells(work, seed, False), 3),
    "type_means": (lambda work, seed: of_training_cells(work, seed, True), 3),
    "ours_1_step": (in_steps(1), 1),
    **{f"ours_{n}_steps": (in_steps(n), 1) for n in (2, 4, 8, 16, 32)},
}
"""Arms, and the seeds that each takes at most."""
PAPER_ARMS: dict[str, tuple[Callable[[Work, int], dict], int]] = {
    "mask_free": (lambda work, seed: of_ours(*filled(work, seed, work.sizes.hidden, mask_ratio=0.0)), 1),
    "masked_30": (lambda work, seed: of_ours(*at_one_step(work, seed)), 1),
}


# counts that were taken away


class Holes(NamedTuple):
    """Counts without a tenth of their entries, what is left of each cell, and those entries: log-normalised by it."""

    left: ad.AnnData
    totals: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    truth: np.ndarray


def with_holes(adata: ad.AnnData, seed: int) -> Holes:
    """Take a tenth of the entries above zero away; each cell keeps one."""
    counts = adata.X.tocoo()
    order = np.random.default_rng(seed).permutation(counts.nnz)
    n_out = round(HOLES * counts.nnz)
    spared = np.zeros(counts.nnz, dtype=bool)
    spared[order[n_out:]] = True
    lost = np.setdiff1d(np.arange(adata.n_obs), counts.row[spared])
    spared |= np.isin(counts.row, lost)
    left = adata.copy()
    left.X = sp.csr_matrix((counts.data[spared], (counts.row[spared], counts.col[spared])), shape=adata.shape)
    rows, columns = counts.row[~spared], counts.col[~spared]
    totals = np.asarray(left.X.sum(axis=1)).ravel()
    return Holes(left, totals, rows, columns, np.log1p(1e4 * counts.data[~spared] / totals[rows]))


def neighbors(left: ad.AnnData, n_times: int) -> np.ndarray:
    """Mean expression over 30 neighbours, the cell among them, on 50 components of its logarithm; so many times."""
    from sklearn.decomposition import PCA
    from sklearn.neighbors import kneighbors_graph

    values = log_normalised(left)
    place = PCA(min(COMPONENTS, min(values.shape) - 1), svd_solver="arpack", random_state=0).fit_transform(values)
    graph = kneighbors_graph(place, min(NEIGHBORS, len(place) - 1), include_self=True)
    if n_times > 1:  # a diffusion goes both ways
        graph = graph + graph.T
    graph = sp.csr_matrix(sp.diags(1 / np.asarray(graph.sum(axis=1)).ravel()) @ graph)
    found = np.expm1(values.toarray())
    for _ in range(n_times):
        found = graph @ found
    return np.log1p(found)


def group_means(left: ad.AnnData, by_type: bool) -> np.ndarray:
    values = log_normalised(left).expm1()
    names = left.obs[TYPE].to_numpy() if by_type else np.zeros(left.n_obs, dtype=int)
    kinds, group = np.unique(names, return_inverse=True)
    means_of = np.stack([np.asarray(values[group == kind].mean(axis=0)).ravel() for kind in range(len(kinds))])
    return np.log1p(means_of)[group]


def scvi(left: ad.AnnData, seed: int) -> np.ndarray:
    """Log-normalised expression that scVI expects: all genes, default architecture and epochs (400 at these sizes)."""
    import scvi as library

    library.settings.seed = seed
    counts = ad.AnnData(left.X.copy())
    library.model.SCVI.setup_anndata(counts)
    network = library.model.SCVI(counts)
    threads = torch.get_num_threads()
    network.train(accelerator="cpu", enable_progress_bar=False)
    torch.set_num_threads(threads)
    return np.log1p(1e4 * np.asarray(network.get_normalized_expression(return_numpy=True)))


def imputed(left: ad.AnnData, model: ScDiVa, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What `tl.impute` expects of all values, and of those that are above zero."""

    def layer(expressed: bool) -> np.ndarray:
        how = {"model": model, "keep_observed": False, "rng": seed, "copy": True}
        return sd.tl.impute(left, expressed=expressed, **how).layers[C.IMPUTED]

    return layer(False), layer(True)


def hole_scores(holes: Holes, imputed: np.ndarray, expressed: np.ndarray | None = None) -> dict[str, float]:
    """Rank correlations over the entries of a cell and of a gene, and the error over all of them.

    The entries asked for are not zero; imputed are expectations, zeros among them. So the error is taken of what
    an arm says of values that are above zero, too, which is the count expected of a Poisson variable of its
    expectation, cut off at zero, if it says nothing else. And of the median gene what is imputed on average, by the
    average that was counted.
    """
    predicted = imputed[holes.rows, holes.columns].astype(float)
    if not np.isfinite(predicted).all():
        raise ValueError(f"{(~np.isfinite(predicted)).sum()} of {len(predicted)} imputed values are not finite.")
    if expressed is None:
        depth = 1e4 / holes.totals[holes.rows]
        rate = np.maximum(np.expm1(predicted) / depth, LEAST_RATE)
        shown = np.log1p(depth * rate / -np.expm1(-rate))
    else:
        shown = expressed[holes.rows, holes.columns].astype(float)
    most = np.argsort(-np.bincount(holes.columns, minlength=imputed.shape[1]), kind="stable")[:MOST_HELD_OUT]
    of_gene = np.isin(holes.columns, most)
    counted = np.asarray(log_normalised(holes.left).expm1().mean(axis=0)).ravel()
    return {
        "n_cells": imputed.shape[0], "n_genes": imputed.shape[1], "n_entries": len(predicted),
        "spearman_cell": grouped_spearman(holes.rows, holes.truth, predicted),
        "spearman_gene": grouped_spearman(holes.columns[of_gene], holes.truth[of_gene], predicted[of_gene]),
        "rmse_shown": float(np.sqrt(np.mean((shown - holes.truth) ** 2))),
        "rmse": float(np.sqrt(np.mean((predicted - holes.truth) ** 2))),
        "excess": float(np.median(np.expm1(imputed).mean(axis=0, dtype=float)[counted > 0] / counted[counted > 0])),
    }  # fmt: skip


def grouped_spearman(group: np.ndarray, true: np.ndarray, predicted: np.ndarray) -> float:
    """Mean over groups of the rank correlation within; without those where either is constant."""
    order = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[order])) + 1
    found = []
    for part in np.split(order, bounds):
        a, b = rankdata(true[part]), rankdata(predicted[part])
        if len(part) > 1 and np.ptp(a) > 0 and np.ptp(b) > 0:
            found.append(np.corrcoef(a, b)[0, 1])
    return float(np.mean(found))


def imputing(make: Callable[[ad.AnnData, Work, int], Any]) -> Callable[[Work, int], dict[str, float]]:
    """Score what an arm makes: an array, or two, the second of values above zero."""

    def run(work: Work, seed: int) -> dict[str, float]:
        holes = work.once(("holes", seed), lambda: with_holes(often(work.adata), seed))
        begun = time.perf_counter()
        made = make(holes.left, work, seed)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, **hole_scores(holes, *(made if isinstance(made, tuple) else (made,)))}

    return run


IMPUTE: dict[str, tuple[Callable[[Work, int], dict], int]] = {
    "ours": (imputing(lambda left, work, seed: imputed(left, work.model, seed)), 3),
    "knn": (imputing(lambda left, work, seed: neighbors(left, 1)), 3),
    "diffused": (imputing(lambda left, work, seed: neighbors(left, DIFFUSED)), 3),
    "gene_means": (imputing(lambda left, work, seed: group_means(left, False)), 3),
    "type_means": (imputing(lambda left, work, seed: group_means(left, True)), 3),
    "scvi": (imputing(lambda left, work, seed: scvi(left, seed)), 3),
}
