"""What is said to survive thinning is what survives."""

from __future__ import annotations

import pytest


@pytest.fixture
def thinning(script):
    return script("thinning")


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
