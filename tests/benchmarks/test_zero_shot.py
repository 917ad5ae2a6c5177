"""The goals of zero_shot.py say what the rows say."""

from __future__ import annotations

import pytest


@pytest.fixture
def zero_shot(script):
    return script("zero_shot")


def test_goals_of_blood_sets(zero_shot):
    def rows(leads):
        for name, lead in zip(zero_shot.SETS, leads, strict=False):
            for arm in ("scdiva", "pca"):
                score = 0.7 + (lead if arm == "scdiva" else 0)
                spread = {"n_seeds": 3, "accuracy_sd": 0.001, "average_bio_sd": 0.0001}
                yield {"set": name, "arm": arm, "accuracy": score, "average_bio": score, "n_cells": 90_000, **spread}

    found = {row["what"]: row for row in zero_shot.goals(list(rows([0.03, -0.01, 0.03, -0.5])))}
    assert len(found) == 8  # two measures, three sets and one count each; no corpus SVD, no other tissue
    assert [row["met"] for what, row in found.items() if "accuracy" in what] == [True, False, True, True]
    assert found["blood sets where accuracy is 0.02 or more above PCA"]["value"] == 2
    assert not any(row["met"] for row in zero_shot.goals(list(rows([-0.01, -0.01, -0.01]))))
    # 0.002 is within what the seeds spread of accuracy, and beyond what they spread of the other
    near = {row["what"]: row["met"] for row in zero_shot.goals(list(rows([0.03, 0.002, 0.021])))}
    assert near["kang_pbmc_12k_1287g: accuracy above PCA"] is None
    assert near["kang_pbmc_12k_1287g: mean of NMI, ARI, ASW above PCA"] is True
    assert near["blood sets where accuracy is 0.02 or more above PCA"] is None
    assert near["blood sets where mean of NMI, ARI, ASW is 0.02 or more above PCA"] is True
