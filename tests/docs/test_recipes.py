"""The recipes run on counts in which one gene responds to the condition."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

import scdiva as sd

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)


@pytest.fixture
def adata():
    cells = sd.datasets.toy(240, 400, n_types=2, rng=0)
    cells.obs["donor"] = [f"d{i % 6}" for i in range(cells.n_obs)]
    cells.obs["condition"] = np.where(cells.obs["donor"].isin(["d0", "d1", "d2"]), "control", "stimulated")
    cells.X = cells.X.toarray()
    cells.X[cells.obs["condition"] == "stimulated", 0] += 30
    return cells


def run(blocks, names):
    with warnings.catch_warnings(), sd.settings.override(progress=False):
        warnings.simplefilter("ignore")  # toy data are small and say so
        for block in blocks:
            exec(compile(block, "recipes.md", "exec"), names)
    return names


def test_pseudobulk_finds_the_gene_that_responds(adata):
    for package in ("decoupler", "pydeseq2"):
        pytest.importorskip(package)
    found = run(BLOCKS[:1], {"adata": adata})["genes"]
    assert found.index[0] == adata.var_names[0]
    assert found["padj"].iloc[0] < 0.01
    assert found["log2FoldChange"].iloc[0] > 0


def test_corrected_expression_doublets_clusters_and_a_saved_model(adata, tmp_path, monkeypatch):
    pytest.importorskip("igraph")
    monkeypatch.chdir(tmp_path)
    blocks = [block.replace('integrate(adata, "donor")', 'integrate(adata, "donor", steps=5)') for block in BLOCKS[1:5]]
    names = run(blocks, {"adata": adata, "sd": sd})
    assert (names["spread"] > 0).all(axis=None)
    assert 0 < names["singlets"].n_obs <= adata.n_obs
    assert names["singlets"].obs["leiden"].nunique() >= 1
    assert np.isfinite(adata.obsm["X_scdiva"]).all()


def test_counts_from_seurat_are_embedded(folder):
    assert run(BLOCKS[5:6], {"sd": sd})["adata"].obsm["X_scdiva"].shape[0] == 60
    assert Path("scdiva.csv").exists()


def test_embeddings_are_scored_by_scib_metrics(adata):
    pytest.importorskip("scib_metrics")
    block = BLOCKS[6].replace('integrate(adata, "donor")', 'integrate(adata, "donor", steps=5)')
    assert {"X_scdiva", "X_scdiva_integrated"} <= set(run([block], {"adata": adata, "sd": sd})["table"].index)


def test_predicted_perturbations_are_scored_by_cell_eval(given, tmp_path, monkeypatch):
    pytest.importorskip("cell_eval")
    import scanpy as sc

    monkeypatch.chdir(tmp_path)
    names = run(BLOCKS[7:], {"screen": given()["screen"], "sd": sd, "sc": sc})
    assert set(names["scores"]["perturbation"]) == {"KLF1+SET", "GATA1+SET"}
