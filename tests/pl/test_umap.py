"""The UMAP that `tl.umap` and `pl.umap` compute and keep, and names written on it."""

from __future__ import annotations

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import scdiva as sd
from scdiva._settings import settings
from scdiva.pl import _umap, umap
from scdiva.pl._figure import write_names

from .conftest import dots


def cells(n: int = 60, seed: int = 0) -> ad.AnnData:
    """Three groups, far apart in ten dimensions."""
    rng = np.random.default_rng(seed)
    group = np.arange(n) % 3
    adata = ad.AnnData(rng.poisson(1.0, size=(n, 4)).astype(np.float32))
    adata.obs["kind"] = pd.Categorical.from_codes(group, ["T cell", "B cell", "Monocyte"])
    z = rng.normal(size=(n, 10)).astype(np.float32) + 12 * np.eye(3, 10, dtype=np.float32)[group]
    adata.obsm["X_scdiva"] = z
    return adata


@pytest.fixture(scope="module")
def drawn() -> ad.AnnData:
    """Cells whose map is there already, so that a test need not compute it."""
    adata = cells()
    umap(adata, save=None)
    plt.close("all")
    return adata


def overlaps(fig) -> int:
    """Pairs of names on the axes that overlap, in the finished picture."""
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in fig.axes[0].texts]
    return sum(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_the_map_that_is_drawn_is_that_of_tl_umap(drawn, hashed):
    adata = cells()
    sd.tl.umap(adata)
    np.testing.assert_array_equal(adata.obsm["X_scdiva_umap"], drawn.obsm["X_scdiva_umap"])
    assert adata.uns["scdiva"]["umap"] == drawn.uns["scdiva"]["umap"]
    plain = cells()
    result = sd.tl.umap(plain, copy=True)
    assert hashed(plain) == hashed(cells())
    np.testing.assert_array_equal(result.obsm["X_umap"], adata.obsm["X_umap"])
    before = hashed(adata.obsm)
    umap(adata)  # finds it
    sd.tl.umap(adata, "scdiva_umap")  # a map already
    assert hashed(adata.obsm) == before
    with pytest.raises(KeyError, match="embed"):
        sd.tl.umap(adata, "X_nothing")


def test_the_map_is_kept_under_its_own_key_and_nothing_else_changes(drawn, hashed):
    adata = cells()
    adata.obsm["X_umap"] = np.zeros((60, 2))
    before = hashed(adata)
    umap(adata, "kind")
    xy = adata.obsm.pop("X_scdiva_umap")
    assert (xy.shape, xy.dtype) == ((60, 2), np.float32)
    assert np.array_equal(xy, drawn.obsm["X_scdiva_umap"])  # same seed, same picture
    del adata.uns["scdiva"], adata.uns["kind_colors"]
    assert hashed(adata) == before


def test_a_bar_shows_how_far_the_map_is(monkeypatch, capfd):
    for name in ("DELAY", "LOG_INTERVAL"):
        monkeypatch.setattr(f"scdiva._settings.{name}", 0.0)
    with settings.override(progress=True):
        umap(cells())
    output = capfd.readouterr()
    assert output.out == ""
    assert "laying out cells: 100%" in output.err


@pytest.fixture
def umap_seeds(monkeypatch):
    """Seeds of UMAPs, which are not computed."""
    seeds = []
    monkeypatch.setattr(
        "scdiva.embedding.umap.umap_of", lambda z, seed: seeds.append(seed) or np.full((len(z), 2), seed, np.float32)
    )
    return seeds


def test_the_map_is_reused_until_embedding_or_seed_changes(drawn, umap_seeds):
    adata = drawn.copy()
    umap(adata, "kind", legend_loc="none")
    assert umap_seeds == []
    umap(adata, legend_loc="none", rng=5)
    with settings.override(seed=5):
        umap(adata, legend_loc="none")
    assert umap_seeds == [5]
    adata.obsm["X_scdiva"] = adata.obsm["X_scdiva"] + 1
    umap(adata, legend_loc="none", rng=5)
    assert umap_seeds == [5, 5]


def test_a_umap_of_the_users_own_is_kept_and_ours_is_replaced(drawn, umap_seeds):
    adata = drawn.copy()
    sd.tl.umap(adata)
    sd.tl.umap(adata, rng=5)
    assert (adata.obsm["X_umap"] == 5).all()
    umap(adata, rng=6)  # both copies of a map are of one embedding
    assert (adata.obsm["X_umap"] == 6).all()
    adata.obsm["X_umap"] = user_map = np.zeros((60, 2))
    for rng in (7, 7):
        with pytest.warns(UserWarning, match=r"'X_umap'.* was not written by scdiva and is kept"):
            sd.tl.umap(adata, rng=rng)
    assert adata.obsm["X_umap"] is user_map
    assert (adata.obsm["X_scdiva_umap"] == 7).all()


def test_cells_with_nan_embedding_are_left_out_with_a_warning():
    adata = cells()
    adata.obsm["X_scdiva"][:4] = np.nan
    with pytest.warns(UserWarning, match="4 of 60 cells have no finite embedding"):
        fig = umap(adata, "kind", return_fig=True)
    assert np.flatnonzero(np.isnan(adata.obsm["X_scdiva_umap"]).all(axis=1)).tolist() == [0, 1, 2, 3]
    assert len(dots(fig.axes[0])) == 56


def test_a_plot_that_fails_leaves_no_map(monkeypatch, hashed):
    def failing(*_, **__):
        raise RuntimeError("no canvas")

    monkeypatch.setattr(_umap, "draw_maps", failing)
    adata = cells()
    with pytest.raises(RuntimeError):
        umap(adata)
    assert hashed(adata) == hashed(cells())


def test_the_warning_about_a_view_names_the_line_of_the_call(drawn):
    view = drawn[:40]
    with pytest.warns(ad.ImplicitModificationWarning) as caught:
        sd.tl.umap(view)
    assert {one.filename for one in caught} == {__file__}


# --- names ------------------------------------------------------------------------------------------------------------
def test_all_cells_are_in_view_and_each_name_stands_at_its_group(drawn):
    fig = umap(drawn.copy(), "kind", return_fig=True)
    assert overlaps(fig) == 0
    axes, xy = fig.axes[0], drawn.obsm["X_scdiva_umap"]
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    assert ((xy > [x0, y0]) & (xy < [x1, y1])).all()
    assert np.ptp(xy[:, 0]) > 0.8 * (x1 - x0)
    centres = {kind: xy[drawn.obs["kind"] == kind].mean(axis=0) for kind in drawn.obs["kind"].cat.categories}
    for text in axes.texts:
        nearest = min(centres, key=lambda kind: np.linalg.norm(centres[kind] - text.get_position()))
        assert nearest == text.get_text()


def test_names_stand_off_each_other_and_off_the_cells_and_in_the_frame():
    rng = np.random.default_rng(0)
    fig, axes = plt.subplots()
    points, anchors = rng.normal(0, 1, (800, 2)), rng.normal(0, 0.7, (9, 2))
    axes.scatter(*points.T)
    write_names(axes, points, anchors, [f"a type {i}" for i in range(9)], ["k"] * 9)
    assert overlaps(fig) == 0
    frame, at = axes.get_window_extent(), axes.transData.transform(points)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)
    centred = [
        box.translated(*(axes.transData.transform(anchor) - np.array([box.x0 + box.x1, box.y0 + box.y1]) / 2))
        for box, anchor in zip(boxes, anchors, strict=True)
    ]
    assert sum(box.count_contains(at) for box in boxes) < 0.7 * sum(box.count_contains(at) for box in centred)
    where = [text.get_position() for text in axes.texts]
    second_axes = plt.subplots()[1]
    second_axes.scatter(*points.T)
    write_names(second_axes, points, anchors, [f"a type {i}" for i in range(9)], ["k"] * 9)
    assert where == [text.get_position() for text in second_axes.texts]
    write_names(second_axes, points, anchors[:0], [], [])
