"""Goals follow from the slope of time and the growth of memory."""

from __future__ import annotations

import pytest


def test_memory_is_extrapolated_from_the_last_two_sizes(script):
    scaling = script("scaling")
    rows = [
        {"part": "cells", "call": "tl.annotate", "n_cells": n, "n_genes": 9, "n_stored": 100 * n, "cpu_seconds": 1.0,
         "peak_mib": peak}
        for n, peak in ((50_000, 700.0), (100_000, 800.0), (200_000, 1000.0))
    ]  # fmt: skip
    each, total = scaling.goals(rows)
    assert each["value"] == pytest.approx(200 * 2**20 / 100_000 / 1e3 - 0.8)
    assert total["value"] == pytest.approx((1000 + 200 * 3) * 2**20 / 1e9)
