"""The arms that embeddings are compared with: each is what it is said to be."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp


@pytest.fixture
def rivals(script):
    return script("_rivals")


def cells(seed=0, n_obs=120, n_vars=160, depth=400) -> ad.AnnData:
    """Counts of three types of cells."""
    rng = np.random.default_rng(seed)
    types = np.arange(n_obs) % 3
    profiles = rng.gamma(0.4, size=(3, n_vars)) + 1e-3
    mean = depth * profiles[types] / profiles[types].sum(axis=1, keepdims=True)
    adata = ad.AnnData(sp.csr_matrix(rng.poisson(mean).astype(np.float32)))
    adata.obs["cell_type"] = pd.Categorical([f"type {kind}" for kind in types])
    return adata


def test_pca_of_the_cells_it_was_fitted_on_is_that_of_scanpy(rivals):
    adata = cells()
    before = adata.X.copy()
    found = rivals.fit_pca(adata)(adata)
    work = adata.copy()
    sc.pp.normalize_total(work, target_sum=1e4)
    sc.pp.log1p(work)
    sc.pp.highly_variable_genes(work, n_top_genes=160)
    work = work[:, work.var["highly_variable"]].copy()
    work.X = work.X.toarray()
    sc.pp.scale(work, max_value=10)
    sc.pp.pca(work, n_comps=50)
    np.testing.assert_allclose(found, work.obsm["X_pca"], atol=1e-3)
    assert (before != adata.X).nnz == 0
