"""`scdiva info`: of a model and of a file, as text and as JSON."""

from __future__ import annotations

import json

import anndata as ad
import numpy as np
import pytest

import scdiva as sd
from scdiva import cli
from scdiva.data.output import write_cells


@pytest.fixture
def described(capsys):
    """Ask for JSON."""

    def ask(*words):
        assert cli.main(["info", *map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return ask


def test_a_model_is_described_without_its_weights(described, small, monkeypatch, capsys):
    def read_config(folder, name, sums):
        assert name == "config.json"
        return (folder / name).read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr("scdiva.models.storage.read_checked", read_config)
        description = described(small)
    assert description["kind"] == "model"
    assert description["config"]["dim"] == 16
    assert description["metadata"] == {"corpus": "drawn at random"}
    assert description["n_parameters"] == sum(one.numel() for one in sd.models.load_model(small).parameters())
    assert cli.main(["info", "scdiva-mini"]) == 0
    printed = capsys.readouterr().out
    assert "n_parameters: 9,759,993\n" in printed
    assert "  n_genes: 19,623\n" in printed


def test_a_file_is_described(described, small, cells, tmp_path):
    adata = ad.read_h5ad(cells / "cells.h5ad")
    sd.tl.embed(adata, small, key_added="mine")
    adata.write_h5ad(tmp_path / "a.h5ad")
    write_cells(adata, tmp_path / "a.zarr")
    description = described(tmp_path / "a.h5ad", "--model", small)
    assert (description["n_cells"], description["n_genes"]) == adata.shape
    assert description["expression"]["holds"] == "counts"
    assert description["expression"]["max"] == adata.X.max()
    in_vocabulary = sd.models.load_model(small).vocabulary.match(adata.var_names).tokens >= 0
    assert description["model"]["n_known"] == in_vocabulary.sum()
    assert description["model"]["share_of_counts"] == pytest.approx(adata.X[:, in_vocabulary].sum() / adata.X.sum())
    assert description["written_by_scdiva"] == {"obsm": ["mine"]}
    assert description["parameters"]["mine"]["model"] == str(small)
    assert described(tmp_path / "a.zarr", "--model", small) == description | {"file": str(tmp_path / "a.zarr")}


def test_an_embedding_without_a_matrix_and_one_that_is_refused(described, small, cells, tmp_path, capsys):
    out = sd.tl.embed_file(cells / "cells.h5ad", tmp_path / "e.h5ad", model=small)
    assert described(out)["expression"] == {"holds": "nothing"}
    assert described(out)["written_by_scdiva"] == {"obsm": ["X_scdiva"]}
    adata = ad.read_h5ad(cells / "cells.h5ad")
    adata.X = (adata.X.toarray() - 1.0).astype(np.float32)
    adata.write_h5ad(tmp_path / "scaled.h5ad")
    assert "negative" in described(tmp_path / "scaled.h5ad")["expression"]["refused"]
    assert cli.main(["info", str(tmp_path / "scaled.h5ad")]) == 0
    assert "refused: " in capsys.readouterr().out


def test_what_was_fitted_is_described(described, small, cells, tmp_path):
    adata = ad.read_h5ad(cells / "cells.h5ad")
    labelled = sd.tl.annotate(ad.read_h5ad(cells / "query.h5ad"), "cell_type", adata, method="knn", model=small)
    description = described(labelled.save(tmp_path / "kept"))
    assert description["kind"] == "annotator"
    assert description["labels"] == list(labelled.labels)
    assert description["model"]["config"]["dim"] == 16


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no model 'nothing'"),
        ("nothing.h5ad", "no file 'nothing.h5ad'"),
        ("text.h5ad", "is not an HDF5 file"),
        ("folder", "lacks README.md"),
    ],
)
def test_what_is_neither_is_said_in_a_line(name, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.h5ad").write_text("no cells")
    assert cli.main(["info", name]) == 1
    stderr = capsys.readouterr().err
    assert message in stderr
    assert len(stderr.splitlines()) == 1
