"""Summaries of models in a notebook and in a terminal; `models.load` gives back whatever was saved."""

from __future__ import annotations

import html

import pytest
import torch

import scdiva as sd

pytestmark = pytest.mark.filterwarnings("ignore:.*known genes.*:UserWarning")


def rows(thing):
    title, *lines = repr(thing).splitlines()
    assert title == type(thing).__name__
    return dict(line.removeprefix("    ").split(": ", 1) for line in lines)


def test_a_loaded_model_says_what_it_is():
    model = sd.models.load()
    assert repr(model) == "ScDiVa(9,759,993 parameters, 19,623 genes, 4 layers of width 128, on cpu)"
    assert "Linear" in torch.nn.Module.__repr__(model)


def test_what_is_fitted_says_so():
    cells = sd.datasets.toy(60, 80, rng=3)
    cells.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 10
    annotator = sd.tl.annotate(cells.copy(), "cell_type", cells.copy(), method="knn")
    fields = rows(annotator)
    assert (fields["method"], fields["model"]) == ("knn", repr(annotator.model))
    assert fields["labels"] == "4: type A, type B, type C, type D"
    assert fields["fitted on"] == "60 labelled cells"
    assert fields["held-out accuracy"].startswith(f"{annotator.notes['accuracy']:.3f} on 60 labelled cells, each")
    annotator.labels = ("x" * 5000, "<script>")
    assert len(rows(annotator)["labels"]) == 200
    table = annotator._repr_html_()
    for name, value in rows(annotator).items():
        assert f">{name}</th>" in table
        assert html.escape(value) in table
    assert "<script>" not in table
    assert "19,623" in annotator.model._repr_html_()
    fitted = sd.tl.fit_perturbation(cells, "perturbation")
    assert rows(fitted)["conditions"].startswith("5 of 1 group")
    assert rows(fitted)["fitted on"] == "50 perturbed and 10 control cells"
    text = "Screen(5 conditions, 1 group(s) of cells, 50 perturbed and 10 control cells, 80 genes)"
    assert repr(fitted.screen) == text


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of each kind, and what was saved."""
    folder, cells = tmp_path_factory.mktemp("saved"), sd.datasets.toy(120, 100)
    cells.obs["perturbation"] = ["control", "A", "B"] * 40
    with sd.settings.override(progress=False, device="cpu"):
        objects = {
            "model": sd.models.load(),
            "annotator": sd.tl.annotate(cells[:40].copy(), "cell_type", cells[40:].copy(), method="knn"),
            "screen": sd.tl.fit_perturbation(cells, "perturbation"),
            "integrated": sd.tl.integrate(cells, "batch", steps=1),
            "adapted": sd.tl.adapt(cells),
        }
    return {name: (fitted, fitted.save(folder / name)) for name, fitted in objects.items()}


@pytest.mark.parametrize("name", ["model", "annotator", "screen", "integrated", "adapted"])
def test_a_folder_gives_back_what_was_saved(saved, name):
    fitted, folder = saved[name]
    for source in (folder, str(folder), fitted):
        result = sd.models.load(source, device="cpu")
        assert type(result) is type(fitted)
        assert repr(result) == repr(fitted)
    assert sd.models.load(fitted) is fitted


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="got int"):
        sd.models.load(3)
