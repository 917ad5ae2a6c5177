"""`tl.adapt`: a new model of the user's cells, everything else as it was."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import scdiva as sd

QUICK = {"max_epochs": 4, "patience": 2, "batch_size": 32, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def batched(adata):
    data = sd.datasets.toy(240, 60, rng=1)
    assert list(data.var_names) == list(adata.var_names)
    data.obs["donor"] = ["a", "b", "c"] * 80
    return data


def changed(old, new):
    return {name for name, value in old.items() if not torch.equal(value, new[name])}


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_set_encoder_is_trained_and_nothing_else_is_touched(plain, batched, method, weights, same):
    before, data, state = weights(plain), batched.copy(), torch.random.get_rng_state()
    legacy = np.random.get_state()[1].copy()  # noqa: NPY002
    new = sd.tl.adapt(batched, plain, batch_key="donor", method=method, rng=3, **QUICK)
    assert same(weights(plain), before)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002
    assert (batched.X != data.X).nnz == 0
    assert batched.obs.equals(data.obs)
    assert list(batched.uns) == list(data.uns)
    assert not batched.obsm
    assert new is not plain
    assert new.config == plain.config
    assert new.vocabulary.fingerprint == plain.vocabulary.fingerprint
    np.testing.assert_array_equal(new.vocabulary.entropy, plain.vocabulary.entropy)
    after = weights(new)
    assert list(after) == list(before)
    found = changed(before, after)
    assert "anchor.table.weight" in found
    assert "anchor.mlp.0.weight" in found
    assert all(name.startswith("anchor.") and not name.startswith("anchor_") for name in found)
    assert all(p.requires_grad for p in new.parameters())
    assert not new.training
    report = new.adaptation
    assert report["improved"]
    assert report["kept"] in ("refitted", "trained")
    assert report["n_training"] + report["n_validation"] == 240
    assert report["n_batches"] == 3
    assert report["method"] == method


def test_the_seed_determines_the_model(plain, batched, weights, same):
    one, two = (sd.tl.adapt(batched, plain, rng=1, **QUICK) for _ in range(2))
    other = sd.tl.adapt(batched, plain, rng=np.random.default_rng(2), **QUICK)
    assert same(weights(one), weights(two))
    assert not same(weights(one), weights(other))


def test_the_new_model_embeds_and_is_saved_in_the_stock_layout(plain, batched, tmp_path):
    new = sd.tl.adapt(batched, plain, rng=1, **QUICK)
    folder = sd.models.save_model(new, new.vocabulary, tmp_path / "own", metadata={"adaptation": new.adaptation})
    states = [sd.tl.embed(batched, model, copy=True).obsm["X_scdiva"] for model in (plain, new, folder)]
    np.testing.assert_array_equal(states[1], states[2])
    assert np.abs(states[0] - states[1]).max() > 1e-2


@pytest.mark.parametrize(("method", "fields"), [("lora", {"anchor": "learned"}), ("full", {"anchor": "encoder"})])
def test_a_transformer_is_trained(build, batched, method, fields, weights, same):
    model = build(**fields)
    before = weights(model)
    new = sd.tl.adapt(batched, model, method=method, batch_key="donor", rng=0, **QUICK | {"learning_rate": 3e-3})
    assert new.adaptation["improved"]
    assert same(weights(model), before)
    found = changed(before, weights(new))
    assert list(weights(new)) == list(before)
    assert "blocks.0.attention.qkv.weight" in found
    if method == "lora":
        assert all(name.startswith("blocks.") and name.endswith(".weight") for name in found)
        assert not any("norm" in name for name in found)
    else:
        assert "embedding.gene.weight" in found
    sd.tl.embed(batched.copy(), new)


def test_what_does_not_help_warns_and_returns_the_given_weights(build, batched, weights, same):
    model = build(anchor="learned")
    with pytest.warns(UserWarning, match="helped those held out"):
        new = sd.tl.adapt(batched, model, minutes=1e-9, rng=0)
    assert new.adaptation["stopped"] == "minutes"
    assert not new.adaptation["improved"]
    assert same(weights(new), weights(model))


def test_cells_without_a_known_gene_are_left_out(plain, batched):
    data = batched.copy()
    matrix = data.X.toarray()
    matrix[:2] = 0
    data.X = sp.csr_matrix(matrix)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        new = sd.tl.adapt(data, plain, rng=0, minutes=1e-9)
    assert any("2 of 240 cells are left out" in str(one.message) for one in said)
    assert new.adaptation["n_training"] + new.adaptation["n_validation"] == 238


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"method": "all"}, ValueError, "method must be"),
        ({"minutes": 0}, ValueError, "minutes must be"),
        ({"max_epochs": 0}, ValueError, "max_epochs must be at least 1"),
        ({"patience": 0}, ValueError, "patience must be at least 1"),
        ({"validation_share": 1.0}, ValueError, "validation_share"),
        ({"learning_rate": -1.0}, ValueError, "learning_rate"),
        ({"batch_key": "nowhere"}, KeyError, "no column 'nowhere'.*'donor'"),
        ({"batch_key": "partly"}, ValueError, "missing for 1 of 240 cells"),
        ({"layer": "nowhere"}, KeyError, "nowhere"),
    ],
)
def test_bad_arguments_are_refused(plain, batched, arguments, error, match):
    data = batched.copy()
    data.obs["partly"] = [None, *["a"] * 239]
    kept = copy.deepcopy(data.obs)
    with pytest.raises(error, match=match):
        sd.tl.adapt(data, plain, **arguments)
    assert data.obs.equals(kept)


def test_too_few_cells_and_no_anndata_are_refused(plain, batched):
    with pytest.raises(ValueError, match="12 cells have a known gene; training needs 20"):
        sd.tl.adapt(batched[:12].copy(), plain)
    with pytest.raises(TypeError, match="AnnData"):
        sd.tl.adapt(batched.X, plain)
