"""Commands that run public functions: the results and options are those of Python, and files are written atomically."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pytest

import scdiva as sd
from scdiva import cli


@pytest.fixture(autouse=True)
def _as_here(monkeypatch, cells):
    monkeypatch.chdir(cells)


@pytest.fixture
def run(small, tmp_path, capsys):
    """Run a command with the small model, writing to a new file; returns the file, after seeing it named."""

    def command(name, *words, out="out.h5ad", model=small):
        out = tmp_path / out
        arguments = [name, *map(str, words), "--out", str(out), "--model", str(model), "--progress", "false"]
        code = cli.main(arguments)
        captured = capsys.readouterr()
        assert code == 0, captured.err
        assert captured.out.splitlines()[0] == str(out)
        return out

    return command


@pytest.fixture
def refused(tmp_path, capsys):
    """Run a command that must fail; return its one-line error, after checking that it wrote no file."""

    def command(name, *words, out="out.h5ad", code=1):
        before = sorted(tmp_path.rglob("*"))
        assert cli.main([name, *map(str, words), "-o", str(tmp_path / out), "--progress", "false"]) == code
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if "warning: " not in line]
        assert len(lines) == 1
        assert captured.out == ""
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return command


def same(actual, expected):
    """Whether two AnnData hold the same cells, to the bit."""
    assert actual.obs.to_csv() == expected.obs.to_csv()
    assert list(actual.var_names) == list(expected.var_names)
    for part in ("layers", "obsm"):
        actual_arrays, expected_arrays = getattr(actual, part), getattr(expected, part)
        assert set(actual_arrays) == set(expected_arrays)
        for key in actual_arrays:
            assert dense(actual_arrays[key]).tobytes() == dense(expected_arrays[key]).tobytes()
    assert (actual.X is None) == (expected.X is None)
    assert actual.X is None or dense(actual.X).tobytes() == dense(expected.X).tobytes()
    assert sorted(actual.uns["scdiva"]) == sorted(expected.uns["scdiva"])


def dense(matrix):
    return matrix.toarray() if hasattr(matrix, "toarray") else np.asarray(matrix)


def test_embed_is_embed_file_and_the_bits_are_those_of_embed(run, small, cells, tmp_path):
    output = ad.read_h5ad(run("embed", "cells.h5ad", "--batch_size", "7"))
    same(output, ad.read_h5ad(sd.tl.embed_file("cells.h5ad", tmp_path / "b.h5ad", model=small, batch_size=7)))
    adata = ad.read_h5ad("cells.h5ad")
    sd.tl.embed(adata, small, batch_size=7)
    np.testing.assert_array_equal(output.obsm["X_scdiva"], adata.obsm["X_scdiva"])


def test_integrate_and_what_it_fitted_embeds_later_cells(run, small, tmp_path):
    folder = tmp_path / "kept"
    words = ["--batch_key", "batch", "--labels_key", "cell_type", "--steps", "3"]
    output = ad.read_zarr(run("integrate", "cells.h5ad", *words, "--rng", "3", "--save", folder, out="out.zarr"))
    adata = ad.read_h5ad("cells.h5ad")
    model = sd.tl.integrate(adata, "batch", "cell_type", model=small, steps=3, rng=3)
    assert output.obsm["X_scdiva_integrated"].tobytes() == adata.obsm["X_scdiva_integrated"].tobytes()
    assert output.n_vars == 0, "like embed: annotation and embeddings, no expression"
    query = ad.read_h5ad("query.h5ad")
    sd.tl.embed(query, model)
    later = ad.read_h5ad(run("embed", "query.h5ad", model=folder))
    np.testing.assert_array_equal(later.obsm["X_scdiva_integrated"], query.obsm["X_scdiva_integrated"])


@pytest.mark.parametrize("kind", ["dense", "zarr", "layer", "raw"])
def test_matrices_are_read_by_blocks_from_every_file(run, small, tmp_path, kind):
    adata, words = ad.read_h5ad("cells.h5ad"), ["--batch_key", "batch", "--steps", "2"]
    stored = adata.copy()
    if kind == "dense":
        stored.X = stored.X.toarray()
    elif kind == "layer":
        stored.layers["counts"], stored.X = stored.X, None
        words += ["--layer", "counts"]
    elif kind == "raw":
        stored.raw = stored
        stored.X = stored.X * 0
        words += ["--use_raw", "true"]
    file = tmp_path / ("stored.zarr" if kind == "zarr" else "stored.h5ad")
    stored.write_zarr(file) if kind == "zarr" else stored.write_h5ad(file)
    output = ad.read_h5ad(run("integrate", file, *words))
    sd.tl.integrate(adata, "batch", model=small, steps=2)
    assert output.obsm["X_scdiva_integrated"].tobytes() == adata.obsm["X_scdiva_integrated"].tobytes()
    assert output.obs.to_csv() == adata.obs.to_csv()


def test_annotate_and_the_annotator_again(run, small, tmp_path):
    folder = tmp_path / "kept"
    words = ["--labels_key", "cell_type", "--reference", "cells.h5ad", "--method", "knn", "--reject", "0.1"]
    output = ad.read_h5ad(run("annotate", "query.h5ad", *words, "--save", folder))
    adata = ad.read_h5ad("query.h5ad")
    sd.tl.annotate(adata, "cell_type", ad.read_h5ad("cells.h5ad"), method="knn", reject=0.1, model=small)
    assert output.obs["scdiva_label"].tolist() == adata.obs["scdiva_label"].tolist()
    assert output.obsm["scdiva_label_probability"].tobytes() == adata.obsm["scdiva_label_probability"].tobytes()
    again = ad.read_h5ad(run("annotate", "query.h5ad", "--reject", "0.1", out="again.h5ad", model=folder))
    assert again.obsm["scdiva_label_probability"].tobytes() == output.obsm["scdiva_label_probability"].tobytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["embed", "nowhere.h5ad"], "scdiva embed: no file 'nowhere.h5ad'."),
        (["integrate", "nowhere.h5ad", "--batch_key", "batch"], "scdiva integrate: no file 'nowhere.h5ad'."),
        (["annotate", "query.h5ad", "--reference", "no.h5ad", "--labels_key", "x"], "no file 'no.h5ad'"),
        (["integrate", "cells.h5ad", "--batch_key", "bach"], "'bach'"),
        (["integrate", "cells.h5ad", "--batch_key", "batch", "--threads", "0"], "settings.threads"),
        (["integrate", "cells.h5ad", "--batch_key", "batch", "--steps", "0"], "steps"),
        (["embed", "cells.h5ad", "--model", "nothing"], "no model 'nothing'"),
        (["integrate", "broken.h5ad", "--batch_key", "batch"], "'broken.h5ad' is not an HDF5 file"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_leaves_nothing(refused, cells, words, message):
    (cells / "broken.h5ad").write_text("no cells")
    assert message in refused(*words)


def test_what_stands_there_is_not_replaced_unless_said(run, refused, small, tmp_path):
    (tmp_path / "out.h5ad").write_text("mine")
    words = ["integrate", "cells.h5ad", "--batch_key", "batch", "--steps", "2", "--model", small]
    for name in (words, ["embed", "cells.h5ad", "--model", small]):
        assert "exists. Pass another out, or --overwrite." in refused(*name)
        assert (tmp_path / "out.h5ad").read_text() == "mine"
    assert ad.read_h5ad(run(*words[:-2], "--overwrite")).n_obs == 60
    assert "must end in .h5ad or .zarr" in refused(*words, out="out.csv")


def test_a_folder_of_another_kind_is_refused_before_the_work(refused, small, tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine.txt").write_text("mine")
    monkeypatch.setattr("scdiva.cli._calls._opened", None)
    words = ["integrate", "cells.h5ad", "--batch_key", "batch", "--model", small, "--overwrite", "--save"]
    assert "it is not a saved model; choose another path" in refused(*words, tmp_path / "kept")
    annotate = ["annotate", "cells.h5ad", "--labels_key", "cell_type", "--model", small, "--overwrite", "--save"]
    assert f"{str(small)!r} exists already: it is not a saved annotator" in refused(*annotate, small)
    assert "is the --out" in refused(*words, tmp_path / "out.zarr", out="out.zarr")
    assert (tmp_path / "kept" / "mine.txt").read_text() == "mine"


def test_the_file_that_is_read_is_never_written(cells, capsys):
    ad.read_h5ad("cells.h5ad").write_zarr("cells.zarr")
    before = (cells / "query.h5ad").read_bytes()
    words = ["annotate", "query.h5ad", "--labels_key", "cell_type", "--reference", "cells.h5ad", "--overwrite"]
    for out in ("query.h5ad", "./cells.h5ad"):
        assert cli.main([*words, "-o", out]) == 1
        assert "is the file that is read" in capsys.readouterr().err
    assert (cells / "query.h5ad").read_bytes() == before
    assert cli.main(["embed", "cells.zarr", "-o", "cells.zarr/inner.zarr"]) == 1
    assert "is inside the file that is read" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["out.h5ad", "out.zarr"])
def test_a_write_that_fails_or_is_stopped_leaves_nothing(refused, small, monkeypatch, out):
    words = ["integrate", "cells.h5ad", "--batch_key", "batch", "--steps", "2", "--model", small]
    of, name = (ad.AnnData, "write_zarr") if out.endswith("zarr") else (ad.io, "write_elem")
    plain = getattr(of, name)

    def half(error, *arguments):
        plain(*arguments)
        raise error

    for error, code, message in (
        (OSError(28, "No space left on device"), 1, "No space left"),
        (KeyboardInterrupt(), 130, "scdiva integrate: stopped."),
    ):
        monkeypatch.setattr(of, name, lambda *arguments, error=error: half(error, *arguments))
        assert message in refused(*words, out=out, code=code)


def test_where_an_error_arose_is_said_when_asked(capsys, monkeypatch, tmp_path):
    def wrong(*_):
        raise RuntimeError("in the\nmiddle")

    monkeypatch.setattr("scdiva.embedding.embed_file.refuse_target", wrong)
    words = ["embed", "cells.h5ad", "-o", str(tmp_path / "x.h5ad")]
    assert cli.main(words) == 1
    assert capsys.readouterr().err == "scdiva embed: in the middle\n"
    assert cli.main([*words, "--verbosity", "debug"]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("Traceback")
    assert stderr.endswith("scdiva embed: in the middle\n")


def test_as_a_process(small, cells, tmp_path):
    out = tmp_path / "e.h5ad"
    words = [sys.executable, "-m", "scdiva", "embed", str(cells / "cells.h5ad"), "--model", str(small), "-o", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (0, f"{out}\n")


@pytest.mark.parametrize("damage", ["uns", "mod"])
def test_files_that_are_no_anndata_are_refused_in_one_line(refused, small, tmp_path, damage):
    file = tmp_path / "broken.h5ad"
    ad.read_h5ad("cells.h5ad").write_h5ad(file)
    with h5py.File(file, "r+") as opened:
        if damage == "uns":
            opened["uns"].create_group("weird").attrs["encoding-type"] = "alien"
        else:
            opened.move("X", "mod/rna/X")
    assert "broken.h5ad'" in refused("integrate", file, "--batch_key", "batch", "--steps", "2", "--model", small)
