"""The page holds what the results hold, a missed goal as missed."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def results(script, tmp_path, monkeypatch):
    """Write results where `tables` looks for them; gives `(tables, write)`."""
    tables = script("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    def write(name, rows, gpu=None, commit="0123456789abcdef", **notes):
        machine = {"processor": "Some CPU", "cores": 2, "python": "3.11.7"}
        if gpu:
            machine |= {"gpu": gpu, "gpu_gib": 79, "cuda": "12.8"}
        entry = {
            "command": f"python benchmarks/{name}.py", "commit": commit, "date": "2026-01-02", "machine": machine,
            "versions": {"scdiva": "0.1.0", "torch": "2.13.0"}, **notes, "rows": rows,
        }  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(entry))

    return tables, write


def whole(tables):
    """All pages, one after the other."""
    return "\n".join(tables.pages().values())


def test_the_committed_page_is_what_the_committed_results_give(script):
    tables = script("tables")
    written = {path: (tables.DOCS / path).read_text(encoding="utf-8") for path in tables.pages()}
    assert written == tables.pages(), "run python benchmarks/tables.py and commit it"
    assert {path.name for path in (tables.DOCS / "results").glob("*.md")} == {f"{topic}.md" for topic in tables.TOPICS}


def test_every_comparison_of_the_front_page_has_its_rows(script):
    tables, front = script("tables"), script("_summary")
    for task in front.TASKS:
        rows = tables.load(task.result)["rows"]
        assert [line.what for line in task.lines if front.compared(rows, line) is None] == []
        assert f"results/{task.page}.md" in tables.pages()


def test_the_best_rival_is_shown_beside_ours(script):
    front = script("_summary")
    task = front.TASKS[0]
    rows = [{"set": "pbmc3k_raw", "arm": arm, "average_bio": value} for arm, value in (("scdiva", 0.7), ("pca", 0.6))]
    goal = {"what": "pbmc3k_raw: mean of NMI, ARI, ASW above PCA", "value": 0.1, "at_least": 0.2, "met": False,
            "interval": [0.05, 0.15], "over": "3 seeds"}  # fmt: skip
    text = front.summary({task.result: {"rows": [*rows, goal]}})
    assert "| pbmc3k | 0.700 | PCA 0.600 | +0.100 (+0.050 to +0.150) | **missed** |" in text
    assert text.count("| pbmc3k") == 1


def test_goals_met_and_missed(results):
    tables, write = results
    write("loss", [
        {"what": "memory", "value": 0.1733, "at_most": 0.25, "met": True, "interval": [0.17, 0.18], "over": "5 rounds"},
        {"what": "speed", "value": 1.5, "at_least": 2.0, "met": False},
        {"what": "close", "value": 2.1, "at_least": 2.0, "met": None, "interval": [1.9, 2.2], "over": "3 seeds"},
        {"what": "once", "value": 2.1, "at_least": 2.0, "met": None},
        {"what": "as rows were once", "value": 2.1, "at_least": 2.0, "met": True},
        {"what": "copies", "value": 0.0, "at_most": 0, "met": True, "over": "counted"},
        {"what": "float32, full", "cpu_seconds": 6.5, "peak_mib": 1470},
        {"what": "chunked / masked", "value": 0.875},
    ])  # fmt: skip
    page = whole(tables)
    assert "| memory | 0.1733 | 0.17 to 0.18 (5 rounds) | ≤ 0.25 | met |" in page
    assert "| speed | 1.5 | - | ≥ 2 | **missed** |" in page
    assert "| close | 2.1 | 1.9 to 2.2 (3 seeds) | ≥ 2 | within noise |" in page
    assert "| once | 2.1 | - | ≥ 2 | one run, no interval |" in page
    assert "| as rows were once | 2.1 | - | ≥ 2 | one run, no interval |" in page
    assert "| copies | 0 | counted | ≤ 0 | met |" in page
    assert "Of the 6 goals 2 met, 1 missed, 1 within noise, and 2 of one run" in page
    assert "| what | cpu seconds | peak MiB |" in page
    assert "| float32, full | 6.5 | 1,470 |" in page
    assert "| chunked / masked | 0.875 |" in page
    assert "`python benchmarks/loss.py`, commit `0123456789ab`, 2026-01-02, Some CPU (2 cores)." in page
    assert "torch 2.13.0" in page
    assert "changes" not in page


def test_the_committed_figures_were_drawn_from_the_committed_results(script):
    from PIL import Image

    tables = script("tables")
    for name, figure in (("thinning", tables.FIGURE), ("scaling", tables.SCALING_FIGURE)):
        drawn_from = Image.open(figure).text["Description"]
        assert drawn_from == tables.fingerprint(tables.load(name)), "run python benchmarks/tables.py and commit it"


def ablated(arm, scores, family="diffusion", key="identity", **more):
    return [
        {"family": family, "arm": arm, "what": f"what {arm} is", "seed": seed, "cells_seen": 1000, key: score, **more}
        for seed, score in enumerate(scores)
    ]


def test_the_ablation_says_what_is_more_than_noise(results):
    tables, write = results
    rows = [
        *ablated("encoder", (8.0, 8.1, 8.2), family="anchor", accuracy=0.5),
        *ablated("better", (7.0, 7.1, 7.21)),
        *ablated("noisy", (7.0, 9.0, 8.0)),
        *ablated("worse", (8.50, 8.61, 8.70)),
    ]
    bases = {"set encoder": "set", "anchor": "encoder", "diffusion": "encoder"}
    notes = {"bases": bases, "sets": ["some"], "not_trained_on": ["some"], "n_cells": 1234, "n_studies": 5}
    write("ablation", rows, seconds=15.0, **notes)
    page = whole(tables)
    assert "| better | what better is | 1,000 | **7.103 ± 0.105 (-0.997)** |" in page
    assert "| noisy | what noisy is | 1,000 | 8.000 ± 1.000 (-0.100) |" in page
    assert "Better than `encoder` by more than two standard errors: `better` (identity, nats)." in page
    assert "Worse: `worse` (identity, nats). Did not help, in no measure here: `noisy`, `worse`." in page
    assert "4 with seed 0, 4 with seed 1, 4 with seed 2" in page
    assert "1,234 cells of the other 5 are trained on" in page
    diffusion = page[page.index("### Diffusion") :]
    assert "15-NN accuracy" not in diffusion  # the cell state is not theirs
    assert "### Set encoder" not in page
