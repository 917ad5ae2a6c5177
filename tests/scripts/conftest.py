"""A prepared corpus of a few cells, and the scripts as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from scdiva.data.packing import pack_files
from scdiva.datasets import toy
from scdiva.tokenizer import load_vocabulary

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))  # as where one of them runs: they import each other

_spec = importlib.util.spec_from_file_location("of_training", Path(__file__).parents[1] / "train" / "conftest.py")
_of_training = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_of_training)
batch = _of_training.batch


@pytest.fixture
def script(monkeypatch):
    """Import a script by name, as it is imported by another that runs beside it."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """What part 1 of train_mini.py leaves: two studies of counts, one of other numbers, one for validation."""
    folder = tmp_path_factory.mktemp("prepared")
    genes = load_vocabulary("human").subset(np.arange(3, 20_000, 40))
    adata = toy(160, 150, rng=4)
    adata.var_names = genes.symbols[:150]
    adata.X.data[:7] = 400  # above a byte
    adata.X.data[7] = 70_000
    cells = {"one": adata[:60].copy(), "two": adata[60:100].copy(), "odd": adata[100:125].copy()}
    # no counts: every number of a cell is its own
    cells["odd"].X.data = np.log1p(np.random.default_rng(0).gamma(2.0, size=cells["odd"].X.nnz)).astype(np.float32)
    cells["held_out"] = adata[125:].copy()
    for name, part in cells.items():
        part.write_h5ad(folder / f"{name}.h5ad")
    names = {"train": ("one", "two", "odd"), "validation": ("held_out",)}
    for part, of in names.items():
        pack_files([folder / f"{name}.h5ad" for name in of], genes, folder / f"{part}.h5", max_length=80).close()
    genes.write(folder / "vocabulary.safetensors")
    return folder
