"""`tl.integrate(finetune=True)`: which weights change, what is written, what is refused, and that it can be resumed."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sklearn.neighbors import NearestNeighbors

import scdiva as sd
from scdiva.models import load_model

TUNE = {"finetune": True, "epochs": 1, "rng": 3}


@pytest.fixture
def data(cells):
    return cells.copy()


def changed(new, model):
    before = model.state_dict()
    return {name for name, value in new.state_dict().items() if not torch.equal(value.cpu(), before[name])}


def test_every_weight_that_the_state_comes_from_is_trained(learned, data, weights, same):
    before = weights(learned)
    new = sd.tl.integrate(data, "batch", "cell_type", model=learned, **TUNE)
    assert same(weights(learned), before)
    idle = {name for name, _ in new.named_parameters() if name.startswith("heads.") or name.endswith("hidden_value")}
    assert changed(new, learned) == {name for name, _ in new.named_parameters()} - idle
    assert new.finetuned_for == "integrate"


@pytest.mark.parametrize("labels_key", ["cell_type", None])
def test_what_is_written(learned, data, labels_key):
    new = sd.tl.integrate(data, "batch", labels_key, model=learned, **TUNE)
    embedding = data.obsm["X_scdiva_integrated"]
    assert embedding.shape == (240, learned.config.dim)
    notes = data.uns["scdiva"]["integrate"]
    assert (notes["finetuned"], notes["steps"], notes["stopped"]) == (True, 240 // 32, "steps")
    assert list(notes["history"]) == ["loss", "reversal", "contrast"]
    assert all(values.shape == (240 // 32,) and (values > 0).all() for values in notes["history"].values())
    np.testing.assert_allclose(
        notes["history"]["loss"], notes["history"]["reversal"] + notes["history"]["contrast"], rtol=1e-5
    )
    again = data.copy()
    del again.obsm["X_scdiva_integrated"]
    sd.tl.embed(again, new)
    np.testing.assert_allclose(again.obsm["X_scdiva_integrated"], embedding, rtol=1e-5, atol=1e-6)


def test_the_model_is_saved_and_reads_as_many_genes_as_it_was_trained_on(learned, data, tmp_path):
    new = sd.tl.integrate(data, "batch", model=learned, context=20, **TUNE)
    loaded = load_model(new.save(tmp_path / "model"))
    assert loaded.config.max_length == 20
    assert loaded.finetuned_for == "integrate"
    sd.tl.embed(data, loaded, key_added="again")
    np.testing.assert_array_equal(data.obsm["again"], data.obsm["X_scdiva_integrated"])
    with pytest.raises(ValueError, match="has integrated batches before"):
        sd.tl.integrate(data, "batch", model=loaded)


def test_a_set_encoder_is_trained_where_the_state_comes_from_it(plain, data):
    new = sd.tl.integrate(data, "batch", "cell_type", model=plain, **TUNE)
    assert {name.split(".")[0] for name in changed(new, plain)} == {"anchor"}
    assert new.config == plain.config
    with pytest.raises(ValueError, match="set encoder"):
        sd.tl.integrate(data, "batch", model=plain, freeze=1, **TUNE)


def test_batches_mix_and_types_separate(learned):
    """On cells whose types and batch effect are known."""
    data = sd.datasets.toy(400, 60, n_batches=2, rng=1)
    counts = data.X.toarray()
    counts[np.ix_(data.obs["batch"] == "batch 1", np.arange(0, 60, 2))] *= 8
    data.X = sp.csr_matrix(counts)
    sd.tl.embed(data, learned)
    sd.tl.integrate(data, "batch", "cell_type", model=learned, finetune=True, epochs=20, lr=3e-3, rng=0)

    def same_neighbours(key, column):
        near = NearestNeighbors(n_neighbors=16).fit(data.obsm[key]).kneighbors()[1]
        values = data.obs[column].to_numpy()
        return (values[near] == values[:, None]).mean()

    assert same_neighbours("X_scdiva", "batch") > 0.8  # the effect is there
    assert same_neighbours("X_scdiva_integrated", "batch") < 0.65
    assert same_neighbours("X_scdiva_integrated", "cell_type") > same_neighbours("X_scdiva", "cell_type") + 0.3


@pytest.mark.parametrize("key", ["batch", "label"])
def test_one_batch_or_label_of_cells_with_genes_is_refused(learned, data, hashed, key):
    data.X[0] = 0
    data.obs["one"] = np.where(np.arange(data.n_obs) == 0, "empty", "a")
    before = hashed(data)
    keys, match = {"batch_key": "batch", "labels_key": "one"}, "fewer than two labels: omit"
    if key == "batch":
        keys = {"batch_key": "one", "labels_key": "cell_type"}
        match = r"are of one batch .*sd\.tl\.annotate\(query, 'cell_type', adata, finetune=True\)"
    with pytest.raises(ValueError, match=match):
        sd.tl.integrate(data, model=learned, **keys, **TUNE)
    with pytest.raises(ValueError, match=r"steps=1000 .* pass epochs"):
        sd.tl.integrate(data, "batch", model=learned, finetune=True, steps=1000)
    assert hashed(data) == before
