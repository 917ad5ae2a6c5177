from __future__ import annotations

import numpy as np
import pytest
import yaml

from scdiva.datasets import toy
from scdiva.tokenizer.vocabulary import Vocabulary

MODEL = {"dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "anchor_linear_dim": 8, "anchor_hidden": 12}
TRAINING = {
    "steps": 6, "batch_size": 8, "warmup_steps": 2, "validate_every": 3, "checkpoint_every": 2, "context": 40,
    "precision": "fp32", "log_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three small studies and the vocabulary of their genes, without entropies."""
    folder = tmp_path_factory.mktemp("studies")
    adata = toy(n_cells=80, n_genes=60)
    for name, rows in (("a", slice(40)), ("b", slice(40, 60)), ("c", slice(60, 80))):
        adata[rows].copy().write_h5ad(folder / f"{name}.h5ad")
    human = Vocabulary.human()
    genes = human.subset(human.match(adata.var_names).tokens)
    genes.with_entropy(np.full(genes.n_genes, np.nan)).write(folder / "genes.safetensors")
    return folder


@pytest.fixture
def options(files, tmp_path):
    """Write a configuration file; returns it and the run's folder."""
    file = tmp_path / "run.yaml"
    content = {
        "train": [str(files / "a.h5ad"), str(files / "b.h5ad")],
        "validation": [str(files / "c.h5ad")],
        "vocabulary": str(files / "genes.safetensors"),
        "out": str(tmp_path / "run"),
        "accelerator": "cpu",
        "progress": False,
        "min_genes": 1,
        "model": MODEL,
        "training": TRAINING,
    }
    file.write_text(yaml.safe_dump(content))
    return file, tmp_path / "run"


@pytest.fixture(scope="session")
def model_options():
    """The small model of `options`."""
    return dict(MODEL)


@pytest.fixture(scope="session")
def training_options():
    """How it is trained."""
    return dict(TRAINING)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The folder of a small model of the genes of `cells`."""
    import torch

    from scdiva.models import ScDiVa, ScDiVaConfig, save_model

    human = Vocabulary.human()
    tokens = human.match(toy(4, 90).var_names[:80]).tokens
    genes = human.subset(np.sort(tokens[tokens >= 0]))
    fields = MODEL | {"anchor": "encoder", "anchor_residual": False, "state_head": True, "state_rank": 4}
    model = ScDiVa(ScDiVaConfig(n_genes=genes.n_genes, **fields), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):  # weights of zero would hide parts of the network
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return save_model(model, genes, tmp_path_factory.mktemp("small") / "model", metadata={"corpus": "drawn at random"})


@pytest.fixture(scope="session")
def cells(tmp_path_factory):
    """A folder with cells.h5ad, query.h5ad and screen.h5ad."""
    folder = tmp_path_factory.mktemp("cells")
    adata = toy(n_cells=90, n_genes=90)
    adata[:60].copy().write_h5ad(folder / "cells.h5ad")
    adata[60:].copy().write_h5ad(folder / "query.h5ad")
    screen = toy(n_cells=120, n_genes=90)
    screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    screen.write_h5ad(folder / "screen.h5ad")
    return folder
