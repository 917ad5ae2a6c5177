"""Calls are judged by the slope of their time."""

from __future__ import annotations

import pytest


def test_a_power_law_gives_its_exponent(script):
    scaling, sizes = script("scaling"), [10, 100, 1000]
    found = scaling.slope("x", sizes, [3 * size**1.3 for size in sizes], 1.05)
    assert (found["value"], found["met"]) == (pytest.approx(1.3), False)
    low, high = scaling.slope("x", sizes, [10, 300, 900], 1.05)["interval"]
    assert high - low > 0.2
