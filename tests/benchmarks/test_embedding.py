"""The benchmark of embeddings scores labelled cells, and skips rows that exist."""

from __future__ import annotations

import json

import numpy as np
import pytest

import scdiva as sd


@pytest.fixture
def folder(tmp_path):
    for name in ("cells", "confounded", "one_type"):
        adata = sd.datasets.toy(160, 150, n_types=2)
        types = adata.obs["cell_type"].astype(str)
        adata.obs["batch"] = types if name == "confounded" else ["x", "y"] * 80
        adata.obs["cell_type"] = "a" if name == "one_type" else types.where(np.arange(160) > 0, "unlabelled")
        adata.write_h5ad(tmp_path / f"{name}.h5ad")
    return tmp_path


def test_scores_leave_out_cells_without_type_or_embedding(script):
    rng = np.random.default_rng(0)
    labels = np.repeat(["a", "b", ""], [60, 60, 20])
    embedding = rng.normal(size=(140, 4)) + 20 * (labels == "b")[:, None]
    embedding[0] = np.nan
    scores = script("embedding").score(embedding, labels)
    assert scores["n_cells"] == 119
    assert scores["n_types"] == 2
    assert scores["accuracy"] == scores["nmi"] == scores["ari"] == 1.0
    assert scores["average_bio"] == pytest.approx((2 + scores["asw"]) / 3)
    shuffled = script("embedding").score(embedding, rng.permutation(labels))
    assert shuffled["accuracy"] < 0.75
    assert shuffled["nmi"] < 0.2


def test_labelled_datasets_are_scored_once(script, folder, tmp_path, monkeypatch, capsys):
    """Each fit is a function of a module, called in its own process; here it is called in this one."""
    record, run, embedding = script("_record"), script("_run"), script("embedding")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(
        run, "in_subprocess", lambda function, *arguments, threads: (function(*arguments), {"cpu_seconds": 1.0})
    )
    call = ["--data", str(folder), "--max-cells", "120", "--seeds", "0", "1", "--arms", "pca20", "embed", "adapt_batch"]
    embedding.main(call)
    rows = json.loads((tmp_path / "results" / "embedding.json").read_text())["rows"]
    assert [(row["set"], row["arm"]) for row in rows] == [
        ("cells", "pca20"), ("cells", "embed"), ("cells", "adapt_batch"), ("confounded", "pca20"),
        ("confounded", "embed"),
    ]  # fmt: skip
    assert [row["fits"] for row in rows] == [1, 1, 2, 1, 1]
    assert len(capsys.readouterr().out.splitlines()) == 5
    embedding.main(call)
    assert capsys.readouterr().out == ""
