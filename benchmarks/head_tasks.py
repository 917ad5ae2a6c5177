"""What tasks gain from a query head, and from a transformer that predicts its values, in studies not seen.

    python benchmarks/head_tasks.py --corpus FOLDER --base FOLDER --heads PRESENCE VALUES [--cells 120]

Studies, base and heads are those of denoising.py: the first head predicts presence, the second, with a transformer,
values. The same cells of each study are given to all arms, with the genes that ten cells express.

- Imputation: a tenth of the entries above zero is set to zero, and `tl.impute(expressed=True)` predicts them. Arms: the
  state head; with the query head, as the bundled model has it; with the transformer's values in the place of the query
  head's.
- Generation: cells are drawn as `tl.generate` does from half of the cells; a classifier separates them from the other
  half. Arms: what cells express is predicted by the state head, as in `tl.generate`, by the query head in context, and
  with the transformer's values; all are corrected by the cells.
- Doublets: two cells of different clusters of eight, summed and thinned to half. AUROC of what says that a cell is one:
  how many genes it shows; `tl.log_likelihood`; the loss of its queries of presence, or of values, by the heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import anndata as ad
import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from _population_metrics import discriminator_auroc
from _record import record
from _scripts import QueryModule, TrainedContext, draw_queries, load_head, with_head
from _timing import report
from denoising import HELD_OUT, MOST, balanced, lead, spearman_within
from sklearn.cluster import KMeans
from sklearn.metrics import roc_auc_score

import scdiva as sd
from scdiva import _constants as C
from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.data.cells import open_cells
from scdiva.diffusion.thinning import Counts, counts_of
from scdiva.metrics import value_spearman
from scdiva.models import ScDiVa, load_model
from scdiva.nn.queries import Context
from scdiva.populations import imputation
from scdiva.populations.corrections import RIDGE, Corrections, fit_population
from scdiva.populations.drawing import Order, draw_cells
from scdiva.populations.states import States, context_of, expression_of, predicted, states_of
from scdiva.train.adaptation import AdaptationCells, read_cells

HOLES, LEAST_GENES, LEAST_CELLS, CLUSTERS, AROUND, AT_ONCE = 0.1, 200, 10, 8, 200, 4
STATE, HEAD, READER = "state head", "query head", "values by transformer"
SCORES = {
    "imputation": {"spearman_gene": 1, "spearman_cell": 1, "rmse": -1},
    "generation": {"forest": -1, "logistic": -1},
    "doublets": {"auroc": 1},
}
"""Scores of each task, and whether more of it is better."""


class Heads(NamedTuple):
    """A model with the query head that predicts presence, and what predicts values with a transformer."""

    model: ScDiVa
    presence: QueryModule
    values: QueryModule


@torch.inference_mode()
def values_of(
    module: QueryModule, cells: AdaptationCells, states: States, genes: np.ndarray, context: Context
) -> np.ndarray:
    """Values `(n, n_genes)` of genes, masked in these cells, that a head predicts which reads them by a transformer."""
    head, numbers = module.model.state_head, torch.from_numpy(genes - N_SPECIAL)
    assert head is not None
    missed = torch.ones_like(context.values)  # of masked genes it is not read
    around = TrainedContext(context.state, context.n_genes, missed, context.values, context.log_odds)
    found = np.empty((cells.n_cells, len(genes)), dtype=np.float32)
    for start in range(0, cells.n_cells, AT_ONCE):
        rows = np.arange(start, min(start + AT_ONCE, cells.n_cells))
        state, n_genes = torch.from_numpy(states.state[rows]), torch.from_numpy(states.n_genes[rows])
        own = None if states.own is None else torch.from_numpy(states.own[rows])
        read = head(state, n_genes)
        expected = head.log_odds(read, numbers).flatten(), head.values(read, numbers).flatten()
        cell = torch.arange(len(rows)).repeat_interleave(len(genes))
        column = torch.arange(len(genes)).repeat(len(rows))
        reading = module._read(list(cells.take(rows).packed), state, numbers[column], cell)
        answers = module.head(
            state, read, n_genes, cell, numbers[column], column, *expected,
            thinned=False, context=around, own=own, reading=reading,
        )  # fmt: skip
        found[rows] = answers[1].view(len(rows), -1).float().numpy()
    return found


def imputed(cells: ad.AnnData, heads: Heads, bare: ScDiVa, seed: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each arm and how well it predicts entries that were set to zero."""
    rng, whole = np.random.default_rng(seed), cells.X
    gone = rng.random(whole.nnz) < HOLES
    left = whole.copy()
    left.data = np.where(gone, 0, left.data)
    left.eliminate_zeros()
    row = np.repeat(np.arange(cells.n_obs), np.diff(whole.indptr))
    true = np.log1p(C.TARGET_SUM * whole.data / np.asarray(left.sum(axis=1)).ravel()[row])[gone]
    row, gene = row[gone], whole.indices[gone]
    read: list[AdaptationCells] = []

    def remembered(model: ScDiVa, shown: AdaptationCells) -> States:
        read[:] = [shown]
        return states_of(model, shown)

    def by_reader(model: ScDiVa, genes: np.ndarray, states: States, context: Context | None = None) -> tuple:
        log_odds, values = predicted(model, genes, states, context)
        return log_odds, values if context is None else values_of(heads.values, read[0], states, genes, context)

    for arm, model in ((STATE, bare), (HEAD, heads.model), (READER, heads.model)):
        data = ad.AnnData(left.copy(), obs=cells.obs, var=cells.var)
        with mock.patch.multiple(imputation, states_of=remembered, predicted=by_reader if arm == READER else predicted):
            sd.tl.impute(data, model=model, expressed=True, keep_observed=False, rng=seed)
        found = np.asarray(data.layers[C.IMPUTED])[row, gene]
        known = np.isfinite(found)
        by_cell = [
            value_spearman(true[at], found[at]) for at in (known & (row == one) for one in range(cells.n_obs))
            if at.sum() > 2
        ]  # fmt: skip
        yield (
            arm,
            {
                "spearman_gene": spearman_within(found[known], true[known], gene[known]),
                "spearman_cell": float(np.nanmean(by_cell)),
                "rmse": float(np.sqrt(np.square(found - true)[known].mean())),
            },
        )


