"""perturbation.py: what is held out stays out, scores are what they are said to be."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest

import scdiva as sd

LABELS = ("control", "A", "B", "C", "D", "A+B", "B+C", "C+D")


@pytest.mark.parametrize("by", ["single", "combination"])
def test_what_is_held_out_is_not_trained_on(script, by):
    arms, screens = script("_perturbation_arms"), script("_screens")
    counts = np.random.default_rng(0).poisson(2.0, (24 * len(LABELS), 60)).astype(np.float32)
    cells = ad.AnnData(counts, obs={"perturbation": np.repeat(LABELS, 24), "line": "x"})
    cells.var_names = sd.datasets.toy(10, 60, n_types=2).var_names
    combined = screens.prepared(cells, screens.Screen("toy", "combination"))
    job = {"set": "toy", "by": by, "control": "control", "separator": "+", "folds": 3, "model": "scdiva-mini",
           "threads": 1, "seed": 0}  # fmt: skip
    asked = []
    for task in (arms.task_of(combined, job, 0, fold) for fold in range(3)):
        trained = set(task.train.obs["condition"])
        assert trained | set(task.asked) == set(LABELS)
        assert not trained & set(task.asked)
        assert set(task.observed.obs["condition"]) == {*task.asked, "control"}
        asked += task.asked
    kind = [name for name in LABELS[1:] if ("+" in name) == (by == "combination")]
    assert sorted(name for name in asked if name in kind) == kind


def test_discrimination_is_the_rank_within_a_fold_and_among_all(script):
    def row(condition, fold, guess, truth, n_parts=2, method="scdiva"):
        means = (np.array([float(guess)]), np.array([float(truth)]))
        return {"method": method, "condition": condition, "group": "", "fold": fold, "n_parts": n_parts,
                "n_seen": condition.count("B"), "means": means}  # fmt: skip

    rows = [
        row("A+B", 0, 2.4, 0), row("A+C", 0, 2.4, 2), row("B+C", 1, 7, 6), row("B+D", 1, 9, 9),
        row("A", 0, 0, 0, n_parts=1), row("A+C", 0, 2, 2, method="additive"),
    ]  # fmt: skip
    found = script("_perturbation_scores").with_discrimination(rows, "combination")
    assert [one.get("discrimination") for one in found] == [0, 1, 1, 1, None, 1]
    assert [one.get("discrimination_all") for one in found] == pytest.approx([2 / 3, 1, 1, 1, None, 1])
    # A+C alone has no B
    assert [one.get("discrimination_part") for one in found] == [1, None, 1, 1, None, None]
