"""Which genes, cells and groups a network is made of, and what is refused before any is read."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.data.cells import open_cells
from scdiva.networks.grn import expressed_fraction
from scdiva.tokenizer.vocabulary import Vocabulary


@pytest.fixture
def cells(grouped):
    return grouped


def no_cells(c):
    c._inplace_subset_obs(np.arange(9))


def two_of_one_key(c):
    c.obs["kind"] = np.array(["a/b", "a_b"])[np.arange(36) % 2]


def small_groups(c):
    c.obs["kind"] = np.where(np.arange(36) < 30, "most", [f"g{i}" for i in range(36)])


def unlabelled(c):
    c.obs["kind"] = c.obs["kind"].where(np.arange(36) > 1)


def rare(c):
    c.X = sp.csr_matrix(c.X.multiply((np.arange(60) != 3) | (np.arange(36)[:, None] == 5)))


def scaled(c):
    c.X = c.X.toarray() - 1.0


@pytest.mark.parametrize(
    ("spoil", "options", "kind", "said"),
    [
        (None, {"method": "pearson"}, ValueError, "method .*'embedding', 'attention'.*got 'pearson'"),
        (None, {"n_targets": 0}, ValueError, "n_targets must be at least 1, got 0"),
        (None, {"n_targets": 2.5}, TypeError, "n_targets must be a whole number"),
        (None, {"min_fraction": 1.5}, ValueError, "min_fraction .*got 1.5"),
        (None, {"min_fraction": float("nan")}, ValueError, "min_fraction must be a share"),
        (None, {"groupby": "kinds"}, KeyError, "column 'kinds' .*'kind'"),
        (None, {"groups": ["plain"]}, ValueError, "groupby="),
        (None, {"reference": "rest"}, ValueError, "groupby="),
        (None, {"groupby": "kind", "groups": ["plain", "z"]}, ValueError, "1 of 2 groups.*is 'z'; there are 'CD4"),
        (None, {"groupby": "kind", "reference": "z"}, ValueError, "first is 'z'"),
        (None, {"groupby": "kind", "groups": []}, ValueError, "groups names no group"),
        (None, {"groupby": "kind", "groups": ["plain", "plain"]}, ValueError, "groups holds 'plain' more than once"),
        (None, {"groupby": "kind", "groups": "plain", "reference": "plain"}, ValueError, "no group but the reference"),
        (unlabelled, {"groupby": "kind"}, ValueError, "missing for 2 of 36 cells"),
        (small_groups, {"groupby": "kind"}, ValueError, "6 of 7 groups have fewer than 10.*'g30', 1.*groups="),
        (two_of_one_key, {"groupby": "kind"}, ValueError, "two groups .*adata.varp.'scdiva_grn_a_b'"),
        (no_cells, {}, ValueError, "9 cells: .*10"),
        (None, {"sources": ["SPI11", "SPI2"]}, ValueError, "2 of 2 sources .*adata.*'SPI11'"),
        (None, {"targets": []}, ValueError, "targets names no gene"),
        (rare, {"sources": ["3"], "min_fraction": 0.05}, ValueError, "1 of 1 sources.*fewer than 5.00%.*2.78%"),
        (None, {"min_fraction": 1.0, "sources": "tf"}, ValueError, "no transcription factor.*at least 100"),
        (scaled, {}, ValueError, "negative"),
        (None, {"layer": "counts"}, KeyError, "counts"),
        (lambda c: c.uns.__setitem__("scdiva", 3), {}, ValueError, "keeps a dictionary"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_and_changes_nothing(cells, infer, contents, spoil, options, kind, said):
    if spoil:
        spoil(cells)
        cells.X = sp.csr_matrix(cells.X)
    if options.get("sources") == ["3"]:
        options = options | {"sources": [cells.var_names[3]]}
    before = contents(cells)
    with pytest.raises(kind, match=said):
        infer(cells, **options)
    assert contents(cells) == before


def test_only_adata_and_only_what_fits(cells, infer, contents, monkeypatch, tmp_path):
    with pytest.raises(TypeError, match="expected an AnnData object"):
        sd.tl.grn("cells.h5ad")
    cells.write_h5ad(tmp_path / "a.h5ad")
    backed = ad.read_h5ad(tmp_path / "a.h5ad", backed="r")
    with pytest.raises(ValueError, match="backed by a file"):
        infer(backed, copy=True)
    backed.file.close()
    before = contents(cells)
    monkeypatch.setattr("scdiva.networks.grn.MAX_BYTES", 55 * 55 * 8 * 2)
    with pytest.raises(ValueError, match="55 sources × 55 targets and 3 groups would take"):
        infer(cells, groupby="kind")
    assert contents(cells) == before
    infer(cells, groupby="kind", groups=["plain", "β δ"])
    assert len(cells.varp) == 2


def test_a_gene_that_no_corpus_saw_has_no_part(cells, infer, build, edges):
    model = build(anchor="encoder")
    table = model.vocabulary.table.copy()
    name = table["symbol"].iloc[4]
    table.loc[table.index[4], "entropy"] = np.nan
    model.vocabulary = Vocabulary(table)
    infer(cells, model=model)
    at = list(cells.var_names).index(name)
    assert np.isnan(edges(cells)[at]).all()
    assert np.isnan(edges(cells)[:, at]).all()
    assert len(cells.uns["scdiva"]["scdiva_grn"]["sources"]) == 54
    with pytest.raises(ValueError, match="that the model knows"):
        infer(cells, model=model, sources=name)


def test_genes_of_few_cells_take_part_if_some_group_expresses_them(cells, infer):
    """Where a gene is expressed in a share of the cells of one group, it is a gene of all networks of the call."""
    x = cells.X.toarray()
    plain = (cells.obs["kind"] == "plain").to_numpy()
    x[~plain, 3], x[plain, 3] = 0, np.arange(plain.sum()) % 2
    cells.X = x
    name = cells.var_names[3]
    infer(cells, min_fraction=0.4)
    infer(cells, min_fraction=0.4, groupby="kind", key_added="by")
    assert name not in cells.uns["scdiva"]["scdiva_grn"]["sources"]
    assert name in cells.uns["scdiva"]["by"]["sources"]
    assert cells.varp["by_plain"][3].nnz > 0
    assert cells.varp["by_CD4_CD8"][3].nnz == 0


def test_shares_are_counted_by_group(cells, vocabulary):
    source = open_cells(cells, vocabulary, ranked=False, empty="nan")
    group = np.arange(36) % 3 - 1
    found = expressed_fraction(source, group, 2)
    x, token = cells.X.toarray(), vocabulary.match(list(cells.var_names)).tokens
    for gene in np.flatnonzero(token >= 0):
        expected = [np.mean(x[group == number, gene] > 0) for number in (0, 1)]
        np.testing.assert_allclose(found[:, token[gene]], expected)
    assert (found[:, :N_SPECIAL] == 0).all()
