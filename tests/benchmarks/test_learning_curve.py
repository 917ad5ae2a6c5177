"""The learning curve's fit is the line that it says, and its training is of the cells it was given."""

from __future__ import annotations

import numpy as np
import pytest

import scdiva as sd
from scdiva.data.corpus import pack_files


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


def test_cells_of_mice_join_the_corpus_by_their_orthologs(curve, tmp_path):
    vocabulary = sd.models.load_model().vocabulary
    human, mouse = sd.datasets.toy(60, 300), sd.datasets.toy(50, 300)
    mouse.var_names = [name.capitalize() for name in mouse.var_names]
    for name, cells in (("human", human), ("mouse", mouse)):
        cells.write_h5ad(tmp_path / f"{name}.h5ad")
    pack_files([tmp_path / "human.h5ad"], vocabulary, tmp_path / "train.h5", max_length=512).close()
    corpus = curve.load_cells(tmp_path / "train.h5", vocabulary)
    curve.MIN_GENES = 1
    with pytest.warns(UserWarning, match="ouse"):
        more = curve.packed_alike(tmp_path / "train.h5", [tmp_path / "mouse.h5ad"], vocabulary)
    both = curve.joined(corpus, more)
    assert both.study_names == ["human", "mouse"]
    assert both.n_obs == 110
    np.testing.assert_array_equal(np.bincount(both.study), [60, 50])
    for start, of in ((0, corpus), (60, more)):
        for one, other in zip(both.read(start, start + of.n_obs), of.read(0, of.n_obs), strict=True):
            np.testing.assert_array_equal(one, other)
    assert more.measured.sum() > 100


def test_what_mouse_cells_bring_is_judged_by_pairs(curve):
    def runs(accuracy):
        return [
            {"n_cells": 20_000, "accuracy": one, "average_bio": 0.6, "linear_accuracy": 0.5, "linear_average_bio": 0.4}
            for one in accuracy
        ]

    found = {
        ("brain", curve.WITHOUT): runs([0.70, 0.80, 0.90]),
        ("brain", curve.WITH): runs([0.75, 0.85, 0.95]),
        ("blood", curve.WITHOUT): runs([0.90, 0.90, 0.91]),
        ("blood", curve.WITH): runs([0.89, 0.89, 0.90]),
    }
    notes = {curve.WITHOUT: {"trained_on": 100}, curve.WITH: {"trained_on": 120}}
    rows = curve.mouse_rows(found, notes)
    assert [row["trained_on"] for row in rows] == [100, 120, 100, 120]
    judged = {row["what"]: row for row in curve.goals(rows)}
    mean = judged["these sets: mean accuracy with mouse cells above without"]
    assert mean["value"] == pytest.approx(0.02)
    assert mean["met"] is True  # seeds agree when they are paired
    assert judged["sets in general: mean accuracy with mouse cells above without"]["met"] is None
    assert judged["brain: accuracy with mouse cells above without"]["met"] is True
    assert judged["blood: accuracy with mouse cells above without"]["met"] is False
    assert judged["blood: average_bio with mouse cells above without"]["value"] == 0