class Expected(NamedTuple):
    """What `draw_cells` asks a fitted population: expected expression by state, corrected; here of known states."""

    model: ScDiVa
    genes: np.ndarray
    corrections: Corrections
    tables: tuple[np.ndarray, np.ndarray]
    row_of: dict[bytes, int]

    def expected(self, states: States) -> tuple[np.ndarray, np.ndarray]:
        rows = [self.row_of[state.tobytes()] for state in states.state]
        return self.corrections.added(states.state, *(table[rows] for table in self.tables))


def generated(
    cells: AdaptationCells, held: AdaptationCells, heads: Heads, seed: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each arm and how well a classifier separates as many cells that it draws from cells that are held out."""
    genes, states = cells.measured.astype(np.int64), states_of(heads.model, cells)
    own = np.arange(cells.n_cells)
    states, context = states._replace(own=own), context_of(heads.model, cells, states, genes)
    by_head = predicted(heads.model, genes, states, context)
    tables = {
        STATE: predicted(heads.model, genes, states),
        HEAD: by_head,
        READER: (by_head[0], values_of(heads.values, cells, states, genes, context)),
    }
    order = Order(own, own, "", 0.0, cells.n_cells)
    row_of, expression = {state.tobytes(): i for i, state in enumerate(states.state)}, expression_of(cells, genes)
    for arm, table in tables.items():
        fitted = fit_population(states.state, *table, expression, np.random.default_rng(seed), RIDGE)
        drawn = draw_cells(
            Expected(heads.model, genes, fitted, table, row_of),  # type: ignore[arg-type]
            cells, states, [order], {}, True, seed,
        )  # fmt: skip
        column = np.searchsorted(genes, drawn.tokens)
        made = sp.csr_matrix((drawn.values, column, drawn.indptr), shape=(cells.n_cells, len(genes)))
        real = expression_of(held, genes)
        yield arm, {kind: discriminator_auroc(real, made, classifier=kind, rng=seed) for kind in SCORES["generation"]}


def doublets(counts: sp.csr_matrix, state: np.ndarray, n: int, rng: np.random.Generator) -> sp.csr_matrix:
    """Two cells of different clusters summed, thinned to half."""
    cluster = KMeans(CLUSTERS, n_init=3, random_state=int(rng.integers(2**31))).fit_predict(state)
    pairs = rng.integers(len(cluster), size=(50 * n, 2))
    pairs = pairs[cluster[pairs[:, 0]] != cluster[pairs[:, 1]]][:n]
    both = sp.csr_matrix(counts[pairs[:, 0]] + counts[pairs[:, 1]])
    both.data = rng.binomial(both.data.astype(np.int64), 0.5).astype(np.float32)
    both.eliminate_zeros()
    return both


def marked(
    adata: ad.AnnData, is_doublet: np.ndarray, around: AdaptationCells, heads: Heads, seed: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield what may mark a doublet, and the AUROC of that; none of the cells is among those around."""
    cells = read_cells(open_cells(adata, heads.model), np.zeros(adata.n_obs, dtype=np.int64))[0]
    yield "number of genes", {"auroc": float(roc_auc_score(is_doublet, np.diff(cells.indptr)))}
    sd.tl.log_likelihood(adata, heads.model, n_samples=8, rng=seed)
    bound = adata.obs[f"{C.OBS_LIKELIHOOD}_{C.PER_GENE}"]
    yield "tl.log_likelihood", {"auroc": float(roc_auc_score(is_doublet, -bound))}

    def packed(some: AdaptationCells) -> tuple[torch.Tensor, Counts, torch.Tensor]:
        batch = some.take(np.arange(some.n_cells))
        return batch.tokens, counts_of(batch.values, batch.cu_seqlens), batch.cu_seqlens

    measured = torch.from_numpy(cells.measured.astype(np.int64))
    asked = draw_queries(*packed(cells), measured, step_generator(seed, 0, "asked"), thinned=True, most=MOST)
    n_asked = asked.cell.bincount(minlength=adata.n_obs), asked.value_cell.bincount(minlength=adata.n_obs)
    for about, other in (("", None), (", context", packed(around))):
        with torch.inference_mode():
            (odds, values), (_, read) = (module.answer(asked, other) for module in (heads.presence, heads.values))
        presence = F.binary_cross_entropy_with_logits(
            balanced(odds, asked.cell), asked.present.double(), reduction="none"
        )
        for arm, loss, of, number in (
            (f"presence, {HEAD}", presence, asked.cell, n_asked[0]),
            (f"values, {HEAD}", (values - asked.value).square(), asked.value_cell, n_asked[1]),
            ("values, transformer", (read - asked.value).square(), asked.value_cell, n_asked[1]),
        ):
            mean = torch.zeros(adata.n_obs).double().index_add_(0, of, loss.double()) / number.clamp_min(1)
            yield arm + about, {"auroc": float(roc_auc_score(is_doublet, mean))}


def goals(rows: list[dict]) -> list[dict]:
    """By how much an arm leads another, mean over the studies."""
    at = {(row["section"], row["arm"], row["set"]): row for row in rows}
    sets, found = list(dict.fromkeys(row["set"] for row in rows)), []
    pairs = [(task, *two) for task in ("imputation", "generation") for two in ((HEAD, STATE), (READER, HEAD))]
    marks = [what + about for about in ("", ", context") for what in (f"presence, {HEAD}", "values, transformer")]
    pairs += [("doublets", mark, "tl.log_likelihood") for mark in marks]
    for task, one, other in pairs:
        for key, sign in SCORES[task].items():
            both = [(at[task, one, name], at[task, other, name]) for name in sets]
            # in a small study no gene is asked of in enough cells
            leads = [sign * (ours[key] - theirs[key]) for ours, theirs in both if key in ours]
            if len(leads) < 2:
                continue
            found.append(lead(f"{one}: {key} ahead of {other}", leads, section=task))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True, help="folder of train_mini.py without these studies")
    parser.add_argument("--heads", type=Path, nargs=2, required=True, help="of train_denoiser.py on that base")
    parser.add_argument("--studies", nargs="+", default=list(HELD_OUT))
    parser.add_argument("--cells", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    sd.settings.progress, sd.settings.threads = False, 1
    bare, seed, n = load_model(arguments.base / "model"), arguments.seed, arguments.cells
    presence, values = (load_head(bare, file) for file in arguments.heads)
    model = with_head(bare, presence).eval()
    model.vocabulary = bare.vocabulary
    heads, rows = Heads(model, presence, values), []
    for name in arguments.studies:
        adata = ad.read_h5ad(arguments.corpus / f"{name}.h5ad")
        adata = ad.AnnData(sp.csr_matrix(adata.X, dtype=np.float32), var=adata.var[[]])
        adata = adata[np.diff(adata.X.indptr) >= LEAST_GENES].copy()
        adata = adata[:, adata.X.getnnz(axis=0) >= LEAST_CELLS].copy()
        rng = np.random.default_rng(seed)
        order = rng.permutation(adata.n_obs)
        some = adata[np.sort(order[: min(n, len(order) // 2)])].copy()
        cells = read_cells(open_cells(adata, bare), np.zeros(adata.n_obs, dtype=np.int64), whole=True)[0]
        state = states_of(bare, cells).state
        asked, around = (cells.subset(np.sort(part)) for part in np.split(order[: some.n_obs + AROUND], [some.n_obs]))
        pairs = ad.AnnData(doublets(adata.X, state, some.n_obs, rng), var=adata.var)
        both = ad.concat([some, pairs], index_unique="-", keys=["cell", "doublet"])
        for task, arms in (
            ("imputation", imputed(some, heads, bare, seed)),
            ("generation", generated(asked, around, heads, seed)),
            ("doublets", marked(both, np.repeat([0, 1], some.n_obs), around, heads, seed)),
        ):
            for arm, scores in arms:
                known = {key: round(score, 4) for key, score in scores.items() if np.isfinite(score)}
                rows.append({"section": task, "set": name, "arm": arm, "n_cells": some.n_obs, **known})
                print(rows[-1], flush=True)
        record("head_tasks", [*rows, *goals(rows)])
    report(goals(rows))


if __name__ == "__main__":
    main()
