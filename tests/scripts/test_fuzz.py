"""What `make fuzz` kept, run again without atheris."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

KEPT = Path(__file__).parent / "fuzzed.zip"
TARGETS = ("sums", "config", "weights", "vocabulary", "folder")


@pytest.fixture
def targets(script):
    return script("fuzz_targets")


@pytest.fixture
def place(targets, tmp_path):
    return targets.Place(tmp_path)


@pytest.mark.fault("fuzzed bytes in a model folder")
@pytest.mark.parametrize("target", TARGETS)
def test_what_was_kept_is_read_or_refused_by_name(targets, place, target):
    with zipfile.ZipFile(KEPT) as file:
        kept = {name: file.read(name) for name in file.namelist() if name.startswith(f"{target}/")}
    if target == "sums":  # which sums are right depends on the version that wrote the files
        kept["sums/accepted-001"] = place.whole["SHA256SUMS"]
    outcomes = {name: targets.judge(target, place, data).accepted for name, data in kept.items()}
    assert set(outcomes.values()) == {True, False}
    if target != "vocabulary":  # what of a table is damage, another version of arrow may see differently
        assert outcomes == {name: name.startswith(f"{target}/accepted") for name in outcomes}
