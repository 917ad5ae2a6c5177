"""`model.save(path)`, and models by their names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva.models import ScDiVa, ScDiVaConfig, load_model
from scdiva.models.storage import available
from scdiva.tokenizer.vocabulary import load_vocabulary


@pytest.fixture
def model() -> ScDiVa:
    vocabulary = load_vocabulary("human").subset(range(3, 15))
    config = ScDiVaConfig(
        n_genes=12, dim=16, n_layers=2, n_heads=2, ffn_dim=24, anchor_linear_dim=8, anchor_hidden=8
    )  # fmt: skip
    made = ScDiVa(config, generator=torch.Generator().manual_seed(0)).eval()
    made.vocabulary, made.metadata = vocabulary, {"corpus": "twelve genes"}
    return made


def test_a_save_that_fails_leaves_the_model_that_was_there(model, tmp_path):
    folder = model.save(tmp_path / "mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"'norm.weight' are NaN or infinite"):
        model.save(folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_model_without_a_vocabulary_is_refused(model, tmp_path):
    bare = ScDiVa(model.config)
    with pytest.raises(ValueError, match=r"no vocabulary: set `model\.vocabulary`"):
        bare.save(tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", available())
def test_every_model_of_the_package_loads(name):
    model = load_model(name, device="cpu")
    assert model.vocabulary.n_genes == model.config.n_genes
    assert np.isfinite(model.vocabulary.entropy).all()


@pytest.mark.parametrize("address", ["hf://", "hf://name", "hf://a/b/c", "hf:///b"])
def test_a_bad_hub_address_is_refused(address):
    with pytest.raises(ValueError, match="no address of a model"):
        load_model(address)
