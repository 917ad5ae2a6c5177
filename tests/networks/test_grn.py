"""`tl.grn`: what it writes, what that depends on, and what it refuses; the methods have files of their own."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import scdiva as sd

METHODS = ("embedding", "attention", "correlation")
OF_THE_CALL = {
    "method", "model", "vocabulary", "groupby", "groups", "keys", "reference", "sources", "targets", "n_targets",
    "min_fraction", "layers", "heads", "cells", "signed", "seconds", "layer", "use_raw", "input", "gene_ids",
    "species", "duplicates", "empty", "share_genes", "share_counts",
}  # fmt: skip


@pytest.fixture
def cells(grouped):
    return grouped


def near(actual, expected, method):
    """Alike but for the order of sums and, for attention, ranks of keys that differ by a rounding."""
    np.testing.assert_allclose(actual, expected, atol=5e-3 if method == "attention" else 2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_writes_what_it_says_and_h5ad_holds_it(cells, infer, method, tmp_path):
    infer(cells, method)
    infer(cells, method, groupby="kind", groups=["plain", "CD4/CD8"], n_targets=7, key_added="by")
    assert set(cells.varp) == {"scdiva_grn", "by_plain", "by_CD4_CD8"}
    for graph in cells.varp.values():
        assert sp.issparse(graph)
        assert (graph.format, graph.dtype, graph.shape) == ("csr", np.float32, (60, 60))
        assert graph.nnz > 20
        assert np.isfinite(graph.data).all()
        assert (graph.data != 0).all()
        assert (graph.diagonal() == 0).all()
    record, grouped_record = cells.uns["scdiva"]["scdiva_grn"], cells.uns["scdiva"]["by"]
    assert set(record) == set(grouped_record) == OF_THE_CALL
    assert (list(record["groups"]), list(record["keys"]), record["groupby"]) == ([], ["scdiva_grn"], "")
    assert (list(grouped_record["groups"]), grouped_record["groupby"]) == (["plain", "CD4/CD8"], "kind")
    assert list(grouped_record["keys"]) == ["by_plain", "by_CD4_CD8"]
    assert (record["method"], record["model"], record["input"]) == (method, "ScDiVa", "counts")
    assert (record["n_targets"], grouped_record["n_targets"]) == (0, 7)
    assert record["cells"].tolist() == [36]
    assert grouped_record["cells"].tolist() == [(cells.obs["kind"] == kind).sum() for kind in ("plain", "CD4/CD8")]
    used = cells.varp["scdiva_grn"].tocoo()
    names = cells.var_names
    assert set(names[used.row]) <= set(record["sources"])
    assert set(names[used.col]) <= set(record["targets"])
    cells.write_h5ad(tmp_path / "a.h5ad")
    back = ad.read_h5ad(tmp_path / "a.h5ad")
    for options in ({}, {"key": "by", "group": "CD4/CD8"}, {"key": "by", "group": "plain", "top": 5}):
        pd.testing.assert_frame_equal(sd.get.grn_df(back, **options), sd.get.grn_df(cells, **options))


@pytest.mark.parametrize("method", METHODS)
def test_blocks_windows_and_workers_change_little_or_nothing(cells, infer, edges, method, monkeypatch):
    from scdiva.data.cells import open_cells

    infer(cells, method, groupby="kind", groups=["plain"], reference="CD4/CD8")
    expected = edges(cells, "scdiva_grn_plain")
    with sd.settings.override(threads=3):
        infer(cells, method, groupby="kind", groups=["plain"], reference="CD4/CD8", key_added="t")
    np.testing.assert_array_equal(edges(cells, "t_plain"), expected)
    monkeypatch.setattr("scdiva.data.batch.WINDOW", 10)
    monkeypatch.setitem(open_cells.__kwdefaults__, "block_rows", 5)
    monkeypatch.setattr("scdiva.networks.methods.HELD_TOKENS", 60)
    infer(cells, method, groupby="kind", groups=["plain"], reference="CD4/CD8", key_added="b")
    near(edges(cells, "b_plain"), expected, method)


@pytest.mark.parametrize("method", METHODS)
def test_of_each_source_the_strongest_are_kept(cells, infer, edges, method):
    infer(cells, method)
    infer(cells, method, n_targets=5, key_added="few")
    all_edges, top_edges = edges(cells), edges(cells, "few")
    for source in range(60):
        targets = np.flatnonzero(np.isfinite(top_edges[source]))
        np.testing.assert_array_equal(top_edges[source, targets], all_edges[source, targets])
        size = np.abs(all_edges[source]) if cells.uns["scdiva"]["few"]["signed"] else all_edges[source]
        assert len(targets) == min(5, np.isfinite(size).sum())
        assert not len(targets) or np.nanmax(np.delete(size, targets)) <= size[targets].min()


def test_of_equal_weights_the_first_columns_are_kept(cells, infer, edges):
    """Genes with the same counts have the same correlation with all others."""
    x = cells.X.toarray()
    x[:, 30:40] = x[:, [20]]
    cells.X = x
    infer(cells, n_targets=4)
    assert np.flatnonzero(np.isfinite(edges(cells)[35])).tolist() == [20, 30, 31, 32]


@pytest.mark.parametrize("method", METHODS)
def test_of_columns_of_one_gene_the_first_stands_for_it(cells, infer, edges, one, method):
    ids = dict(zip(one.vocabulary.symbols, one.vocabulary.ensembl_ids, strict=True))
    half = sp.csr_matrix(cells.X.multiply(np.where(np.arange(60) < 10, 0.5, 1.0)[None]))
    twice = ad.AnnData(
        sp.hstack([half, half[:, :10]]).tocsr().astype(np.float32),
        obs=cells.obs,
        var=pd.DataFrame(index=[*cells.var_names, *(ids[name] for name in cells.var_names[:10])]),
    )
    twice.X = twice.X * 2  # counts are whole
    cells.X = cells.X * 2
    sources = list(cells.var_names[[2, 12]])
    infer(cells, method, sources=np.array(sources))
    infer(twice, method, sources=[ids[sources[0]], sources[1]])
    weights = edges(twice)
    assert np.isnan(weights[60:]).all()
    assert np.isnan(weights[:, 60:]).all()
    near(weights[:60, :60], edges(cells), method)
    assert list(twice.uns["scdiva"]["scdiva_grn"]["sources"]) == sources


def test_transcription_factors_are_sources_on_request():
    """The bundled model, real cells."""
    import scanpy as sc

    cells = sc.datasets.pbmc68k_reduced()
    sd.tl.grn(cells, sources="tf", n_targets=50, use_raw=True)
    about = cells.uns["scdiva"]["scdiva_grn"]
    factors = set(sd.datasets.transcription_factors())
    assert set(about["sources"]) == factors & set(about["targets"])
    assert {"SPI1", "IRF8", "KLF6"} <= set(about["sources"])
    assert len(about["targets"]) > 600
    assert (np.diff(cells.varp["scdiva_grn"].indptr)[cells.var_names.isin(about["sources"])] == 50).all()
    assert about["model"] == "scdiva-mini"
    table = sd.get.grn_df(cells, sources=["SPI1"], top=20)
    assert {"CST3", "TYROBP", "LYZ", "FCER1G", "AIF1"} & set(table["target"])


@pytest.mark.parametrize("method", METHODS)
def test_cells_without_genes_have_no_part(cells, infer, one, edges, hashed, method):
    in_vocabulary = one.vocabulary.match(list(cells.var_names)).tokens >= 0
    without = np.arange(36) >= 34
    cells.X = sp.csr_matrix(cells.X.multiply(~without[:, None] | ~in_vocabulary))
    with pytest.raises(ValueError, match="2 of 36 cells"):
        infer(cells, method)
    infer(cells, method, empty="nan")
    nonempty = cells[~without].copy()
    infer(nonempty, method)
    near(edges(nonempty), edges(cells), method)
    assert nonempty.uns["scdiva"]["scdiva_grn"]["cells"] == cells.uns["scdiva"]["scdiva_grn"]["cells"] == [34]
    cells.obs["kind"] = np.where(np.arange(36) > 24, "few", "many")  # eleven, two of them empty
    before = hashed(cells)
    with pytest.raises(ValueError, match=r"1 of 2 groups .*10 cells .*'few', 9"):
        infer(cells, method, groupby="kind", empty="nan")
    assert hashed(cells) == before


def test_a_gene_that_only_raw_holds_is_said_to_be_there(cells, infer):
    data = cells.copy()
    data.raw = cells
    name, data = data.var_names[3], data[:, 5:].copy()
    with pytest.raises(ValueError, match=rf"'{name}', which adata.raw has.*adata\.raw\.to_adata") as error:
        infer(data, "correlation", sources=[name], use_raw=True)
    names = {"adata": data}
    exec(str(error.value).split("genes of adata: ")[1].split(", and")[0], names)
    infer(names["adata"], "correlation", sources=[name])
