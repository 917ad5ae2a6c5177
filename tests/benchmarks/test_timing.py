"""Goals are judged by their interval; one run misses a goal and meets none."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("value", "judged", "at_least", "at_most"),
    [
        (2.0, {"interval": (1.9, 2.1)}, *["within noise"] * 2), (2.05, {"interval": (2.0, 2.1)}, "met", "within noise"),
        (1.85, {"interval": (1.8, 1.9)}, "missed", "met"), (2.15, {"interval": (2.1, 2.2)}, "met", "missed"),
        (2.0, {"counted": True}, "met", "met"), (1.99, {"counted": True}, "missed", "met"),
        (99.0, {}, "one run, no interval", "missed"), (1.0, {}, "missed", "one run, no interval"),
    ],
)  # fmt: skip
def test_a_goal_is_judged_by_all_of_its_interval(script, value, judged, at_least, at_most):
    timing = script("_record")
    for bound, words in (("at_least", at_least), ("at_most", at_most)):
        row = timing.goal("x", value, **{bound: 2.0}, **judged, arm="y")
        assert timing.verdict(row) == words
        assert row["met"] is {"met": True, "missed": False}.get(words)
        assert (row["value"], row["arm"]) == (value, "y")
