"""Which genes, cells and groups a network is made of, and what is refused before any is read."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

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


def rare(c):
    c.X = sp.csr_matrix(c.X.multiply((np.arange(60) != 3) | (np.arange(36)[:, None] == 5)))


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (None, {"min_fraction": float("nan")}, "min_fraction must be a share"),
        (None, {"groups": ["plain"]}, "groupby="),
        (None, {"reference": "rest"}, "groupby="),
        (None, {"groupby": "kind", "reference": "z"}, "first is 'z'; there are 'CD4"),
        (None, {"groupby": "kind", "groups": []}, "groups is empty"),
        (None, {"groupby": "kind", "groups": ["plain", "plain"]}, "groups holds 'plain' more than once"),
        (None, {"groupby": "kind", "groups": "plain", "reference": "plain"}, "no group but the reference"),
        (small_groups, {"groupby": "kind"}, "6 of 7 groups have fewer than 10.*'g30', 1.*groups="),
        (two_of_one_key, {"groupby": "kind"}, "two groups .*adata.varp.'scdiva_grn_a_b'"),
        (no_cells, {}, "9 cells: .*10"),
        (None, {"sources": ["SPI11", "SPI2"]}, "2 of 2 sources .*adata.*'SPI11'"),
        (None, {"targets": []}, "targets is empty"),
        (rare, {"sources": ["3"], "min_fraction": 0.05}, "1 of 1 sources.*fewer than 5.00%.*2.78%"),
        (None, {"min_fraction": 1.0, "sources": "tf"}, "no transcription factor.*at least 100"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(cells, infer, hashed, spoil, options, message):
    if spoil:
        spoil(cells)
        cells.X = sp.csr_matrix(cells.X)
    if options.get("sources") == ["3"]:
        options = options | {"sources": [cells.var_names[3]]}
    before = hashed(cells)
    with pytest.raises(ValueError, match=message):
        infer(cells, **options)
    assert hashed(cells) == before


def test_only_what_fits(cells, infer, hashed, monkeypatch):
    before = hashed(cells)
    monkeypatch.setattr("scdiva.networks.grn.MAX_BYTES", 55 * 55 * 8 * 2)
    with pytest.raises(ValueError, match="55 sources × 55 targets and 3 groups would take"):
        infer(cells, groupby="kind")
    assert hashed(cells) == before
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
