"""A small model and a small stream of cells, without files."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.datasets import toy
from scdiva.tokenizer.vocabulary import Vocabulary
from scdiva.train import PretrainingConfig, PretrainingModule, fit

N_GENES = 30
STUDIES = {
    "large": (range(90), range(40)),
    "middle": (range(90, 130), range(33)),
    "small": (range(130, 145), range(9, 40)),
}
"""Rows and columns of each study of the corpus: the small one lacks nine genes, the middle one seven."""


def make_batch(generator: torch.Generator, n_cells: int = 6, n_studies: int = 2) -> CellBatch:
    """Ragged cells of two types: the first likes low genes, the second high ones."""
    lengths = torch.randint(1, 12, (n_cells,), generator=generator).tolist()
    kinds = torch.randint(2, (n_cells,), generator=generator).tolist()
    tokens, values = [], []
    for length, kind in zip(lengths, kinds, strict=True):
        preference = torch.linspace(-3, 3, N_GENES) * (1 if kind else -1)
        noise = -torch.log(-torch.log(torch.rand(N_GENES, generator=generator)))
        tokens.append((preference + noise).argsort(descending=True)[:length] + N_SPECIAL)
        values.append(torch.rand(length, generator=generator).sort(descending=True).values * 3 + 0.2)
    study = torch.randint(n_studies, (n_cells,), generator=generator)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return from_ragged(indptr, torch.cat(tokens).numpy(), torch.cat(values).numpy(), study.numpy())


class CellStream(pl.LightningDataModule):
    """Batch s is a function of (seed, s)."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.seed, self.start_step = seed, 0

    def train_dataloader(self):
        return (make_batch(step_generator(self.seed, step, "data")) for step in itertools.count(self.start_step))

    def val_dataloader(self):
        batches = [make_batch(step_generator(99, i, "validation")) for i in range(2)]
        return DataLoader(batches, batch_size=None)


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """The 40 genes of the corpus, all of one entropy."""
    human = Vocabulary.human()
    genes = human.subset(human.match(toy(145, 40).var_names).tokens)
    return genes.with_entropy(np.ones(genes.n_genes))


@pytest.fixture(scope="session")
def corpus(vocabulary, tmp_path_factory) -> PackedCells:
    """Three packed studies of unlike size, with four cell types and a batch effect each."""
    folder = tmp_path_factory.mktemp("corpus")
    adata = toy(145, 40)
    for name, (rows, columns) in STUDIES.items():
        adata[list(rows), list(columns)].copy().write_h5ad(folder / f"{name}.h5ad")
    return pack_files([folder / f"{name}.h5ad" for name in STUDIES], vocabulary, folder / "corpus.h5")


@pytest.fixture
def batch():
    return make_batch(torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def stream():
    """Make a datamodule of an endless stream."""
    return CellStream


@pytest.fixture(scope="session")
def config():
    """Make a configuration for a few steps."""

    def make(**fields) -> PretrainingConfig:
        settings = {
            "steps": 20, "batch_size": 6, "warmup_steps": 3, "learning_rate": 3e-3, "precision": "fp32",
            "log_every": 1, "validate_every": 5, "checkpoint_every": 5,
        } | fields  # fmt: skip
        return PretrainingConfig(**settings)

    return make


@pytest.fixture
def run(tiny, config, stream):
    """Train from new objects, everything that a new process would have, and note the module as `run.module`."""

    def start(out, *, kind=PretrainingModule, model=None, settings=None, data=None, **options):
        module = start.module = kind(tiny(**(model or {})), config(**(settings or {})), n_studies=2)
        data = stream() if data is None else data
        return module, fit(module, data, out_dir=out, accelerator="cpu", **{"progress": False} | options)

    return start
