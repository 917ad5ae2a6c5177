"""Perturbation prediction with `finetune=True`: what is trained, what predicts, its folder, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva._constants import BASELINES
from scdiva.data.batch import InMemoryCells
from scdiva.models import load
from scdiva.perturbation.response import KINDS

TUNE = {"finetune": True, "epochs": 1, "rng": 3}


@pytest.fixture(scope="module")
def data(perturbed_cells):
    return perturbed_cells(("control", "0", "1", "2", "3", "0+1", "1+2", "drug"))


@pytest.fixture(scope="module")
def of_groups(perturbed_cells):
    return perturbed_cells(("control", "0", "1", "drug", "0+drug"), ("b", "a"), n=6, doses=(1.0, 10.0))


@pytest.fixture(scope="module")
def fitted(data, learned):
    return sd.tl.fit_perturbation(data, "perturbation", model=learned, **TUNE)


def predict(data, model, predict=None, **arguments):
    return sd.tl.predict_perturbation(data.copy(), model=model, predict=predict, **{"rng": 0} | arguments)


def alike(one, other):
    np.testing.assert_array_equal(one.X, other.X)
    assert one.varm.keys() == other.varm.keys()
    for key in one.varm:
        np.testing.assert_array_equal(one.varm[key], other.varm[key])


def with_noise(model):
    """Change the weights of all blocks, in place."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("blocks."):
                parameter.add_(torch.randn(parameter.shape, generator=draw))


def test_all_weights_are_trained_and_the_model_given_is_not(data, learned, fitted, weights, same, build):
    assert same(weights(learned), weights(build(anchor="learned")))
    before, after = learned.state_dict(), fitted.model.state_dict()
    kept = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert {name.split(".")[0] for name in kept} <= {"heads"}
    assert fitted.model.finetuned_for == "perturbation"
    assert fitted.model.metadata["finetuned"]["training"]["steps"] == 14  # 7 conditions of 64 examples, 32 a step
    assert len(fitted.notes["loss"]) == 14
    assert set(fitted.base.values()) == {"finetuned"}
    assert "fine-tuned" in repr(fitted)
    assert set(fitted.notes["validation"]["method"]) >= {"expected", "additive"}
    assert fitted.notes["labels"].tolist() == ["drug"]
    assert not fitted.head.training
    assert not any(p.requires_grad for p in fitted.head.parameters())


@pytest.mark.parametrize("kind", ["learned", "plain"])
def test_noise_in_the_blocks_changes_what_is_predicted(request, data, kind, tmp_path, genes):
    given = request.getfixturevalue(kind)
    fitted = sd.tl.fit_perturbation(data, "perturbation", model=given, **TUNE)
    names = [genes[0], f"{genes[0]}+{genes[3]}", genes[20]]
    before = predict(data, fitted, names)
    folder = fitted.save(tmp_path / "fitted")
    noisy = load(folder, device="cpu")
    alike(before, predict(data, noisy, names))
    with_noise(noisy.model)
    after = predict(data, noisy, names)
    moved = np.abs(before.varm["scdiva_mean"] - after.varm["scdiva_mean"]).max(axis=0)
    assert (moved > 1e-3).all()
    for name in (*BASELINES, "expected"):
        if kind == "plain":  # its set encoder's states have no block
            np.testing.assert_array_equal(*(p.varm[f"scdiva_baseline_{name}"] for p in (before, after)))
    # without fine-tuning no block counts
    fitted = sd.tl.fit_perturbation(data, "perturbation", model=given, rng=3)
    frozen = load(fitted.save(tmp_path / "frozen"), device="cpu")
    before = predict(data, frozen, names)
    with_noise(frozen.model)
    np.testing.assert_array_equal(before.varm["scdiva_mean"], predict(data, frozen, names).varm["scdiva_mean"])


def test_what_is_written(data, fitted, genes):
    cells = data.copy()
    names = [f"{genes[0]}+{genes[3]}", genes[1], "drug", f"{genes[30]}+drug"]
    predicted = sd.tl.predict_perturbation(cells, model=fitted, predict=names, rng=0)
    notes = predicted.uns["scdiva"]["perturbation"]
    assert notes["base"].tolist() == ["finetuned"] * 4
    np.testing.assert_array_equal(notes["loss"], fitted.notes["loss"])
    assert np.isnan(predicted.varm["scdiva_sd"]).all()
    kept = cells.uns["scdiva_perturbation"]
    assert set(kept["baselines"]) == {"no_change", "train_mean", "matching_mean", "additive", "linear", "expected"}
    np.testing.assert_array_equal(kept["mean"].T, predicted.varm["scdiva_mean"])
    scores = sd.tl.score_perturbation(predict(data, fitted), data)
    assert {"scdiva", "expected", "additive"} <= set(scores["method"])
    assert set(sd.tl.score_perturbation(predict(data, replace(fitted)), data)["method"]) == set(scores["method"])


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
        other = ~np.isin(t.numpy(), perturbed)
        t = torch.cat([torch.from_numpy(perturbed), t[torch.from_numpy(other)]])[:12]
        v = torch.cat([torch.zeros(2), v[torch.from_numpy(other)]])[:12]
        masked = torch.arange(len(t)) < 2
        bounds = torch.tensor([0, len(t)], dtype=torch.int32)
        with torch.no_grad():
            hidden = fitted.model(t, v, bounds, value_mask=masked).hidden
            inputs = torch.stack([torch.cat([hidden.mean(dim=0), hidden[place]]) for place in (0, 1)])
            standard = ((inputs - head.mean) / head.sd).unflatten(1, (2, -1))
            u = head.mlp((standard / standard.square().mean(dim=-1, keepdim=True).sqrt()).flatten(1)).sum(dim=0)
            changes.append((head.scale * (2 * head.base + u @ head.basis)).numpy())
    assert len(changes) == 64
    mean = np.maximum(predicted.varm["scdiva_control"][:, 0] + np.mean(changes, axis=0), 0)
    np.testing.assert_allclose(predicted.varm["scdiva_mean"][:, 0], mean, atol=1e-4)


