"""What `make fuzz` kept, run again without atheris, and the judge of it."""

from __future__ import annotations

import os
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
    outcomes = {name: targets.judge(target, place, data).accepted for name, data in kept.items()}
    assert set(outcomes.values()) == {True, False}
    if target != "vocabulary":  # what of a table is damage, another version of arrow may see differently
        assert outcomes == {name: name.startswith(f"{target}/accepted") for name in outcomes}


def test_whole_files_are_accepted(targets, place):
    for name, target in zip(targets.KINDS, ("config", "weights", "vocabulary", "sums"), strict=False):
        assert targets.judge(target, place, place.whole[name]).accepted
    for i, name in enumerate(targets.KINDS):
        assert targets.judge("folder", place, bytes([i]) + place.whole[name]).accepted


def test_changes_keep_the_format_and_come_from_the_seed(script, place):
    import random

    mutate, targets = script("fuzz_mutate"), script("fuzz_targets")
    refused = {}
    for name, target in zip(targets.KINDS, ("config", "weights", "vocabulary"), strict=False):
        whole = place.whole[name]
        made = [mutate.changed(target, whole, random.Random(seed)) for seed in range(60)]
        again = [mutate.changed(target, whole, random.Random(seed)) for seed in range(60)]
        assert made == again
        told = [targets.judge(target, place, data) for data in made if data is not None]
        refused[target] = {outcome.where for outcome in told if not outcome.accepted}
    assert min(map(len, refused.values())) >= 4, refused  # they get past the first check


def _imports(folder, sums):
    import this  # noqa: F401


def _starts(folder, sums):
    os.system("true")


def _writes(folder, sums):
    (folder / "more").write_text("")


def _reads_elsewhere(folder, sums):
    Path(__file__).read_bytes()


def _evaluates(folder, sums):
    eval("1 + 1")


def _unpickles(folder, sums):
    import pickle

    pickle.loads(b"cos\ngetcwd\n(tR.")


def _fails(folder, sums):
    raise KeyError("dim")


def _names_nothing(folder, sums):
    raise ValueError("wrong")


def _tells_all(folder, sums):
    raise ValueError(f"{folder}: " + "x" * 10_000)


def _takes_memory(folder, sums):
    assert bytes(b"x" * 400_000_000)
    raise ValueError(f"{folder}")


FORBIDDEN = {
    _imports: "done while loading: import",
    _starts: r"done while loading: os\.system",
    _writes: "done while loading: open",
    _reads_elsewhere: "done while loading: open",
    _evaluates: "done while loading: compile",
    _unpickles: r"done while loading: pickle\.find_class",
    _fails: "KeyError: 'dim'",
    _names_nothing: "ValueError that names no file: wrong",
    _tells_all: "a message of 10,",
    _takes_memory: r"took \d+ MiB",
}


def test_the_judge_sees_what_a_loader_must_not_do(targets, place, monkeypatch):
    for reader, said in FORBIDDEN.items():
        with monkeypatch.context() as patch:
            patch.setattr(targets._folder, "read_config", reader)
            if reader is _takes_memory:  # the highest mark of this process may be higher already
                patch.setattr(targets, "MOST_MIB", -1)
            with pytest.raises(targets.Finding, match=said):
                targets.judge("config", place, place.whole["config.json"])
        assert targets.judge("config", place, place.whole["config.json"]).accepted


def test_a_slow_loader_is_a_finding(targets, place, monkeypatch):
    monkeypatch.setattr(targets, "MOST_SECONDS", 0.0)
    with pytest.raises(targets.Finding, match="seconds"):
        targets.judge("config", place, place.whole["config.json"])


def test_keeping_replaces_the_inputs_of_one_target_and_gives_equal_bytes(script, tmp_path, monkeypatch):
    fuzz, inputs = script("fuzz"), tmp_path / "found"
    monkeypatch.setattr(fuzz, "KEPT", tmp_path / "kept.zip")
    inputs.mkdir()
    for i in range(fuzz.MOST_KEPT + 3):
        (inputs / f"refused-{i:03}").write_bytes(bytes([i]))
    assert fuzz.kept("config") == []
    fuzz.keep("config", inputs)
    fuzz.keep("sums", inputs)
    before = fuzz.KEPT.read_bytes()
    fuzz.keep("config", inputs)
    assert fuzz.KEPT.read_bytes() == before
    assert fuzz.kept("config") == fuzz.kept("sums") == [bytes([i]) for i in range(fuzz.MOST_KEPT)]
    (inputs / "refused-000").unlink()
    fuzz.keep("config", inputs)
    assert fuzz.kept("config")[0] == b"\x01"
    assert fuzz.kept("sums")[0] == b"\x00"
