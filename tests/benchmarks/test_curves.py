"""The tables of learning curves, attempts and adapting: means, spreads and differences are those of the rows."""

from __future__ import annotations

import pytest


@pytest.fixture
def curves(script):
    return script("_curves")


def lines(text):
    return [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("|")
    ]


def test_learning_curve(curves):
    def row(seed, accuracy):
        scores = dict.fromkeys(curves.MEASURES, 0.5) | {"accuracy": accuracy}
        return {"curve": "cells", "cells": 3000, "steps": 10, "seed": seed, **scores}

    fit = {
        "fit": "cells", "measure": "accuracy", "most": 30000, "per_tenfold": 0.0123, "per_tenfold_se": 0.004,
        "at_ten_times": 0.9,
    }  # fmt: skip
    text = curves.learning_curve({"rows": [row(0, 0.6), row(1, 0.8), fit]})
    assert lines(text)[2] == ["cells", "3,000", "10", "0.700 ± 0.141", *["0.500 ± 0.000"] * 3]
    assert "Over cells, 15-NN accuracy: +0.012 ± 0.004" in text
    assert "0.900 at ten times 30,000" in text


def test_cells_of_mice(curves, script):
    def row(arm, cells, accuracy):
        scores = {f"{key}_seeds": [0.5, 0.5] for key in curves.MEASURES} | {"accuracy_seeds": accuracy}
        return {"set": "brain", "arm": arm, "n_cells": 320, "trained_on": cells, **scores}

    result = {"rows": [row("without mouse", 19000, [0.6, 0.8]), row("with mouse", 21000, [0.8, 0.8])]}
    text = curves.learning_curve_mouse(result)
    trained = "without mouse (19,000 cells)"
    assert lines(text)[2] == ["brain (320)", trained, "0.700 ± 0.141", *["0.500 ± 0.000"] * 3]
    goal = script("_timing").goal("brain: accuracy", 0.1, at_least=0.0, interval=(-0.1, 0.3), over="2 seeds")
    page = script("tables").mouse({"rows": [*result["rows"], goal]})
    assert "| brain: accuracy | 0.1 | -0.1 to 0.3 (2 seeds) | ≥ 0 | within noise |" in page


def test_what_training_added_has_an_interval(script):
    def row(arm, accuracy, bio):
        spread = {"n_seeds": 3, "n_cells": 1000, "accuracy_sd": 0.001, "average_bio_sd": 0.002}
        return {"set": "some", "arm": arm, "accuracy": accuracy, "average_bio": bio, **spread}

    added = script("_curves").added_by_training
    text = added([row("scdiva", 0.91, 0.7), row("linear", 0.9, 0.72)])
    assert "| some | +0.010 (-0.016 to +0.036, 1,000 cells) | -0.020 (-0.026 to -0.014, 3 seeds) |" in text
    assert added([row("scdiva", 0.91, 0.7)]) == ""
