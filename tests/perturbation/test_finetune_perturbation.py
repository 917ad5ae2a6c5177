"""Perturbation prediction with `finetune=True`: what is trained, what predicts, its folder, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva.data.batch import InMemoryCells
from scdiva.models import load

from .conftest import alike, predict

TUNE = {"finetune": True, "epochs": 1, "rng": 3}


@pytest.fixture(scope="module")
def tuned(data, learned):
    return sd.tl.fit_perturbation(data, "perturbation", model=learned, **TUNE)


def test_all_weights_are_trained_and_the_model_given_is_not(data, learned, tuned, weights, same, build):
    assert same(weights(learned), weights(build(anchor="learned")))
    before, after = learned.state_dict(), tuned.model.state_dict()
    unchanged = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert {name.split(".")[0] for name in unchanged} <= {"heads"}
    assert tuned.model.finetuned_for == "perturbation"
    assert tuned.model.metadata["finetuned"]["training"]["steps"] == 14  # 7 conditions of 64 examples, 32 a step
    assert len(tuned.notes["loss"]) == 14
    assert set(tuned.base.values()) == {"finetuned"}
    assert "fine-tuned" in repr(tuned)
    assert set(tuned.notes["validation"]["method"]) >= {"expected", "additive"}
    assert tuned.notes["labels"].tolist() == ["drug"]
    assert not tuned.head.training
    assert not any(p.requires_grad for p in tuned.head.parameters())


def test_what_is_written(data, tuned, genes):
    cells = data.copy()
    names = [f"{genes[0]}+{genes[3]}", genes[1], "drug", f"{genes[30]}+drug"]
    predicted = sd.tl.predict_perturbation(cells, model=tuned, predict=names, rng=0)
    notes = predicted.uns["scdiva"]["perturbation"]
    assert notes["base"].tolist() == ["finetuned"] * 4
    np.testing.assert_array_equal(notes["loss"], tuned.notes["loss"])
    assert np.isnan(predicted.varm["scdiva_sd"]).all()
    stored = cells.uns["scdiva_perturbation"]
    assert set(stored["baselines"]) == {"no_change", "train_mean", "matching_mean", "additive", "linear", "expected"}
    np.testing.assert_array_equal(stored["mean"].T, predicted.varm["scdiva_mean"])
    scores = sd.tl.score_perturbation(predict(data, tuned), data)
    assert {"scdiva", "expected", "additive"} <= set(scores["method"])
    assert set(sd.tl.score_perturbation(predict(data, replace(tuned)), data)["method"]) == set(scores["method"])


def test_the_prediction_is_the_mean_over_control_cells_one_by_one(perturbed_cells, learned, genes):
    data = perturbed_cells(("control", "0", "1", "0+1"), n=90)
    fitted = sd.tl.fit_perturbation(data, "perturbation", model=learned, context=12, **TUNE)
    name = tuple(sorted([genes[1], genes[7]]))
    predicted = predict(data, fitted, ["+".join(name)], n_cells=5)
    control = data[data.obs["perturbation"] == "control"].copy()
    # the same by hand: the ranked genes of each cell that the model reads, the perturbed ones first
    from scdiva.data.cells import open_cells

    source = open_cells(control, fitted.model)
    (_, (indptr, tokens, values)), *_ = source.windows(4096)
    cells = InMemoryCells(indptr, tokens, values, np.zeros(90, dtype=np.int64), source.measured_tokens, 1)
    perturbed = fitted.model.vocabulary.match(list(name)).tokens
    head, changes = fitted.head, []
    for row in np.unique(np.linspace(0, 89, 64).round().astype(int)):
        t, v, _ = cells.take(np.array([row])).packed
        unperturbed = ~np.isin(t.numpy(), perturbed)
        t = torch.cat([torch.from_numpy(perturbed), t[torch.from_numpy(unperturbed)]])[:12]
        v = torch.cat([torch.zeros(2), v[torch.from_numpy(unperturbed)]])[:12]
        masked = torch.arange(len(t)) < 2
        bounds = torch.tensor([0, len(t)], dtype=torch.int32)
        with torch.no_grad():
            hidden = fitted.model(t, v, bounds, value_mask=masked).hidden
            inputs = torch.stack([torch.cat([hidden.mean(dim=0), hidden[position]]) for position in (0, 1)])
            standard = ((inputs - head.mean) / head.sd).unflatten(1, (2, -1))
            u = head.mlp((standard / standard.square().mean(dim=-1, keepdim=True).sqrt()).flatten(1)).sum(dim=0)
            changes.append((head.scale * (2 * head.base + u @ head.basis)).numpy())
    assert len(changes) == 64
    mean = np.maximum(predicted.varm["scdiva_control"][:, 0] + np.mean(changes, axis=0), 0)
    np.testing.assert_allclose(predicted.varm["scdiva_mean"][:, 0], mean, atol=1e-4)


def test_doses_groups_and_labels(perturbed_cells, learned, genes):
    of_groups = perturbed_cells(("control", "0", "1", "drug", "0+drug"), ("b", "a"), n=6, doses=(1.0, 10.0))
    how = {"groupby": "line", "dose_key": "dose"}
    fitted = sd.tl.fit_perturbation(of_groups, "perturbation", model=learned, **how, **TUNE)
    assert (fitted.head.part_tokens < 0).sum() == len(fitted.head.labels) == 1
    names = [genes[0], "drug", f"{genes[0]}+drug", genes[9]]
    predicted = predict(of_groups, fitted, names, dose=[1.0, 10.0, 100.0])
    notes, mean = predicted.uns["scdiva"]["perturbation"], predicted.varm["scdiva_mean"]
    assert mean.shape[1] == 2 * 4 * 3
    change = (mean - predicted.varm["scdiva_control"])[:, notes["perturbation"] == "drug"]
    inside = (mean[:, notes["perturbation"] == "drug"] > 0).all(axis=1)  # a mean is not below 0
    strength = np.log2(1 + np.array([1, 10, 100]) / 5.5)
    for group in (0, 1):  # proportional to the strength
        three = change[inside, 3 * group : 3 * group + 3]
        np.testing.assert_allclose(three / strength, np.repeat(three[:, :1] / strength[0], 3, axis=1), atol=1e-5)
    assert np.abs(change[:, 0] - change[:, 3]).max() > 1e-6  # cells of the groups differ
    # a group that the screen does not have
    new = of_groups[of_groups.obs["line"] == "a"].copy()
    new.obs["line"] = "c"
    prediction = predict(new, fitted, names[:2])
    assert np.isfinite(prediction.varm["scdiva_mean"]).all()
    assert set(prediction.uns["scdiva"]["perturbation"]["base"]) == {"finetuned"}


def test_saved_and_loaded_it_predicts_the_same_bits(data, learned, tuned, tmp_path):
    folder = tuned.save(tmp_path / "fitted")
    loaded = load(folder, device="cpu")
    alike(predict(data, tuned), predict(data, loaded))
    assert loaded.head.state_dict().keys() == tuned.head.state_dict().keys()
    np.testing.assert_array_equal(loaded.notes["loss"], tuned.notes["loss"])
    # and so does the one call that fits and predicts
    at_once = sd.tl.predict_perturbation(data.copy(), "perturbation", model=learned, **TUNE)
    alike(at_once, predict(data, folder, rng=3))


@pytest.mark.parametrize(
    ("settings", "tensors", "match"),
    [
        (lambda s: s["base"].update(single="additive"), None, "base"),
        (None, lambda t: [t.pop(name) for name in list(t) if name.startswith("response.")], "base"),
        (None, lambda t: t.update({"response.part_tokens": t["response.part_tokens"][:-1]}), "tokens of the perturbed"),
        (None, lambda t: t.update({"response.part_tokens": t["response.part_tokens"] + 10_000}), "names tokens"),
        (None, lambda t: t.update({"response.basis": t["response.basis"][:, 1:].contiguous()}), "the tensors"),
        (None, lambda t: t.update({"response.scale": torch.tensor(torch.nan)}), r"'response\.scale' holds NaN"),
    ],
)
def test_a_folder_that_does_not_fit_together_is_refused(tuned, learned, altered, tmp_path, settings, tensors, match):
    folder = tuned.save(tmp_path / "fitted")
    with pytest.raises(ValueError, match=match):
        load(altered(folder, settings, tensors), device="cpu")
    mismatch = replace(tuned, model=learned)
    with pytest.raises(ValueError, match="not fine-tuned on perturbations"):
        load(mismatch.save(tmp_path / "other"), device="cpu")
