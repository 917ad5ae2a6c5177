"""The folder of a fitted annotator: what it holds, what it gives back, and what is refused."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva.annotation import annotator as annotators
from scdiva.models import load, pretrained, save_model

from .conftest import SHORT


@pytest.fixture(scope="module")
def fitted(query, reference, plain):
    by_method = {}
    for name, how in SHORT.items():
        with warnings.catch_warnings(), sd.settings.override(progress=False, device="cpu", precision="fp32"):
            warnings.simplefilter("ignore", UserWarning)  # fine-tuning may not help
            by_method[name] = sd.tl.annotate(
                query.copy(), "cell_type", reference, model=plain, rng=0, parents={"type A": "low", "type B": "low"},
                **how,
            )  # fmt: skip
    return by_method


@pytest.fixture
def folder(fitted, tmp_path):
    return fitted["linear"].save(tmp_path / "annotator")


@pytest.mark.parametrize("name", SHORT)
def test_saved_and_loaded_it_is_the_same(name, fitted, tmp_path):
    annotator = fitted[name]
    folder = annotator.save(tmp_path / "here" / "annotator")
    loaded = load(folder, device="cpu")
    assert (loaded.method, loaded.labels, loaded.parents) == (annotator.method, annotator.labels, annotator.parents)
    assert loaded.model.finetuned_for == ("annotate" if name == "finetune" else None)
    for name in ("tokens", "novelty"):
        actual, expected = getattr(loaded, name), getattr(annotator, name)
        np.testing.assert_array_equal(actual, expected)
        assert actual.dtype == expected.dtype
    state, loaded_state = annotator.head.state_dict(), loaded.head.state_dict()
    assert state.keys() == loaded_state.keys()
    assert all(torch.equal(value, loaded_state[name]) for name, value in state.items())
    assert not loaded.head.training
    assert not any(p.requires_grad for p in loaded.head.parameters())
    assert [p.name for p in folder.parent.iterdir()] == ["annotator"]
    assert repr(loaded) == repr(annotator)


def test_notes_come_back(fitted, tmp_path):
    annotator = fitted["finetune"]
    notes = annotator.notes | {"nothing": float("nan"), "inner": {"with": np.array([1.0, np.nan]), "n": np.int64(3)}}
    loaded = load(replace(annotator, notes=notes).save(tmp_path / "one")).notes
    assert loaded.keys() == notes.keys()
    assert np.isnan(loaded["nothing"])
    np.testing.assert_array_equal(loaded["inner"]["with"], [1, np.nan])
    for part in ("reliability", "history"):
        for name, column in annotator.notes[part].items():
            np.testing.assert_array_equal(loaded[part][name], column)
    for name in ("labels_key", "seed", "temperature", "accuracy", "finetuned"):
        assert loaded[name] == annotator.notes[name], name


@pytest.mark.parametrize("name", ["annotator.json", "annotator.safetensors", "model/SHA256SUMS", "SHA256SUMS"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks .*{name.rsplit('/', 1)[-1]}"):
        load(folder)


def test_another_model_is_refused(folder, build, network, altered):
    reseeded, wider = network(seed=5), build(anchor="learned")
    for model, match in ((reseeded, r"model/SHA256SUMS does not match"), (wider, "head does not fit the model")):
        shutil.rmtree(folder / "model")
        save_model(model, model.vocabulary, folder / "model")
        with pytest.raises(ValueError, match=match):
            load(folder if model is reseeded else altered(folder))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.update(format="scdiva"), "has no entry format ="),
        (lambda s: s.update(format_version=2), "version 2"),
        (lambda s: s.pop("labels"), "'labels'"),
        (lambda s: s.update(notes=3), "int"),
        (lambda s: s["sizes"].update(n_labels=1), "labels out of range"),
        (lambda s: s["sizes"].update(method="forest"), "method must be one of"),
        (lambda s: s["sizes"].update(n_genes=-1), "n_genes out of range"),
        (lambda s: s["sizes"].update(n_known=10**12), "n_known out of range"),
        (lambda s: s["sizes"].update(n_tokens=10**12), "head does not fit"),
        (lambda s: s["sizes"].update(own_dim=4000), "does not hold the tensors"),
        (lambda s: s.update(genes="of another version"), "other human genes"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, altered, change, match):
    with pytest.raises(ValueError, match=match):
        load(altered(folder, change))


def test_nothing_is_set_aside_for_sizes_that_a_file_claims(fitted, altered, tmp_path, monkeypatch):
    """Ten million known cells of a state of 256 would be 10 GB."""
    folder = altered(fitted["knn"].save(tmp_path / "one"), lambda s: s["sizes"].update(n_known=10_000_000))
    head_class = annotators.AnnotationHead

    def watched(sizes):
        head = head_class(sizes)
        assert {value.device.type for value in head.state_dict().values()} == {"meta"}
        return head

    monkeypatch.setattr(annotators, "AnnotationHead", watched)
    with pytest.raises(ValueError, match="does not hold the tensors"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("tokens"), "does not hold the tensors"),
        (lambda t: t.pop("head.temperature"), "does not hold the tensors"),
        (lambda t: t.update({"head.more": torch.zeros(1)}), "does not hold the tensors"),
        (lambda t: t.update({"head.centroids": t["head.centroids"][:, :-1].contiguous()}), "does not hold"),
        (lambda t: t["head.classifier.weight"].fill_(np.nan), "NaN or infinite"),
        (lambda t: t["novelty"].fill_(np.nan), "NaN or infinite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder, altered, change, match):
    with pytest.raises(ValueError, match=match):
        load(altered(folder, tensors=change))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_fails_leaves_nothing_behind(fitted, folder, tmp_path, monkeypatch, overwrite):
    def fails(*_):
        raise OSError("no space left")

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(pretrained, "write_sums", fails)
    with pytest.raises(OSError, match="no space"):
        fitted["knn"].save(folder if overwrite else tmp_path / "new", overwrite=overwrite)
    assert [p.name for p in tmp_path.iterdir()] == ["annotator"]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
