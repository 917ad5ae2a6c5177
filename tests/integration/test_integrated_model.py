"""The model that `tl.integrate` returns: later cells, files, saving, and what such a model refuses."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import torch

import scdiva as sd

QUICK = {"steps": 6, "rng": 3}
KEY = "X_scdiva_integrated"


@pytest.fixture(scope="module")
def left_out(cells):
    """The third batch, and the others."""
    third = (cells.obs["batch"] == "batch 3").to_numpy()
    return cells[third].copy(), cells[~third].copy()


@pytest.fixture(scope="module")
def fitted(plain, left_out):
    """A model integrated on two of three batches, and these cells with their embedding."""
    data = left_out[1].copy()
    return sd.tl.integrate(data, "batch", "cell_type", model=plain, **QUICK | {"steps": 30}), data


def embedded(data, model, **arguments):
    return sd.tl.embed(data, model, copy=True, key_added="found", **arguments).obsm["found"]


def test_the_same_cells_get_the_same_bits(fitted):
    model, data = fitted
    np.testing.assert_array_equal(embedded(data, model), data.obsm[KEY])


def test_a_batch_never_seen_is_embedded_without_a_refit(fitted, left_out, plain):
    model, data = fitted
    before = {name: value.clone() for name, value in model.state_dict().items()}
    query = left_out[0]
    embedding = embedded(query, model)
    assert embedding.shape == (query.n_obs, data.obsm[KEY].shape[1])
    np.testing.assert_allclose(np.linalg.norm(embedding, axis=1), 1, rtol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # embeddings do not depend on the other cells of the dataset
    np.testing.assert_allclose(embedded(query[::7].copy(), model), embedding[::7], atol=1e-6)
    shuffled = query[:, np.random.default_rng(0).permutation(query.n_vars)].copy()
    np.testing.assert_allclose(embedded(shuffled, model), embedding, atol=1e-6)
    together = ad.concat([data, query])
    np.testing.assert_allclose(embedded(together, model)[data.n_obs :], embedding, atol=1e-6)
    # and it lies among the cells of its own type
    near = np.argsort(-embedding @ data.obsm[KEY].T, axis=1)[:, :15]
    kind = data.obs["cell_type"].to_numpy()[near]
    assert (kind == query.obs["cell_type"].to_numpy()[:, None]).mean() > 0.8


def test_saved_and_loaded_it_is_the_same(fitted, left_out, tmp_path):
    model, data = fitted
    folder = sd.models.save_model(model, model.vocabulary, tmp_path / "integrated")
    loaded = sd.models.load_model(folder, device="cpu")
    assert loaded.config == model.config
    for source in (loaded, folder, str(folder)):
        np.testing.assert_array_equal(embedded(data, source), data.obsm[KEY])
        np.testing.assert_array_equal(embedded(left_out[0], source), embedded(left_out[0], model))


def test_it_is_neither_integrated_again_nor_adapted(fitted):
    model, data = fitted
    adata = data.copy()
    with pytest.raises(ValueError, match=r"has integrated batches before.*tl\.embed"):
        sd.tl.integrate(adata, "batch", model=model)
    with pytest.raises(ValueError, match="Adapt the model that it came from"):
        sd.tl.adapt(adata, model)
    assert set(adata.obsm) == {KEY}


@pytest.mark.parametrize("fields", [{"anchor": "learned"}, {"anchor": "encoder", "anchor_residual": False}])
def test_each_kind_of_model(build, left_out, fields, tmp_path):
    model, data = build(**fields), left_out[1][:60].copy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    new = sd.tl.integrate(data, "batch", model=model, **QUICK | {"steps": 3})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    after = new.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    embedding = embedded(data, new)
    np.testing.assert_allclose(embedding, data.obsm[KEY], atol=1e-5)  # components are computed in other blocks of cells
    folder = sd.models.save_model(new, new.vocabulary, tmp_path / "new")
    np.testing.assert_array_equal(embedded(data, folder), embedding)
