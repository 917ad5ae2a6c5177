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


def cells(n: int = 60, seed: int = 0) -> ad.AnnData:
    """Three groups, far apart in ten dimensions."""
    rng = np.random.default_rng(seed)
    group = np.arange(n) % 3
    z = rng.normal(size=(n, 10)).astype(np.float32) + 12 * np.eye(3, 10, dtype=np.float32)[group]
    adata = ad.AnnData(rng.poisson(1.0, size=(n, 4)).astype(np.float32))
    adata.var_names = ["CD3E", "MS4A1", "LYZ", "GNLY"]
    adata.obs_names = [f"cell{i}" for i in range(n)]
    adata.obs["kind"] = pd.Categorical(
        [("T cell", "B cell", "Monocyte")[i] for i in group], ["T cell", "B cell", "Monocyte"]
    )
    adata.obs["depth"] = rng.uniform(size=n)
    adata.obs["flag"] = group == 1
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


def box_centre(text) -> np.ndarray:
    """Middle of a name, in pixels."""
    box = text.get_window_extent()
    return np.array([box.x0 + box.x1, box.y0 + box.y1]) / 2


def test_the_map_that_is_drawn_is_that_of_tl_umap(drawn):
    adata = cells()
    sd.tl.umap(adata)
    np.testing.assert_array_equal(adata.obsm["X_scdiva_umap"], drawn.obsm["X_scdiva_umap"])
    plain = cells()
    other = sd.tl.umap(plain, copy=True)
    assert set(plain.obsm) == {"X_scdiva"}
    np.testing.assert_array_equal(other.obsm["X_umap"], adata.obsm["X_umap"])
    umap(adata)  # finds it
    assert adata.uns["scdiva"]["umap"] == drawn.uns["scdiva"]["umap"]
    before = {key: adata.obsm[key].copy() for key in adata.obsm}
    sd.tl.umap(adata, "scdiva_umap")  # a map already
    assert {key: np.array_equal(adata.obsm[key], x) for key, x in before.items()} == dict.fromkeys(before, True)
    with pytest.raises(KeyError, match="embed"):
        sd.tl.umap(adata, "X_nothing")


def test_the_map_is_kept_under_its_own_key_and_nothing_else_changes(drawn):
    adata = cells()
    adata.obsm["X_umap"] = np.zeros((60, 2))
    before = adata.copy()
    umap(adata, "kind")
    assert set(adata.obsm) == {"X_scdiva", "X_umap", "X_scdiva_umap"}
    assert set(adata.uns) == {"scdiva", "kind_colors"}
    for key in before.obsm:
        assert np.array_equal(adata.obsm[key], before.obsm[key])
    pd.testing.assert_frame_equal(adata.obs, before.obs)
    xy = adata.obsm["X_scdiva_umap"]
    assert xy.shape == (60, 2)
    assert xy.dtype == np.float32
    assert np.array_equal(xy, drawn.obsm["X_scdiva_umap"])  # same seed, same picture


@pytest.mark.parametrize("progress", [True, False])
def test_a_bar_shows_how_far_the_map_is_if_asked_for(drawn, progress, monkeypatch, capfd):
    for name in ("DELAY", "LOG_INTERVAL"):
        monkeypatch.setattr(f"scdiva._settings.{name}", 0.0)
    adata = cells()
    with settings.override(progress=progress):
        umap(adata)
    said = capfd.readouterr()
    assert said.out == ""
    assert ("laying out cells: 100%" in said.err) is progress
    assert progress or not said.err
    np.testing.assert_array_equal(adata.obsm["X_scdiva_umap"], drawn.obsm["X_scdiva_umap"])


def test_the_map_is_reused_until_embedding_or_seed_changes(drawn, monkeypatch):
    made = []
    monkeypatch.setattr(
        "scdiva.embedding.umap.umap_of",
        lambda z, seed: made.append(seed) or np.random.default_rng(0).normal(size=(len(z), 2)),
    )
    adata = drawn.copy()
    umap(adata, "kind", legend_loc="none")
    assert made == []
    umap(adata, legend_loc="none", rng=5)
    with settings.override(seed=5):
        umap(adata, legend_loc="none")
    assert made == [5]
    adata.obsm["X_scdiva"] = adata.obsm["X_scdiva"] + 1
    umap(adata, legend_loc="none", rng=5)
    assert made == [5, 5]


def test_a_map_of_the_users_own_is_drawn_and_never_replaced():
    adata = cells()
    theirs = np.random.default_rng(1).normal(size=(60, 2))
    adata.obsm["X_scdiva_umap"] = theirs.copy()
    fig = umap(adata, return_fig=True)
    assert np.array_equal(adata.obsm["X_scdiva_umap"], theirs)
    assert "scdiva" not in adata.uns
    shown = np.asarray(fig.axes[0].collections[0].get_offsets())
    assert sorted(map(tuple, shown)) == sorted(map(tuple, theirs))


