"""The arms that embeddings are compared with: each is what it is said to be."""

from __future__ import annotations

import numpy as np
import scanpy as sc

import scdiva as sd


def test_pca_of_the_cells_it_was_fitted_on_is_that_of_scanpy(script):
    adata = sd.datasets.toy(120, 160, n_types=3)
    found = script("_rivals").fit_pca(adata)(adata)
    work = adata.copy()
    sc.pp.normalize_total(work, target_sum=1e4)
    sc.pp.log1p(work)
    sc.pp.highly_variable_genes(work, n_top_genes=160)
    work = work[:, work.var["highly_variable"]].copy()
    work.X = work.X.toarray()
    sc.pp.scale(work, max_value=10)
    sc.pp.pca(work, n_comps=50)
    np.testing.assert_allclose(found, work.obsm["X_pca"], atol=1e-3)
