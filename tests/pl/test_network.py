"""Plots of gene networks: the graph, the matrix of weights, and the targets of a factor."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyArrowPatch
from scipy.spatial.distance import pdist

from scdiva.pl import attention, grn, regulon
from scdiva.pl._network import DOWN, UP, _positions

from .conftest import heatmap, legend, texts


def parts(fig) -> tuple[list, PathCollection, int]:
    """Lines (one collection, or none), dots, and the number of arrows."""
    axes = fig.axes[0]
    lines = [c for c in axes.collections if isinstance(c, LineCollection)]
    genes = next(c for c in axes.collections if isinstance(c, PathCollection))
    return lines, genes, sum(isinstance(patch, FancyArrowPatch) for patch in axes.patches)


@pytest.mark.parametrize("n_edges", [1, 20, 500])
def test_lines_are_the_strongest_pairs(with_network, n_edges):
    adata, weights = with_network()
    (lines,), genes, _ = parts(grn(adata, n_edges=n_edges, n_labels=0, return_fig=True))
    size = np.abs(weights[np.triu_indices(len(weights), 1)])
    expected = np.sort(size[size > 0])[::-1][:n_edges]
    assert len(lines.get_segments()) == len(expected)
    if len(expected) > 1:
        widths, span = np.sort(lines.get_linewidths())[::-1], np.ptp(expected)
        np.testing.assert_allclose(widths, 0.5 + 2 * (expected - expected.min()) / span, rtol=1e-4)
    assert len(genes.get_offsets()) == len(np.unique(np.concatenate(lines.get_segments()), axis=0))


def test_lines_end_at_their_genes_and_have_the_colour_of_their_sign(with_network):
    adata, weights = with_network()
    fig = grn(adata, n_edges=500, n_labels=0, return_fig=True)
    (lines,), dots, _ = parts(fig)
    positions = np.asarray(dots.get_offsets())  # of the genes with an edge, by name
    genes = np.flatnonzero((weights != 0).any(axis=0))
    genes = genes[np.argsort(adata.var_names[genes])]
    colours = lines.get_colors()
    for ends, colour in zip(lines.get_segments(), colours, strict=True):
        i, j = (genes[np.linalg.norm(positions - end, axis=1).argmin()] for end in ends)
        assert weights[i, j] != 0
        np.testing.assert_allclose(colour[:3], to_rgba(UP if weights[i, j] > 0 else DOWN)[:3])
    assert (np.array(colours)[:, :3] == to_rgba(DOWN)[:3]).all(axis=1).sum() == 2
    area = dots.get_sizes()
    strength = np.abs(weights).sum(axis=0)[genes]
    np.testing.assert_allclose((area / area.max() - 0.15) / 0.85, strength / strength.max(), rtol=1e-4)
    assert legend(fig)[-2:] == ["above 0", "below 0"]


def test_modules_are_apart_and_named(with_network):
    adata, weights = with_network()
    fig = grn(adata, n_edges=500, n_labels=0, return_fig=True)
    dots = parts(fig)[1]
    kind = adata.var["scdiva_grn_module"][(weights != 0).any(axis=0)].sort_index().to_numpy()
    middles = {}
    for name in "012":
        members = np.asarray(dots.get_offsets())[kind == name]
        assert len(np.unique(dots.get_facecolors()[kind == name], axis=0)) == 1
        middles[name] = members.mean(axis=0), np.linalg.norm(members - members.mean(axis=0), axis=1).max()
    for a, b in ("01", "02", "12"):
        assert np.linalg.norm(middles[a][0] - middles[b][0]) > middles[a][1] + middles[b][1]
    assert legend(fig)[:4] == ["module (genes)", "0 (12)", "1 (8)", "2 (5)"]
    adata.var["group"] = [*"aaaaaaaaaaaa", *([None] * 14)]
    fig = grn(adata, modules="group", n_edges=500, return_fig=True)
    assert legend(fig)[:3] == ["module (genes)", "a (12)", "other (13)"]


@pytest.mark.parametrize("n", [2, 30, 150])
def test_genes_are_apart_and_placed_the_same_every_time(n):
    rng = np.random.default_rng(n)
    ends = rng.integers(n, size=(2 * n, 2))
    graph = nx.Graph([(f"G{a}", f"G{b}") for a, b in ends if a != b])
    code = pd.Series(rng.integers(-1, 3, graph.number_of_nodes()), sorted(graph))
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    for kind in (None, code):
        positions = _positions(graph, kind)
        assert set(positions) == set(graph)
        assert pdist(np.array(list(positions.values()))).min() > 0.05
        again = _positions(graph, kind)
        assert all(np.array_equal(positions[gene], again[gene]) for gene in positions)
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # noqa: NPY002


def test_few_edges_with_a_direction_have_heads(with_network):
    adata, weights = with_network("attention", signed=False)
    lines, _, n_heads = parts(grn(adata, n_edges=60, return_fig=True))
    assert (lines, n_heads) == ([], 60)
    (lines,), _, n_heads = parts(grn(adata, n_edges=61, return_fig=True))
    assert (len(lines.get_segments()), n_heads) == (61, 0)
    strongest = np.unravel_index(np.argmax(weights), weights.shape)
    one = grn(adata, n_edges=1, n_labels=2, return_fig=True)
    assert {*texts(one.axes[0].texts)} == {f"GENE{i}" for i in strongest}


def test_only_some_genes(with_network):
    adata, weights = with_network()
    chosen = ["GENE3", "GENE20", "GENE4", "GENE0"]
    (lines,), *_ = parts(grn(adata, genes=chosen, modules=None, return_fig=True))
    columns = adata.var_names.get_indexer(chosen)
    assert len(lines.get_segments()) == (weights[np.ix_(columns, columns)] != 0).sum() // 2 > 0
    with pytest.warns(UserWarning, match="1 of 3 genes .*'scdiva_grn' .*: TNF"):
        grn(adata, genes=["TNF", "GENE3", "GENE20"])


def test_the_network_of_one_group_is_drawn(with_network):
    adata, _ = with_network(groups=("T cell", "B cell"))
    assert grn(adata, group="B cell", return_fig=True) is not None
    for group in (None, "NK"):
        with pytest.raises(KeyError, match="must be one of those that 'scdiva_grn' has a network of: T cell, B cell"):
            grn(adata, group=group)


# --- the matrix -------------------------------------------------------------------------------------------------------
def test_fields_are_weights_of_sources_in_columns(with_network):
    adata, weights = with_network("attention", signed=False)
    fig = attention(adata, genes=list(adata.var_names), return_fig=True)
    rows, columns, fields = heatmap(fig)
    assert rows == columns
    assert set(rows) == set(adata.var_names)
    at = adata.var_names.get_indexer(rows)
    expected = weights.T[np.ix_(at, at)]
    np.testing.assert_allclose(fields, np.where(expected == 0, np.nan, expected), rtol=1e-6)
    assert fig.axes[1].get_ylabel() == "excess attention rank"
    rows, columns, _ = heatmap(attention(adata, n_genes=7, gene_symbols="symbol", return_fig=True))
    strength = weights.sum(axis=0) + weights.sum(axis=1)
    assert set(rows) == set(columns) == {f"GENE{i}-s" for i in np.argsort(-strength)[:7]}


def test_sources_and_targets_may_differ(with_network):
    factors = ["GENE1", "GENE5", "GENE13", "GENE21"]
    adata, weights = with_network("attention", signed=False, sources=factors)
    rows, columns, fields = heatmap(attention(adata, n_genes=10, return_fig=True))
    assert set(columns) == set(factors)
    strength = weights.sum(axis=0) + weights.sum(axis=1)
    assert set(rows) == {f"GENE{i}" for i in np.argsort(-strength, kind="stable")[:10]}
    i, j = (adata.var_names.get_indexer(names) for names in (rows, columns))
    np.testing.assert_allclose(np.nan_to_num(fields), weights[np.ix_(j, i)].T, rtol=1e-6)
    rows, columns, _ = heatmap(attention(adata, genes=["GENE2", "GENE5", "GENE1"], return_fig=True))
    assert (set(rows), set(columns)) == ({"GENE1", "GENE2", "GENE5"}, {"GENE1", "GENE5"})
    with pytest.raises(ValueError, match="genes hold 0 sources and 2 targets"):
        attention(adata, genes=["GENE7", "GENE8"])


def test_colours_of_signed_weights_are_white_at_0(with_network):
    for options, label in [
        ({}, "Pearson correlation"),
        ({"groups": ("T cell",), "reference": "rest"}, "difference of Pearson correlation\nT cell − rest"),
    ]:
        adata, _ = with_network(**options)
        fig = attention(adata, genes=list(adata.var_names), return_fig=True)
        low, high = fig.axes[0].collections[0].get_clim()
        assert low == -high < 0
        assert fig.axes[1].get_ylabel() == label
    adata, weights = with_network("embedding", signed=False)
    low, _ = attention(adata, return_fig=True).axes[0].collections[0].get_clim()
    assert 0 < low < np.quantile(weights[weights > 0], 0.02)


# --- the targets ------------------------------------------------------------------------------------------------------
def test_lines_are_the_weights_and_colours_their_signs(targets):
    axes = regulon(targets, n_targets=9, return_fig=True).axes[0]
    assert texts(axes.get_yticklabels()) == [f"TARGET{i}" for i in range(9)]
    lines, dots = axes.collections
    ends = np.array([segment[1] for segment in lines.get_segments()])
    np.testing.assert_allclose(ends, np.column_stack([targets["weight"].abs()[:9], np.arange(9)]))
    signs = [to_rgba(UP if sign > 0 else DOWN) for sign in targets["sign"][:9]]
    np.testing.assert_allclose(lines.get_colors(), signs)
    fills = [UP, "white", DOWN, "0.45", *["white"] * 5]
    np.testing.assert_allclose(dots.get_facecolors(), [to_rgba(fill) for fill in fills])
    assert (axes.yaxis_inverted(), axes.get_xlim()[0]) == (True, 0)
    bold = [text.get_text() for text in axes.get_yticklabels() if text.get_fontweight() == "bold"]
    assert bold == ["TARGET0", "TARGET2", "TARGET3"]
    assert axes.get_title() == "SPI1: 9 strongest targets, 3 known"
    plain = regulon(targets.drop(columns=["known", "sign"]), return_fig=True)
    assert legend(plain) == ["increases with the factor", "decreases with the factor"]


def test_one_of_several_factors(targets):
    regulons = pd.concat([targets, targets.assign(source="CEBPB", weight=1.0).head(3)])
    axes = regulon(regulons, "CEBPB", return_fig=True).axes[0]
    assert axes.get_title().startswith("CEBPB: 3 strongest targets")
