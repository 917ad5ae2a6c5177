"""The recipes run on counts in which one gene responds to the condition. `make recipes` runs all of them."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import numpy as np
import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "examples.py"))
RECIPES = SCRIPT["recipes"]()


def run(title, folder):
    if missing := SCRIPT["absent"](RECIPES[title]):
        pytest.skip(f"needs {missing[0]}")
    return SCRIPT["run_recipe"](RECIPES[title], folder)


def test_every_package_has_a_recipe_that_imports_what_it_uses():
    text = SCRIPT["RECIPES"].read_text(encoding="utf-8")
    for name in ("scib_metrics", "celltypist", "decoupler", "pertpy", "squidpy", "mudata", "pydeseq2"):
        assert any(f"import {name}" in code or f"from {name}" in code for code in RECIPES.values())
    assert len(re.findall(r"^% not run\n```\w+\n", text, flags=re.M)) == text.count("% not run") == 5
    assert not any("rapids" in code or "push(" in code for code in RECIPES.values())


def test_absent_packages_are_named():
    assert SCRIPT["absent"]("import numpy\nfrom no_such_package.part import thing\n") == ["no_such_package"]


def test_pseudobulk_finds_the_gene_that_responds(tmp_path):
    names = run("Differential expression", tmp_path)
    genes = names["genes"]
    assert genes.index[0] == names["adata"].var_names[0]
    assert genes["padj"].iloc[0] < 0.01
    assert genes["log2FoldChange"].iloc[0] > 0


def test_corrected_expression_has_a_standard_deviation(tmp_path):
    assert (run("Expression in a common batch", tmp_path)["spread"] > 0).all(axis=None)


@pytest.mark.parametrize("title", ["Doublets", "Save, load and share models", "MuData"])
def test_cells_are_embedded(title, tmp_path):
    names = run(title, tmp_path)
    adata = names.get("singlets", names["adata"])
    assert np.isfinite(adata.obsm["X_scdiva"]).all()


def test_an_embedding_is_a_reduction_of_seurat(tmp_path):
    assert np.isfinite(run("Seurat", tmp_path)["adata"].obsm["X_scdiva"]).all()
    if not SCRIPT["has_seurat"]():
        pytest.skip("needs Seurat")
    code = 'load("r"); stopifnot(all(dim(Embeddings(object, "scdiva")) == c(240, 192)), "umap" %in% Reductions(object))'
    subprocess.run(["Rscript", "-e", f"suppressMessages(library(Seurat)); {code}"], cwd=tmp_path, check=True)


def test_a_file_of_the_portal_is_integrated(tmp_path):
    portal = run("CELLxGENE", tmp_path)["portal"]
    assert portal.var_names.str.startswith("ENSG").all()
    assert np.isfinite(portal.obsm["X_scdiva_integrated"]).all()


def test_predicted_perturbations_are_scored_by_cell_eval(tmp_path):
    scores = run("Scores of predicted perturbations", tmp_path)["scores"]
    assert set(scores["perturbation"]) == {"KLF1+SET", "GATA1+SET"}