def test_doses_groups_and_labels(of_groups, learned, genes):
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
    found = predict(new, fitted, names[:2])
    assert np.isfinite(found.varm["scdiva_mean"]).all()
    assert set(found.uns["scdiva"]["perturbation"]["base"]) == {"finetuned"}


def test_saved_and_loaded_it_predicts_the_same_bits(data, learned, fitted, tmp_path, genes):
    folder = fitted.save(tmp_path / "fitted")
    found = load(folder, device="cpu")
    alike(predict(data, fitted), predict(data, found))
    assert found.head.state_dict().keys() == fitted.head.state_dict().keys()
    np.testing.assert_array_equal(found.notes["loss"], fitted.notes["loss"])
    # and so does the one call that fits and predicts
    at_once = sd.tl.predict_perturbation(data.copy(), "perturbation", model=learned, **TUNE)
    alike(at_once, predict(data, folder, rng=3))


class _Stopped(Exception):
    pass


def test_a_resumed_run_gives_the_same_bits(data, learned, tmp_path, monkeypatch, weights, same):
    from scdiva.perturbation.response_head import ResponseObjective

    whole = sd.tl.fit_perturbation(data, "perturbation", model=learned, **TUNE | {"epochs": 3})
    how = TUNE | {"epochs": 3, "checkpoint_dir": tmp_path / "run"}
    forward = ResponseObjective.forward

    def stops_in_the_second_epoch(self, network, rows, progress, generator):
        if progress > 0.5:
            raise _Stopped
        return forward(self, network, rows, progress, generator)

    monkeypatch.setattr(ResponseObjective, "forward", stops_in_the_second_epoch)
    with pytest.raises(_Stopped):
        sd.tl.fit_perturbation(data, "perturbation", model=learned, **how)
    monkeypatch.undo()
    resumed = sd.tl.fit_perturbation(data, "perturbation", model=learned, **how)
    assert same(weights(resumed.model), weights(whole.model))
    assert same(weights(resumed.head), weights(whole.head))
    np.testing.assert_array_equal(resumed.notes["loss"], whole.notes["loss"])
    with pytest.raises(ValueError, match="other cells"):
        sd.tl.fit_perturbation(data[::-1].copy(), "perturbation", model=learned, **how)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"epochs": 2}, "finetune=True"),
        ({"finetune": True, "freeze": 3}, "freeze=3"),
        ({"finetune": True, "context": 2}, "context=2 leaves no room"),
        ({"finetune": True, "control": "DMSO"}, "DMSO"),
    ],
)
@pytest.mark.parametrize("call", ["fit_perturbation", "predict_perturbation"])
def test_arguments_are_refused_before_anything_is_read(learned, data, contents, given, match, call, monkeypatch):
    monkeypatch.setattr("scdiva.perturbation.screen.open_cells", None)
    cells, before = data.copy(), contents(data)
    with pytest.raises(ValueError, match=match):
        getattr(sd.tl, call)(cells, "perturbation", model=learned, **given)
    assert contents(cells) == before


def test_a_loss_that_is_not_finite_leaves_everything_as_it_was(data, learned, contents, weights, same):
    cells, before, theirs = data.copy(), contents(data), weights(learned)
    with pytest.raises(FloatingPointError, match="lower learning rate"):
        sd.tl.predict_perturbation(cells, "perturbation", model=learned, **TUNE | {"lr": 1e30})
    assert contents(cells) == before
    assert same(weights(learned), theirs)


@pytest.mark.parametrize("given", [{"finetune": True}, {"epochs": 1}, {"lora": 2}])
def test_a_fitted_model_is_not_fine_tuned(data, fitted, contents, given):
    cells, before = data.copy(), contents(data)
    with pytest.raises(ValueError, match=f"{next(iter(given))} cannot be used with a fitted model"):
        sd.tl.predict_perturbation(cells, model=fitted, **given)
    assert contents(cells) == before


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        (lambda s: s["base"].update(single="additive"), None),
        (None, lambda t: [t.pop(name) for name in list(t) if name.startswith("response.")]),
        (None, lambda t: t.pop("response.base")),
        (None, lambda t: t.update({"response.more": torch.zeros(1)})),
        (None, lambda t: t.update({"response.part_tokens": t["response.part_tokens"][:-1]})),
        (None, lambda t: t.update({"response.part_tokens": t["response.part_tokens"] + 10_000})),
        (None, lambda t: t.update({"response.basis": t["response.basis"][:, 1:].contiguous()})),
        (None, lambda t: t.update({"response.scale": torch.tensor(torch.nan)})),
    ],
)
def test_a_folder_that_does_not_fit_together_is_refused(fitted, altered, tmp_path, settings, tensors):
    folder = fitted.save(tmp_path / "fitted")
    load(folder, device="cpu")
    altered(folder, settings, tensors)
    with pytest.raises(ValueError, match=r"holds no perturbation model|'response\.scale' holds NaN"):
        load(folder, device="cpu")


def test_a_head_on_another_network_is_refused(fitted, learned, tmp_path):
    other = replace(fitted, model=learned)
    with pytest.raises(ValueError, match="not fine-tuned on perturbations"):
        load(other.save(tmp_path / "other"), device="cpu")
    assert set(fitted.base) == {*KINDS, "measured"}
