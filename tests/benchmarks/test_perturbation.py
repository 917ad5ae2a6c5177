"""perturbation.py: what is held out stays out, scores are what they are said to be, goals say what the rows say."""

from __future__ import annotations

import json

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


def test_of_a_group_left_out_only_controls_are_trained_on(arms, screens):
    adata = cells(labels=("control", "A", "B"), groups=("x", "y"))
    adata = adata[~((adata.obs["line"] == "x") & (adata.obs["perturbation"] == "B"))].copy()
    screen = screens.prepared(adata, screens.Screen("toy", "group", groupby="line"))
    assert screens.n_folds(screen, "group", 5) == 2
    task = arms.task_of(screen, job("group"), 0, 1)
    assert (task.group, task.asked) == ("y", ["A"])  # nobody else has B
    assert set(task.train.obs.loc[task.train.obs["group"] == "y", "condition"]) == {"control"}
    assert set(task.observed.obs.loc[task.observed.obs["group"] == "y", "condition"]) == {"control", "A"}


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


def test_rows_are_means_over_conditions_then_seeds(scores):
    def row(seed, condition, pearson, n_parts, n_seen):
        return {"seed": seed, "method": "scdiva", "condition": condition, "group": "", "n_parts": n_parts,
                "n_seen": n_seen, "pearson_delta": pearson}  # fmt: skip

    rows = [
        row(0, "A", 0.1, 1, 0), row(0, "B", 0.3, 1, 0), row(0, "A+B", 0.2, 2, 0), row(0, "A+B", 0.4, 2, 0),
        row(1, "A", 0.5, 1, 0), row(1, "B", 0.5, 1, 0), row(1, "A+B", 0.6, 2, 1),
    ]  # fmt: skip
    found = scores.summary(rows, "single")
    assert (found["pearson_delta"], found["pearson_delta_sd"], found["n_conditions"]) == (0.35, 0.15, 2)
    of_seeds = {"n_seeds": 2, "pearson_delta_sd": 0.15, "pearson_delta_seeds": [0.2, 0.5]}
    assert found["each"]["singles"] == {"n_conditions": 2, "pearson_delta": 0.35, **of_seeds}
    assert found["each"]["2 parts, 0 seen"]["pearson_delta"] == 0.3
    assert found["each"]["2 parts, 1 seen"]["pearson_delta"] == 0.6
    assert scores.summary(rows, "combination")["pearson_delta"] == pytest.approx(0.45)


def test_gears_is_told_sets_and_its_means_are_scored(arms, screens, scores, script, tmp_path):
    gears = script("_perturbation_gears")
    assert [gears.told(name, "no", "&") for name in ("no", "A", "A&B")] == ["ctrl", "A+ctrl", "A+B"]
    (tmp_path / "sets.gmt").write_text("one\turl\tA\tB\tX\ntwo\turl\tB\n")
    found = gears.gene_sets(tmp_path / "sets.gmt", {"A", "B", "C"})
    assert found["A"] == {"one"}
    assert found["B"] == {"one", "two"}
    assert len(found["C"]) == 1
    assert not found["C"] & {"one", "two"}

    screen = screens.prepared(cells(), screens.Screen("toy", "combination"))
    task = arms.task_of(screen, job(), 0, 0)
    values, _ = gears.log_normalised(task.train)
    observed, _ = gears.log_normalised(task.observed)
    held = task.observed.obs["condition"].to_numpy()
    means = np.stack([np.asarray(observed[held == name].mean(axis=0)).ravel() for name in task.asked])
    predicted = gears.as_predicted(task, job(), values, means)
    rows = scores.conditions(predicted, task.observed)
    assert [row["condition"] for row in rows] == task.asked
    assert {row["method"] for row in rows} == {"scdiva"}
    for row in rows:
        assert row["pearson_delta"] == pytest.approx(1, abs=1e-4)
        assert row["pearson_delta_mean"] == pytest.approx(1, abs=1e-4)
        assert (row["n_parts"], row["n_seen"], row["n_cells"]) == (2, 2, 24)


