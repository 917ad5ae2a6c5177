"""Faults of what is installed: no GPU, no Triton, no extra. Nothing falls back in silence."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import scdiva as sd
from scdiva.models import load_model
from scdiva.train import pretrain

from .conftest import CALLS

ROOT = Path(__file__).parents[2]
# --- no GPU, no Triton ------------------------------------------------------------------------------------------------
ON_DEVICE = (
    "tl.embed", "tl.integrate", "tl.annotate", "tl.adapt", "tl.grn", "tl.reconstruct", "tl.log_likelihood",
    "tl.predict_perturbation",
)  # fmt: skip


@pytest.mark.fault("no GPU")
@pytest.mark.parametrize("device", ["cuda:3", "mps"])
@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_device_that_is_not_there(cells, model, refused, monkeypatch, name, device):
    """A missing device raises an error instead of using the CPU, whether set by the call or by the settings."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    patterns = f"device='{device}' was asked for", "finds no (CUDA|MPS) device here"
    refused(lambda a: CALLS[name](a, model, device=device), cells, ValueError, *patterns)
    with sd.settings.override(device=device):
        refused(lambda a: CALLS[name](a, model, device=None), cells, ValueError, *patterns)
    with pytest.raises(ValueError, match=patterns[0]):
        load_model(model, device=device)


@pytest.fixture
def without_triton(monkeypatch):
    from scdiva.kernels import _attention

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "triton" else find(name, *a))
    _attention._triton_obstacle.cache_clear()
    yield
    monkeypatch.undo()
    _attention._triton_obstacle.cache_clear()


def attention(backend, device="cpu"):
    from scdiva.kernels import resolve_backend

    return resolve_backend(backend, head_dim=64, dtype=torch.float32, device=torch.device(device))


@pytest.mark.fault("no Triton")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_triton_that_is_asked_for_and_not_installed(without_triton, device):
    with pytest.raises(ImportError, match=r"not installed \(pip install \"scdiva\[gpu\]\"\)\. Pass backend='auto' or"):
        attention("triton", device)


@pytest.mark.fault("no Triton")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_triton_attention_takes_sdpa(without_triton, device):
    assert attention("auto", device) == "sdpa"


# --- missing extras, said before work ---------------------------------------------------------------------------------
EXTRAS = {
    "modules": ("igraph", "leiden", lambda a, m: sd.tl.grn_modules(a), "scdiva.networks.network.network_of"),
    "scores, Leiden": (
        "igraph", "leiden", lambda a, m: sd.metrics.avg_bio(a.obsm["X_own"], a.obs["cell_type"].to_numpy()),
        "scdiva.metrics.integration.scored_cells",
    ),
    "a model of the hub": ("huggingface_hub", "hub", lambda a, m: sd.tl.embed(a, "hf://owner/name"), None),
    "a push": (
        "huggingface_hub", "hub", lambda a, m: sd.models.push("scdiva-mini", "hf://a/b"),
        "scdiva.models.storage.find_model",
    ),
    "pretraining": (
        "triton", "gpu",
        lambda a, m: pretrain(["no such file"], "nowhere", model={"attention_backend": "triton"}),
        "scdiva.data.datamodule.CellDataModule",
    ),
}  # fmt: skip


@pytest.mark.fault("missing extras")
@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_extra_is_named_before_any_work_with_the_line_that_installs_it(
    cells, model, refused, monkeypatch, name
):
    def called(*_, **__):
        raise AssertionError("work began before the missing package was named")

    module, extra, call, work = EXTRAS[name]
    monkeypatch.setitem(sys.modules, module, None)
    if work:
        monkeypatch.setattr(work, called)
    refused(lambda a: call(a, model), cells, ImportError, rf"pip install 'scdiva\[{extra}\]'")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(requirement.startswith(module.replace("_", "-")) for requirement in extras[extra])
