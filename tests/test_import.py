"""`import scdiva` is cheap, and each part loads only what it needs. Each test asks a fresh interpreter."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import scdiva

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
HEAVY = (
    "torch", "scanpy", "pytorch_lightning", "lightning", "jax", "anndata", "pandas", "sklearn", "umap", "matplotlib",
    "numba", "pooch", "requests",
)  # fmt: skip


def fresh(code: str) -> str:
    """Run code in a new interpreter and give back what it wrote."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_is_fast_and_loads_nothing_heavy():
    code = (
        "import json, sys, time; start = time.perf_counter(); import scdiva; took = time.perf_counter() - start\n"
        f"print(json.dumps([took, [name for name in {HEAVY!r} if name in sys.modules]]))"
    )
    runs = [json.loads(fresh(code)) for _ in range(4)]
    assert min(took for took, _ in runs) < 0.3  # the minimum of several runs excludes other load on the machine
    assert runs[0][1] == []


STAGES = """
import importlib, json, pkgutil, sys
loaded = lambda *names: print(json.dumps([name for name in names if name in sys.modules]))

def again(*missing):
    for name in [name for name in sys.modules if name.split(".")[0] == "scdiva"]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(missing))

for part in ("tokenizer.serialize", "tokenizer.entropy", "pp", "datasets", "get", "pl", "data.cells"):
    importlib.import_module(f"scdiva.{part}")
import scdiva.models
scdiva.models.ScDiVaConfig.paper()
loaded("torch", "pytorch_lightning", "scanpy", "numba")

from scdiva.models import load_model
load_model("scdiva-mini")
for part in ("annotation.fit", "embedding.dataset_pcs", "integration.objective", "perturbation.response_head"):
    importlib.import_module(f"scdiva.{part}")
loaded("triton", "torch._dynamo", "torch._inductor", "sympy", "pytorch_lightning")

again("anndata", "scanpy")
for part in ("kernels", "diffusion", "models.scdiva", "models.pretrained", "data.batch", "data.corpus", "train"):
    importlib.import_module(f"scdiva.{part}")
sys.path.insert(0, BENCHMARKS)
import gpu

del sys.modules["anndata"], sys.modules["scanpy"]
again("dask", "decoupler", "distributed", "harmonypy", "huggingface_hub", "igraph", "marsilea", "matplotlib_venn",
      "scdataset", "scib_metrics", "tensorboard", "triton")
import scdiva
count = 0
for part in pkgutil.iter_modules(scdiva.__path__):
    if not part.name.startswith("_"):
        module = importlib.import_module(f"scdiva.{part.name}")
        count += sum(getattr(module, name) is not None for name in getattr(module, "__all__", ()))
print(count)
"""


def test_each_part_loads_only_what_it_needs_and_no_extra():
    """One process after another use: preparing data, loading a model, training on a GPU machine, everything.

    Preparing data needs no torch. A model loads without Triton and torch's compiler (150 MB, two seconds), and only
    fine-tuning and pretraining load Lightning. A training machine has torch, Lightning and packed files; anndata and
    scanpy may be missing. No public name needs an extra.
    """
    without_torch, without_training, *_, count = fresh(f"BENCHMARKS = {str(BENCHMARKS)!r}\n{STAGES}").splitlines()
    assert (json.loads(without_torch), json.loads(without_training)) == ([], [])
    assert int(count) > 100


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    import scdiva

    assert scdiva.__version__ == version("scdiva")


@pytest.mark.parametrize("writable", [True, False])
def test_numba_gets_a_cache_of_its_own_only_where_it_could_not_write(monkeypatch, tmp_path, writable):
    """Without one, scanpy and umap-learn can't be imported in a read-only container."""
    monkeypatch.setattr(scdiva, "_is_writable", lambda _: writable)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    scdiva._set_numba_cache()
    cache_dir = os.environ["NUMBA_CACHE_DIR"]
    assert [str(path) for path in tmp_path.iterdir()] == ([] if writable else [cache_dir])
    if not writable:
        assert os.stat(cache_dir).st_mode & 0o077 == 0
        scdiva._set_numba_cache()
        assert os.environ["NUMBA_CACHE_DIR"] == cache_dir


def test_a_folder_is_writable_if_it_can_be_made(monkeypatch, tmp_path):
    assert scdiva._is_writable(tmp_path / "a" / "b")
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    assert not scdiva._is_writable(tmp_path / "a" / "b")


@pytest.mark.parametrize("part", ["", "data", *(name for name, module in scdiva._WHERE.items() if module is None)])
def test_dir_shows_public_names_only(part):
    module = importlib.import_module(f"scdiva.{part}".rstrip("."))
    assert dir(module) == sorted(module.__all__)
    assert all(getattr(module, name) is not None for name in dir(module))
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018
