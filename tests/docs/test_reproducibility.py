"""The same seed gives the same bytes, also in another process.

Each call runs here and in a fresh interpreter, with another hash seed and other global random states, and what it gives
is compared by checksum. Within one process the same is tested beside each call (tests/embedding, tests/train).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import hashlib, json
import numpy as np
from scdiva import cli

adata = sd.datasets.toy(30, 70)

def checksum(*parts):
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()

found = {}
net = sd.models.load_model(device="cpu")  # once: by its name each call reads it anew
sd.tl.embed(adata, net)
found["embed"] = checksum(adata.obsm["X_scdiva"])
model = sd.tl.integrate(adata, "batch", model=net, steps=6)
found["integrate"] = checksum(adata.obsm["X_scdiva_integrated"], *(p.detach().numpy() for p in model.parameters()))
made = sd.tl.generate(adata, 3, net, groupby="cell_type")
found["generate"] = checksum(made.X.data, made.X.indices, made.X.indptr, made.layers["counts"].data)
other = sd.tl.generate(adata, 3, net, groupby="cell_type", rng=6)
found["another seed"] = checksum(other.X.data, other.X.indices, other.X.indptr, other.layers["counts"].data)

adata.write_h5ad("study.h5ad")
model = {"dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "anchor_linear_dim": 8, "anchor_hidden": 12}
training = {"steps": 3, "batch_size": 8, "precision": "fp32", "compile_blocks": "no", "context": 40, "seed": 5}
config = {"train": ["study.h5ad"], "out": "run", "vocabulary": "scdiva-mini", "model": model, "training": training}
with open("run.yaml", "w") as file:
    json.dump(config | {"accelerator": "cpu", "progress": False, "min_genes": 1}, file)
assert cli.main(["pretrain", "--config", "run.yaml"]) == 0
with open("run/model/model.safetensors", "rb") as file:
    found["pretrain"] = hashlib.sha256(file.read()).hexdigest()
with open("found.json", "w") as file:
    json.dump(found, file)
"""
CALLS = ["embed", "integrate", "generate", "pretrain"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of this process and of another one."""
    import scdiva as sd

    this_folder, subprocess_folder = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    with contextlib.chdir(this_folder), sd.settings.override(seed=5, progress=False, precision="auto"):
        exec(SCRIPT, {"sd": sd})
    begin = "import numpy as np, random, torch\nrandom.seed(1), np.random.seed(2), torch.manual_seed(3)\n"
    begin += "import scdiva as sd\nsd.settings.seed = 5\nsd.settings.progress = False\n"
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    call = [sys.executable, "-W", "ignore", "-c", begin + SCRIPT]
    done = subprocess.run(call, cwd=subprocess_folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads((folder / "found.json").read_text()) for folder in (this_folder, subprocess_folder)]


@pytest.mark.parametrize("call", CALLS)
def test_two_processes_give_the_same_bytes(call, runs):
    one, two = runs
    assert one[call] == two[call]


def test_another_seed_gives_other_bytes(runs):
    assert runs[0]["generate"] != runs[0]["another seed"]
