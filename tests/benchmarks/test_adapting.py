"""The benchmark of adapting: its arms on real cells, which studies a model was not trained on, goals."""

from __future__ import annotations

import pytest

import scdiva as sd
from scdiva.data.corpus import pack_files
from scdiva.models import save_model


@pytest.fixture
def adapting(script):
    return script("adapting")


def test_held_out_studies_are_labelled_and_not_in_training(adapting, tmp_path):
    model = sd.models.load_model()
    (tmp_path / "base" / "prepared").mkdir(parents=True)
    (tmp_path / "corpus").mkdir()
    save_model(model, model.vocabulary, tmp_path / "base" / "model")
    for name, types in (("known", "ab"), ("new", "ab"), ("one_type", "a"), ("unlabelled", ("a", "None"))):
        cells = sd.datasets.toy(120, 100)
        cells.obs["cell_type"] = [types[i % len(types)] for i in range(120)]
        cells.write_h5ad(tmp_path / "corpus" / f"{name}.h5ad")
    cells = tmp_path / "corpus" / "known.h5ad"
    pack_files([cells], model.vocabulary, tmp_path / "base" / "prepared" / "train.h5").close()
    assert list(adapting.held_out(tmp_path / "corpus", tmp_path / "base")) == ["new"]


def test_goals_are_of_each_set_and_of_means(adapting):
    def row(name, arm, accuracy):
        score = {"accuracy": accuracy, "accuracy_sd": 0.0, "average_bio": accuracy, "n_cells": 20_000, "n_seeds": 3}
        return {"set": name, "arm": arm, "group": "sets", **score}

    scores = {"a": (0.80, 0.85, 0.90), "b": (0.70, 0.65, 0.60), "c": (0.70, 0.65, 0.74)}
    rows = [
        row(name, arm, value)
        for name, of in scores.items()
        for arm, value in zip(("zero-shot", "pca", "adapted"), of, strict=True)
    ]
    found = {one["what"]: one for one in adapting.goals(rows)}
    assert found["a: accuracy above the better of model and PCA"]["met"] is True
    assert found["b: accuracy above the better of model and PCA"]["met"] is False
    mean = found["sets: mean accuracy above pca"]
    assert mean["value"] == pytest.approx(0.03)
    assert mean["met"] is None
    assert "sets: mean accuracy above scvi" not in found
    assert "all sets: mean accuracy above pca" not in found


def test_means_are_over_all_sets_beside_those_by_group(adapting, script):
    def row(name, group, arm, accuracy):
        score = {"accuracy": accuracy, "accuracy_sd": 0.0, "average_bio": accuracy, "n_cells": 500, "n_seeds": 3}
        return {"set": name, "arm": arm, "group": group, "cpu_seconds": 1.0, "chosen": [1.5], **score}

    scores = {"a": (0.80, 0.90), "b": (0.70, 0.78), "c": (0.70, 0.76), "d": (0.60, 0.62)}
    rows = [
        row(name, "mouse" if name == "d" else "sets", arm, value)
        for name, of in scores.items()
        for arm, value in zip(("zero-shot", "adapted"), of, strict=True)
    ]
    rows.append(row("a", "sets", "scvi", 0.5))
    found = {one["what"]: one for one in adapting.goals(rows)}
    assert found["sets: mean accuracy above zero-shot"]["value"] == pytest.approx(0.08)
    everything = found["all sets: mean accuracy above zero-shot"]
    assert everything["value"] == pytest.approx(0.065)
    assert everything["over"] == "4 sets"
    assert "all sets: mean accuracy above scvi" not in found  # of one set

    page = script("_curves").adapting({"rows": rows})
    assert "| **all sets, mean of 4** | 0.700 / 0.700 | 0.765 / 0.765 |  |  |  |" in page