def test_our_arms_and_their_baselines_are_scored(arms, screens, scores, tmp_path):
    screens.prepared(cells(), screens.Screen("toy", "combination")).write_h5ad(tmp_path / "cells.h5ad")
    work = job(arm="ours_base", file=str(tmp_path / "cells.h5ad"), seeds=[0])
    found, cost = arms.run(work)
    rows = json.loads(str(found["rows"]))
    assert cost["fits"] == 3
    of = {method: scores.summary([row for row in rows if row["method"] == method], "combination")
          for method in {row["method"] for row in rows}}  # fmt: skip
    # effects multiply rates, so they add up in the logarithm but for what normalising and single counts do to it
    assert of["additive"]["pearson_delta"] > 0.8 > of["train_mean"]["pearson_delta"] + 0.2
    assert of["no_change"]["pearson_delta"] == 0
    assert of["scdiva"]["n_conditions"] == of["additive"]["n_conditions"] == 3


def test_rows_are_made_once_and_written(perturbation, tmp_path, monkeypatch):
    monkeypatch.setitem(perturbation.record.__globals__, "RESULTS", tmp_path)
    cells().write_h5ad(tmp_path / "mine.h5ad")
    call = ["--h5ad", str(tmp_path / "mine.h5ad"), "--perturbation-key", "perturbation", "--by", "combination",
            "--folds", "3", "--arms", "ours", "ours_base", "gears", "--seeds", "0"]  # fmt: skip
    base = ("scdiva", "additive", "train_mean")

    def fitted(job, *_):
        rows = [{"seed": 0, "method": method, "condition": "A+B", "group": "", "n_parts": 2, "n_seen": 2,
                 "pearson_delta": 0.5} for method in base]  # fmt: skip
        return {"rows": np.array(json.dumps(rows))}, {"cpu_seconds": 1.234, "peak_mib": 9.0, "fits": 3}

    monkeypatch.setattr(perturbation, "fit", fitted)
    monkeypatch.setattr(perturbation, "missing", lambda arm: None)
    assert perturbation.main(call) == 0
    result = json.loads((tmp_path / "perturbation.json").read_text())
    rows = [row for row in result["rows"] if "arm" in row]
    assert [row["arm"] for row in rows] == ["ours", "ours_base", "train_mean", "additive"]
    assert {row["set"] for row in rows} == {"mine, combination"}
    assert rows[0]["cpu_seconds"] == 1.23
    assert "cpu_seconds" not in rows[2]
    assert "--gene-sets" in result["left_out"]["gears"]

    def never(*_):
        raise AssertionError("fitted again")

    monkeypatch.setattr(perturbation, "fit", never)
    assert perturbation.main(call) == 0
    for more in (["--again"], ["--seeds", "1"], ["--folds", "2"], ["--max-cells", "21"]):
        with pytest.raises(AssertionError, match="again"):
            perturbation.main([*call, *more])
    for wrong in (call[:2], [*call, "--by", "group"]):
        with pytest.raises(SystemExit):
            perturbation.main(wrong)


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


def test_the_page_shows_all_parts_and_marks_what_is_not_ours(script):
    tables, goals = script("tables"), script("_perturbation_goals").goals
    made = {"package": "some 1.0", "commit": "0123456789abcdef", "processor": "Some CPU"}
    spread = {"pearson_delta_sd": 0.01, "discrimination_sd": 0.0}
    rows = [{**made, **spread, **row} for row in rows_for_goals()]
    rows[0] |= {"cpu_seconds": 1234.5, "peak_mib": 600.0, "base": {"additive": 4, "train_mean": 1}}
    page = tables.perturbation({"rows": [*rows, *goals(rows)], "left_out": {"ours_base": "why"}})
    assert "| doubles (15) | `tl.predict_perturbation` | 0.600 ± 0.010 | 0.600 | 1,234 | 600 |" in page
    assert "| doubles (15) | additive (5) | 0.800 ± 0.010 | 0.800 | - | - |" in page
    assert "| doubles, 2 parts, 2 seen (5) | 0.810 | - | 0.300 | 0.800 | - |" in page
    assert "| lines, y (9) | 0.500 | - | - | - | 0.550 |" in page
    assert "doubles, `tl.predict_perturbation`: base additive (4), train_mean (1)." in page
    assert "groups where it is | 1 | 0 to 1 (2 groups) | ≥ 2 | **missed** |" in page
    assert "Left out: the same without its network; why." in page
    assert "None of it was measured here" in page
    assert "| scDiVa, in its paper | 0.837 / 0.134 | 0.709 / - |" in page
    assert "| GEARS | 0.715 |" in page
