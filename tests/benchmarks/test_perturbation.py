"""perturbation.py: what is held out stays out, scores are what they are said to be, goals say what the rows say."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd

LABELS = ("control", "A", "B", "C", "D", "A+B", "B+C", "C+D")
GENES = 60


@pytest.fixture
def screens(script):
    return script("_screens")


@pytest.fixture
def arms(script):
    return script("_perturbation_arms")


@pytest.fixture
def scores(script):
    return script("_perturbation_scores")


@pytest.fixture
def perturbation(script):
    return script("perturbation")


def cells(n_each=24, labels=LABELS, groups=("x",)) -> ad.AnnData:
    """Counts of a screen: each part of a perturbation multiplies six genes of its own by four."""
    rng = np.random.default_rng(0)
    means = rng.gamma(2, 2, GENES)
    rows, obs = [], []
    for group in groups:
        for label in labels:
            rate = means.copy()
            for part in label.split("+"):
                if part != "control":
                    first = 6 * (ord(part) - ord("A"))
                    rate[first : first + 6] *= 4
            rows.append(rng.poisson(rate, (n_each, GENES)))
            obs += [(label, group)] * n_each
    adata = ad.AnnData(sp.csr_matrix(np.vstack(rows).astype(np.float32)))
    adata.obs["perturbation"], adata.obs["line"] = zip(*obs, strict=True)
    adata.var_names = sd.datasets.toy(10, GENES, n_types=2).var_names
    return adata


def job(by="combination", **more) -> dict:
    return {"set": "toy", "by": by, "control": "control", "separator": "+", "folds": 3, "model": "scdiva-mini",
            "threads": 1, "seed": 0, **more}  # fmt: skip


def test_what_is_held_out_is_not_trained_on(arms, screens):
    combined = screens.prepared(cells(), screens.Screen("toy", "combination"))
    for by in ("single", "combination"):
        asked = []
        for fold in range(3):
            task = arms.task_of(combined, job(by), 0, fold)
            trained = set(task.train.obs["condition"])
            assert trained | set(task.asked) == set(LABELS)
            assert not trained & set(task.asked)
            assert set(task.observed.obs["condition"]) == {*task.asked, "control"}
            assert task.group is None
            asked += task.asked
        kind = [name for name in LABELS[1:] if ("+" in name) == (by == "combination")]
        assert sorted(name for name in asked if name in kind) == kind


def test_discrimination_is_the_rank_within_a_fold_and_among_all(scores):
    def row(condition, fold, guess, truth, n_parts=2, method="scdiva"):
        means = (np.array([float(guess)]), np.array([float(truth)]))
        return {
            "method": method,
            "condition": condition,
            "group": "",
            "fold": fold,
            "n_parts": n_parts,
            "n_seen": condition.count("B"),
            "means": means,
        }

    rows = [
        row("A+B", 0, 2.4, 0), row("A+C", 0, 2.4, 2), row("B+C", 1, 7, 6), row("B+D", 1, 9, 9),
        row("A", 0, 0, 0, n_parts=1), row("A+C", 0, 2, 2, method="additive"),
    ]  # fmt: skip
    found = scores.with_discrimination(rows, "combination")
    assert [one.get("discrimination") for one in found] == [0, 1, 1, 1, None, 1]
    assert [one.get("discrimination_all") for one in found] == pytest.approx([2 / 3, 1, 1, 1, None, 1])
    # A+C alone has no B
    assert [one.get("discrimination_part") for one in found] == [1, None, 1, 1, None, None]
    assert all("means" not in one for one in found)


def rows_for_goals() -> list[dict]:
    def row(name, arm, split, pearson, n=15, **each):
        return {"set": name, "arm": arm, "split": split, "n_conditions": n, "pearson_delta": pearson,
                "discrimination": pearson, "each": each}  # fmt: skip

    def part(n, pearson):
        return {"n_conditions": n, "pearson_delta": pearson, "pearson_delta_top20": pearson}

    seen, half = "2 parts, 2 seen", "2 parts, 1 seen"
    return [
        row("doubles", "ours", "combination", 0.6, **{seen: part(5, 0.81), half: part(10, 0.5)}),
        row("doubles", "gears", "combination", 0.9),
        row("doubles", "train_mean", "combination", 0.5, **{seen: part(5, 0.3), half: part(10, 0.6)}),
        row("doubles", "additive", "combination", 0.8, 5, **{seen: part(5, 0.8)}),
        row("lines", "ours", "group", 0.4, x=part(9, 0.3), y=part(9, 0.5)),
        row("lines", "elsewhere", "group", 0.4, x=part(9, 0.2), y=part(9, 0.55)),
        row("singles", "train_mean", "single", 0.4, singles=part(9, 0.4)),
    ]


def test_goals(script):
    goals = script("_perturbation_goals").goals
    found = {row["what"]: (row["value"], row["met"]) for row in goals(rows_for_goals())}
    best, elsewhere = "above the best baseline", "above the same perturbation elsewhere"
    assert found == {
        # additive has 5 of the 15, so it is no rival over all
        f"doubles: pearson_delta, {best}": (0.1, None),
        f"doubles: discrimination, {best}": (0.1, None),
        f"doubles, all parts seen: pearson_delta, {best}": (0.01, None),
        f"doubles, all parts seen: pearson_delta_top20, {best}": (0.01, None),
        # 0.1 in a group and -0.05 in the other
        f"lines: pearson_delta, {elsewhere}, mean over groups": (0.025, None),
        f"lines: pearson_delta, {elsewhere}, groups where it is": (1, False),
        f"lines: pearson_delta_top20, {elsewhere}, mean over groups": (0.025, None),
        f"lines: pearson_delta_top20, {elsewhere}, groups where it is": (1, False),
    }
    assert goals([row for row in rows_for_goals() if row["arm"] != "ours"]) == []
    spread = {"seeds": [0, 1, 2], "pearson_delta_sd": 0.01, "discrimination_sd": 0.05}
    often = goals([{**row, **spread} for row in rows_for_goals()])
    assert [row["met"] for row in often[:3]] == [True, None, None]
    assert "spread over 3 seeds not kept" in often[2]["over"]
