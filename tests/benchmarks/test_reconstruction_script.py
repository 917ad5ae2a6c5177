"""reconstruction.py: what is taken away comes back as the truth, baselines are the obvious ones, goals judge."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from scdiva.models import load_model


@pytest.fixture
def cells(script):
    return script("_reconstruction_cells")


@pytest.fixture
def table(script):
    return script("_reconstruction_table")


@pytest.fixture(scope="module")
def model():
    return load_model("scdiva-mini")


NAMES = ["CD3D", "LYZ", "CD14", "MS4A1", "CD79A", "GNLY", "NKG7", "FTH1", "ACTB", "CD20", "no gene"]


def toy(n=60) -> ad.AnnData:
    """Counts of ten genes, one of them twice (MS4A1 is CD20), and of one that nobody knows."""
    rng = np.random.default_rng(0)
    counts = rng.poisson(3, (n, len(NAMES)))
    counts[:, 9] = 1  # rarer than MS4A1
    counts[:, 8] += 1
    adata = ad.AnnData(sp.csr_matrix(counts.astype(np.float32)))
    adata.var_names = NAMES
    adata.obs["cell_type"] = np.where(np.arange(n) < n // 2, "T", "B")
    adata.obs.loc[adata.obs_names[-1], "cell_type"] = "unlabelled"
    return adata


def work_of(cells, model, adata):
    return cells.Work("toy", cells.prepared(adata, model), model, cells.Sizes(4, 2, 4, 2, 2))


def test_training_and_test_cells_are_apart(cells, model):
    train, test = work_of(cells, model, toy()).split()
    assert not set(train) & set(test)
    assert len(train) + len(test) == 59
    assert len(test) == 12


def test_holes_are_a_tenth_and_the_truth_is_what_was_there(cells, model):
    adata = cells.prepared(toy(), model)
    holes = cells.with_holes(adata, 1)
    assert len(holes.truth) == round(0.1 * adata.X.nnz)
    assert holes.left.X.nnz + len(holes.truth) == adata.X.nnz
    assert (holes.left.X[holes.rows, holes.columns] == 0).all()
    total = np.asarray(holes.left.X.sum(axis=1)).ravel()[holes.rows]
    was = np.asarray(adata.X[holes.rows, holes.columns]).ravel()
    np.testing.assert_allclose(holes.truth, np.log1p(1e4 * was / total))
    told = np.zeros(adata.shape)
    told[holes.rows, holes.columns] = holes.truth
    scores = cells.hole_scores(holes, told)
    assert scores["rmse"] == 0
    # an expectation of many counts holds no zeros; one of nearly none is a single count where there is one
    sure = cells.hole_scores(holes._replace(totals=np.full(adata.n_obs, 1e9)), told)
    assert sure["rmse_shown"] == pytest.approx(0, abs=1e-6)
    rare = cells.hole_scores(holes, 1e-9 * np.random.default_rng(0).random(adata.shape))
    one = np.log1p(1e4 / holes.totals[holes.rows])
    assert rare["rmse_shown"] == pytest.approx(np.sqrt(np.mean((one - holes.truth) ** 2)), rel=1e-4)
    assert scores["spearman_cell"] == pytest.approx(1)
    apart = cells.hole_scores(holes, told + 1, told)  # an arm that says both
    assert (apart["rmse_shown"], apart["rmse"]) == (0, pytest.approx(1))
    told[holes.rows[0], holes.columns[0]] = np.nan
    with pytest.raises(ValueError, match=r"1 of .* imputed values are not finite"):
        cells.hole_scores(holes, told)


def rows():
    made = {"set": "some", "n_cells": 5, "package": "scdiva 0.1.0"}
    score = {"masked_recall": 0.5, "known_spearman": 0.4, "known_rmse": 0.3}
    drawn = {"forest": 0.7, "mmd": 0.010, "mmd_floor": -0.002, "exact_copies": 0, "share_closer": 0.03}
    return [
        {**made, "part": "masked", "arm": "ours", **score, "masked_recall": 0.9, "masked_recall_sd": 0.01},
        {**made, "part": "masked", "arm": "ours_no_places", **score, "note": "a note"},
        {**made, "part": "masked", "arm": "marginals", **score, "masked_recall": 0.6},
        {**made, "part": "masked", "arm": "ours_8_steps", "masked_recall": 0.5, "seconds_per_cell": 1.0},
        {**made, "part": "paper", "arm": "mask_free", "l_dist": 0.0, "bleu": 1.0, "value_spearman": 1.0},
        {**made, "part": "impute", "arm": "ours", "spearman_cell": 0.5, "rmse_shown": 1.0},
        {**made, "part": "impute", "arm": "knn", "spearman_cell": 0.4, "rmse_shown": 1.2},
        {**made, "part": "population", "arm": "ours", **drawn},
        {**made, "part": "population", "arm": "transformer_1", **drawn},
        {**made, "part": "population", "arm": "transformer_32", **drawn, "mmd": 0.013},
        {**made, "part": "population", "arm": "by_type", "own_type": 0.75, "real_own_type": 0.9,
         "each": {"B": 0.9, "T": 0.6}, "real_each": {"B": 1.0, "T": 0.8}},
        {**made, "part": "likelihood", "arm": "ours", "auroc_shuffled": 1.0, "auroc_doublets": 0.4,
         "bound_real": -5.0, "bound_doublets": -4.9},
    ]  # fmt: skip


def test_goals(table):
    found = {row["what"]: (row["value"], row["met"]) for row in table.goals(rows())}
    assert found == {
        "some: recall at one step, above training cells": (-0.1, False),
        "some: Spearman of hidden values, above training cells": (0.0, None),
        "some: imputation, Spearman per cell above mean of 30 neighbours": (0.1, None),
        "some: imputation, RMSE of what is expressed below mean of 30 neighbours": (0.2, None),
        "some: AUROC of the forest, drawn cells": (0.7, None),
        "some: exact copies": (0.0, True),
        "some: share nearer to a real cell than real ones": (0.03, None),
        "some: MMD² of 32 steps less that of one (at most the larger of floor and spread)": (0.003, False),
        "some: drawn cells named as their type, mean over types": (0.75, None),
        "some: drawn cells named as their type, B": (0.9, None),
        "some: drawn cells named as their type, T": (0.6, None),
        "some: likelihood, scdiva-mini: AUROC of real cells, same counts in other genes": (1.0, None),
        "some: likelihood, scdiva-mini: nats a gene of real cells above doublets": (-0.1, False),
    }
    assert table.goals([]) == []
    # five cells say nothing of a share; of two thousand these do
    many = {row["what"]: row["met"] for row in table.goals([{**row, "n_cells": 2000} for row in rows()])}
    assert many["some: AUROC of the forest, drawn cells"] is True
    assert many["some: share nearer to a real cell than real ones"] is False
    assert many["some: drawn cells named as their type, mean over types"] is False
