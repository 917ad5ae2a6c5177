"""`tl.adapt`: a new model of the user's cells, everything else as it was."""

from __future__ import annotations

import warnings

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch

import scdiva as sd
from scdiva.models.inference import width_of


@pytest.fixture(scope="module")
def batched(adata):
    data = sd.datasets.toy(240, 60, rng=1)
    assert list(data.var_names) == list(adata.var_names)
    data.obs["donor"] = ["a", "b", "c"] * 80
    return data


def test_components_make_the_embedding_and_nothing_else_is_touched(plain, batched, hashed, weights):
    before, data = weights(plain), hashed(batched)
    new = sd.tl.adapt(batched, plain, batch_key="donor", rng=3)
    assert hashed(batched) == data
    assert new is not plain
    assert new.vocabulary.fingerprint == plain.vocabulary.fingerprint
    after = weights(new)
    parts = ("table.weight", "center", "dataset_map", "state_map", "offset")
    assert set(after) == {*before, *(f"dataset_components.{name}" for name in parts)}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert plain.adaptation is None
    report = new.adaptation
    assert report.keys() == {"n_components", "n_genes", "ratio", "n_cells", "n_batches", "seconds", "seed"}
    assert report["n_components"] == new.config.adapted == len(report["ratio"]) == 20
    assert (report["n_cells"], report["n_batches"]) == (240, 3)


def test_of_many_cells_some_are_drawn(plain, batched, monkeypatch):
    monkeypatch.setattr("scdiva.embedding.adapt.MOST_CELLS", 100)
    drawn, redrawn = (sd.tl.adapt(batched, plain, rng=np.random.default_rng(seed)) for seed in (1, 2))
    assert drawn.adaptation["n_cells"] == 100
    assert drawn.adaptation["ratio"] != redrawn.adaptation["ratio"]


def test_the_new_model_embeds_later_cells_and_is_saved(plain, batched, tmp_path):
    new = sd.tl.adapt(batched, plain, rng=1)
    folder = new.save(tmp_path / "own")
    later = batched[:7].copy()
    states = [sd.tl.embed(later, model, copy=True).obsm["X_scdiva"] for model in (plain, new, folder)]
    embedding = sd.tl.embed(batched, new, copy=True).obsm["X_scdiva"]
    np.testing.assert_array_equal(states[1], states[2])
    np.testing.assert_allclose(states[1], embedding[:7], atol=1e-6)
    assert states[1].shape == (7, width_of(new, "embedding")) == (7, 20)
    batched.write_h5ad(tmp_path / "cells.h5ad")
    sd.tl.embed_file(tmp_path / "cells.h5ad", tmp_path / "out.h5ad", model=new, batch_size=16)
    np.testing.assert_allclose(ad.read_h5ad(tmp_path / "out.h5ad").obsm["X_scdiva"], embedding, atol=1e-6)
    loaded = sd.models.load_model(folder)
    assert loaded.adaptation == new.adaptation
    again = sd.tl.adapt(batched, loaded, rng=1)  # its components are replaced, not joined by others
    assert again.config == new.config


def test_tools_that_read_states_find_what_they_found(batched):
    model = sd.models.load_model()
    new = sd.tl.adapt(batched, model, rng=1)
    one, two = (sd.tl.impute(batched, [batched.var_names[0]], m, rng=0, copy=True) for m in (model, new))
    np.testing.assert_array_equal(one.obsm["scdiva_imputed"], two.obsm["scdiva_imputed"])
    data = batched.copy()
    sd.tl.integrate(data, "donor", model=new, steps=2, rng=0)
    assert np.isfinite(data.obsm["X_scdiva_integrated"]).all()


def test_a_transformers_state_is_used_too(build, batched):
    model = build(anchor="learned")
    new = sd.tl.adapt(batched[:60].copy(), model, rng=0)
    assert new.adaptation["n_cells"] == 60
    assert sd.tl.embed(batched, new, copy=True).obsm["X_scdiva"].shape == (240, 20)


def test_batches_that_were_not_named_are_noticed(batched):
    """Cells of one column differ in half of their genes."""
    data = batched.copy()
    matrix = data.X.toarray()
    second = np.arange(240) % 2 == 1
    matrix[np.ix_(second, np.arange(0, data.n_vars, 2))] *= 8
    data.X = sp.csr_matrix(matrix)
    data.obs["chemistry"] = np.where(second, "v3", "v2")
    data.obs["score"] = np.arange(240) % 2  # not what a batch is called
    with pytest.warns(UserWarning, match=r"adata\.obs\['chemistry'\].*batch_key='chemistry'"):
        sd.tl.adapt(data, rng=0)
    for cells, key in ((data, "chemistry"), (batched, None)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sd.tl.adapt(cells, batch_key=key, rng=0)
        assert not any("batch_key" in str(one.message) for one in caught)


def test_too_few_cells_are_refused(plain, batched):
    with pytest.raises(ValueError, match="12 cells have a known gene; at least 20"):
        sd.tl.adapt(batched[:12].copy(), plain)


@pytest.mark.parametrize("batches", [1, 2])
def test_identical_cells_are_said_to_be_so(cells, plain, batches):
    data = cells[np.arange(60) % batches].copy()
    data.obs_names, data.obs["batch"] = [f"copy{i}" for i in range(60)], [f"b{i % batches}" for i in range(60)]
    with pytest.raises(ValueError, match=r"no gene varies: the \d+ cells are .*identical"):
        sd.tl.adapt(data, plain, batch_key="batch" if batches > 1 else None)
