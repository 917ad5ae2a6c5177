"""The task benchmarks: what is hidden stays hidden, scores equal their definitions, the page is that of the results."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd


def test_differences_are_paired_and_datasets_of_a_study_drawn_together(script):
    tables, values = script("tables"), np.random.default_rng(0).normal(0.1, 0.1, 6)
    interval = script("_record").bootstrap(values)
    assert script("_record").bootstrap(np.repeat(values, 3), np.repeat(list("abcdef"), 3)) == pytest.approx(interval)
    names = [f"kang_{i}" for i in range(3)] + [f"other_{i}" for i in range(4)]
    scores, baseline = ({(name, ""): x for name in names} for x in (0.9, 0.8))
    gap = tables.gap(scores, {**baseline, ("only_theirs", ""): 0.0})
    assert (gap.value, gap.n, gap.n_studies, gap.verdict()) == (pytest.approx(0.1), 7, 5, "better")
    assert tables.gap(dict(list(scores.items())[:6]), baseline).verdict() == "no interval"  # four studies
    signs = {key: 0.8 + 0.3 * (-1) ** i for i, key in enumerate(scores)}
    assert tables.gap(signs, baseline).verdict() == "no difference"


def test_hidden_labels_are_hidden_and_ilisi_is_its_definition(script):
    integration, adata = script("integration"), sd.datasets.toy(120, 160, n_types=3)
    labels = adata.obs["cell_type"].astype(str).to_numpy().astype(object)
    labels[:10] = "nan"
    half, redrawn = (integration.hidden_half(labels.astype(str), seed) for seed in (1, 0))
    assert (len(half), half.min() >= 10) == (55, True)
    assert not np.array_equal(half, redrawn)
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
    (task,) = annotation.tasks(adata, "assay", {"r → q": ["q"]}, None, 0)
    assert (task.reference.tolist(), task.query.tolist()) == ([0, 1, 2], [3, 4, 5, 6, 7])


def test_fine_tuned_models_do_not_see_what_they_are_scored_on(script, monkeypatch):
    finetuning, adata = script("finetuning"), sd.datasets.toy(90, 160, n_types=3)
    adata.X, adata.obs["batch"] = sp.csr_matrix(adata.X, dtype=np.float32), np.array(list("xyz"))[np.arange(90) % 3]
    monkeypatch.setitem(finetuning.QUERIES, "toy", ("batch", ["z"]))
    types, tuning = adata.obs["cell_type"].astype(str).to_numpy(), {"finetune": True, "epochs": 1, "context": 16}
    hidden = script("integration").hidden_half(types, 0)
    for fit, rows in ((finetuning.annotate, np.arange(90) % 3 == 2), (finetuning.integrate, hidden)):
        altered = adata.copy()
        changed = types.copy()
        changed[rows] = changed[rows][::-1]
        altered.obs["cell_type"] = changed
        results = []
        for cells in (adata.copy(), altered):
            result = fit(cells, "toy", "fine-tuned", tuning, 0)
            results.append(result["embedding"] if "embedding" in result else result["tasks"][0]["predicted"])
        np.testing.assert_array_equal(*results)
    random, trained = finetuning.network("random weights"), sd.models.load_model("scdiva-paper-mini")
    assert random.config == trained.config
    assert not np.allclose(random.gene_weight.detach().numpy(), trained.gene_weight.detach().numpy())


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
    left, rows, columns, truth = imputation.with_holes(imputation.often_detected(adata), 1)
    assert len(truth) == round(0.1 * imputation.often_detected(adata).X.nnz)
    assert (left.X[rows, columns] == 0).all()
    imputed = np.zeros(left.shape)
    imputed[rows, columns] = truth
    scores = imputation.impute_scores(adata, {"imputed": imputed, "expressed": imputed}, 1)
    assert (scores["rmse"], scores["rmse_shown"], scores["spearman_cell"]) == (0, 0, pytest.approx(1))


def test_the_page_and_its_csv_files_are_those_of_the_results(script):
    tables = script("tables")
    assert tables.PAGE.read_text(encoding="utf-8") == tables.page()
    large = tables.LARGE.read_text(encoding="utf-8")
    assert large == tables.with_scaling(large)
    for name, results in tables.FILES.items():
        assert (tables.TABLES / f"{name}.csv").read_text(encoding="utf-8") == tables.csv_of(results)
    for name in tables.TASKS:
        assert f"(_static/benchmarks/{name}.svg)" in tables.page()
        assert (tables.TABLES / f"{name}.svg").read_text(encoding="utf-8").startswith("<?xml")
