from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from scdiva.pl import _reconstruction, reconstruction
from scdiva.pl._reconstruction import spearman_within

KEY = "scdiva_reconstructed"


@pytest.fixture
def three(reconstruct):
    """The columns of the paper's figure, written in another order than they are drawn."""
    adata = reconstruct(key="many", n_steps=32, recall=0.8)
    reconstruct(adata, key="none", mask_ratio=0.0)
    return reconstruct(adata, key="one", n_steps=1)


def points(ax) -> np.ndarray:
    """Points of a panel, shown ones and then hidden ones, without those of the legend."""
    return np.concatenate([np.asarray(dots.get_offsets()) for dots in ax.collections[:2]])


def by_loop(adata, key=KEY) -> dict[str, list]:
    """Genes that a cell and its reconstruction share, cell by cell: rank, reconstructed rank, values, hidden."""
    layer = {end: adata.layers[key + end].toarray() for end in ("", "_rank", "_true", "_true_rank", "_masked")}
    cells = []
    for i in range(adata.n_obs):
        both = (layer["_rank"][i] > 0) & (layer["_true_rank"][i] > 0)
        cells.append([layer[end][i][both] for end in ("_true_rank", "_rank", "_true", "", "_masked")])
    return dict(zip(("rank", "back", "true", "value", "masked"), zip(*cells, strict=True), strict=True))


def test_looks_as_it_did(three, looks_as_it_did):
    looks_as_it_did(reconstruction(three, return_fig=True), "reconstruction")


def test_every_gene_of_both_is_a_point_at_its_rank_and_value(reconstruct):
    adata = reconstruct()
    before = adata.copy()
    axes = reconstruction(adata, return_fig=True).axes
    slow = by_loop(adata)
    for ax, (x, y) in zip(axes, (("rank", "back"), ("true", "value")), strict=False):
        expected = np.column_stack([np.concatenate(slow[x]), np.concatenate(slow[y])])
        found = points(ax)
        assert len(found) == len(expected)
        np.testing.assert_allclose(found[np.lexsort(found.T)], expected[np.lexsort(expected.T)])
        assert len(ax.collections[1].get_offsets()) == np.concatenate(slow["masked"]).sum()
        assert ax.get_xlim() == ax.get_ylim()
    assert list(adata.layers) == list(before.layers)
    assert adata.uns.keys() == before.uns.keys()


def test_corners_hold_correlations_errors_and_how_many_come_back(reconstruct):
    adata = reconstruct()
    slow = by_loop(adata)
    axes = reconstruction(adata, return_fig=True).axes
    hidden = slow["masked"]
    for ax, x, y in ((axes[0], "rank", "back"), (axes[1], "true", "value")):
        every = np.mean([spearmanr(a, b)[0] for a, b in zip(slow[x], slow[y], strict=True)])
        some = np.mean([spearmanr(a[h], b[h])[0] for a, b, h in zip(slow[x], slow[y], hidden, strict=True)])
        assert ax.get_title().splitlines()[-1] == f"ρ {every:.2f} (all), {some:.2f} (masked)"
    error = np.concatenate([(b - a)[h] for a, b, h in zip(slow["true"], slow["value"], hidden, strict=True)])
    recall = len(error) / adata.layers[KEY + "_masked"].sum()
    assert axes[2].get_title() == (
        f"RMSE {np.sqrt((error**2).mean()):.2f}, {len(error):,} values\n{recall:.0%} of masked genes recovered"
    )
    bars = axes[2].patches
    assert sum(bar.get_height() for bar in bars) == pytest.approx(1)
    reach = np.quantile(np.abs(error), 0.995)
    assert (bars[0].get_x(), bars[-1].get_x() + bars[-1].get_width()) == pytest.approx((-reach, reach), rel=1e-5)
    beyond = (error >= bars[-1].get_x()).mean()  # the outermost bar holds what lies beyond it
    assert 0 < bars[-1].get_height() == pytest.approx(beyond)


def test_where_nothing_was_masked_the_errors_of_all_genes_are_grey(reconstruct):
    adata = reconstruct(mask_ratio=0.0)
    axes = reconstruction(adata, return_fig=True).axes
    n = adata.layers[KEY + "_true_rank"].nnz
    assert axes[0].get_title() == "nothing masked\nρ 1.00 (all)"
    assert f"{n:,} values" in axes[2].get_title()
    assert "recovered" not in axes[2].get_title()
    assert axes[2].patches[0].get_facecolor()[:3] == (0.5, 0.5, 0.5)
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["visible"]


def test_of_many_points_some_are_drawn_and_numbers_stay_those_of_all(reconstruct, monkeypatch):
    adata = reconstruct()
    whole = reconstruction(adata, return_fig=True)
    monkeypatch.setattr(_reconstruction, "_MOST_POINTS", 50)
    figs = [reconstruction(adata, return_fig=True) for _ in range(2)]
    drawn = [points(fig.axes[1]) for fig in figs]
    assert {len(these) for these in drawn} == {50}
    np.testing.assert_array_equal(drawn[0], drawn[1])
    every = set(map(tuple, points(whole.axes[1])))
    assert set(map(tuple, drawn[0])) <= every
    for fig in figs:
        assert [ax.get_title() for ax in fig.axes] == [ax.get_title() for ax in whole.axes]


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
        these = cell == i
        if these.sum() >= 3 and np.ptp(x[these]) and np.ptp(y[these]):
            values.append(spearmanr(x[these], y[these])[0])
    found = spearman_within(x, y, cell)
    np.testing.assert_allclose(found, np.mean(values) if values else np.nan, atol=1e-12)
    np.testing.assert_allclose(spearman_within(np.exp(x), y + 7.0, cell), found, atol=1e-12)


def test_what_cannot_be_drawn_is_refused(reconstruct, tmp_path):
    adata = reconstruct()
    for keys, options, error, words in [
        ("mine", {}, KeyError, r"call scdiva.tl.reconstruct\(adata, ..., key_added='mine'\)"),
        ([], {}, ValueError, r"keys=\[\] must name one reconstruction"),
        ([KEY, KEY], {}, ValueError, "several different ones"),
        (None, {"save": tmp_path / "picture"}, ValueError, "picture format"),
    ]:
        with pytest.raises(error, match=words):
            reconstruction(adata, keys, **options)
    adata.layers[KEY + "_rank"] = adata.layers[KEY + "_rank"] * 0
    with pytest.raises(ValueError, match=f"recovered in the reconstruction '{KEY}'"):
        reconstruction(adata)
    del adata.uns["scdiva"]
    with pytest.raises(KeyError, match=r"no reconstruction: call scdiva.tl.reconstruct\(adata\)"):
        reconstruction(adata)
    assert plt.get_fignums() == []
