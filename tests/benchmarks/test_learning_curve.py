"""The learning curve's fit is the line that it says, and its training is of the cells it was given."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def curve(script):
    return script("learning_curve")


def test_a_line_in_the_logarithm_is_found_and_extrapolated(curve):
    numbers = [100, 1000, 10000] * 2
    values = [0.5 + 0.1 * np.log10(n) for n in numbers]
    line = curve.extrapolated(numbers, values)
    assert line["per_tenfold"] == pytest.approx(0.1)
    assert line["per_tenfold_se"] == pytest.approx(0, abs=1e-6)
    assert line["at_ten_times"] == pytest.approx(1.0)
    rng = np.random.default_rng(0)
    noisy = curve.extrapolated(numbers, [value + rng.normal(scale=0.05) for value in values])
    assert abs(noisy["per_tenfold"] - 0.1) < 3 * noisy["per_tenfold_se"]
