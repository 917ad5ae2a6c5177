from __future__ import annotations

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
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


def test_a_weight_of_0_that_is_kept_is_no_gap(with_network):
    adata, _ = with_network("attention", groups=("T cell",), reference="rest")
    stored = adata.varp["scdiva_grn_T cell"].copy()
    kept = stored.nnz
    stored.data[:5] = 0
    adata.varp["scdiva_grn_T cell"] = stored
    _, _, fields = drawn(attention(adata, genes=list(adata.var_names), return_fig=True))
    assert (np.isfinite(fields).sum(), (fields == 0).sum()) == (kept, 5)
    assert adata.varp["scdiva_grn_T cell"].nnz == kept


def test_genes_that_are_alike_stand_together(with_network):
    adata, _ = with_network("attention", signed=False)
    rows, _, _ = drawn(attention(adata, genes=list(adata.var_names[:25]), return_fig=True))
    kinds = adata.var["scdiva_grn_module"][rows].to_numpy()
    assert (kinds[1:] != kinds[:-1]).sum() == 2


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


def test_names_do_not_touch(with_network):
    adata, _ = with_network("attention", signed=False)
    fig = attention(adata, return_fig=True)
    fig.canvas.draw()
    for labels in (fig.axes[0].get_xticklabels(), fig.axes[0].get_yticklabels()):
        boxes = [label.get_window_extent() for label in labels]
        assert not any(a.overlaps(b) for a, b in pairwise(boxes))


def test_the_users_axes_are_drawn_on(with_network, tmp_path):
    adata, _ = with_network("attention", signed=False)
    _, (left, right) = plt.subplots(1, 2, figsize=(12, 6))
    assert attention(adata, n_genes=9, ax=right, save=tmp_path / "a.png") is None
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert right.collections
    assert not left.collections


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_genes_are_drawn(with_network, n):
    adata, weights = with_network("attention", signed=False)
    pairs = np.argwhere(weights > 0)
    genes = list(dict.fromkeys(adata.var_names[pairs.ravel()]))[: max(n, 2)]
    rows, _, _ = drawn(attention(adata, genes=genes, return_fig=True))
    assert len(rows) == max(n, 2)


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


@pytest.mark.parametrize(
    ("layers", "heads", "title"),
    [
        ([3], [0, 1, 2], "Attention, layer 3, heads 0–2"),
        ([0, 2, 3, 7], [], "Attention, layers 0, 2–3, 7, all heads"),
        ([], [], "Attention, all layers, all heads"),
    ],
)
def test_the_title_names_layers_and_heads(with_network, layers, heads, title):
    adata, _ = with_network("attention", signed=False)
    adata.uns["scdiva"]["scdiva_grn"] |= {"layers": np.array(layers, int), "heads": np.array(heads, int)}
    assert attention(adata, return_fig=True).axes[0].get_title() == title


def test_from_the_call_to_the_picture():
    """Two heads of one layer of the bundled model, and what is drawn of each."""
    import scdiva as sd

    adata = sd.datasets.toy(48, 60)
    shown = []
    for head in (0, 3):
        sd.tl.grn(
            adata, "attention", layers=1, heads=head, groupby="cell_type", n_targets=None, key_added=f"head{head}"
        )
        fig = attention(adata, key=f"head{head}", group="type A", genes=list(adata.var_names[:12]), return_fig=True)
        assert fig.axes[0].get_title() == f"Attention, layer 1, head {head}, type A"
        rows, columns, fields = drawn(fig)
        at = pd.DataFrame(fields, rows, columns)
        table = sd.get.grn_df(adata, key=f"head{head}", group="type A", sources=columns, targets=rows)
        assert len(table) == np.isfinite(fields).sum() > 50
        for source, target, weight in zip(table["source"], table["target"], table["weight"], strict=True):
            assert at.loc[target, source] == pytest.approx(weight, rel=1e-5)
        shown.append(at.loc[sorted(rows), sorted(columns)].to_numpy())
    assert np.nanmax(np.abs(shown[0] - shown[1])) > 1e-3
