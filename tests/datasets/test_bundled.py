"""Cells of PBMC 3k that are part of the package."""

from __future__ import annotations

import anndata as ad
import numpy as np

from scdiva import datasets

SIZES = {
    "B": 86, "CD14+ Mono": 120, "CD8 T": 67, "DC": 32, "FCGR3A+ Mono": 50, "Memory CD4 T": 120, "NK": 50,
    "Naive CD4 T": 174, "Platelet": 14,
}  # fmt: skip
MARKERS = {"B": "MS4A1", "CD14+ Mono": "LYZ", "NK": "GNLY", "Platelet": "PPBP", "DC": "FCER1A", "CD8 T": "CD8A"}


def test_real_cells_have_counts_types_and_markers(tmp_path):
    adata = datasets.pbmc3k_small()
    assert adata.shape == (713, 32738)
    assert adata.X.format == "csr"
    assert adata.X.has_sorted_indices
    assert adata.X.dtype == np.float32
    assert (adata.X.data == np.rint(adata.X.data)).all()
    assert adata.X.data.min() == 1
    assert adata.var_names.is_unique
    assert adata.obs_names.is_unique
    assert adata.obs["cell_type"].value_counts().to_dict() == SIZES
    share = adata.X.multiply(1 / adata.X.sum(axis=1)).tocsr()
    for cell_type, gene in MARKERS.items():
        of_gene = np.asarray(share[:, adata.var_names.get_loc(gene)].todense()).ravel()
        assert adata.obs["cell_type"].iloc[of_gene.argsort()[-10:]].value_counts().index[0] == cell_type
    assert "10x Genomics" in adata.uns["source"]
    assert "CC BY 4.0" in adata.uns["license"]
    adata.write_h5ad(tmp_path / "cells.h5ad")
    assert (ad.read_h5ad(tmp_path / "cells.h5ad").X != adata.X).nnz == 0
