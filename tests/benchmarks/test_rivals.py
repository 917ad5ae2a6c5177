"""The arms that embeddings are compared with: each is what it is said to be."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp

from scdiva.data.packed import pack_files
from scdiva.tokenizer import Vocabulary, load_vocabulary
from scdiva.train import LinearMap


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


def vocabulary_of(n_genes: int) -> Vocabulary:
    human = load_vocabulary("human")
    return human.subset(human.tokens[:n_genes])


def test_the_linear_map_is_applied_to_log_normalised_values(rivals):
    vocabulary = vocabulary_of(160)
    adata = cells()
    adata.var_names = list(vocabulary.symbols)
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(vocabulary.tokens.max() + 1, 4)).astype(np.float32)
    bias = rng.normal(size=4).astype(np.float32)
    found = rivals.project_on(LinearMap(weight, bias, np.zeros(4), np.zeros(len(weight)), 1.0), vocabulary)(adata)
    counts = adata.X.toarray()
    values = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found, values @ weight[vocabulary.tokens] + bias, rtol=1e-3, atol=1e-3)


def test_the_corpus_svd_is_kept_and_refused_beside_another_vocabulary(rivals, tmp_path, monkeypatch):
    assert rivals.corpus_svd(None) is None
    assert rivals.corpus_svd(tmp_path) is None
    monkeypatch.setattr(rivals, "SVD_DIMS", 3)
    vocabulary = vocabulary_of(160).with_entropy(np.full(160, 1.0, dtype=np.float32))
    files = []
    for study in range(2):
        adata = cells(study)
        adata.var_names = list(vocabulary.symbols)
        files.append(tmp_path / f"study{study}.h5ad")
        adata.write_h5ad(files[-1])
    pack_files(files, vocabulary, tmp_path / "train.h5", min_genes=1)
    vocabulary.write(tmp_path / "vocabulary.safetensors")
    first = rivals.corpus_svd(tmp_path)(adata)
    (tmp_path / "train.h5").write_bytes(b"no corpus any more")
    np.testing.assert_array_equal(rivals.corpus_svd(tmp_path)(adata), first)
    assert first.shape == (120, 3)
    vocabulary_of(150).with_entropy(np.full(150, 1.0, dtype=np.float32)).write(tmp_path / "vocabulary.safetensors")
    with pytest.raises(ValueError, match="another vocabulary"):
        rivals.corpus_svd(tmp_path)


def test_thinned_counts(script):
    sets = script("_sets")
    adata = cells(depth=4000)
    same = sets.thinned(adata, 1.0, 0)
    assert (same.X != adata.X).nnz == 0
    less = sets.thinned(adata, 0.1, 0)
    assert abs(less.X.sum() / adata.X.sum() - 0.1) < 0.005
    assert (less.X > adata.X).nnz == 0
    assert (less.X.data > 0).all()
    assert (sets.thinned(adata, 0.1, 0).X != less.X).nnz == 0
    assert (sets.thinned(adata, 0.1, 1).X != less.X).nnz > 0
    with pytest.raises(ValueError, match="share"):
        sets.thinned(adata, 0.0, 0)
    sc.pp.log1p(adata)
    with pytest.raises(ValueError, match="integer counts"):
        sets.thinned(adata, 0.5, 0)
