"""`tl.annotate(method="probe")` and `finetune=True` on models of both kinds: what is trained, read and learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import scdiva as sd
from scdiva.models import ScDiVa, load

pytestmark = pytest.mark.filterwarnings("ignore:fine-tuning did not lower")


@pytest.fixture(scope="module")
def new(cells):
    return (cells.obs["batch"] == "batch 3").to_numpy()


@pytest.fixture(scope="module")
def weak(learned):
    """The same with the weights of initialisation: its cells have nearly one state."""
    model = ScDiVa(learned.config, generator=torch.Generator().manual_seed(0)).eval()
    model.vocabulary = learned.vocabulary
    return model


def annotate(query, reference, model, **arguments):
    """Annotator, annotated copy and accuracy."""
    data = query.copy()
    truth = data.obs.pop("cell_type").astype(str)
    annotator = sd.tl.annotate(data, "cell_type", reference, model=model, **{"rng": 3} | arguments)
    return annotator, data, (data.obs["scdiva_label"].astype(str) == truth).mean()


def probability(query, annotator):
    data = query.copy()
    sd.tl.annotate(data, model=annotator)
    return data.obsm["scdiva_label_probability"]


def test_a_probe_trains_no_weight_of_the_model_and_reads_its_state_alone(query, reference, learned, weights, same):
    before = weights(learned)
    annotator, data, _ = annotate(query, reference, learned, method="probe")
    assert same(weights(learned), before)
    assert annotator.model is learned
    sizes = annotator.head.sizes
    assert (sizes.method, sizes.own_dim, sizes.n_genes, sizes.state_dim) == ("probe", 0, 0, learned.config.dim)
    # probabilities follow from what tl.embed gives of the genes that both have
    states = sd.tl.embed(query[:, :55].copy(), learned, copy=True).obsm["X_scdiva"]
    u = nn.functional.normalize(torch.from_numpy(states), dim=1)
    logits = annotator.head.classifier((u - annotator.head.feature_mean) / annotator.head.feature_scale)
    expected = (logits / annotator.notes["temperature"]).softmax(dim=1).detach()
    np.testing.assert_allclose(data.obsm["scdiva_label_probability"], expected, atol=1e-5)


def test_fine_tuning_trains_every_weight_of_the_state(query, reference, learned, weights, same):
    before = weights(learned)
    annotator, data, _ = annotate(query, reference, learned, finetune=True, epochs=2)
    assert same(weights(learned), before)
    idle = {name for name in before if name.startswith("heads.") or name.endswith("hidden_value")}
    after = annotator.model.state_dict()
    assert {name for name in before if not torch.equal(after[name], before[name])} == before.keys() - idle
    assert annotator.model.finetuned_for == "annotate"
    assert annotator.model.metadata["finetuned"]["training"]["steps"] == 2 * (144 // 32)
    notes = data.uns["scdiva"]["scdiva_label"]
    assert (notes["steps"], notes["finetuned"], notes["n_held_out"]) == (8, True, 16)
    assert all(values.shape == (8,) for values in notes["history"].values())


def test_fine_tuning_learns_what_a_probe_cannot(query, reference, weak, plain):
    probe = annotate(query, reference, weak, method="probe")[2]
    annotator, _, tuned = annotate(query, reference, weak, finetune=True, lr=3e-3, epochs=25)
    assert probe < 0.6
    assert tuned > 0.85
    assert annotator.notes["accuracy"] > annotator.notes["accuracy_before"]
    assert annotator.notes["loss"] < annotator.notes["loss_before"]
    # all of a set encoder is trained
    assert annotate(query, reference, plain, finetune=True, lr=3e-3, epochs=25)[2] > 0.8


def test_held_out_batches_are_never_trained_on(query, reference, learned, weights, same):
    """Other counts in the batch that is held out leave the weights as they are; in the other batch they don't."""
    annotator = annotate(query, reference, learned, finetune=True, epochs=1, batch_key="batch")[0]
    assert annotator.notes["n_held_out"] == 80
    unchanged = []
    for batch in ("batch 1", "batch 2"):
        changed = reference.copy()
        rows = np.flatnonzero(reference.obs["batch"] == batch)
        counts = changed.X.toarray()
        counts[rows] = counts[rows][:, ::-1]
        changed.X = type(reference.X)(counts)
        retrained = annotate(query, changed, learned, finetune=True, epochs=1, batch_key="batch")[0]
        unchanged.append(same(weights(retrained.model), weights(annotator.model)))
    assert sorted(unchanged) == [False, True]
    assert annotator.notes["n_labelled"] == 160


def test_cells_are_cut_to_the_context_that_the_model_was_tuned_on(cells, new, learned, tmp_path):
    mixed = cells.copy()
    mixed.obs["cell_type"] = mixed.obs["cell_type"].where(~new)
    arguments = {"finetune": True, "epochs": 1, "context": 9, "model": learned, "rng": 3}
    annotator = sd.tl.annotate(mixed, "cell_type", **arguments)
    assert annotator.model.config.max_length == 9
    expected = mixed.obsm["scdiva_label_probability"]
    np.testing.assert_allclose(probability(cells, annotator), expected, atol=1e-5)
    loaded = load(annotator.save(tmp_path / "one"))
    np.testing.assert_array_equal(probability(cells, loaded), probability(cells, annotator))
    assert loaded.model.finetuned_for == "annotate"
