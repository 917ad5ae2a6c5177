"""A fitted perturbation model: what it predicts, its folder, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from scdiva._constants import BASELINES, EXPECTED
from scdiva.models import PerturbationModel, load
from scdiva.models.storage import kind_of
from scdiva.perturbation.conditions import ScreenDesign
from scdiva.perturbation.response import KINDS
from scdiva.perturbation.screen import Conditions

NONE = np.zeros((0, 6), dtype=np.float32)
NOTES = {"seed": "3", "seconds": 1.5, "nothing": np.nan, "validation": {"mse": np.array([1.0, np.nan])}}


@pytest.fixture(scope="module")
def model(network):
    return network()


@pytest.fixture(scope="module")
def make(measured, model):
    """A fitted model whose screen is drawn; two perturbations are labels."""
    a, b, c = model.vocabulary.symbols[:3]

    def build_model(model=model, doses=None, **base):
        labels = (a, f"{b}@1", f"{a}+{b}", "drug", f"drug+{c}", "heat@1")
        screen = measured(labels, doses=doses, genes=[*model.vocabulary.symbols[:8], *"wxyz"])
        chosen = dict.fromkeys((*KINDS, "measured"), EXPECTED) | base
        return PerturbationModel(model, screen, chosen, ScreenDesign.of("perturbation", "control", "line"), NOTES)

    return build_model


@pytest.fixture(scope="module")
def fitted(make):
    return make(doses=[2, 4, 2, 2, 8, 2])


@pytest.fixture
def folder(fitted, tmp_path):
    return fitted.save(tmp_path / "fitted")


@pytest.fixture(scope="module")
def targets(model):
    a, b, c, d = model.vocabulary.symbols[:4]
    parts = ((b,), (a, c), ("drug", "heat"), (d,), (a, b))
    return Conditions(tuple(tuple(sorted(p)) for p in parts), np.array([0, 1, 0, 1, 0]), np.array([1, 1, 2.0, 3, 1]))


def test_what_predicts_is_named_by_kind(make, targets):
    one = make(single="train_mean", combination="additive").mean_change(targets, NONE)
    assert one.base == [EXPECTED, "additive", "additive", "train_mean", EXPECTED]  # b was measured in line 1
    assert tuple(one.baselines) == BASELINES
    expected = make().mean_change(targets, NONE)
    assert set(expected.base) == {EXPECTED}
    for row, name in enumerate(one.base):
        from_what = expected.change if name == EXPECTED else one.baselines[name]
        np.testing.assert_array_equal(one.change[row], from_what[row])
    assert one.sd.shape == one.change.shape == (5, 12)
    assert (one.sd > 0).all()


def test_a_base_that_is_not_defined_is_refused(make, targets, model):
    fitted = make(combination="elsewhere", group="elsewhere")
    fitted.mean_change(targets.only(np.array([0])), NONE)
    name = "+".join(targets.parts[1])
    with pytest.raises(ValueError, match=rf"method 'elsewhere' .*'{re.escape(name)}'.*Fit again"):
        fitted.mean_change(targets, NONE)


def test_saved_and_loaded_it_predicts_the_same_to_the_bit(make, targets, tmp_path):
    fitted = make(doses=[1, 2, 1, 1, 4, 1], single="linear")
    folder = fitted.save(tmp_path / "here" / "fitted")
    assert kind_of(folder) == "perturbation_model"
    stream = torch.random.get_rng_state()
    loaded = load(str(folder), device="cpu")
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert (loaded.base, loaded.design) == (fitted.base, fitted.design)
    for name, value in vars(fitted.screen).items():
        loaded_value = getattr(loaded.screen, name)
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, loaded_value)
            assert value.dtype == loaded_value.dtype
    actual, expected = (m.mean_change(targets, NONE) for m in (loaded, fitted))
    np.testing.assert_array_equal(actual.change, expected.change)
    np.testing.assert_array_equal(actual.sd, expected.sd)
    assert np.isnan(loaded.notes["nothing"])
    assert (loaded.notes["seed"], loaded.notes["seconds"]) == ("3", 1.5)
    np.testing.assert_array_equal(loaded.notes["validation"]["mse"], [1, np.nan])
    assert [p.name for p in folder.parent.iterdir()] == ["fitted"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.pop("genes"), "'genes'"),
        (lambda s: s["given"].pop("separator"), "'separator'"),
        (lambda s: s["base"].pop("group"), "'group'"),
        (lambda s: s["base"].update(single="the best"), "the best"),
        (lambda s: s.update(genes=[]), "out of range"),
        (lambda s: s.update(groups=[]), "out of range"),
        (lambda s: s["parts"].append([]), "out of range"),
        (lambda s: s["parts"].pop(), "out of range"),
        (lambda s: (s["parts"].pop(), s["labels"].pop()), "does not hold the tensors"),
        (lambda s: s["groups"].append("more"), "does not hold the tensors"),
        (lambda s: s["genes"].append("more"), "does not hold the tensors"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, altered, change, match):
    with pytest.raises(ValueError, match=match):
        load(altered(folder, change))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("delta"), "does not hold the tensors"),
        (lambda t: t["group"].fill_(2), "group numbers are out of range"),
        (lambda t: t["group"].fill_(-1), "group numbers are out of range"),
        (lambda t: t.update(group=t["group"].double()), "group numbers are out of range"),
        (lambda t: t["n_cells"].fill_(0), "out of range"),
        (lambda t: t["n_control"].fill_(0), "out of range"),
        (lambda t: t["dose"].fill_(0), "out of range"),
        (lambda t: t["variance"].fill_(-1), "out of range"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder, altered, change, match):
    with pytest.raises(ValueError, match=match):
        load(altered(folder, tensors=change))
