"""Invalid output and input files, and folders of another kind: errors come first, and no file is left."""

from __future__ import annotations

import inspect
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import scdiva as sd
from scdiva import cli
from scdiva.data.packing import pack_files
from scdiva.models import Annotator, PerturbationModel, load, load_model, save_model
from scdiva.models.pretrained import load_fitted
from scdiva.train import pretrain

PLOTS = [name for name in sd.pl.__all__ if "save" in inspect.signature(getattr(sd.pl, name)).parameters]


@pytest.fixture(scope="module")
def file(drawn, tmp_path_factory):
    path = tmp_path_factory.mktemp("cells") / "cells.h5ad"
    drawn.copy().write_h5ad(path)
    return path


@pytest.fixture(scope="module")
def folders(model, drawn, tmp_path_factory):
    """A saved model, an annotator and a fitted perturbation model."""
    at = tmp_path_factory.mktemp("folders")
    quick = {"model": model, "rng": 0, "device": "cpu"}
    annotator = sd.tl.annotate(drawn[:20].copy(), "cell_type", reference=drawn[20:].copy(), method="knn", **quick)
    return {
        "a model": save_model(model, model.vocabulary, at / "a"),
        "an annotator": annotator.save(at / "b"),
        "a fitted perturbation model": sd.tl.fit_perturbation(drawn.copy(), "perturbation", **quick).save(at / "c"),
    }


def plot(name):
    """Call a plot with a file to be written, and with cells or words for whatever else it asks."""
    function = getattr(sd.pl, name)
    words = {"labels_key": "cell_type", "condition": "A"}

    def call(out, adata, *_):
        arguments = {
            one.name: adata if "AnnData" in str(one.annotation) else words.get(one.name, {"a": ["x"], "b": ["x"]})
            for one in inspect.signature(function).parameters.values()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        }
        function(**arguments, save=out.with_suffix(".png"))

    return call


WRITES = {
    "tl.embed_file": lambda out, _, model, file: sd.tl.embed_file(file, out.with_suffix(".h5ad"), model=model),
    "tl.embed_file, zarr": lambda out, _, model, file: sd.tl.embed_file(file, out.with_suffix(".zarr"), model=model),
    "data.pack_files": lambda out, _, model, file: pack_files([file], model.vocabulary, out),
    "models.save_model": lambda out, _, model, __: save_model(model, model.vocabulary, out),
    **{f"pl.{name}": plot(name) for name in PLOTS},
}


@pytest.mark.fault("outputs that can't be written")
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("where", ["below a file", "below a broken link", "in a folder of the system"])
def test_a_folder_that_can_not_be_written_into(name, where, drawn, model, file, tmp_path, hashed):
    (tmp_path / "a file").write_text("years of work")
    (tmp_path / "a link").symlink_to(tmp_path / "gone")
    out = {
        "below a file": tmp_path / "a file" / "deep" / "out",
        "below a broken link": tmp_path / "a link" / "out",
        "in a folder of the system": Path("/proc/out"),
    }[where]
    if not Path("/proc/self").exists() and where == "in a folder of the system":
        pytest.skip("there is none here")
    before, start = hashed(drawn), time.monotonic()
    with pytest.raises(OSError, match=r"is not a folder|can't be written into") as caught:
        WRITES[name](out, drawn, model, file)
    assert str(out.parent).startswith(str(caught.value).split("'")[1])  # it names the folder that is in the way
    assert time.monotonic() - start < 10
    assert hashed(drawn) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a file", "a link"]
    assert (tmp_path / "a file").read_text() == "years of work"


@pytest.mark.fault("URLs as outputs")
@pytest.mark.parametrize("name", [*WRITES, "Annotator.save", "PerturbationModel.save", "pretrain", "integrate", "CLI"])
def test_no_folder_is_named_after_a_scheme(name, drawn, model, file, folders, tmp_path, monkeypatch, capsys):
    url = "s3://bucket/out"
    more = {
        "Annotator.save": lambda: load(folders["an annotator"]).save(url),
        "PerturbationModel.save": lambda: load(folders["a fitted perturbation model"]).save(url, overwrite=True),
        "pretrain": lambda: pretrain(str(file), url),
        "integrate": lambda: sd.tl.integrate(drawn.copy(), "batch", model=model, finetune=True, checkpoint_dir=url),
        "CLI": lambda: cli.main(["embed", str(file), "-o", f"{url}.h5ad"]),
    }
    monkeypatch.chdir(tmp_path)
    if name == "CLI":
        assert more[name]() == 1
        assert "is a URL" in capsys.readouterr().err
    else:
        with pytest.raises(ValueError, match="is a URL, and results are written to a local path"):
            more[name]() if name in more else WRITES[name](Path(url), drawn, model, file)
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("outputs that can't be written")
@pytest.mark.parametrize("name", WRITES)
def test_a_folder_where_a_file_should_be(name, drawn, model, file, tmp_path):
    for suffix in ("", ".h5ad", ".zarr", ".h5", ".png"):
        (tmp_path / f"out{suffix}").mkdir()
        (tmp_path / f"out{suffix}" / "thesis.txt").write_text("years of work")
    with pytest.raises(
        (FileExistsError, IsADirectoryError), match=r"is a folder|it is not a saved model|exists\. Pass"
    ):
        WRITES[name](tmp_path / "out", drawn, model, file)
    assert len(list(tmp_path.glob("*/thesis.txt"))) == len(list(tmp_path.iterdir())) == 5


