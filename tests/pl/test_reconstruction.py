"""Plots of reconstructions, and of what sets of genes have in common."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from scdiva.pl import _reconstruction, gene_overlap, reconstruction
from scdiva.pl._reconstruction import spearman_within

from .conftest import legend, sets_of, texts

KEY = "scdiva_reconstructed"


def points(ax) -> np.ndarray:
    """Points of a panel, shown ones and then hidden ones, without those of the legend."""
    return np.concatenate([np.asarray(dots.get_offsets()) for dots in ax.collections[:2]])


def by_loop(adata, key=KEY) -> dict[str, list]:
    """Genes that a cell and its reconstruction share, cell by cell: rank, reconstructed rank, values, hidden."""
    layer = {end: adata.layers[key + end].toarray() for end in ("", "_rank", "_true", "_true_rank", "_masked")}
    cells = []
    for i in range(adata.n_obs):
        shared = (layer["_rank"][i] > 0) & (layer["_true_rank"][i] > 0)
        cells.append([layer[end][i][shared] for end in ("_true_rank", "_rank", "_true", "", "_masked")])
    return dict(zip(("rank", "back", "true", "value", "masked"), zip(*cells, strict=True), strict=True))


def test_every_gene_of_both_is_a_point_at_its_rank_and_value(reconstruct):
    adata = reconstruct()
    axes = reconstruction(adata, return_fig=True).axes
    slow = by_loop(adata)
    hidden = slow["masked"]
    for ax, x, y in ((axes[0], "rank", "back"), (axes[1], "true", "value")):
        expected = np.column_stack([np.concatenate(slow[x]), np.concatenate(slow[y])])
        drawn = points(ax)
        np.testing.assert_allclose(drawn[np.lexsort(drawn.T)], expected[np.lexsort(expected.T)])
        assert len(ax.collections[1].get_offsets()) == np.concatenate(hidden).sum()
        assert ax.get_xlim() == ax.get_ylim()
        rho_all = np.mean([spearmanr(a, b)[0] for a, b in zip(slow[x], slow[y], strict=True)])
        rho_masked = np.mean([spearmanr(a[h], b[h])[0] for a, b, h in zip(slow[x], slow[y], hidden, strict=True)])
        assert ax.get_title().splitlines()[-1] == f"ρ {rho_all:.2f} (all), {rho_masked:.2f} (masked)"


def test_errors_are_those_of_the_masked_genes(reconstruct):
    adata = reconstruct()
    slow = by_loop(adata)
    ax = reconstruction(adata, return_fig=True).axes[2]
    error = np.concatenate([(b - a)[h] for a, b, h in zip(slow["true"], slow["value"], slow["masked"], strict=True)])
    recall = len(error) / adata.layers[KEY + "_masked"].sum()
    assert ax.get_title() == (
        f"RMSE {np.sqrt((error**2).mean()):.2f}, {len(error):,} values\n{recall:.0%} of masked genes recovered"
    )
    bars = ax.patches
    assert sum(bar.get_height() for bar in bars) == pytest.approx(1)
    reach = np.quantile(np.abs(error), 0.995)
    assert (bars[0].get_x(), bars[-1].get_x() + bars[-1].get_width()) == pytest.approx((-reach, reach), rel=1e-5)
    beyond = (error >= bars[-1].get_x()).mean()  # the outermost bar holds what lies beyond it
    assert 0 < bars[-1].get_height() == pytest.approx(beyond)


def test_where_nothing_was_masked_the_errors_of_all_genes_are_grey(reconstruct):
    adata = reconstruct(mask_ratio=0.0)
    fig = reconstruction(adata, return_fig=True)
    assert fig.axes[0].get_title() == "nothing masked\nρ 1.00 (all)"
    assert f"{adata.layers[KEY + '_true_rank'].nnz:,} values" in fig.axes[2].get_title()
    assert "recovered" not in fig.axes[2].get_title()
    assert fig.axes[2].patches[0].get_facecolor()[:3] == (0.5, 0.5, 0.5)
    assert legend(fig) == ["visible"]


def test_of_many_points_some_are_drawn_and_numbers_stay_those_of_all(reconstruct, monkeypatch):
    adata = reconstruct()
    full_figure = reconstruction(adata, return_fig=True)
    monkeypatch.setattr(_reconstruction, "_MOST_POINTS", 50)
    figs = [reconstruction(adata, return_fig=True) for _ in range(2)]
    drawn = [points(fig.axes[1]) for fig in figs]
    assert len(drawn[0]) == 50
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert set(map(tuple, drawn[0])) <= set(map(tuple, points(full_figure.axes[1])))
    assert [ax.get_title() for ax in figs[0].axes] == [ax.get_title() for ax in full_figure.axes]


def test_columns_stand_in_the_order_asked_for_and_else_in_the_papers(three):
    def titles(keys=None):
        fig = reconstruction(three, keys, return_fig=True)
        return [ax.get_title().rsplit("\n", 1)[0] for ax in fig.axes[: len(fig.axes) // 3]]

    none, one, many = "nothing masked\nnone", "30% masked, 1 step\none", "30% masked, 32 steps\nmany"
    assert titles() == [none, one, many]
    assert titles(["many", "none"]) == [many, none]
    assert titles("one") == ["30% masked, 1 step"]
    three.uns["scdiva"]["many"]["n_steps"] = 1
    assert titles() == [none, "30% masked, 1 step\nmany", one]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40))
def test_correlations_are_scipys_within_each_cell(rows):
    cell, x, y = np.array(rows).T
    values = []
    for i in np.unique(cell):
        in_cell = cell == i
        if in_cell.sum() >= 3 and np.ptp(x[in_cell]) and np.ptp(y[in_cell]):
            values.append(spearmanr(x[in_cell], y[in_cell])[0])
    correlation = spearman_within(x, y, cell)
    np.testing.assert_allclose(correlation, np.mean(values) if values else np.nan, atol=1e-12)
    np.testing.assert_allclose(spearman_within(np.exp(x), y + 7.0, cell), correlation, atol=1e-12)


# --- sets of genes ----------------------------------------------------------------------------------------------------
def overlaps(sets: dict[str, list[str]]) -> dict[tuple[bool, ...], int]:
    """Genes in all of some sets and in no other, by the definition."""
    sizes = {}
    for chosen in itertools.product([False, True], repeat=len(sets)):
        if any(chosen):
            inside = [set(genes) for genes, is_in in zip(sets.values(), chosen, strict=True) if is_in]
            outside = [set(genes) for genes, is_in in zip(sets.values(), chosen, strict=True) if not is_in]
            sizes[chosen] = len(set.intersection(*inside) - set().union(*outside))
    return {chosen: n for chosen, n in sizes.items() if n}


def columns(fig) -> list[tuple[int, tuple[bool, ...]]]:
    """Height of each column's bar, and which dots of it are dark, from above."""
    below, above = fig.axes[0].child_axes
    n = len(below.get_yticks())
    dark = [line.get_color() == "0.25" for line in below.lines]
    assert below.yaxis_inverted()
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in below.lines] == [
        (x, y) for x in range(len(above.patches)) for y in range(n)
    ]
    return [(round(bar.get_height()), tuple(dark[i * n : i * n + n])) for i, bar in enumerate(above.patches)]


