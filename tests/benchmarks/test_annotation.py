"""annotation.py: what is hidden stays hidden, scores are what they are said to be."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest


@pytest.fixture
def arms(script):
    return script("_annotation_arms")


@pytest.fixture
def scores(script):
    return script("_annotation_scores")


def tasks(arms, labels, split, part="full", **more):
    """Cells of these labels, and what is asked of them."""
    obs = {"cell_type": labels, "batch": "x", "split": split}
    adata = ad.AnnData(np.ones((len(labels), 1), dtype=np.float32), obs=obs)
    adata.obs_names = [f"c{number}" for number in range(len(labels))]
    job = {"part": part, "set": "toy", "share": None, "seed": 0, "queries": {"q": ["later"]}, "model": "scdiva-mini",
           "threads": 1, **more}  # fmt: skip
    return adata, arms.tasks(adata, job)


def test_neither_the_querys_types_nor_the_hidden_ones_are_told(arms):
    labels = ["nan"] * 10 + ["a", "b"] * 70
    adata, (task,) = tasks(arms, labels, ["later", "first", "first"] * 50, "few", share=0.2)
    reference, query = arms.parts_of(adata, task)
    assert list(query.obs) == ["batch"]
    assert list(reference.obs) == ["batch", "known_type"]
    names = reference.obs_names[reference.obs["known_type"] != "unlabelled"]
    assert (query.n_obs, len(names)) == (50, round(0.2 * 94))
    assert (reference.obs.loc[names, "known_type"] == adata.obs.loc[names, "cell_type"]).all()


def test_calibration_error_is_its_definition(scores):
    # bins (0.4, 0.467] and (0.933, 1]; a bin is closed above
    confidence, correct = np.array([0.45, 0.44, 0.95, 1.0, 1.0]), np.array([True, False, True, True, False])
    by_hand = (2 * abs(0.445 - 0.5) + 3 * abs(2.95 / 3 - 2 / 3)) / 5
    assert scores.ece(confidence, correct) == pytest.approx(by_hand)
    edges = np.array([1 / 15, 1 / 15 + 1e-6, 0.0])
    assert scores.ece(edges, np.array([True, False, False])) == pytest.approx((1 - 1 / 15 + 1 / 15) / 3, abs=1e-6)


def test_naming_is_scored_on_types_that_the_reference_has(arms, scores):
    adata, todo = tasks(arms, ["a", "a", "b", "a", "a", "b", "c", "nan"], ["first"] * 3 + ["later"] * 5)
    said = {"predicted": np.array(["a", "b", "b", "a", "a"]), "confidence": np.array([1.0, 1.0, 0.5, 1.0, 1.0])}
    found = scores.scored(adata, "full", todo, [said])
    assert (found["n_cells"], found["accuracy"]) == (3, pytest.approx(2 / 3))
    assert found["f1"] == {"a": pytest.approx(2 / 3), "b": pytest.approx(2 / 3)}
    assert found["ece"] == found["ece_pooled"] == pytest.approx((2 * 0.5 + 0.5) / 3)


def test_rejection_is_the_share_of_pairs_in_order(arms, scores):
    adata, todo = tasks(arms, ["a", "b", "c", "a", "b", "b", "c", "d"], ["first"] * 3 + ["later"] * 5, "unknown")
    # d, which no reference has, is neither known nor taken out
    found = scores.scored(adata, "unknown", todo, [{"novelty": np.array([0.3, 0.1, 0.4, 0.2, 9.0])}] * 3)
    assert found["rejection"] == {"a": pytest.approx(2 / 3), "b": pytest.approx(0.5), "c": pytest.approx(1 / 3)}
    assert found["rejection_auroc"] == pytest.approx(0.5)
