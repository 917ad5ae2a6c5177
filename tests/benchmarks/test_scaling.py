"""Calls are judged by the slope of their time."""

from __future__ import annotations

import pytest


def test_a_power_law_gives_its_exponent(script):
    scaling, sizes = script("scaling"), [10, 100, 1000]
    found = scaling.slope(sizes, [3 * size**1.3 for size in sizes])
    assert (found.value, found.error) == (pytest.approx(1.3), pytest.approx(0, abs=1e-6))
    assert scaling.slope(sizes, [10, 300, 900]).error > 0.1
