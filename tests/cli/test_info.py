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
    def read(folder, name, sums):
        assert name == "config.json"
        return (folder / name).read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr("scdiva.models.storage.read_checked", read)
        found = described(small)
    assert found["kind"] == "model"
    assert found["config"]["dim"] == 16
    assert found["metadata"] == {"corpus": "drawn at random"}
    assert found["n_parameters"] == sum(one.numel() for one in sd.models.load_model(small).parameters())
    assert cli.main(["info", "scdiva-mini"]) == 0
    said = capsys.readouterr().out
    assert "n_parameters: 9,759,993\n" in said
    assert "  n_genes: 19,623\n" in said


def test_a_file_is_described(described, small, cells, tmp_path):
    adata = ad.read_h5ad(cells / "cells.h5ad")
    sd.tl.embed(adata, small, key_added="mine")
    adata.write_h5ad(tmp_path / "a.h5ad")
    write_cells(adata, tmp_path / "a.zarr")
    found = described(tmp_path / "a.h5ad", "--model", small)
    assert (found["n_cells"], found["n_genes"]) == adata.shape
    assert found["expression"]["holds"] == "counts"
    assert found["expression"]["max"] == adata.X.max()
    known = sd.models.load_model(small).vocabulary.match(adata.var_names).tokens >= 0
    assert found["model"]["n_known"] == known.sum()
    assert found["model"]["share_of_counts"] == pytest.approx(adata.X[:, known].sum() / adata.X.sum())
    assert found["written_by_scdiva"] == {"obsm": ["mine"]}
    assert found["parameters"]["mine"]["model"] == str(small)
    assert described(tmp_path / "a.zarr", "--model", small) == found | {"file": str(tmp_path / "a.zarr")}


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
    found = described(labelled.save(tmp_path / "kept"))
    assert found["kind"] == "annotator"
    assert found["labels"] == list(labelled.labels)
    assert found["model"]["config"]["dim"] == 16


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
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
