"""scripts/gpu_once.py at toy sizes on a CPU, with the packages that a GPU machine has."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from train_reader import read_readers

from scdiva.data.packing import pack_files
from scdiva.datasets import toy
from scdiva.models import load_model
from scdiva.tokenizer import load_vocabulary

_spec = importlib.util.spec_from_file_location(
    "of_gpu", Path(__file__).parents[1] / "benchmarks" / "test_gpu_script.py"
)
_of_gpu = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_of_gpu)


@pytest.fixture
def carried(script, tmp_path):
    """A corpus of two small studies that is packed for another machine."""
    genes, prepared = load_vocabulary("scdiva-paper-mini"), tmp_path / "prepared"
    prepared.mkdir()
    for part, n_cells in (("train", 120), ("validation", 40)):
        cells = toy(n_cells, 150, rng=n_cells)
        cells.var_names = genes.symbols[:150]
        cells.write_h5ad(tmp_path / f"{part}.h5ad")
        pack_files([tmp_path / f"{part}.h5ad"], genes, prepared / f"{part}.h5", max_length=80).close()
    genes.write(prepared / "vocabulary.safetensors")
    script("carry_corpus").pack(prepared, tmp_path / "carried")
    return tmp_path / "carried"


def test_runs_by_time_continue_a_model_and_are_summed_in_its_card(carried, script, tmp_path, monkeypatch):
    paper = script("train_paper")
    init = paper.BUNDLED
    n_bundled = len(load_model(init).metadata.get("by_time", []))
    monkeypatch.setattr(paper, "BUNDLED", tmp_path / "installed")
    weights = []
    for number in range(2):
        out = tmp_path / f"run{number}"
        options = ["--seconds", "4", "--toy", "--accelerator", "cpu", "--prepared", str(carried.parent / "prepared")]
        monkeypatch.setattr("sys.argv", ["train_paper.py", *options, "--init", str(init), "--out", str(out)])
        paper.main()
        init = out / "gpu" / "model"
        weights.append(load_model(init).embedding.gene.weight)
    assert not torch.equal(*weights)
    runs = load_model(init).metadata["by_time"]
    assert len(runs) == n_bundled + 2
    n_cells_before = np.cumsum([0, *(run["cells"] for run in runs)])
    assert [run["training"]["seed"] for run in runs] == n_cells_before[:-1].tolist(), (
        "each run sees the cells in another order"
    )
    monkeypatch.setattr("sys.argv", ["train_paper.py", "--init", str(init), "--install"])
    paper.main()
    card = (tmp_path / "installed" / "README.md").read_text()
    steps, cells = (sum(run[name] for run in runs) for name in ("steps", "cells"))
    contexts = ", then ".join(dict.fromkeys(str(run["training"]["context"]) for run in runs))
    assert f"| {len(runs)} by time | {contexts} | {steps:,} x up to 2,048 tokens | {cells:,} | " in card
    assert "| short | 256 | 1,258 of 1,600 x 32 |" in card, "stages of the bundled model"
    assert "120 human cells of 1 public studies" in card
    assert torch.equal(load_model(tmp_path / "installed").embedding.gene.weight, weights[1])


def test_steps_run_without_anndata_and_return_small_files(carried, script, tmp_path, monkeypatch):
    """One section and both trainings; test_gpu_script.py runs all sections."""
    monkeypatch.syspath_prepend(str(_of_gpu.ROOT / "benchmarks"))
    site, out, once = _of_gpu.bare_site(tmp_path / "site"), tmp_path / "out", script("gpu_once")
    assert set(once.STEPS) <= set(once.gpu.SECTIONS)
    command = ("scripts/gpu_once.py", "--dry-run", "--corpus", str(carried), "--seconds", "240", "--commit", "none")
    answer = _of_gpu.bare(site, out, *command, "--skip", *(set(once.STEPS) - {"head"}))
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    rows = json.loads((out / "gpu.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {"checks", "head", "reader"}
    assert not [row for row in rows if "error" in row]
    weights, runs = read_readers(out / "readers.safetensors")
    assert list(weights) == ["1x", "4x", "16x"]
    for size, row in zip(weights, [row for row in rows if row["section"] == "reader"], strict=True):
        assert (row["what"], row["steps"]) == (f"reader, {size}", runs[size][-1]["steps"])
        assert row["parameters"] == sum(weight.numel() for weight in weights[size].values())
        assert row["nll after"] != row["nll before"]
        assert row["base after"] == row["base before"], "the same cells and genes"
        assert row["earlier_steps"] == (5698 if size == "1x" else 0), "only the bundled reader has been trained"
    files = list(out.rglob("*"))
    assert len(files) <= 8
    assert all(file.is_file() and file.stat().st_size <= 15 * 2**20 for file in files)
    steps = json.loads((out / "config.json").read_text())["metadata"]["by_time"][-1]["steps"]
    assert f" step: {steps:,} steps" in answer.stdout, "the number of steps follows from the rate"


@pytest.mark.parametrize(
    ("order", "seconds", "trained"),
    [
        (["paper", "reader"], 400, {"paper": 200, "reader": 400}),
        (["reader", "paper"], 400, {"reader": 200, "paper": 400}),
        (["paper", "reader"], 200, {"paper": 200}),
        (["reader"], 100, {"reader": 100}),
    ],
)
def test_trainings_share_the_time_in_the_given_order(script, monkeypatch, tmp_path, order, seconds, trained):
    """A training that ends at once leaves its share to the next."""
    monkeypatch.syspath_prepend(str(_of_gpu.ROOT / "benchmarks"))
    once, calls = script("gpu_once"), {}

    def train(name, prepared, run, seconds, *options, max_seconds):
        calls[name] = seconds, " ".join(options)
        return name == "paper"

    monkeypatch.setattr(once, "train", train)
    for name in ("config.json", "readers.safetensors"):
        (tmp_path / name).touch()
    arguments = SimpleNamespace(train=order, dry_run=False, init=tmp_path)
    failed = once.train_all(arguments, tmp_path, time.monotonic() + seconds)
    assert {name: round(share) for name, (share, _) in calls.items()} == trained
    assert list(calls) == list(trained)
    assert failed == ("reader" in trained)
    init = {"paper": tmp_path, "reader": f"{tmp_path}/readers.safetensors"}
    assert all(options.endswith(f"--init {init[name]}") for name, (_, options) in calls.items())
    if "reader" in calls:
        assert "--sizes 1x 4x 16x --batch-size 64" in calls["reader"][1]


def test_a_large_file_is_cut_into_pieces(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(_of_gpu.ROOT / "scripts"))
    once = importlib.import_module("gpu_once")
    monkeypatch.setattr(once, "PIECE", 10)
    file, out = tmp_path / "last.ckpt", tmp_path / "out"
    out.mkdir()
    file.write_bytes(bytes(range(25)))
    once.copy_in_pieces(file, out)
    pieces = sorted(out.iterdir())
    assert [piece.stat().st_size for piece in pieces] == [10, 10, 5]
    assert b"".join(piece.read_bytes() for piece in pieces) == file.read_bytes()
