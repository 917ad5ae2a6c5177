"""The page "which model when" sets bold the best of each row, and says on how many sets the lead is beyond noise."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "which_model.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| [^-].* \d*\.\d", line)]


def test_the_best_of_a_row_is_bold():
    assert len(ROWS) > 20
    for _, *cells in ROWS:
        figures = [float(cell.strip("*")) for cell in cells if cell != "-"]
        bold = {float(cell.strip("*")) for cell in cells if cell.startswith("**")}
        assert bold == {max(figures)}


def test_every_set_has_a_verdict():
    for n_sets, verdicts in re.findall(r"Of (\d+) sets: (.*?)\. \[All", PAGE):
        assert sum(map(int, re.findall(r" on (\d+)", verdicts))) == int(n_sets)
