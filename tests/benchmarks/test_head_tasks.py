"""What tasks are given by a head, and what marks a doublet."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch

import scdiva as sd
from scdiva.data.cells import open_cells
from scdiva.diffusion.thinning import counts_of
from scdiva.models import load_model
from scdiva.populations.states import context_of, fit_to, predicted, states_of
from scdiva.train.adaptation import read_cells

pytestmark = pytest.mark.filterwarnings("ignore:the data have")


@pytest.fixture
def given(script):
    """The script, a model with a reader of random weights, and cells."""
    tasks, scripts, model = script("head_tasks"), script("_scripts"), load_model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = scripts.QueryConfig(reader_genes=20)
        module = scripts.QueryModule(model, config, torch.zeros(1, model.config.n_tokens, dtype=torch.bool)).eval()
        for weight in (module.head.out.weight, module.head.line.weight):
            torch.nn.init.normal_(weight, std=0.1)
    adata = sd.datasets.toy(40, 120)
    cells = read_cells(open_cells(adata, model), np.zeros(adata.n_obs, dtype=np.int64), whole=True)[0]
    return tasks, scripts, model, module, cells


def test_values_are_those_that_single_queries_of_training_are_given(given):
    tasks, scripts, model, module, cells = given
    asked, around = cells.subset(np.arange(5)), cells.subset(np.arange(5, 40))
    genes = np.sort(cells.measured.astype(np.int64))
    states = states_of(model, asked)
    found = tasks.values_of(module, asked, states, genes, context_of(model, around, states_of(model, around), genes))
    batch, other = asked.take(np.arange(5)), around.take(np.arange(35))
    queries = scripts.Asked(
        batch.packed, *[torch.zeros(0, dtype=torch.int64)] * 2, torch.zeros(0),
        torch.arange(5).repeat_interleave(len(genes)), torch.from_numpy(genes).repeat(5), torch.zeros(5 * len(genes)),
        thinned=False,
    )  # fmt: skip
    with torch.inference_mode():
        counts = counts_of(other.values, other.cu_seqlens)
        _, expected = module.answer(queries, (other.tokens, counts, other.cu_seqlens))
    np.testing.assert_allclose(found, expected.view(5, -1), rtol=1e-4, atol=1e-4)
    # a cell that is in the context does not read itself
    itself = states_of(model, around)
    context = context_of(model, around, itself, genes)
    own = tasks.values_of(module, around, itself._replace(own=np.arange(35)), genes, context)
    assert not np.allclose(own, tasks.values_of(module, around, itself, genes, context), atol=1e-3)


def test_the_state_head_predicts_as_a_fitted_population_does(given):
    tasks, _, model, _, cells = given
    states, genes = states_of(model, cells), cells.measured.astype(np.int64)
    fitted = fit_to(model, cells, states, np.random.default_rng(0))
    row_of = {state.tobytes(): i for i, state in enumerate(states.state)}
    known = tasks.Expected(model, genes, fitted.corrections, predicted(model, genes, states), row_of)
    some = states.take(np.array([7, 3, 3]))
    for one, other in zip(known.expected(some), fitted.expected(some), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_doublet_has_half_the_counts_of_two_cells_of_different_clusters(given):
    tasks, *_ = given
    groups = np.repeat(np.arange(8), 10)
    state = np.eye(8)[groups] + np.random.default_rng(0).normal(scale=1e-3, size=(80, 8))
    counts = sp.csr_matrix(1000.0 * np.eye(8, dtype=np.float32)[groups])  # a gene for each cluster
    found = tasks.doublets(counts, state, 30, np.random.default_rng(0)).toarray()
    assert found.shape == (30, 8)
    assert ((found > 0).sum(axis=1) == 2).all()
    assert 490 < found[found > 0].mean() < 510


def test_arms_and_goals(given):
    tasks, _, model, module, _ = given
    heads = tasks.Heads(model, module, module)
    adata = sd.datasets.toy(60, 120)
    cells = read_cells(open_cells(adata, model), np.zeros(60, dtype=np.int64), whole=True)[0]
    asked, around = cells.subset(np.arange(30)), cells.subset(np.arange(30, 60))
    pairs = ad.AnnData(sp.csr_matrix(adata.X[:10] + adata.X[30:40]), var=adata.var)
    both = ad.concat([adata[:10].copy(), pairs], index_unique="-", keys=["cell", "doublet"])
    many, bare = sd.datasets.toy(200, 120), load_model()
    many.X = sp.csr_matrix(many.X)
    bare.query_head = None
    found = {
        "imputation": dict(tasks.imputed(many, heads, bare, 0)),
        "generation": dict(tasks.generated(asked, around, heads, 0)),
        "doublets": dict(tasks.marked(both, np.repeat([0, 1], 10), around, heads, 0)),
    }
    imputed = [scores["rmse"] for scores in found["imputation"].values()]
    assert len(set(imputed)) == 3  # each arm has its own predictions
    assert found["doublets"]["number of genes"]["auroc"] > 0.9  # they are not thinned here
    rows = [
        {"section": task, "set": name, "arm": arm, **{key: score + (name == "b") for key, score in scores.items()}}
        for name in "ab"
        for task, arms in found.items()
        for arm, scores in arms.items()
    ]
    leads = {(row["section"], row["what"]): row["value"] for row in tasks.goals(rows)}
    lead = found["imputation"]["query head"]["rmse"] - found["imputation"]["state head"]["rmse"]
    assert leads["imputation", "query head: rmse ahead of state head"] == pytest.approx(-lead, abs=1e-4)
    assert len(leads) == 3 * 2 + 2 * 2 + 4
    assert not tasks.goals([row for row in rows if row["set"] == "a"])
