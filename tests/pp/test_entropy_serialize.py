from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from scdiva import get
from scdiva.datasets import toy
from scdiva.pp import entropy_serialize, gene_entropy
from scdiva.tokenizer.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def human() -> Vocabulary:
    return Vocabulary.human()


@pytest.fixture(scope="module")
def vocabulary(human) -> Vocabulary:
    return human.with_entropy(np.round(np.random.default_rng(0).uniform(0, 2, human.n_genes), 1))


@pytest.fixture
def adata() -> ad.AnnData:
    return toy(40, 60)


def slow_ranks(counts, entropy, tokens, max_length):
    """Ranks of each gene, one cell after the other."""
    ranks = np.zeros(counts.shape, int)
    for i, cell in enumerate(counts):
        v = np.log1p(cell / cell.sum() * 1e4).astype(np.float32)
        score = v / (np.maximum(entropy.astype(np.float32), np.float32(0.3)) + np.float32(1e-6))
        order = [j for j in np.lexsort((tokens, -score)) if cell[j] > 0][:max_length]
        ranks[i, order] = np.arange(1, len(order) + 1)
    return ranks


@pytest.mark.parametrize("max_length", [1200, 49])
def test_ranks_equal_the_slow_way(adata, vocabulary, max_length):
    before = adata.copy()
    assert entropy_serialize(adata, vocabulary, max_length=max_length) is None
    ranks = adata.layers["scdiva_rank"]
    assert type(ranks) is sp.csr_matrix
    assert ranks.dtype == np.int32
    assert ranks.has_sorted_indices
    tokens = vocabulary.match(adata.var_names).tokens
    expected = slow_ranks(before.X.toarray(), vocabulary.entropy[tokens], tokens, max_length)
    np.testing.assert_array_equal(ranks.toarray(), expected)
    assert (adata.X != before.X).nnz == 0
    record = adata.uns["scdiva_rank"]
    assert record["kind"] == "counts"
    assert record["max_length"] == max_length
    assert record["n_truncated"] == ((before.X.toarray() > 0).sum(1) > max_length).sum()


def test_own_entropies(adata, human):
    uncounted = human.with_entropy(np.full(human.n_genes, np.nan))
    with pytest.raises(ValueError, match="holds no entropies"):
        entropy_serialize(adata, uncounted)
    gene_entropy(adata, human)
    entropy_serialize(adata, human, entropy_key="scdiva_entropy")
    tokens = human.match(adata.var_names).tokens
    expected = slow_ranks(adata.X.toarray(), adata.var["scdiva_entropy"].to_numpy(), tokens, 1200)
    np.testing.assert_array_equal(adata.layers["scdiva_rank"].toarray(), expected)
    assert adata.uns["scdiva_rank"]["entropy_key"] == "scdiva_entropy"
    with pytest.raises(KeyError, match=r"'entropy' .*'scdiva_entropy'.*call scdiva.pp.gene_entropy"):
        entropy_serialize(adata, human, entropy_key="entropy")
    adata.var.iloc[[4, 9], adata.var.columns.get_loc("scdiva_entropy")] = np.nan
    with pytest.raises(ValueError, match=rf"for 2 of 60 known genes \(first: '{adata.var_names[4]}'\)"):
        entropy_serialize(adata, human, entropy_key="scdiva_entropy")


def test_rank_of_summed_columns_stands_at_the_first(adata, vocabulary):
    names = [*adata.var_names, "NOGENE"]
    twice = ad.AnnData(sp.hstack([adata.X, adata.X[:, [3]], adata.X[:, [5]]]).tocsr(), adata.obs)
    twice.var_names = [*names, adata.var["ensembl_id"].iloc[3]]
    entropy_serialize(twice, vocabulary)
    ranks = twice.layers["scdiva_rank"].toarray()
    assert not ranks[:, 60:].any()
    assert twice.layers["scdiva_rank"].nnz < twice.X.nnz
    assert ((ranks[:, 3] > 0) == ((adata.X[:, [3]].toarray() + adata.X[:, [5]].toarray())[:, 0] > 0)).all()


