"""scdiva adds to AnnData objects and changes nothing of AnnData itself: they show themselves as anndata makes them."""

from __future__ import annotations

import inspect
import warnings

import anndata

import scdiva as sd


def functions_of(value):
    return [value.fget, value.fset, value.fdel] if isinstance(value, property) else [inspect.unwrap(value)]


def test_an_annotated_object_shows_itself_as_anndata_makes_it():
    before = dict(vars(anndata.AnnData))
    adata = sd.datasets.toy(60, 80, rng=3)
    adata.obs["batch"] = ["a", "b"] * 30
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # toy data are small and say so
        sd.pp.gene_entropy(adata)
        sd.tl.embed(adata)
        sd.tl.annotate(adata, "cell_type", adata.copy(), method="knn")
        sd.tl.integrate(adata, "batch", steps=2)
        sd.tl.grn(adata, method="correlation")
        made = sd.tl.generate(adata, 3)
    assert dict(vars(anndata.AnnData)) == before
    # nor did an import, before this test
    homes = {getattr(function, "__module__", None) or "" for v in before.values() for function in functions_of(v)}
    assert [home for home in homes if home.startswith("scdiva")] == []
    assert any(home.startswith("anndata") for home in homes)

    for one in (adata, made):
        parts = {name: dict(getattr(one, name)) for name in ("obsm", "varm", "layers", "varp")}
        plain = anndata.AnnData(one.X, one.obs, one.var, dict(one.uns), **parts)
        assert type(one) is anndata.AnnData
        assert repr(one) == repr(plain)
        assert "scdiva" in repr(one)
        assert not {"__repr__", "_repr_html_"} & set(vars(one))
        if hasattr(plain, "_repr_html_"):  # 0.12 has none
            assert type(one)._repr_html_ is type(plain)._repr_html_
            assert isinstance(one._repr_html_(), str)
