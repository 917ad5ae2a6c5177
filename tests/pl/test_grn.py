from __future__ import annotations

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyArrowPatch
from scipy.spatial.distance import pdist

from scdiva.pl import grn
from scdiva.pl._network import DOWN, UP, _places


def lines(fig) -> LineCollection:
    (found,) = [c for c in fig.axes[0].collections if isinstance(c, LineCollection)]
    return found


def dots(fig):
    return next(c for c in fig.axes[0].collections if isinstance(c, PathCollection))


def heads(fig) -> list[FancyArrowPatch]:
    return [patch for patch in fig.axes[0].patches if isinstance(patch, FancyArrowPatch)]


def legend(fig) -> list[str]:
    return [text.get_text() for text in fig.axes[0].get_legend().get_texts()]


def test_looks_as_it_did(with_network, looks_as_it_did):
    adata, _ = with_network()
    looks_as_it_did(grn(adata, n_labels=12, return_fig=True), "grn")


def test_arrows_look_as_they_did(with_network, looks_as_it_did):
    adata, _ = with_network("attention")
    looks_as_it_did(grn(adata, n_edges=40, n_labels=10, return_fig=True), "grn_arrows")


@pytest.mark.parametrize("n_edges", [1, 20, 500])
def test_lines_are_the_strongest_pairs(with_network, n_edges):
    adata, weights = with_network()
    fig = grn(adata, n_edges=n_edges, n_labels=0, return_fig=True)
    size = np.abs(weights[np.triu_indices(len(weights), 1)])
    expected = np.sort(size[size > 0])[::-1][:n_edges]
    drawn = lines(fig)
    assert len(drawn.get_segments()) == len(expected)
    widths = np.sort(drawn.get_linewidths())[::-1]
    if len(expected) > 1:
        span = np.ptp(expected)
        np.testing.assert_allclose(widths, 0.5 + 2 * (expected - expected.min()) / span, rtol=1e-4)
    n = len(np.unique(np.concatenate(drawn.get_segments()), axis=0))
    assert len(dots(fig).get_offsets()) == n
    assert fig.axes[0].get_title() == f"Gene correlation: {len(expected)} strongest edges, {n} genes"


def test_lines_end_at_their_genes_and_have_the_colour_of_their_sign(with_network):
    adata, weights = with_network()
    fig = grn(adata, n_edges=500, n_labels=0, return_fig=True)
    place = np.asarray(dots(fig).get_offsets())  # of the genes with an edge, by name
    genes = np.flatnonzero((weights != 0).any(axis=0))
    genes = genes[np.argsort(adata.var_names[genes])]
    drawn = lines(fig)
    colours = drawn.get_colors()
    for ends, colour in zip(drawn.get_segments(), colours, strict=True):
        i, j = (genes[np.linalg.norm(place - end, axis=1).argmin()] for end in ends)
        weight = weights[i, j]
        assert weight != 0
        np.testing.assert_allclose(colour[:3], to_rgba(UP if weight > 0 else DOWN)[:3])
    assert (np.array(colours)[:, :3] == to_rgba(DOWN)[:3]).all(axis=1).sum() == 2
    area = dots(fig).get_sizes()
    strength = np.abs(weights).sum(axis=0)[genes]
    np.testing.assert_allclose((area / area.max() - 0.15) / 0.85, strength / strength.max(), rtol=1e-4)
    assert legend(fig)[-2:] == ["above 0", "below 0"]


def test_modules_are_apart_and_named(with_network):
    adata, weights = with_network()
    fig = grn(adata, n_edges=500, n_labels=0, return_fig=True)
    place = np.asarray(dots(fig).get_offsets())
    kind = adata.var["scdiva_grn_module"][(weights != 0).any(axis=0)].sort_index().to_numpy()
    colours = dots(fig).get_facecolors()
    middles = {}
    for name in "012":
        own = place[kind == name]
        assert len(np.unique(colours[kind == name], axis=0)) == 1
        middle = own.mean(axis=0)
        middles[name] = middle, np.linalg.norm(own - middle, axis=1).max()
    for a, b in ("01", "02", "12"):
        assert np.linalg.norm(middles[a][0] - middles[b][0]) > middles[a][1] + middles[b][1]
    assert legend(fig)[:4] == ["module (genes)", "0 (12)", "1 (8)", "2 (5)"]