def test_raw_layer_and_lognormalised(adata, vocabulary):
    expected = entropy_serialize(adata, vocabulary, copy=True).layers["scdiva_rank"]
    assert "scdiva_rank" not in adata.layers
    cells = ad.AnnData(np.zeros(adata.shape), adata.obs, adata.var, layers={"counts": adata.X})
    cells.raw = adata[:, ::-1]
    for reading in ({"layer": "counts"}, {"use_raw": True}):
        entropy_serialize(cells, vocabulary, **reading, key_added="a")
        assert (cells.layers["a"] != expected).nnz == 0
    with pytest.raises(ValueError, match=r"adata\.raw holds 30 .*raw\.to_adata"):
        entropy_serialize(cells[:, :30].copy(), vocabulary, use_raw=True)
    cells.var_names = [cells.var_names[0]] * 2 + list(cells.var_names[2:])
    with pytest.raises(ValueError, match=r"adata repeat.*adata\.var_names_make_unique"):
        entropy_serialize(cells, vocabulary, use_raw=True)
    adata.X = adata.X.multiply(1e4 / adata.X.sum(1)).tocsr().log1p()
    entropy_serialize(adata, vocabulary)
    assert adata.uns["scdiva_rank"]["kind"] == "lognorm"
    assert (adata.layers["scdiva_rank"] != expected).nnz < 0.05 * expected.nnz  # near-ties may swap


def test_empty_cells(adata, vocabulary):
    x = adata.X.toarray()
    x[7] = 0
    adata.X = x
    with pytest.raises(ValueError, match=rf"1 of 40 cells .*counts .*'{adata.obs_names[7]}'"):
        entropy_serialize(adata, vocabulary)
    assert "scdiva_rank" not in adata.layers
    assert "scdiva_rank" not in adata.uns
    entropy_serialize(adata, vocabulary, empty="nan")
    assert (np.diff(adata.layers["scdiva_rank"].indptr) == 0).nonzero()[0].tolist() == [7]
    with pytest.raises(ValueError, match="empty must be"):
        entropy_serialize(adata, vocabulary, empty="drop")
    with pytest.raises(ValueError, match="max_length must be"):
        entropy_serialize(adata, vocabulary, max_length=0)


def test_table_of_ranks(adata, vocabulary, tmp_path):
    with pytest.raises(KeyError, match=r"call scdiva\.pp\.entropy_serialize"):
        get.serialized_df(adata)
    entropy_serialize(adata, vocabulary)
    adata.write_h5ad(tmp_path / "a.h5ad")
    adata = ad.read_h5ad(tmp_path / "a.h5ad")
    table = get.serialized_df(adata)
    assert list(table.columns) == ["cell", "rank", "gene"]
    ranks = adata.layers["scdiva_rank"].toarray()
    assert len(table) == (ranks > 0).sum()
    at = adata.obs_names.get_indexer(table["cell"]), adata.var_names.get_indexer(table["gene"])
    np.testing.assert_array_equal(ranks[at], table["rank"])
    assert table.equals(table.assign(at=at[0]).sort_values(["at", "rank"]).drop(columns="at"))
    two = [adata.obs_names[9], adata.obs_names[2]]
    top_ranks = get.serialized_df(adata, cells=two, max_rank=3)
    assert top_ranks["cell"].tolist() == [two[0]] * 3 + [two[1]] * 3
    assert top_ranks["rank"].tolist() == [1, 2, 3] * 2
    assert get.serialized_df(adata, cells=two[0]).equals(table[table["cell"] == two[0]].reset_index(drop=True))
    with pytest.raises(KeyError, match=r"1 of 2 cells .*adata, .*'nobody'"):
        get.serialized_df(adata, cells=[two[0], "nobody"])
    with pytest.raises(ValueError, match=r"max_rank .*got 0"):
        get.serialized_df(adata, max_rank=0)
