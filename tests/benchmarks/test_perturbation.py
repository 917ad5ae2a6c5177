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


def test_complete_screens_are_taken_as_they_come(script, tmp_path):
    """Files in scverse's layout: the sets whose file is there run, with labels of the convention and all genes."""
    perturbation, screens = script("perturbation"), script("_screens")
    guides = ["NegCtrl0_NegCtrl1", "KLF1_NegCtrl0", "SET_NegCtrl0", "SET_KLF1"]
    counts = np.random.default_rng(0).poisson(2.0, (120, 60)).astype(np.float32)
    norman = ad.AnnData(counts, obs={"guide_identity": np.repeat([f"{guide}__{guide}" for guide in guides], 30)})
    norman.write_h5ad(tmp_path / "norman_2019_raw.h5ad")
    arguments = perturbation.parsed(["--data", str(tmp_path), "--max-cells", "25"])
    assert arguments.sets == ["norman_2019_doubles", "norman_2019_singles"]
    for _, screen, cells in perturbation.sets_of(arguments):
        assert screen.by in ("combination", "single")
        assert cells.obs["condition"].value_counts().to_dict() == dict.fromkeys(
            ["control", "KLF1", "SET", "KLF1+SET"], 25
        )
        assert cells.n_vars == 60
    every = perturbation.parsed(["--data", str(tmp_path), "--sets", "kang_2018"])
    with pytest.raises(FileNotFoundError, match=r"kang_2018\.h5ad"):
        next(perturbation.sets_of(every))
    guides = ["SPI1_pDS255", "63(mod)_pBA580", "*"]
    adamson = ad.AnnData(counts[:90], obs={"perturbation": np.repeat(guides, 30)})
    adamson.write_h5ad(tmp_path / "adamson_2016_upr_perturb_seq.h5ad")
    screen = screens.SCREENS["adamson_2016"]
    cells = screens.prepared(screens.read_screen(tmp_path, screen), screen)
    assert cells.obs["condition"].value_counts().to_dict() == {"SPI1": 30, "control": 30}


def test_pages_say_how_small_the_part_of_normans_screen_is(script):
    tables, front = script("tables"), script("_summary")
    rows = [row for row in tables.load("perturbation")["rows"] if row.get("arm") == "ours"]
    (task,) = (task for task in front.TASKS if task.result == "perturbation")
    n = {row["set"]: row["n_conditions"] for row in rows}
    assert [line.label for line in task.lines] == [
        f"Norman, {n['norman_doubles']} doubles, 500 genes", f"Norman, {n['norman_singles']} singles, 500 genes",
    ]  # fmt: skip
    assert script("_perturbation_table").named("norman_doubles", 15) == "norman_doubles: 15 doubles, 500 genes"
    assert all(row["n_cells"] == 3375 for row in rows if row["set"].startswith("norman"))
