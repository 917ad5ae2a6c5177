"""The study writes what it says, calls what a user calls, and judges by the slope."""

from __future__ import annotations

import pytest


@pytest.fixture
def scaling(script, monkeypatch):
    module = script("scaling")
    monkeypatch.setattr(module, "N_BLOCKS", 2)
    return module


def test_a_power_law_gives_its_exponent(scaling):
    sizes = [10, 100, 1000]
    found = scaling.slope(sizes, [3 * size**1.3 for size in sizes])
    assert (found.value, found.error) == (pytest.approx(1.3), pytest.approx(0, abs=1e-6))
    assert scaling.slope(sizes, [10, 300, 900]).error > 0.1


def test_goals_leave_small_sizes_out(scaling):
    def row(part, size, seconds, call="entropy"):
        n_cells, n_genes = (size, 5) if part != "genes" else (5, size)
        peak = 500.0 + size / 1000
        measured = {"cpu_seconds": seconds, "peak_mib": peak, "peaks_mib": [peak, peak + 6, peak]}
        return {"part": part, "call": call, "n_cells": n_cells, "n_genes": n_genes, **measured}

    rows = [
        *(row("cells", size, size**1.2) for size in (10_000, 100_000)), row("cells", 10, 1e9),
        *(row("genes", size, seconds) for size, seconds in ((1_000, 2.0), (9_000, 2.1), (40_000, 2.0))),
        row("memory", 10_000, 1.0, "embedding"), row("memory", 100_000, 1.0, "embedding"),
    ]  # fmt: skip
    cells, genes, memory = scaling.goals(rows)
    assert (cells["value"], cells["met"]) == (pytest.approx(1.2), False)
    assert "10,000 to 100,000 cells" in cells["what"]
    assert (genes["value"], genes["met"]) == (pytest.approx(0, abs=0.02), True)
    assert (memory["value"], memory["met"]) == (pytest.approx(600 / 510), False)
    assert memory["interval"] == pytest.approx([600 / 516, 606 / 510], abs=1e-5)
