from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest

from scdiva.pl import attention


def drawn(fig) -> tuple[list[str], list[str], np.ndarray]:
    """Names of rows, of columns, and the fields, NaN where there is none."""
    axes = fig.axes[0]
    rows = [text.get_text() for text in axes.get_yticklabels()]
    columns = [text.get_text() for text in axes.get_xticklabels()]
    return rows, columns, np.ma.filled(axes.collections[0].get_array().astype(float), np.nan).reshape(len(rows), -1)


def bar(fig) -> str:
    return fig.axes[1].get_ylabel()


@pytest.mark.parametrize("reference", ["", "rest"])
def test_looks_as_it_did(with_network, looks_as_it_did, reference):
    if reference:
        adata, _ = with_network("attention", groups=("T cell",), reference=reference)
    else:
        adata, _ = with_network("attention", signed=False)
    fig = attention(adata, n_genes=18, return_fig=True)
    looks_as_it_did(fig, "attention_difference" if reference else "attention")


def test_fields_are_weights_of_sources_in_columns(with_network):
    adata, weights = with_network("attention", signed=False)
    fig = attention(adata, genes=list(adata.var_names), return_fig=True)
    rows, columns, fields = drawn(fig)
    assert rows == columns
    assert set(rows) == set(adata.var_names)
    at = adata.var_names.get_indexer(rows)
    expected = weights.T[np.ix_(at, at)]
    np.testing.assert_allclose(fields, np.where(expected == 0, np.nan, expected), rtol=1e-6)
    assert bar(fig) == "excess attention rank"
    assert (fig.axes[0].get_xlabel(), fig.axes[0].get_ylabel()) == ("source gene", "target gene")


def test_the_strongest_genes_are_drawn(with_network):
    adata, weights = with_network("attention", signed=False)
    rows, columns, _ = drawn(attention(adata, n_genes=7, gene_symbols="symbol", return_fig=True))
    strength = weights.sum(axis=0) + weights.sum(axis=1)
    assert set(rows) == {f"GENE{i}-s" for i in np.argsort(-strength)[:7]}
    assert rows == columns


def test_sources_and_targets_may_differ(with_network):
    factors = ["GENE1", "GENE5", "GENE13", "GENE21"]
    adata, weights = with_network("attention", signed=False, sources=factors)
    fig = attention(adata, n_genes=10, return_fig=True)
    rows, columns, fields = drawn(fig)
    assert set(columns) == set(factors)
    strength = weights.sum(axis=0) + weights.sum(axis=1)
    assert set(rows) == {f"GENE{i}" for i in np.argsort(-strength, kind="stable")[:10]}
    i, j = (adata.var_names.get_indexer(names) for names in (rows, columns))
    np.testing.assert_allclose(np.nan_to_num(fields), weights[np.ix_(j, i)].T, rtol=1e-6)
    assert fig.axes[0].get_xlabel() == "source gene"
    rows, columns, _ = drawn(attention(adata, genes=["GENE2", "GENE5", "GENE1"], return_fig=True))
    assert (set(rows), set(columns)) == ({"GENE1", "GENE2", "GENE5"}, {"GENE1", "GENE5"})


def test_colours_of_signed_weights_are_white_at_0(with_network):
    for options, label in [
        ({}, "Pearson correlation"),
        ({"groups": ("T cell",), "reference": "rest"}, "difference of Pearson correlation\nT cell − rest"),
    ]:
        adata, _ = with_network(**options)
        fig = attention(adata, genes=list(adata.var_names), return_fig=True)
        low, high = fig.axes[0].collections[0].get_clim()
        assert low == -high < 0
        assert bar(fig) == label
    adata, weights = with_network("embedding", signed=False)
    low, _ = attention(adata, return_fig=True).axes[0].collections[0].get_clim()
    assert 0 < low < np.quantile(weights[weights > 0], 0.02)


def test_what_cannot_be_drawn_is_refused(with_network, tmp_path):
    adata, _ = with_network("attention", sources=["GENE1", "GENE2"])
    for options, error, words in [
        ({"key": "other"}, KeyError, "no network 'other': call scdiva.tl.grn"),
        ({"genes": ["TNF"]}, KeyError, r"none of 1 genes \(TNF\) is in the network 'scdiva_grn' of 26"),
        ({"genes": ["GENE7", "GENE8"]}, ValueError, "genes hold 0 sources and 2 targets"),
        ({"genes": ["GENE1", "GENE20"]}, ValueError, "no weight between these genes is kept: call scdiva.tl.grn"),
        ({"n_genes": 0}, ValueError, "n_genes must be"),
        ({"gene_symbols": "name"}, KeyError, "has no column 'name'"),
        ({"save": tmp_path / "picture"}, ValueError, "picture format"),
    ]:
        with pytest.raises(error, match=words):
            attention(adata, **options)
    assert plt.get_fignums() == []