def test_colours_follow_the_kind_of_column(drawn):
    adata = drawn.copy()
    fig = umap(adata, "kind", return_fig=True)
    assert sorted(text.get_text() for text in fig.axes[0].texts) == ["B cell", "Monocyte", "T cell"]
    assert overlaps(fig) == 0
    dots = fig.axes[0].collections[0]
    assert len(np.unique(dots.get_facecolors(), axis=0)) == 3

    fig = umap(adata, "flag", return_fig=True, legend_loc="right margin")
    assert [t.get_text() for t in fig.axes[0].get_legend().get_texts()] == ["False", "True"]
    assert len(fig.axes[0].texts) == 0

    for number in ("depth", "LYZ"):
        fig = umap(adata, number, return_fig=True)
        assert len(fig.axes) == 2  # the plot and its colour bar
        shown = np.asarray(fig.axes[0].collections[0].get_array())
        log = np.log1p(1e4 * adata.X[:, 2] / np.maximum(adata.X.sum(axis=1), 1))
        assert np.allclose(shown, np.sort(adata.obs["depth"] if number == "depth" else log))
        assert fig.axes[1].get_ylabel() == ("" if number == "depth" else "log-normalised")


def test_all_cells_are_in_view_and_each_name_stands_at_its_group(drawn):
    fig = umap(drawn.copy(), "kind", return_fig=True)
    fig.canvas.draw()
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
    dots, anchors = rng.normal(0, 1, (800, 2)), rng.normal(0, 0.7, (9, 2))
    axes.scatter(*dots.T)
    write_names(axes, dots, anchors, [f"a type {i}" for i in range(9)], ["k"] * 9)
    assert overlaps(fig) == 0
    frame, at = axes.get_window_extent(), axes.transData.transform(dots)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)
    own = [
        text.get_window_extent().translated(*(axes.transData.transform(anchor) - box_centre(text)))
        for text, anchor in zip(axes.texts, anchors, strict=True)
    ]
    assert sum(box.count_contains(at) for box in boxes) < 0.7 * sum(box.count_contains(at) for box in own)
    where = [text.get_position() for text in axes.texts]
    other = plt.subplots()[1]
    other.scatter(*dots.T)
    write_names(other, dots, anchors, [f"a type {i}" for i in range(9)], ["k"] * 9)
    assert where == [text.get_position() for text in other.texts]
    write_names(other, dots, anchors[:0], [], [])


def test_scanpys_colours_are_used(drawn):
    adata = drawn.copy()
    adata.uns["kind_colors"] = ["#ff0000", "#00ff00", "#0000ff"]
    dots = umap(adata, "kind", return_fig=True).axes[0].collections[0]
    at = {tuple(np.float32(p)): tuple(c) for p, c in zip(dots.get_offsets(), dots.get_facecolors(), strict=True)}
    first = tuple(adata.obsm["X_scdiva_umap"][0])
    assert at[first] == (1.0, 0.0, 0.0, 1.0)


def test_cells_without_a_label_are_grey_and_unnamed(drawn):
    adata = drawn.copy()
    adata.obs.loc[adata.obs["kind"] == "B cell", "kind"] = np.nan
    fig = umap(adata, "kind", return_fig=True)
    assert sorted(text.get_text() for text in fig.axes[0].texts) == ["Monocyte", "T cell"]
    grey = np.isclose(fig.axes[0].collections[0].get_facecolors()[:, :3], 0.83, atol=0.005).all(axis=1)
    assert grey[:20].all()
    assert not grey[20:].any()


@pytest.mark.parametrize("dtype", [object, "category"])
def test_texts_that_stand_for_a_missing_value_are_no_group(drawn, dtype):
    adata = drawn.copy()
    adata.obs["note"] = pd.Series(["a", "nan", "b"] * 20, adata.obs_names).astype(dtype)
    with pytest.warns(UserWarning, match="'nan' for 20 of 60 cells"):
        fig = umap(adata, "note", return_fig=True)
    assert sorted(text.get_text() for text in fig.axes[0].texts) == ["a", "b"]


def test_many_groups_get_distinct_colours_and_a_legend_at_the_side(drawn):
    adata = drawn.copy()
    adata.obs["clone"] = pd.Categorical([f"clone {i:02d}" for i in range(60)])
    fig = umap(adata, "clone", return_fig=True)
    assert len(fig.axes[0].texts) == 0
    assert len(fig.axes[0].get_legend().get_texts()) == 60
    assert len(np.unique(fig.axes[0].collections[0].get_facecolors(), axis=0)) == 60


def test_cells_with_nan_embedding_are_left_out_with_a_warning():
    adata = cells()
    adata.obsm["X_scdiva"][:4] = np.nan
    with pytest.warns(UserWarning, match="4 of 60 cells have no finite embedding"):
        fig = umap(adata, "kind", return_fig=True)
    assert np.isnan(adata.obsm["X_scdiva_umap"][:4]).all()
    assert np.isfinite(adata.obsm["X_scdiva_umap"][4:]).all()
    assert len(fig.axes[0].collections[0].get_offsets()) == 56


