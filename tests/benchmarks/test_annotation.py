"""annotation.py: what is hidden stays hidden, scores are what they are said to be, goals say what the rows say."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest

import scdiva as sd


@pytest.fixture
def arms(script):
    return script("_annotation_arms")


@pytest.fixture
def scores(script):
    return script("_annotation_scores")


@pytest.fixture
def annotation(script):
    return script("annotation")


def cells(n_cells=150, **options) -> ad.AnnData:
    """Toy counts with `batch`, `cell_type` and `split` in obs; every third cell is of the query."""
    adata = sd.datasets.toy(n_cells, 160, n_types=3, n_batches=2, **options)
    adata.obs = adata.obs[["batch", "cell_type"]].astype(str)
    adata.obs["split"] = np.where(np.arange(n_cells) % 3 == 0, "later", "first")
    return adata


def job(part="full", **more) -> dict:
    return {"part": part, "set": "toy", "share": None, "seed": 0, "queries": {"q": ["later"]}, "model": "scdiva-mini",
            "threads": 1, **more}  # fmt: skip


def test_neither_the_querys_types_nor_the_hidden_ones_are_told(arms):
    adata = cells()
    adata.obs.loc[adata.obs_names[:10], "cell_type"] = "nan"
    (task,) = arms.tasks(adata, job("few", share=0.2))
    reference, query = arms.parts_of(adata, task)
    assert list(query.obs) == ["batch"]
    assert list(reference.obs) == ["batch", "known_type"]
    assert query.n_obs == 50
    known = reference.obs["known_type"] != "unlabelled"
    names = reference.obs_names[known]
    assert len(names) == round(0.2 * sum((adata.obs["cell_type"] != "nan") & (adata.obs["split"] == "first")))
    assert (reference.obs.loc[names, "known_type"] == adata.obs.loc[names, "cell_type"]).all()
    (full,) = arms.tasks(adata, job())
    assert len(full.known) == 100 - sum(np.arange(10) % 3 > 0)


def test_calibration_error_is_its_definition(scores):
    # bins (0.4, 0.467] and (0.933, 1]; a bin is closed above
    confidence, correct = np.array([0.45, 0.44, 0.95, 1.0, 1.0]), np.array([True, False, True, True, False])
    by_hand = (2 * abs(0.445 - 0.5) + 3 * abs(2.95 / 3 - 2 / 3)) / 5
    assert scores.ece(confidence, correct) == pytest.approx(by_hand)
    edges = np.array([1 / 15, 1 / 15 + 1e-6, 0.0])
    assert scores.ece(edges, np.array([True, False, False])) == pytest.approx((1 - 1 / 15 + 1 / 15) / 3, abs=1e-6)


def test_naming_is_scored_on_types_that_the_reference_has(arms, scores):
    labels = ["a", "a", "b", "a", "a", "b", "c", "nan"]
    obs = {"cell_type": labels, "batch": "x", "split": ["first"] * 3 + ["later"] * 5}
    adata = ad.AnnData(np.zeros((8, 1), dtype=np.float32), obs=obs)
    todo = arms.tasks(adata, job())
    said = {"predicted": np.array(["a", "b", "b", "a", "a"]), "confidence": np.array([1.0, 1.0, 0.5, 1.0, 1.0])}
    found = scores.scored(adata, "full", todo, [said])
    assert found["n_cells"] == 3
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["f1"] == {"a": pytest.approx(2 / 3), "b": pytest.approx(2 / 3)}
    assert found["ece"] == found["ece_pooled"] == pytest.approx((2 * 0.5 + 0.5) / 3)


def test_rejection_is_the_share_of_pairs_in_order(arms, scores):
    labels = ["a", "b", "c", "a", "b", "b", "c", "d"]
    obs = {"cell_type": labels, "batch": "x", "split": ["first"] * 3 + ["later"] * 5}
    adata = ad.AnnData(np.zeros((8, 1), dtype=np.float32), obs=obs)
    todo = arms.tasks(adata, job("unknown"))
    # d, which no reference has, is neither known nor taken out
    novelty = np.array([0.3, 0.1, 0.4, 0.2, 9.0])
    found = scores.scored(adata, "unknown", todo, [{"novelty": novelty}] * 3)
    assert found["rejection"] == {"a": pytest.approx(2 / 3), "b": pytest.approx(0.5), "c": pytest.approx(1 / 3)}
    assert found["rejection_auroc"] == pytest.approx(0.5)


def rows_for_goals():
    def row(part, arm, macro_f1=0.5, name="kang", **more):
        return {"set": name, "part": part, "arm": arm, "macro_f1": macro_f1, **more}

    rows = [
        row("full", "ours", 0.80, ece_pooled=0.06),
        row("full", "ours_knn", 0.85),
        row("full", "logistic", 0.79),
        row("full", "logistic_balanced", 0.81),
        row("full", "knn", 0.86),
        row("unknown", "ours", rejection={"a": 0.9, "b": 0.7}),
        row("unknown", "logistic", rejection={"a": 0.8, "b": 0.6}),
        row("unknown", "ours", name="other", rejection={"c": 1.0}),
        row("unknown", "logistic", name="other", rejection={"c": 0.6}),
    ]
    for name, best in (("kang", 0.52), ("other", 0.519)):
        rows += [
            row("few", "ours", 0.4, name, share=0.01),
            row("few", "ours_centroid", best, name, share=0.01),
            row("few", "scanvi", 0.5, name, share=0.01),
        ]
    return rows


def test_goals(script):
    goals = script("_annotation_goals").goals
    few = "1% of the labels: sets where the {} is above every rival by 0.02 in macro-F1"
    unknown = "a type taken out: mean rejection AUROC of the default over 3 types"
    assert {row["what"]: (row["value"], row["met"]) for row in goals(rows_for_goals())} == {
        "kang: macro-F1, best of ours above the best rival": (-0.01, False),
        "kang: macro-F1, default above logistic regression": (0.01, None),
        "kang: macro-F1, default above balanced logistic regression": (-0.01, False),
        "kang: calibration error of the default": (0.06, False),
        few.format("best of ours"): (1, False),
        few.format("default"): (0, False),
        unknown: (0.86667, None),
        f"{unknown}, above logistic regression's": (0.2, None),
    }
    # types are what is drawn of the last two: 0.1, 0.1 and 0.4 above the other's
    assert [row["over"] for row in goals(rows_for_goals())[-2:]] == ["3 types", "3 types"]
    many = [{**row, "n_cells": 50_000, "accuracy": 0.9} for row in rows_for_goals() if row["part"] == "full"]
    assert [row["met"] for row in goals(many)] == [False, True, False, False]
    few_cells = [{**row, "n_cells": 500} for row in many]
    assert [row["met"] for row in goals(few_cells)] == [None, None, None, None]
    assert goals([row for row in rows_for_goals() if not row["arm"].startswith("ours")]) == []
    assert goals([row for row in rows_for_goals() if row["arm"].startswith("ours")]) == []
