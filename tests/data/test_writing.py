from __future__ import annotations

import anndata as ad
import numpy as np
import pytest

import scdiva as sd


@pytest.fixture
def adata():
    cells = sd.datasets.toy(40, 60)
    cells.obsm["X_scdiva"] = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    return cells


CALLS = {
    "match_genes": lambda a, **k: sd.pp.match_genes(a, **k),
    "gene_entropy": lambda a, **k: sd.pp.gene_entropy(a, **k),
    "embed": lambda a, **k: sd.tl.embed(a, "no model is loaded for data that can't take the result", **k),
    "entropy_serialize": lambda a, **k: sd.pp.entropy_serialize(a, **k),
    "umap": lambda a, **k: sd.pl.umap(a, **k),
}


@pytest.mark.parametrize("call", [name for name in CALLS if name != "entropy_serialize"])
@pytest.mark.parametrize("user_entry", ["a string", ["a"]])
def test_what_the_user_keeps_under_our_name_stays(adata, call, user_entry):
    adata.uns["scdiva"] = user_entry
    before = (list(adata.obsm), list(adata.var), list(adata.uns))
    with pytest.raises(ValueError, match=r"adata.uns\['scdiva'\].*adata.uns.pop"):
        CALLS[call](adata)
    assert (list(adata.obsm), list(adata.var), list(adata.uns)) == before
    assert adata.uns["scdiva"] == user_entry


@pytest.mark.parametrize("call", CALLS)
def test_a_backed_view_is_refused_before_anything_is_computed(adata, call, tmp_path):
    adata.write_h5ad(tmp_path / "a.h5ad")
    backed = ad.read_h5ad(tmp_path / "a.h5ad", backed="r")
    try:
        with pytest.raises(ValueError, match=r"backed by a file.*adata\.to_memory"):
            CALLS[call](backed[:20])
        if call != "umap":
            with pytest.raises(ValueError, match=r"copy=True.*adata\.to_memory"):
                CALLS[call](backed, copy=True)
    finally:
        backed.file.close()
