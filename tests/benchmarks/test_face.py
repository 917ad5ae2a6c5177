"""What a user waits for is measured of every public call."""

from __future__ import annotations

import subprocess
import sys

import pytest

import scdiva as sd


@pytest.fixture
def face(script):
    return script("face")


def measured(face) -> set[str]:
    return {name.split(",")[0] for name in face.CALLS}


@pytest.mark.parametrize("part", ["pp", "tl", "pl", "get"])
def test_every_public_call_is_measured(face, part):
    assert {f"{part}.{name}" for name in getattr(sd, part).__all__} <= measured(face)


def test_every_command_is_measured(face):
    text = subprocess.run([sys.executable, "-m", "scdiva", "--help"], capture_output=True, text=True, check=True).stdout
    listed = text.split("commands:")[1].split("options:")[0]
    commands = [line.split()[0] for line in listed.splitlines() if line.strip()]
    assert len(commands) > 5
    assert {f"command line: {name}" for name in commands} <= measured(face)


def test_goals_are_of_sizes_that_are_measured(face):
    assert face.SIZES.keys() <= face.CALLS.keys()
    for call, size, *_ in face.WITHIN:
        assert size in face.sizes_of(call)


def test_a_goal_is_judged_by_its_row(face):
    row = {"call": "tl.grn", "size": 3000, "n_cells": 2700, "warm_cpu": 11.0}
    (judged,) = face.goals([row, {"call": "tl.grn", "size": 700, "n_cells": 700, "warm_cpu": 20.0}])
    assert (judged["value"], judged["met"]) == (11.0, False)
