from __future__ import annotations

import anndata as ad
import numpy as np
import pytest

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.tokenizer.vocabulary import Vocabulary


def test_static_embeddings_are_rows_of_the_table(adata, one, vocabulary):
    cells = adata.copy()
    sd.tl.embed(cells, one)
    embedding = cells.uns["scdiva"]["X_scdiva"]
    assert sd.tl.gene_embedding(cells, one) is None
    genes = cells.varm["X_scdiva"]
    assert (genes.shape, genes.dtype) == ((cells.n_vars, 16), np.float32)
    row = {symbol: i for i, symbol in enumerate(vocabulary.symbols)}
    table = one.embedding.gene.weight[N_SPECIAL:].detach().numpy()
    for name, vector in zip(cells.var_names, genes, strict=True):
        np.testing.assert_array_equal(vector, table[row[name]] if name in row else np.nan)
    assert 0 < np.isnan(genes[:, 0]).sum() < 10
    assert cells.uns["scdiva"]["X_scdiva"] is embedding  # that of the cells
    notes = cells.uns["scdiva"]["X_scdiva_genes"]
    assert notes["model"] == "ScDiVa"
    assert 0.8 < notes["share_counts"] < 1
    assert not {"precision", "pooling"} & set(notes)


def test_genes_are_found_by_name_and_never_by_position(adata, one, vocabulary):
    genes = sd.tl.gene_embedding(adata, one, copy=True).varm["X_scdiva"]
    order = np.random.default_rng(0).permutation(adata.n_vars)
    moved = adata[:, order].copy()
    moved.var["symbol"] = list(moved.var_names)
    moved.var_names = [f"row{i}" for i in range(moved.n_vars)]
    sd.pp.match_genes(moved, vocabulary, gene_ids="symbol")
    sd.tl.gene_embedding(moved, one)
    np.testing.assert_array_equal(moved.varm["X_scdiva"], genes[order])
    twice = ad.concat([adata, adata[:, :2]], axis=1, merge="first")
    ids = dict(zip(vocabulary.symbols, vocabulary.ensembl_ids, strict=True))
    twice.var_names = [*adata.var_names, *(ids.get(name, name) for name in adata.var_names[:2])]
    embedding = sd.tl.gene_embedding(twice, one, copy=True).varm["X_scdiva"]
    np.testing.assert_array_equal(embedding[-2:], embedding[:2])
    assert np.isfinite(embedding[:2]).all()


def test_raw_may_hold_other_genes(adata, one):
    genes = sd.tl.gene_embedding(adata, one, copy=True).varm["X_scdiva"]
    subset = adata[:, 5:30][:, ::-1].copy()
    subset.var_names = ["not there", *subset.var_names[1:]]
    subset.raw = adata
    sd.tl.gene_embedding(subset, one, use_raw=True)
    np.testing.assert_array_equal(subset.varm["X_scdiva"][1:], genes[5:30][::-1][1:])
    assert np.isnan(subset.varm["X_scdiva"][0]).all()


def test_a_gene_that_no_corpus_saw_has_no_embedding(adata, build, vocabulary):
    model = build(anchor="learned")
    table = vocabulary.table.copy()
    table.loc[table.index[4], "entropy"] = np.nan
    model.vocabulary = Vocabulary(table)
    genes = sd.tl.gene_embedding(adata, model, copy=True).varm["X_scdiva"]
    expected = sd.tl.gene_embedding(adata, build(anchor="learned"), copy=True).varm["X_scdiva"]
    without = np.isnan(genes).all(axis=1) & ~np.isnan(expected).all(axis=1)
    assert list(adata.var_names[without]) == [table["symbol"].iloc[4]]


def test_a_frame_holds_the_genes_that_have_an_embedding(adata, one):
    cells = adata.copy()
    with pytest.raises(KeyError, match=r"tl\.gene_embedding"):
        sd.get.gene_embedding_df(cells)
    sd.tl.gene_embedding(cells, one, key_added="mine")
    frame = sd.get.gene_embedding_df(cells, key="mine")
    embedded = ~np.isnan(cells.varm["mine"][:, 0])
    assert list(frame.index) == list(cells.var_names[embedded])
    np.testing.assert_array_equal(frame.to_numpy(), cells.varm["mine"][embedded])