# --- inputs that are no file of cells ---------------------------------------------------------------------------------
@pytest.mark.fault("several files for one")
@pytest.mark.parametrize("make", [list, tuple, set])
def test_several_files(file, model, tmp_path, make):
    with pytest.raises(TypeError, match=f"must be the path of one file, got {make.__name__}: call embed_file once"):
        sd.tl.embed_file(make([file, file.with_name("b.h5ad")]), tmp_path / "out.h5ad", model=model)
    with pytest.raises(TypeError, match="out must be a path"):
        sd.tl.embed_file(file, make([tmp_path / "out.h5ad"]), model=model)


@pytest.mark.fault("folders that are no store")
@pytest.mark.parametrize("holds", ["nothing", "files", "cells", "Cell Ranger's files", "much", "an empty .zarr"])
def test_a_folder_that_is_no_store(file, model, tmp_path, holds):
    folder = tmp_path / ("in.zarr" if holds == "an empty .zarr" else "in")
    folder.mkdir()
    message = r"is a folder, but no \.zarr that AnnData wrote\."
    if holds == "files":
        (folder / "notes.txt").write_text("notes")
    elif holds == "cells":
        shutil.copy(file, folder / "donor1.h5ad")
        message += r" It holds donor1\.h5ad: name one of them"
    elif holds == "Cell Ranger's files":
        (folder / "matrix.mtx.gz").write_bytes(b"")
        message += r".*read_10x_mtx"
    elif holds == "much":  # which is not walked through
        for i in range(200):
            (folder / str(i) / "deep").mkdir(parents=True)
            (folder / str(i) / "deep" / "file").write_bytes(bytes(1000))
    start = time.monotonic()
    with pytest.raises(ValueError, match=message):
        sd.tl.embed_file(folder, tmp_path / "out.h5ad", model=model)
    assert time.monotonic() - start < 2
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


# --- models of another kind -------------------------------------------------------------------------------------------
TAKE_MODELS = {
    "tl.embed": ("a model", lambda a, m: sd.tl.embed(a, m)),
    "models.load_model": ("a model", lambda _, m: load_model(m, device="cpu")),
    "an annotator": ("an annotator", lambda _, m: load_fitted(Annotator, m, "cpu")),
    "a fitted perturbation model": (
        "a fitted perturbation model",
        lambda _, m: load_fitted(PerturbationModel, m, "cpu"),
    ),
}
TAKEN_BY = {
    "a model": r"scdiva\.tl\.embed\(adata, model=folder\) takes it",
    "an annotator": r"scdiva\.tl\.annotate\(adata, model=folder\) takes it",
    "a fitted perturbation model": r"scdiva\.tl\.predict_perturbation\(adata, model=folder\) takes it",
}


@pytest.mark.fault("folders of another kind as models")
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name, (accepted, _) in TAKE_MODELS.items() for kind in TAKEN_BY if kind != accepted],
)
def test_a_folder_of_another_kind(folders, drawn, refused, name, kind):
    accepted, call = TAKE_MODELS[name]
    message = refused(lambda a: call(a, folders[kind]), drawn, ValueError, f"it holds {kind}", TAKEN_BY[kind])
    if accepted == "a model":  # the one within is named, and can be used
        assert f"The model in it is {str(folders[kind] / 'model')!r}" in message
        load_model(folders[kind] / "model", device="cpu")


# --- one label, or one per cell ---------------------------------------------------------------------------------------
@pytest.mark.fault("labels that part nothing")
@pytest.mark.parametrize("labels", ["one", "none", "one each"])
def test_scores_of_labels_that_part_nothing(labels):
    pytest.importorskip("igraph")
    z = np.random.default_rng(0).normal(size=(60, 4))
    values = {"one": ["T"] * 60, "none": [None] * 60, "one each": [f"cell{i}" for i in range(60)]}[labels]
    message = "(needs at least two labels|has a label|share a label)"
    with pytest.raises(ValueError, match=message) as caught:
        sd.metrics.avg_bio(z, np.array(values, dtype=object))
    assert "n_samples" not in str(caught.value)
