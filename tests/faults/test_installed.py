"""Faults of what is installed: no GPU, no Triton, no extra. Nothing falls back in silence."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest
import torch

import scdiva as sd
from scdiva.models import load_model

ROOT = Path(__file__).parents[2]
# --- no GPU, no Triton ------------------------------------------------------------------------------------------------
ON_DEVICE = {
    "tl.embed": lambda a, m, d: sd.tl.embed(a, m, device=d),
    "tl.integrate": lambda a, m, d: sd.tl.integrate(a, "batch", model=m, steps=2, device=d),
    "tl.annotate": lambda a, m, d: sd.tl.annotate(a, "cell_type", model=m, device=d),
    "tl.adapt": lambda a, m, d: sd.tl.adapt(a, m, device=d),
    "tl.grn": lambda a, m, d: sd.tl.grn(a, model=m, device=d),
    "tl.reconstruct": lambda a, m, d: sd.tl.reconstruct(a, m, device=d),
    "tl.log_likelihood": lambda a, m, d: sd.tl.log_likelihood(a, m, n_samples=2, device=d),
    "tl.predict_perturbation": lambda a, m, d: sd.tl.predict_perturbation(a, "perturbation", model=m, device=d),
    "models.load_model": lambda _, m, d: load_model(m, device=d or sd.settings.resolve_device()),
}


@pytest.mark.fault("no GPU")
@pytest.mark.parametrize("device", ["cuda:3", "mps"])
@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_device_that_is_not_there(cells, model, refused, monkeypatch, name, device):
    """Nothing falls back to the CPU in silence, asked for by the call or by the settings."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    said = f"device='{device}' was asked for", "finds no (CUDA|MPS) device here"
    refused(lambda a: ON_DEVICE[name](a, model, device), cells, ValueError, *said)
    with sd.settings.override(device=device):
        refused(lambda a: ON_DEVICE[name](a, model, None), cells, ValueError, *said)


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


# --- missing extras ---------------------------------------------------------------------------------------------------
HINTS = {
    "igraph, modules": ("igraph", "leiden", lambda a: sd.tl.grn_modules(a)),
    "igraph, Leiden": (
        "igraph",
        "leiden",
        lambda a: sd.metrics.avg_bio(a.obsm["X_own"], a.obs["cell_type"].to_numpy()),
    ),
    "huggingface-hub": ("huggingface_hub", "hub", lambda a: sd.tl.embed(a, "hf://owner/name")),
}


def extras():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.fault("missing extras")
@pytest.mark.parametrize("name", HINTS)
def test_a_missing_extra_is_named_with_the_line_that_installs_it(cells, model, refused, monkeypatch, name):
    module, extra, call = HINTS[name]
    if name == "igraph, modules":
        sd.tl.grn(cells, "correlation", model=model, device="cpu")
    monkeypatch.setitem(__import__("sys").modules, module, None)
    refused(call, cells, ImportError, rf"pip install 'scdiva\[{extra}\]'")
    assert any(wanted.startswith(module.replace("_", "-")) for wanted in extras()[extra])


# --- missing extras, said before work ---------------------------------------------------------------------------------
def no_work(monkeypatch, *names):
    """Fail where one of these is called."""

    def called(*_, **__):
        raise AssertionError("work began before the missing package was named")

    for name in names:
        monkeypatch.setattr(name, called)


LATE = {
    "modules, on a network that is not there": (
        "igraph", "leiden", lambda a: sd.tl.grn_modules(a, key="none"), ("scdiva.networks.network.network_of",),
    ),
    "scores of a definition, Leiden": (
        "igraph", "leiden", lambda a: sd.metrics.avg_bio(a.obsm["X_own"], a.obs["cell_type"]),
        ("scdiva.metrics.integration.scored_cells",),
    ),
    "a push": (
        "huggingface_hub", "hub", lambda _: sd.models.push("scdiva-mini", "hf://a/b"),
        ("scdiva.models.storage.find_model",),
    ),
    "pretraining": (
        "triton", "gpu",
        lambda _: __import__("scdiva.train", fromlist=["pretrain"]).pretrain(
            ["no such file"], "nowhere", model={"attention_backend": "triton"}
        ),
        ("scdiva.data.datamodule.CellDataModule",),
    ),
}  # fmt: skip


@pytest.mark.fault("extras found missing late")
@pytest.mark.parametrize("name", LATE)
def test_a_missing_extra_is_said_before_any_work(cells, refused, monkeypatch, name):
    module, extra, call, work = LATE[name]
    monkeypatch.setitem(__import__("sys").modules, module, None)
    no_work(monkeypatch, *work)
    refused(call, cells, ImportError, rf"pip install 'scdiva\[{extra}\]'")
    assert any(wanted.startswith(module.replace("_", "-")) for wanted in extras()[extra])
