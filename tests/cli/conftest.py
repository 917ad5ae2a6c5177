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
    genes.with_entropy(np.full(genes.n_genes, np.nan)).write(folder / "genes.parquet")
    return folder


@pytest.fixture
def options(files, tmp_path):
    """Write a configuration file; returns it and the run's folder."""
    file = tmp_path / "run.yaml"
    content = {
        "train": [str(files / "a.h5ad"), str(files / "b.h5ad")],
        "validation": [str(files / "c.h5ad")],
        "vocabulary": str(files / "genes.parquet"),
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
