"""scripts/gpu_once.py at toy sizes on a CPU, with the packages that a GPU machine has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from scdiva.data.packing import pack_files
from scdiva.datasets import toy
from scdiva.models import load_model
from scdiva.tokenizer import load_vocabulary

ROOT = Path(__file__).parents[2]
MISSING = (
    "adbc", "anndata", "annbatch", "datashader", "igraph", "leidenalg", "legacy_api_wrap", "marsilea", "matplotlib",
    "mpl_toolkits", "mudata", "numba", "numcodecs", "pertpy", "pyarrow", "pylab", "pynndescent", "pytest", "_pytest",
    "scanpy", "scdataset", "scib_metrics", "scikit_learn", "sklearn", "seaborn", "session_info", "umap", "umap_learn",
    "zarr",
)  # fmt: skip
"""Beginnings of the names in site-packages of packages that a GPU machine lacks."""


def bare(folder: Path, out: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages of this environment, less those that are MISSING; results go to `out`."""
    (folder / "site").mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        name = re.split(r"[-.]", entry.name)[0].lower()
        if name not in MISSING and "scdiva" not in name and entry.suffix != ".pth":
            (folder / "site" / entry.name).symlink_to(entry)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV", "SCDIVA"))}
    env |= {"PYTHONPATH": f"{ROOT / 'src'}:{folder / 'site'}", "OUT": str(out), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-S", *command)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def carried(script, tmp_path):
    """A corpus of two small studies that is packed for another machine."""
    genes, prepared = load_vocabulary("scdiva-paper-mini"), tmp_path / "prepared"
    prepared.mkdir()
    for part, n_cells in (("train", 120), ("validation", 30)):
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
    assert [run["training"]["seed"] for run in runs] == [0, runs[0]["cells"]]
    monkeypatch.setattr("sys.argv", ["train_paper.py", "--init", str(init), "--install"])
    paper.main()
    card = (tmp_path / "installed" / "README.md").read_text()
    steps, cells = (sum(run[name] for run in runs) for name in ("steps", "cells"))
    assert f"| 2 by time | 64 | {steps:,} x up to 2,048 tokens | {cells:,} | " in card
    assert "| short | 256 | 1,258 of 1,600 x 32 |" in card, "stages of the bundled model"
    assert "120 human cells of 1 public studies" in card
    assert torch.equal(load_model(tmp_path / "installed").embedding.gene.weight, weights[1])


def test_all_sections_run_without_anndata_and_small_files_come_back(carried, tmp_path):
    out = tmp_path / "out"
    command = ("scripts/gpu_once.py", "--dry-run", "--corpus", str(carried), "--seconds", "400", "--commit", "none")
    answer = bare(tmp_path, out, *command)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    rows = json.loads((out / "gpu.json").read_text())["rows"]
    assert not [row for row in rows if row.keys() & {"error", "failed"}]
    sections = list(dict.fromkeys(row["section"] for row in rows))
    assert sections == ["checks", "parity", "ceilings", "tuning", "train", "fit", "embed", "sdpa"]
    missed = [row["profile"] for row in rows if row.get("met") is False and "profile" in row]
    assert missed, "a CPU does not meet goals of a GPU"
    assert all(re.match(r"[\d.e-]+ ms in \d+ of \S+", profile) for profile in missed)
    files = list(out.rglob("*"))
    assert len(files) <= 8
    assert all(file.is_file() and file.stat().st_size <= 15 * 2**20 for file in files)
    steps = json.loads((out / "config.json").read_text())["metadata"]["by_time"][-1]["steps"]
    assert f" step: {steps} steps" in answer.stdout, "the number of steps follows from the rate"
