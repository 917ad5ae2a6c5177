"""What is said to survive thinning is what survives."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest


@pytest.fixture
def thinning(script):
    return script("thinning")


def counts(n_obs=80) -> tuple[ad.AnnData, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = np.array(["a", "b"])[np.arange(n_obs) % 2]
    mean = np.where(labels[:, None] == "a", [[60.0, 5, 30]], [[5.0, 60, 30]])
    return ad.AnnData(rng.poisson(mean).astype(np.float32)), labels


def dense(adata: ad.AnnData) -> np.ndarray:
    return adata.X.toarray() if hasattr(adata.X, "toarray") else np.asarray(adata.X)


def test_a_scale_free_arm_keeps_its_cosine_and_one_of_noise_does_not(thinning):
    adata, labels = counts()
    arms = {
        "shares": lambda cells: dense(cells) / np.maximum(dense(cells).sum(axis=1, keepdims=True), 1),
        "noise": lambda cells: np.random.default_rng(cells.n_obs + int(dense(cells).sum())).normal(
            size=(cells.n_obs, 3)
        ),
        "constant": lambda cells: 100 + dense(cells) / 1000,
    }
    rows = {(row["arm"], row["depth"]): row for row in thinning.survive(arms, adata, labels, 0)}
    assert {depth for _, depth in rows} == set(thinning.DEPTHS)
    for arm in ("shares", "constant"):  # nothing is lost where nothing is thinned
        full = rows[arm, 1.0]
        assert full["cosine"] == pytest.approx(1)
        assert full["cosine_centred"] == pytest.approx(1)
    assert rows["shares", 0.1]["cosine_centred"] > 0.85
    assert rows["shares", 0.1]["accuracy"] > 0.9
    assert abs(rows["noise", 0.1]["cosine_centred"]) < 0.5
    # an offset that all cells share: the plain cosine sees nothing, the centred one does
    assert rows["constant", 0.1]["cosine"] > 0.9999
    assert rows["constant", 0.1]["cosine_centred"] < 0.5


def test_halves_share_no_cell_and_leave_out_what_has_no_label(thinning):
    labels = np.array(["a"] * 20 + ["b"] * 10 + ["nan"] * 5 + ["alone"])
    fitted, asked = thinning.halves(labels, 3)
    assert not set(fitted) & set(asked)
    assert set(fitted) | set(asked) == set(range(30))
    assert (labels[asked] == "a").sum() == 10
    assert not np.array_equal(asked, thinning.halves(labels, 4)[1])


def test_goals_compare_with_the_best_rival(thinning):
    def run(arm, cosine, accuracy, depth=0.1):
        one = {"arm": arm, "depth": depth, "n_cells": 500, "cosine": 0.9, "cosine_centred": cosine}
        other = {**one, "cosine_centred": cosine + (0.001 if arm == "scdiva" else 0)}
        return [{**one, "accuracy": accuracy}, {**other, "accuracy": accuracy + 0.02}]

    runs = zip(run("scdiva", 0.8, 0.7), run("pca", 0.5, 0.8), run("svd", 0.6, 0.6), strict=True)
    rows = thinning.summarised("some", [list(one) for one in runs])
    assert rows[0]["accuracy"] == pytest.approx(0.71)
    assert rows[0]["accuracy_sd"] == pytest.approx(0.01)
    plain, cosine, accuracy = thinning.goals(rows)
    assert (plain["value"], plain["met"]) == (0, None)
    assert (cosine["met"], cosine["best_rival"], cosine["value"]) == (True, "svd", pytest.approx(0.2005))
    assert (accuracy["met"], accuracy["best_rival"], accuracy["value"]) == (False, "pca", pytest.approx(-0.1))
