from __future__ import annotations

import csv

import numpy as np
import pytest

from scdiva.pl import training

RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)


def write_log(folder, first, last, *, loss=lambda step: 3 + 9 * np.exp(-step / 40), validate=True, studies=3):
    """Log steps `first` to `last` (from 0, as the logger counts) every 2 steps, and validation every 20."""
    folder.mkdir(parents=True)
    steps = range(first + 1, last, 2)
    with (folder / "metrics.csv").open("w", newline="") as lines:
        out = csv.writer(lines)
        out.writerow(["step", "train/loss", "train/cells_per_second", *(["val/loss"] if validate else [])])
        for step in steps:
            out.writerow([step, loss(step), 300 + 40 * np.sin(step), *([""] if validate else [])])
            if validate and (step + 1) % 20 == 0:
                out.writerow([step, "", "", loss(step) + 0.3])
    if not validate:
        return
    with (folder / "validation.csv").open("w", newline="") as lines:
        out = csv.writer(lines)
        out.writerow(["step", "study", "mask_ratio", "n_cells", "perplexity", "accuracy", "value_error"])
        for step in (s + 1 for s in steps if (s + 1) % 20 == 0):
            fall = np.exp(-step / 50)
            out.writerow([step, "", "", 90, 100 + 900 * fall, 0.3 - 0.2 * fall, 0.5 + fall])
            for ratio in RATIOS:
                out.writerow([step, "", ratio, 18, 50 + ratio * 2000 * fall, 0.4 - 0.3 * ratio, 0.5 + ratio])
            for i in range(studies):
                out.writerow([step, f"study {i}", "", 30, 80 + 100 * i + 900 * fall, 0.1 + 0.05 * i, 0.4 + i])


@pytest.fixture
def run(tmp_path):
    """A run that was killed after 70 steps and went on from step 40."""
    write_log(tmp_path / "log" / "version_0", 0, 70)
    write_log(tmp_path / "log" / "version_1", 40, 120)
    return tmp_path


def lines(ax) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_xydata() for line in ax.lines}


def test_looks_as_it_did(run, looks_as_it_did):
    looks_as_it_did(training(run, return_fig=True), "training")


def test_starts_are_joined_without_gap_or_overlap(run):
    loss, ratios, _, rate = training(run, return_fig=True).axes
    np.testing.assert_array_equal(loss.lines[0].get_xdata(), np.arange(2, 121, 2))
    np.testing.assert_allclose(loss.lines[0].get_ydata(), 3 + 9 * np.exp(-np.arange(1, 120, 2) / 40))
    np.testing.assert_array_equal(lines(loss)["validation"][:, 0], np.arange(20, 121, 20))
    assert list(lines(ratios)) == ["10%", "30%", "50%", "70%", "90%"]
    np.testing.assert_allclose(lines(ratios)["30%"][:, 1], 50 + 600 * np.exp(-np.arange(20, 121, 20) / 50))
    np.testing.assert_array_equal(rate.lines[0].get_xdata(), np.arange(2, 121, 2))


def test_a_later_start_takes_the_place_of_what_a_killed_one_logged(tmp_path):
    write_log(tmp_path / "log" / "version_2", 0, 70, loss=lambda step: 5.0)
    write_log(tmp_path / "log" / "version_10", 40, 60, loss=lambda step: 1.0)
    y = training(tmp_path, return_fig=True).axes[0].lines[0].get_ydata()
    assert y.tolist() == [5.0] * 20 + [1.0] * 10


def test_studies_predicted_worst_stand_on_top(tmp_path):
    write_log(tmp_path / "log" / "version_0", 0, 70, studies=23)
    studies = training(tmp_path, return_fig=True).axes[2]
    assert [label.get_text() for label in studies.get_yticklabels()] == [f"study {i}" for i in range(3, 23)]
    assert "the worst 20 of 23 studies" in studies.get_title()


def test_what_was_not_logged_is_left_out(tmp_path):
    write_log(tmp_path / "log" / "version_0", 0, 30, validate=False)
    drawn = training(tmp_path, return_fig=True).axes
    assert [ax.get_ylabel() for ax in drawn] == ["loss", "cells per second"]
    assert len(training(tmp_path / "log" / "version_0" / "metrics.csv", return_fig=True).axes) == 2


def test_a_line_that_a_kill_cut_off_is_not_drawn(run):
    with (run / "log" / "version_1" / "metrics.csv").open("a") as out:
        out.write("121,0.00")
    assert training(run, return_fig=True).axes[0].lines[0].get_xdata()[-1] == 120


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no log at"):
        training(tmp_path / "nowhere")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column 'step'"):
        training(tmp_path / "other.csv")
    (tmp_path / "empty.csv").write_text("step,train/loss\n")
    with pytest.raises(ValueError, match="nothing was logged so far"):
        training(tmp_path / "empty.csv")
