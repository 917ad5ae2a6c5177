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


def test_attempts_are_held_against_the_first(curves):
    def row(arm, score):
        by_set = {"one": {"average_bio": score, "linear_average_bio": 0.4}}
        linear = {"linear_accuracy": 0.4, "linear_average_bio": 0.4}
        return {"arm": arm, "what": f"what {arm} is", "accuracy": score, "average_bio": score, "sets": by_set,
                "thinned": {"few": {"accuracy": score / 2}}, **linear}  # fmt: skip

    found = lines(curves.attempts({"rows": [row("set", 0.5), row("wide", 0.52)]}))
    assert found[2] == ["set", "what set is", "0.500", "0.500", "0.500", "0.250"]
    assert found[3] == ["wide", "what wide is", "0.520 (+0.020)", "0.520 (+0.020)", "0.520", "0.260"]
    assert found[4] == ["linear", "its linear part alone", "0.400", "0.400", "0.400", "-"]


def test_adapting_shows_what_was_chosen_and_means_of_groups(curves):
    def row(name, arm, accuracy, **more):
        score = {"accuracy": accuracy, "average_bio": accuracy / 2, "n_cells": 1000, "cpu_seconds": 4.6}
        return {"set": name, "arm": arm, "group": "studies", **score, **more}

    rows = [
        row("a", "zero-shot", 0.8), row("a", "adapted", 0.9, chosen=[1.0, 1.5, 1.0]), row("a", "harmony", 0.7),
        row("b", "zero-shot", 0.6), row("b", "adapted", 0.7, chosen=[None, None, None]),
    ]  # fmt: skip
    found = lines(curves.adapting({"rows": rows}))
    assert found[2] == ["a (1,000)", "0.800 / 0.400", "0.900 / 0.450", "0.700 / 0.350", "1, 1.5", "5"]
    assert found[3] == ["b (1,000)", "0.600 / 0.300", "0.700 / 0.350", "", "alone", "5"]
    assert found[4][:3] == ["**studies, mean of 2**", "0.700 / 0.350", "0.800 / 0.400"]


def test_what_training_added_has_an_interval(script):
    def row(arm, accuracy, bio):
        spread = {"n_seeds": 3, "n_cells": 1000, "accuracy_sd": 0.001, "average_bio_sd": 0.002}
        return {"set": "some", "arm": arm, "accuracy": accuracy, "average_bio": bio, **spread}

    added = script("_curves").added_by_training
    text = added([row("scdiva", 0.91, 0.7), row("linear", 0.9, 0.72)])
    assert "| some | +0.010 (-0.016 to +0.036, 1,000 cells) | -0.020 (-0.026 to -0.014, 3 seeds) |" in text
    assert added([row("scdiva", 0.91, 0.7)]) == ""


def test_sister_studies_stand_side_by_side(script):
    score = {"accuracy": 0.9, "accuracy_sd": 0.01}
    rows = [
        {"set": "kang", "task": "tl.embed", "trained": "shipped", **score},
        {"set": "kang", "task": "tl.embed", "trained": "left_out", "accuracy": 0.8, "ece": 0.02},
    ]
    page = script("_curves").sister_studies({"rows": rows})
    assert "| kang | `tl.embed` | in training (scdiva-mini) | 0.900 ± 0.010 | - |" in page
    assert "| kang | `tl.embed` | left out of training | 0.800 | 0.020 |" in page
