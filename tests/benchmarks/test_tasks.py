"""The task benchmarks: what is hidden stays hidden, scores equal their definitions, the page is that of the results."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.stats import ttest_ind, ttest_rel

import scdiva as sd


def test_a_lead_has_the_interval_of_students_t(script):
    tasks = script("_run")
    runs = [[{"a": value} for value in values] for values in ((0.80, 0.83, 0.86, 0.81), (0.78, 0.82, 0.83, 0.80))]
    one, other = ({**tasks.over_seeds(run), "seeds": [0, 1, 2, 3]} for run in runs)
    values = [[run["a"] for run in some] for some in runs]
    expected = ttest_rel(*values).confidence_interval(0.95)
    assert tasks.lead(one, other, "a") == (pytest.approx(0.0175), pytest.approx(tuple(expected), abs=1e-4))
    del one["a_seeds"]  # rows of earlier results have deviations only
    expected = ttest_ind(*values, equal_var=False).confidence_interval(0.95)
    assert tasks.lead(one, other, "a")[1] == pytest.approx(tuple(expected), abs=2e-4)


def test_hidden_labels_are_hidden_and_ilisi_is_its_definition(script):
    integration, adata = script("integration"), sd.datasets.toy(120, 160, n_types=3)
    labels = adata.obs["cell_type"].astype(str).to_numpy().astype(object)
    labels[:10] = "nan"
    half, other = (integration.hidden_half(labels.astype(str), seed) for seed in (1, 0))
    assert (len(half), half.min() >= 10) == (55, True)
    assert not np.array_equal(half, other)
    rng = np.random.default_rng(0)
    batches = np.array(["x", "y"])[np.arange(300) % 2]
    mixed = rng.normal(size=(300, 4))
    assert integration.ilisi(mixed, batches) > 0.9
    assert integration.ilisi(mixed + 50.0 * (batches == "x")[:, None], batches) == pytest.approx(0, abs=1e-6)


def test_annotation_is_scored_on_types_of_the_reference(script):
    annotation = script("annotation")
    obs = {"cell_type": ["a", "a", "b", "a", "a", "b", "c", "nan"], "batch": "x", "assay": ["r"] * 3 + ["q"] * 5}
    adata = ad.AnnData(np.ones((8, 1), dtype=np.float32), obs=obs)
    prediction = {"predicted": np.array(["a", "b", "b", "a", "a"]), "confidence": np.array([1.0, 1.0, 0.5, 1.0, 1.0])}
    scores = annotation.scores(adata, annotation.tasks(adata, "assay", {"q": ["q"]}, None, 0), [prediction])
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert scores["f1"] == {"a": pytest.approx(2 / 3), "b": pytest.approx(2 / 3)}
    (task,) = annotation.tasks(adata, "assay", {"q": ["q"]}, 0.4, 0)
    assert set(adata.obs["cell_type"].iloc[task.labelled]) == {"a", "b"}  # two types in any share


@pytest.mark.parametrize("by", ["single", "combination"])
def test_held_out_perturbations_are_not_trained_on(script, by):
    perturbation, labels = script("perturbation"), ("control", *"ABCDE", "A+B", "B+C", "C+D", "D+E", "A+E")
    counts = np.random.default_rng(0).poisson(2.0, (24 * len(labels), 60)).astype(np.float32)
    cells = ad.AnnData(counts, obs={"perturbation": np.repeat(labels, 24)})
    adata = perturbation.prepared(cells, perturbation.Screen("toy", by))
    predicted = []
    for task in (perturbation.task_of(adata, by, 0, fold) for fold in range(5)):
        assert not set(task.train.obs["condition"]) & set(task.predict)
        assert set(task.observed.obs["condition"]) == {*task.predict, "control"}
        predicted += task.predict
    assert {("+" in name) for name in predicted} == ({True} if by == "combination" else {True, False})


def test_holes_are_a_tenth_and_the_truth_scores_perfectly(script):
    imputation, adata = script("imputation"), sd.datasets.toy(80, 120)
    adata.X = sp.csr_matrix(adata.X, dtype=np.float32)
    left, rows, columns, truth = imputation.with_holes(imputation.often(adata), 1)
    assert len(truth) == round(0.1 * imputation.often(adata).X.nnz)
    assert (left.X[rows, columns] == 0).all()
    told = np.zeros(left.shape)
    told[rows, columns] = truth
    scores = imputation.impute_scores(adata, {"imputed": told, "expressed": told}, 1)
    assert (scores["rmse"], scores["rmse_shown"], scores["spearman_cell"]) == (0, 0, pytest.approx(1))


def test_the_page_and_its_csv_files_are_those_of_the_results(script):
    tables = script("tables")
    assert tables.PAGE.read_text(encoding="utf-8") == tables.page()
    for name, results in tables.FILES.items():
        assert (tables.TABLES / f"{name}.csv").read_text(encoding="utf-8") == tables.csv_of(results)
