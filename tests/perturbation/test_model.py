"""A fitted perturbation model: what it predicts, its folder, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from scdiva._constants import BASELINES, EXPECTED
from scdiva.models import PerturbationModel, load, save_model
from scdiva.models.storage import kind_of
from scdiva.perturbation.conditions import ScreenDesign
from scdiva.perturbation.response import KINDS
from scdiva.perturbation.screen import Conditions

FILES = ["perturbation_model.json", "perturbation_model.safetensors", "model/SHA256SUMS", "SHA256SUMS"]
MODEL_FILES = [f"model/{name}" for name in ("config.json", "model.safetensors", "vocabulary.safetensors", "README.md")]
NONE = np.zeros((0, 6), dtype=np.float32)
NOTES = {"seed": "3", "seconds": 1.5, "nothing": np.nan, "validation": {"mse": np.array([1.0, np.nan])}}


@pytest.fixture(scope="module")
def model(network):
    return network()


@pytest.fixture(scope="module")
def make(measured, model):
    """A fitted model whose screen is drawn; two perturbations are labels."""
    a, b, c = model.vocabulary.symbols[:3]

    def made(model=model, doses=None, **base):
        labels = (a, f"{b}@1", f"{a}+{b}", "drug", f"drug+{c}", "heat@1")
        screen = measured(labels, doses=doses, genes=[*model.vocabulary.symbols[:8], *"wxyz"])
        chosen = dict.fromkeys((*KINDS, "measured"), EXPECTED) | base
        return PerturbationModel(model, screen, chosen, ScreenDesign.of("perturbation", "control", "line"), NOTES)

    return made


@pytest.fixture(scope="module")
def fitted(make):
    return make(doses=[2, 4, 2, 2, 8, 2])


@pytest.fixture
def folder(fitted, tmp_path):
    return fitted.save(tmp_path / "fitted")


@pytest.fixture(scope="module")
def asked(model):
    a, b, c, d = model.vocabulary.symbols[:4]
    parts = ((b,), (a, c), ("drug", "heat"), (d,), (a, b))
    return Conditions(tuple(tuple(sorted(p)) for p in parts), np.array([0, 1, 0, 1, 0]), np.array([1, 1, 2.0, 3, 1]))


def test_what_predicts_is_named_by_kind(make, asked):
    one = make(single="train_mean", combination="additive").mean_change(asked, NONE)
    assert one.base == [EXPECTED, "additive", "additive", "train_mean", EXPECTED]  # b was measured in line 1
    assert tuple(one.baselines) == BASELINES
    expected = make().mean_change(asked, NONE)
    assert set(expected.base) == {EXPECTED}
    for row, name in enumerate(one.base):
        from_what = expected.change if name == EXPECTED else one.baselines[name]
        np.testing.assert_array_equal(one.change[row], from_what[row])
    assert one.sd.shape == one.change.shape == (5, 12)
    assert (one.sd > 0).all()


def test_a_base_that_is_not_defined_is_refused(make, asked, model):
    fitted = make(combination="elsewhere", group="elsewhere")
    fitted.mean_change(asked.only(np.array([0])), NONE)
    name = "+".join(asked.parts[1])
    with pytest.raises(ValueError, match=rf"method 'elsewhere' .*'{re.escape(name)}'.*Fit again"):
        fitted.mean_change(asked, NONE)


def test_new_groups_are_predicted_from_their_states(fitted, asked):
    new = asked.only(np.array([0, 3]))
    new = replace(new, group=np.full(2, 3))
    wide = replace(
        fitted.screen,
        groups=("a", "b", "c"),
        states=np.vstack([fitted.screen.states, -fitted.screen.states[:1]]),
        control=np.vstack([fitted.screen.control, fitted.screen.control[:1]]),
        n_control=np.append(fitted.screen.n_control, 20),
    )
    three = replace(fitted, screen=wide)
    state = wide.states[1:2] + 0.01
    found = three.mean_change(new, state)
    assert np.isfinite(found.change).all()
    far = three.mean_change(new, -state)
    assert not np.allclose(found.change, far.change)
    for name in ("train_mean", "additive"):
        np.testing.assert_array_equal(found.baselines[name], far.baselines[name])
    two = replace(new, group=np.full(2, 2))  # of two groups nothing is known of a new one by its state
    np.testing.assert_array_equal(fitted.mean_change(two, state).change, fitted.mean_change(two, -state).change)


def test_saved_and_loaded_it_predicts_the_same_to_the_bit(make, asked, tmp_path):
    given = make(doses=[1, 2, 1, 1, 4, 1], single="linear")
    folder = given.save(tmp_path / "here" / "fitted")
    assert kind_of(folder) == "perturbation_model"
    stream = torch.random.get_rng_state()
    found = load(str(folder), device="cpu")
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert (found.base, found.design) == (given.base, given.design)
    assert (found.screen.genes, found.screen.groups) == (given.screen.genes, given.screen.groups)
    assert found.screen.conditions.parts == given.screen.conditions.parts
    for name in ("delta", "n_cells", "control", "n_control", "states", "variance"):
        one, other = getattr(found.screen, name), getattr(given.screen, name)
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    one, other = (m.mean_change(asked, NONE) for m in (found, given))
    np.testing.assert_array_equal(one.change, other.change)
    np.testing.assert_array_equal(one.sd, other.sd)
    assert np.isnan(found.notes["nothing"])
    assert (found.notes["seed"], found.notes["seconds"]) == ("3", 1.5)
    np.testing.assert_array_equal(found.notes["validation"]["mse"], [1, np.nan])
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == sorted(FILES + MODEL_FILES)
    assert [p.name for p in folder.parent.iterdir()] == ["fitted"]


def test_another_model_is_refused(folder, network, altered):
    wider = network(anchor_learned_dim=4)  # the same genes, another state
    for other, match in ((network(seed=5), r"model/SHA256SUMS does not match"), (wider, "does not hold the tensors")):
        shutil.rmtree(folder / "model")
        save_model(other, other.vocabulary, folder / "model")
        with pytest.raises(ValueError, match=match):
            load(folder if other is not wider else altered(folder))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.update(format="scdiva annotator"), "has no entry format ="),
        (lambda s: s.update(format_version=2), "version 2"),
        (lambda s: s.pop("genes"), "'genes'"),
        (lambda s: s.pop("notes"), "'notes'"),
        (lambda s: s.pop("given"), "'given'"),
        (lambda s: s["given"].pop("separator"), "'separator'"),
        (lambda s: s.update(notes=3), "int"),
        (lambda s: s.update(base=["additive"]), "list"),
        (lambda s: s["base"].pop("group"), "'group'"),
        (lambda s: s["base"].update(single="the best"), "the best"),
        (lambda s: s.update(genes=[]), "out of range"),
        (lambda s: s.update(groups=[]), "out of range"),
        (lambda s: s["parts"].append([]), "out of range"),
        (lambda s: s.update(parts=3), "int"),
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
        (lambda t: t.update({"head.more": torch.zeros(1)}), "does not hold the tensors"),
        (lambda t: t.update(delta=t["delta"][:, :-1].contiguous()), "does not hold"),
        (lambda t: t["delta"].fill_(np.nan), "NaN or infinite"),
        (lambda t: t["variance"].fill_(np.inf), "NaN or infinite"),
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


def test_what_stands_there_is_not_overwritten(make, folder, tmp_path):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    plain = make(single="linear")
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        plain.save(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert plain.save(folder, overwrite=True) == folder
    assert load(folder).base["single"] == "linear"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    shutil.copytree(folder / "model", tmp_path / "model")
    for taken in (tmp_path / "mine", tmp_path / "model", tmp_path / "mine" / "thesis.txt"):
        for overwrite in (False, True):
            with pytest.raises(FileExistsError, match="no perturbation model folder"):
                plain.save(taken, overwrite=overwrite)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fitted", "mine", "model"]


def test_what_is_stored_is_plain_json(folder):
    settings = json.loads(
        (folder / "perturbation_model.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert settings["notes"]["nothing"] is None
    assert settings["genes"][-4:] == list("wxyz")
