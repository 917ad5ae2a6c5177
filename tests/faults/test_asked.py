"""Faults of what is asked for: genes that can't be imputed, and places where a model can't be saved."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import scdiva as sd

# --- genes to impute --------------------------------------------------------------------------------------------------
ASKED = {
    "misspelt": (lambda a: [a.var_names[0], a.var_names[1] + "x"], "1 of 2 genes are not .*did you mean"),
    "not known to the model": (lambda a: [a.var_names[0], a.var_names[57]], "lacks 1 of 2 genes"),
    "none": (lambda _: [], "genes is empty"),
    "a number": (lambda a: [a.var_names[0], 3], "1 of 2 are not text .first: int"),
    "a name with a slash": (lambda _: ["A/B"], "h5ad and zarr do not take for a column.*'A/B'"),
}


@pytest.mark.fault("genes that can't be imputed")
@pytest.mark.parametrize("name", ASKED)
def test_genes_that_can_not_be_imputed_are_named_before_any_are(cells, model, refused, monkeypatch, name):
    genes_of, message = ASKED[name]
    if "slash" in name:
        cells.var["id"] = cells.var_names.to_numpy()
        cells.var_names = ["A/B", *cells.var_names[1:]]

    def called(*_, **__):
        raise AssertionError("cells were read before the genes were looked at")

    monkeypatch.setattr("scdiva.data.batch.read_cells", called)
    error = TypeError if name == "a number" else ValueError
    refused(lambda a: sd.tl.impute(a, genes_of(a), model), cells, error, message)


# --- where a model can't be saved -------------------------------------------------------------------------------------
def state_of(folder: Path) -> dict[str, str]:
    """Every file below a folder, with what it holds."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def notes(path, **_):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"mine": 1}))


def other_model(path, model, **_):
    model.save(path)


def other_annotator(path, annotator, **_):
    annotator.save(path)


def a_file(path, **_):
    path.write_text("mine")


def an_empty_folder(path, **_):
    path.mkdir()


@pytest.fixture(scope="module")
def annotator(model, drawn):
    return sd.tl.annotate(
        drawn[:20].copy(), "cell_type", reference=drawn[20:].copy(), model=model, method="knn", rng=0, device="cpu"
    )


THERE = [
    *((make, "model", overwrite) for make in (notes, other_annotator, a_file, an_empty_folder) for overwrite in (0, 1)),
    *((make, "annotator", overwrite) for make in (notes, other_model, a_file) for overwrite in (0, 1)),
    (other_model, "model", 0),
    (other_annotator, "annotator", 0),
]


@pytest.mark.fault("a save over something else")
@pytest.mark.parametrize(("make", "kind", "overwrite"), THERE)
def test_what_stands_where_a_model_is_saved_stays(model, annotator, tmp_path, make, kind, overwrite):
    make(tmp_path / "taken", model=model, annotator=annotator)
    before = state_of(tmp_path)
    what = {"model": model, "annotator": annotator}[kind]
    message = (
        "pass overwrite=True" if make.__name__ == f"other_{kind}" else f"it is not a saved {kind}.*choose another path"
    )
    with pytest.raises(FileExistsError, match=message):
        what.save(tmp_path / "taken", overwrite=bool(overwrite))
    assert state_of(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