@pytest.mark.parametrize("n", [2, 4])
def test_columns_are_the_overlaps_and_the_largest_comes_first(n):
    sets = sets_of(n)
    fig = gene_overlap(sets, return_fig=True)
    drawn = columns(fig)
    assert {dark: height for height, dark in drawn} == overlaps(sets)
    heights = [height for height, _ in drawn]
    assert heights == sorted(heights, reverse=True)
    names = texts(fig.axes[0].child_axes[0].get_yticklabels())
    assert names == [f"{name} ({len(genes)})" for name, genes in sets.items()]


def test_many_overlaps_are_cut_and_that_is_said():
    sets = sets_of(7)
    counts = sorted(overlaps(sets).values(), reverse=True)
    with pytest.warns(UserWarning, match=rf"{len(counts) - 40} of {len(counts)} overlaps, the smallest, are not drawn"):
        fig = gene_overlap(sets, return_fig=True)
    assert [height for height, _ in columns(fig)] == counts[:40]


def test_sets_that_share_nothing_are_drawn_with_a_warning():
    with pytest.warns(UserWarning, match="share a gene .*'ENSG1'.*'SPI1'"):
        gene_overlap({"a": ["ENSG1"], "b": ["SPI1", "TP53"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gene_overlap({"a": ["X"], "b": ["X", "Y"], "c": ["Z"]})
