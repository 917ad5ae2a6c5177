"""What models say of themselves, in a notebook as in a terminal."""

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
    said = rows(annotator)
    assert said["method"] == "knn"
    assert said["labels"] == "4: type A, type B, type C, type D"
    assert said["fitted on"] == "60 labelled cells"
    assert said["held-out accuracy"].startswith(
        f"{annotator.notes['accuracy']:.3f} on 60 labelled cells, each predicted by a fit without it"
    )
    assert said["model"] == repr(annotator.model)
    annotator.labels = ("x" * 5000, "y")
    assert len(rows(annotator)["labels"]) == 200
    fitted = sd.tl.fit_perturbation(cells, "perturbation")
    more = rows(fitted)
    assert more["conditions"].startswith("5 of 1 group")
    assert more["fitted on"] == "50 perturbed and 10 control cells"
    assert repr(fitted.screen) == (
        "Screen(5 conditions, 1 group(s) of cells, 50 perturbed and 10 control cells, 80 genes)"
    )


def test_notebooks_show_the_same_as_a_table():
    cells = sd.datasets.toy(60, 80, rng=3)
    cells.obs["cell_type"] = cells.obs["cell_type"].astype(str).replace("type B", "<script>")
    annotator = sd.tl.annotate(cells.copy(), "cell_type", cells.copy(), method="knn")
    table = annotator._repr_html_()
    for name, value in rows(annotator).items():
        assert f">{name}</th>" in table
        assert html.escape(value) in table
    assert "<script>" not in table
    assert "19,623" in annotator.model._repr_html_()