def test_the_users_axes_are_drawn_on_and_left_open(drawn, tmp_path):
    fig, (left, right) = plt.subplots(1, 2)
    assert umap(drawn.copy(), "kind", ax=right, title="mine", save=tmp_path / "a.png") is None
    assert right.get_title() == "mine"
    assert len(right.collections) == 1
    assert len(left.collections) == 0
    assert plt.fignum_exists(fig.number)


def test_save_writes_a_picture_and_closes_its_own_figure(drawn, tmp_path):
    before = plt.get_fignums()
    umap(drawn.copy(), "kind", save=tmp_path / "new" / "map.png")
    assert (tmp_path / "new" / "map.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["map.png"]
    with pytest.raises(ValueError, match="no such map"):
        umap(drawn.copy(), "kind", cmap="no such map", marker="no marker")
    assert plt.get_fignums() == before


def test_bad_input_is_refused_and_adata_left_alone(tmp_path):
    adata = cells()
    with pytest.raises(KeyError, match=r"'X_pca'.*'X_scdiva'.*tl\.embed"):
        umap(adata, basis="X_pca")
    with pytest.raises(KeyError, match=r"'Kind' .*kind, depth, flag"):
        umap(adata, "Kind")
    with pytest.raises(ValueError, match=r"legend_loc .*'auto', .* got 'left'"):
        umap(adata, "kind", legend_loc="left")
    for name in ("map", "map.docx"):
        with pytest.raises(ValueError, match="must end in a picture format"):
            umap(adata, "kind", save=tmp_path / name)
    with pytest.raises(ValueError, match=r"4 finite rows of 4: .*5"):
        umap(adata[:4].copy())
    assert set(adata.obsm) == {"X_scdiva"}
    assert dict(adata.uns) == {}


@pytest.mark.parametrize("store", ["dask", "dask sparse", "csr_array"])
def test_a_gene_is_drawn_from_any_storage(drawn, store):
    import dask.array as da
    import scipy.sparse as sp

    adata = drawn.copy()
    x = adata.X
    adata.X = {
        "dask": lambda: da.from_array(x, chunks=(20, 4)),
        "dask sparse": lambda: da.from_array(x, chunks=(20, 4)).map_blocks(sp.csr_matrix),
        "csr_array": lambda: sp.csr_array(x),
    }[store]()
    log = np.log1p(1e4 * x[:, 2] / np.maximum(x.sum(axis=1), 1))
    np.testing.assert_allclose(_umap._values(adata, ["LYZ"], None, False, None)["LYZ"][0], log)
    umap(adata, "LYZ")
    adata.X = adata.X * 0.5  # not counts
    np.testing.assert_allclose(_umap._values(adata, ["LYZ"], None, False, None)["LYZ"][0], x[:, 2] * 0.5)


def test_a_gene_that_can_not_be_drawn_is_refused(drawn):
    adata = drawn.copy()
    with pytest.raises(TypeError, match=r"color must be .*got 3"):
        umap(adata, ["LYZ", 3])
    adata.var_names = ["LYZ", "LYZ", "CD3E", "GNLY"]
    with pytest.raises(ValueError, match="2 columns are called 'LYZ'"):
        umap(adata, "LYZ")
    adata.X = None
    with pytest.raises(ValueError, match="adata has no X"):
        umap(adata, "CD3E")


def test_a_umap_of_the_users_own_is_kept_and_ours_is_replaced(drawn, monkeypatch):
    monkeypatch.setattr("scdiva.embedding.umap.umap_of", lambda z, seed: np.full((len(z), 2), seed, dtype=np.float32))
    adata = drawn.copy()
    sd.tl.umap(adata)
    sd.tl.umap(adata, rng=5)
    assert (adata.obsm["X_umap"] == 5).all()
    umap(adata, rng=6)  # both copies of a map are of one embedding
    assert (adata.obsm["X_umap"] == 6).all()
    adata.obsm["X_umap"] = theirs = np.zeros((60, 2))
    for rng in (7, 7):
        with pytest.warns(UserWarning, match=r"'X_umap'.* was not written by scdiva and is kept"):
            sd.tl.umap(adata, rng=rng)
    assert adata.obsm["X_umap"] is theirs
    assert (adata.obsm["X_scdiva_umap"] == 7).all()


def test_a_plot_that_fails_leaves_no_map(monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("no canvas")

    monkeypatch.setattr(_umap, "draw_maps", failing)
    adata = cells()
    with pytest.raises(RuntimeError):
        umap(adata)
    assert set(adata.obsm) == {"X_scdiva"}
    assert dict(adata.uns) == {}


def test_the_warning_about_a_view_names_the_line_of_the_call(drawn):
    view = drawn[:40]
    with pytest.warns(ad.ImplicitModificationWarning) as caught:
        sd.tl.umap(view)
    assert {one.filename for one in caught} == {__file__}
