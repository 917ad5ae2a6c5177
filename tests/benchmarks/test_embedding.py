"""The benchmark of embeddings scores what it says, and scores an unchanged embedding once."""

from __future__ import annotations

import json
import sys

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


def test_datasets_have_two_types_and_batches_that_types_share(script, folder):
    run = script("_run")
    assert run.labelled_datasets(folder) == ["cells", "confounded"]
    read = {name: run.read_dataset(folder, name, 120) for name in ("cells", "confounded")}
    assert [adata.n_obs for adata in read.values()] == [120, 120]
    assert {name: run.batch_column(adata) for name, adata in read.items()} == {"cells": "batch", "confounded": None}
    assert list(run.read_dataset(folder, "cells", 120).obs_names) == list(read["cells"].obs_names)


def test_scores_leave_out_cells_without_type_or_embedding(script):
    rng = np.random.default_rng(0)
    labels = np.repeat(["a", "b", ""], [60, 60, 20])
    embedding = rng.normal(size=(140, 4)) + 20 * (labels == "b")[:, None]
    embedding[0] = np.nan
    found = script("embedding").score(embedding, labels)
    assert found["n_cells"] == 119
    assert found["n_types"] == 2
    assert found["accuracy"] == found["nmi"] == found["ari"] == 1.0
    assert found["average_bio"] == pytest.approx((2 + found["asw"]) / 3, abs=1e-3)
    shuffled = script("embedding").score(embedding, rng.permutation(labels))
    assert shuffled["accuracy"] < 0.75
    assert shuffled["nmi"] < 0.2


def test_differences_are_paired_and_drawn_by_dataset(script):
    run, embedding = script("_run"), script("embedding")
    rows = [
        {"group": "benchmark", "set": name, "arm": arm, "accuracy": one, "average_bio": one}
        for arm, scores in (("pca20", (0.5, 0.9, 0.7)), ("adapt", (0.6, 1.0)))
        for name, one in zip("xyz", scores, strict=False)
    ]
    assert embedding.differences(rows, "benchmark", "adapt", "accuracy") == pytest.approx({"x": 0.1, "y": 0.1})
    assert run.bootstrap([0.1, 0.1]) == pytest.approx((0.1, 0.1))
    low, high = run.bootstrap([0.0] * 50 + [1.0] * 50)
    assert low == pytest.approx(0.4, abs=0.02)
    assert high == pytest.approx(0.6, abs=0.02)
    judged = {row["what"]: row for row in embedding.goals(rows)}
    assert judged["adapt: 15-NN accuracy less that of pca20"]["met"] is True


def test_an_unchanged_embedding_is_scored_once(script, folder, tmp_path, monkeypatch, capsys):
    record, embedding = script("_record"), script("embedding")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    call = ["embedding.py", "--data", str(folder), "--datasets", "cells", "--arms"]
    for arms, said in ((["pca20"], 0), (["pca20", "embed"], 1), (["embed"], 1)):
        monkeypatch.setattr(sys, "argv", [*call, *arms])
        embedding.main()
        assert capsys.readouterr().out.count("as before") == said
    rows = json.loads((tmp_path / "results" / "embedding.json").read_text())["rows"]
    assert [row["arm"] for row in rows if "arm" in row] == ["pca20", "embed"]
