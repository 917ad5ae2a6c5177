"""Arms take turns, goals are judged, misses are counted."""

from __future__ import annotations

import pytest


def test_a_goal_is_met_at_its_bound_and_missed_beyond(script):
    goal = script("_timing").goal
    assert goal("x", 2.0, at_least=2.0, counted=True, arm="y") == {
        "what": "x",
        "value": 2.0,
        "at_least": 2.0,
        "met": True,
        "over": "counted",
        "arm": "y",
    }
    assert goal("x", 1.99, at_least=2.0, counted=True)["met"] is False
    assert goal("x", 0.25, at_most=0.25, counted=True)["met"] is True
    assert goal("x", 0.26, at_most=0.25, counted=True)["met"] is False


def test_one_run_misses_a_goal_and_meets_none(script):
    timing = script("_timing")
    assert timing.goal("x", 99.0, at_least=2.0)["met"] is None
    assert timing.goal("x", 1.99, at_least=2.0)["met"] is False
    assert timing.verdict(timing.goal("x", 99.0, at_least=2.0)) == "one run, no interval"


@pytest.mark.parametrize(
    ("interval", "at_least", "at_most"),
    [((1.9, 2.1), (None, "within noise"), (None, "within noise")), ((2.0, 2.1), (True, "met"), (None, "within noise")),
     ((1.8, 1.9), (False, "missed"), (True, "met")), ((2.1, 2.2), (True, "met"), (False, "missed"))],
)  # fmt: skip
def test_an_interval_is_all_on_one_side_of_the_goal_or_within_noise(script, interval, at_least, at_most):
    timing = script("_timing")
    for bound, (met, words) in (("at_least", at_least), ("at_most", at_most)):
        row = timing.goal("x", sum(interval) / 2, **{bound: 2.0}, interval=interval, over="3 seeds")
        assert row["met"] is met
        assert timing.verdict(row) == words
