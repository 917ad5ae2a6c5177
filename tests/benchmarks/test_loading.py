"""Every arm gives the cells it is timed for, and ours gives the rows of the file."""

from __future__ import annotations

import pytest


@pytest.fixture
def loading(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script("_record"), "RESULTS", tmp_path)
    return script("loading")


def test_the_goal_is_against_the_faster_way_of_the_rival(loading):
    cpu = {
        "ours": 2.0,
        "ours, thread": 2.5,
        "ours, gzip": 9.0,
        "backed": 30.0,
        "scDataset": 5.0,
        "scDataset, matrix": 3.0,
    }
    rounds = {name: [spent, spent + 0.1, spent + 0.2] for name, spent in cpu.items()}
    rows = loading.rows_of(rounds, {name: [2 * spent] for name, spent in cpu.items()})
    goals = {row["what"]: (row["value"], row["met"]) for row in rows if "met" in row}
    assert goals == {
        "CPU time per cell, backed / ours": (15.0, True),
        "CPU time per cell, scDataset, matrix / ours": (1.5, False),
    }
    assert next(row["value"] for row in rows if "gzip" in row["what"]) == 4.5
    with_thread = [row["value"] for row in rows if row["what"].endswith("with the thread")]
    assert with_thread == [12.0, 1.2]
