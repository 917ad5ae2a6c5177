"""A result says where it comes from, also on machines that lack a package or the repository."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import version

import pytest
import torch

import scdiva
from scdiva._settings import multiplies_bf16


def test_a_result_names_its_origin(script, tmp_path, monkeypatch):
    record = script("_record")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["benchmarks/x.py", "--repeats", "2"])
    path = record.record("x", [{"what": "a", "value": 1.5}], data="toy")
    assert path == tmp_path / "results" / "x.json"
    entry = json.loads(path.read_text())
    assert entry["command"] == "python benchmarks/x.py --repeats 2"
    assert entry["rows"] == [{"what": "a", "value": 1.5}]
    assert entry["data"] == "toy"
    assert entry["versions"]["torch"] == version("torch")
    assert entry["versions"]["scdiva"] == scdiva.__version__
    assert entry["machine"]["cores"] >= 1
    assert ("gpu" in entry["machine"]) == torch.cuda.is_available()
    assert entry["commit"]
    # what decides how long bfloat16 takes
    assert entry["machine"]["multiplies_bf16"] == multiplies_bf16("cpu")
    assert entry["machine"]["torch_uses"] == torch.backends.cpu.get_cpu_capability()


@pytest.fixture
def repository(script, tmp_path, monkeypatch):
    """A repository of two tracked files, where `_record` believes to be."""
    record = script("_record")
    folder = tmp_path / "benchmarks"
    (folder / "results").mkdir(parents=True)
    (folder / "x.py").write_text("1")
    (folder / "results" / "x.json").write_text("{}")
    monkeypatch.setattr(record, "__file__", str(folder / "_record.py"))
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return record, folder


@pytest.mark.parametrize("new", ["x.py", "y.py"])
def test_changed_and_new_code_marks_the_commit_and_results_do_not(repository, tmp_path, new):
    record, folder = repository
    clean = record.commit()
    assert len(clean) == 40
    (folder / "results" / "x.json").write_text("{} ")  # an earlier benchmark of the same run wrote its figures
    assert record.commit() == clean
    (tmp_path / "notes.md").write_text("read by no benchmark")
    assert record.commit() == clean
    (folder / new).write_text("2")
    assert record.commit() == clean + "+changes"


def test_rows_are_kept_only_if_they_were_made_alike(script, tmp_path, monkeypatch):
    record = script("_record")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert record.kept_rows("some", ["pca"], seeds=[0, 1]) == []
    rows = [{"set": "blood", "arm": "pca", "accuracy": 0.5}, {"set": "blood", "arm": "scdiva"}, {"what": "a goal"}]
    last = {"seeds": [0, 1], "commit": "abc", "rows": rows}
    (tmp_path / "some.json").write_text(json.dumps(last))
    assert record.kept_rows("some", ["pca", "scvi"], seeds=[0, 1]) == [{"commit": "abc", **rows[0]}]
    assert record.kept_rows("some", ["pca"], seeds=[0]) == record.kept_rows("some", [], seeds=[0, 1]) == []
    # taken over once more, it is still of the commit that made it
    rows[0]["commit"] = "first"
    (tmp_path / "some.json").write_text(json.dumps(last))
    assert record.kept_rows("some", ["pca"], seeds=[0, 1])[0]["commit"] == "first"
