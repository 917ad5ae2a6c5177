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


def test_a_curve_of_one_point_is_not_fitted(curve):
    row = {"curve": "cells", "cells": 3, "steps": 1, **dict.fromkeys(curve.MEASURES, 0.5)}
    row |= {f"linear_{key}": 0.4 for key in curve.MEASURES}
    assert curve.fits([row]) == []
    found = curve.fits([row, row | {"cells": 30}, row | {"curve": "steps"}, row | {"curve": "steps", "steps": 10}])
    assert {(fit["fit"], fit["measure"]) for fit in found} == {
        ("cells", "accuracy"), ("cells", "average_bio"), ("cells", "linear_accuracy"), ("cells", "linear_average_bio"),
        ("steps", "accuracy"), ("steps", "average_bio"),
    }  # fmt: skip
