"""`model.save(path)`, and models by their names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva.models import ScDiVa, ScDiVaConfig, load_model
from scdiva.models.hub import available
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


def test_a_model_is_loaded_as_it_was_saved(model, tmp_path):
    folder = model.save(tmp_path / "new" / "mine")
    again = load_model(folder, device="cpu")
    assert (again.config, again.metadata) == (model.config, {"corpus": "twelve genes"})
    assert again.vocabulary.fingerprint == model.vocabulary.fingerprint
    stored = again.state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]  # nothing beside it is left


def test_what_is_loaded_can_be_saved_over_itself_if_it_is_asked(model, tmp_path):
    folder = model.save(tmp_path / "mine")
    loaded = load_model(folder, device="cpu")
    with torch.no_grad():
        loaded.norm.weight.fill_(2.0)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FileExistsError, match="exists already: pass overwrite=True"):
        loaded.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    loaded.save(folder, overwrite=True)
    assert (load_model(folder, device="cpu").norm.weight == 2.0).all()


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


def test_saving_is_no_part_of_the_network(model):
    assert not any("save" in name for name in (*model.state_dict(), *dict(model.named_modules())))


@pytest.mark.parametrize("name", available())
def test_every_model_of_the_package_loads(name):
    model = load_model(name, device="cpu")
    assert model.vocabulary.n_genes == model.config.n_genes
    assert np.isfinite(model.vocabulary.entropy).all()


@pytest.mark.parametrize("address", ["hf://", "hf://name", "hf://a/b/c", "hf:///b"])
def test_a_bad_hub_address_is_refused(address):
    with pytest.raises(ValueError, match="no address of a model"):
        load_model(address)
