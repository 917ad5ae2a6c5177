"""A result says where it comes from, also on machines that lack a package or the repository."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from importlib.metadata import version

import pytest
import torch

from scdiva._settings import multiplies_bf16


def test_a_result_names_its_origin(script, tmp_path, monkeypatch):
    record = script("_record")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["benchmarks/x.py", "--repeats", "2"])
    entry = json.loads(record.record("x", [{"what": "a", "value": 1.5}]).read_text())
    assert entry["command"] == "python benchmarks/x.py --repeats 2"
    assert entry["rows"] == [{"what": "a", "value": 1.5}]
    assert entry["versions"]["torch"] == version("torch")
    assert ("gpu" in entry["machine"]) == torch.cuda.is_available()
    assert entry["machine"]["multiplies_bf16"] == multiplies_bf16("cpu")  # it decides how long bfloat16 takes
    with pytest.raises(ValueError, match="nan"):
        record.record("x", [{"value": float("nan")}])


def test_changed_and_new_code_marks_the_commit_and_results_do_not(script, tmp_path, monkeypatch):
    record, folder = script("_record"), tmp_path / "benchmarks"
    (folder / "results").mkdir(parents=True)
    (folder / "x.py").write_text("1")
    (folder / "results" / "x.json").write_text("{}")
    monkeypatch.setattr(record, "__file__", str(folder / "_record.py"))
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    clean = record.commit()
    assert len(clean) == 40
    (folder / "results" / "x.json").write_text("{} ")  # an earlier benchmark of the same run wrote its figures
    (tmp_path / "notes.md").write_text("read by no benchmark")
    assert record.commit() == clean
    for name in ("x.py", "y.py"):
        (folder / name).write_text("2")
        assert record.commit() == clean + "+changes"
        subprocess.run(["git", *who, "stash", "-q"], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    ("commit", "again", "expected"),
    [
        ("abc", True, True),
        ("abd", True, False),
        ("abc+changes", True, False),
        ("unknown", True, False),
        ("abd", False, True),
    ],
)
def test_again_repeats_rows_of_other_commits(script, monkeypatch, commit, again, expected):
    run = script("_run")
    rows = [{"set": "a", "commit": recorded} for recorded in ("abc", "abc+changes", "unknown")]
    monkeypatch.setattr(run, "recorded_rows", lambda name: rows)
    monkeypatch.setattr(run, "commit", lambda: commit)
    assert run.has_row("embedding", {"set": "a"}, Namespace(again=again)) is expected
    assert not run.has_row("embedding", {"set": "b"}, Namespace(again=again))