@pytest.mark.parametrize("n", [2, 30, 150])
def test_genes_are_apart_and_placed_the_same_every_time(n):
    rng = np.random.default_rng(n)
    ends = rng.integers(n, size=(2 * n, 2))
    graph = nx.Graph([(f"G{a}", f"G{b}") for a, b in ends if a != b])
    code = pd.Series(rng.integers(-1, 3, graph.number_of_nodes()), sorted(graph))
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    for kind in (None, code):
        places = _places(graph, kind)
        assert set(places) == set(graph)
        assert pdist(np.array(list(places.values()))).min() > 0.05
        again = _places(graph, kind)
        assert all(np.array_equal(places[gene], again[gene]) for gene in places)
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # noqa: NPY002


def test_small_and_missing_modules_are_other(with_network):
    adata, _ = with_network()
    adata.var["group"] = [*"aaaaaaaaaaaa", *([None] * 14)]
    fig = grn(adata, modules="group", n_edges=500, return_fig=True)
    assert legend(fig)[:3] == ["module (genes)", "a (12)", "other (13)"]


def test_few_edges_with_a_direction_have_heads(with_network):
    adata, weights = with_network("attention", signed=False)
    fig = grn(adata, n_edges=60, return_fig=True)
    assert len(heads(fig)) == 60
    assert not any(isinstance(c, LineCollection) for c in fig.axes[0].collections)
    many = grn(adata, n_edges=61, return_fig=True)
    assert not heads(many)
    assert len(lines(many).get_segments()) == 61
    strongest = np.unravel_index(np.argmax(weights), weights.shape)
    one = grn(adata, n_edges=1, n_labels=2, return_fig=True)
    assert {text.get_text() for text in one.axes[0].texts} == {f"GENE{i}" for i in strongest}


def test_only_some_genes(with_network):
    adata, weights = with_network()
    chosen = ["GENE3", "GENE20", "GENE4", "GENE0"]
    fig = grn(adata, genes=chosen, modules=None, return_fig=True)
    columns = adata.var_names.get_indexer(chosen)
    n = (weights[np.ix_(columns, columns)] != 0).sum() // 2
    assert len(lines(fig).get_segments()) == n > 0
    with pytest.warns(UserWarning, match="1 of 3 genes .*'scdiva_grn' .*: TNF"):
        grn(adata, genes=["TNF", "GENE3", "GENE20"])


def test_what_cannot_be_drawn_is_refused(with_network, tmp_path):
    adata, _ = with_network()
    grouped, _ = with_network(groups=("T cell", "B cell"))
    for data, options, error, words in [
        (adata, {"key": "other"}, KeyError, r"no network 'other': call scdiva.tl.grn\(adata, ..., key_added='other'\)"),
        (adata, {"group": "T cell"}, KeyError, "is of all cells: leave group out"),
        (grouped, {}, KeyError, "must be one of those that 'scdiva_grn' has a network of: T cell, B cell"),
        (grouped, {"group": "NK"}, KeyError, "group='NK' must be one of"),
        (adata, {"genes": ["GENES", "TNF"]}, KeyError, r"none of 2 genes \(GENES, TNF\) is in the network"),
        (adata, {"genes": "GENE1"}, TypeError, "must be a list"),
        (adata, {"genes": ["lone", "GENE1"]}, ValueError, "no edge between the 2 genes asked for"),
        (adata, {"modules": "other"}, KeyError, r"call scdiva.tl.grn_modules\(adata, ..., key_added='other'\)"),
        (adata, {"n_edges": 0}, ValueError, "n_edges must be"),
        (adata, {"n_labels": -1}, ValueError, "n_labels must be"),
        (adata, {"gene_symbols": "name"}, KeyError, "has no column 'name'"),
        (adata, {"save": tmp_path / "picture"}, ValueError, "picture format"),
    ]:
        with pytest.raises(error, match=words):
            grn(data, **options)
    del adata.varp["scdiva_grn"]
    with pytest.raises(KeyError, match=r"adata\.varp .*'scdiva_grn'.*call scdiva.tl.grn"):
        grn(adata)
    assert plt.get_fignums() == []
