"""Pages and goals are those of the results, a missed goal as missed."""

from __future__ import annotations

import json

import pytest


def test_the_committed_pages_are_what_the_committed_results_give(script):
    tables = script("tables")
    written = {path: (tables.DOCS / path).read_text(encoding="utf-8") for path in tables.pages()}
    assert written == tables.pages(), "run python benchmarks/tables.py and commit it"
    assert {path.name for path in (tables.DOCS / "results").glob("*.md")} == {f"{topic}.md" for topic in tables.TOPICS}


def test_the_committed_figures_were_drawn_from_the_committed_results(script):
    from PIL import Image

    tables = script("tables")
    for name, figure in (("thinning", tables.FIGURE), ("scaling", tables.SCALING_FIGURE)):
        drawn_from = Image.open(figure).text["Description"]
        assert drawn_from == tables.fingerprint(tables.load(name)), "run python benchmarks/tables.py and commit it"


def test_every_lead_of_the_front_page_is_the_difference_of_its_rows(script):
    tables, front, restate = script("tables"), script("_summary"), script("restate")
    for task in front.TASKS:
        rows = tables.load(task.result)["rows"]
        for line in task.lines:
            ours, _, theirs, goal = front.compared(rows, line)
            assert goal["value"] == pytest.approx((theirs - ours) if line.lower else (ours - theirs), abs=2e-4), (
                line.what
            )
            assert goal["interval"][0] <= goal["value"] <= goal["interval"][1]
            if task.result in restate.GOALS:  # were its rivals better, it would be missed
                plain = [row for row in rows if "met" not in row]
                better = [
                    {**row, line.key: 1.5} if row["arm"] in line.rivals and line.key in row else row for row in plain
                ]
                judged = script(restate.GOALS[task.result]).goals(better)
                assert [one["met"] for one in judged if one["what"] == line.what] == [False]


def test_the_committed_goals_are_those_that_the_committed_rows_give(script):
    restate = script("restate")
    for name, module in restate.GOALS.items():
        result = json.loads((restate.RESULTS / f"{name}.json").read_text())
        rows = [row for row in result["rows"] if "met" not in row]
        again = json.loads(json.dumps(script(module).goals(rows)))
        assert [row for row in result["rows"] if "met" in row] == again, (
            f"run benchmarks/restate.py, commit {name}.json"
        )


def test_every_committed_goal_says_what_its_interval_says(script):
    results = script("tables").RESULTS
    rows = [row for path in results.glob("*.json") for row in json.loads(path.read_text())["rows"] if "met" in row]
    assert len(rows) > 200
    for row in rows:
        low, high = row.get("interval", (row["value"],) * 2)
        surely, hardly = (low >= row["at_least"], high < row["at_least"]) if "at_least" in row else (
            high <= row["at_most"], low > row["at_most"])  # fmt: skip
        sure = "interval" in row or row.get("over") == "counted"
        assert row["met"] is (True if surely and sure else False if hardly else None), row["what"]
