"""`pl.umap`: maps that are there already, several colours, values that are missing, and where genes are read."""

from __future__ import annotations

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from matplotlib.colors import to_hex

import scdiva as sd
from scdiva.pl import umap

GREY = (0.83, 0.83, 0.83, 1.0)


@pytest.fixture
def adata() -> ad.AnnData:
    """60 cells of three groups on a map, and nothing to make another one from."""
    rng = np.random.default_rng(0)
    group = np.arange(60) % 3
    cells = ad.AnnData(sp.csr_matrix(rng.poisson(2.0, (60, 4)).astype(np.float32)))
    cells.var_names = ["CD3E", "MS4A1", "LYZ", "GNLY"]
    cells.obs["kind"] = pd.Categorical.from_codes(group, ["T cell", "B cell", "Monocyte", "never seen"])
    cells.obs["depth"] = rng.uniform(size=60)
    cells.obsm["X_umap"] = rng.normal(size=(60, 2)) + 6 * np.eye(3)[group][:, :2]
    return cells


@pytest.fixture
def no_umap(monkeypatch):
    """Fail where a UMAP is computed."""
    monkeypatch.delattr("scdiva.embedding.umap.umap_of")


def drawn_at(axes) -> np.ndarray:
    """Where dots stand, of all layers."""
    return np.concatenate([np.asarray(dots.get_offsets()) for dots in axes.collections])


@pytest.mark.usefixtures("no_umap")
@pytest.mark.parametrize(
    ("basis", "shape", "axis"),
    [
        ("X_umap", 2, "UMAP"),
        ("X_umap", 3, "UMAP"),
        ("X_tsne", 2, "tsne"),
        ("spatial", 2, "spatial"),
        ("X_scdiva_umap", 2, "UMAP"),
    ],
)
def test_a_map_is_drawn_as_it_is_and_nothing_is_written(adata, basis, shape, axis):
    theirs = np.random.default_rng(1).normal(1e4, 1.0, size=(60, shape))
    adata.obsm[basis] = theirs.copy()
    before = {key: np.array(value) for key, value in adata.obsm.items()}
    axes = umap(adata, basis=basis, return_fig=True).axes[0]
    assert sorted(map(tuple, drawn_at(axes))) == sorted(map(tuple, theirs[:, :2]))
    assert (axes.get_xlabel(), axes.get_ylabel()) == (f"{axis} 1", f"{axis} 2")
    assert before.keys() == adata.obsm.keys()
    assert all(np.array_equal(before[key], adata.obsm[key]) for key in before)
    assert dict(adata.uns) == {}


@pytest.mark.usefixtures("no_umap")
def test_other_plots_draw_a_map_as_it_is_too(adata):
    adata.obsm["X_tsne"] = -adata.obsm["X_umap"]
    adata.obs["batch"] = ["one", "two"] * 30
    fig = sd.pl.integration(adata, "batch", before="X_umap", after="X_tsne", return_fig=True)
    assert [axes.get_title() for axes in fig.axes] == ["before: X_umap", "after: X_tsne"]
    assert sorted(map(tuple, drawn_at(fig.axes[0])[:60])) == sorted(map(tuple, adata.obsm["X_umap"]))
    adata.obs["scdiva_label"] = adata.obs["kind"]
    assert sd.pl.annotation(adata, basis="X_umap", return_fig=True) is not None
    assert set(adata.uns) == {"batch_colors", "scdiva_label_colors"}


@pytest.mark.usefixtures("no_umap")
def test_a_map_of_few_cells_will_do_but_not_of_none(adata):
    few = adata[:3].copy()
    assert len(drawn_at(umap(few, basis="X_umap", return_fig=True).axes[0])) == 3
    few.obsm["X_umap"][0] = np.nan
    with pytest.warns(UserWarning, match=r"1 of 3 cells .*embedding") as caught:
        umap(few, basis="X_umap")
    assert caught[0].filename == __file__
    few.obsm["X_umap"][:] = np.nan
    with pytest.raises(ValueError, match=r"obsm\['X_umap'\] has 0 finite rows of 3"):
        umap(few, basis="X_umap")


def test_several_colours_have_a_panel_each(adata, tmp_path):
    fig = umap(adata, ["kind", "depth", "LYZ", "GNLY", "CD3E"], basis="X_umap", return_fig=True)
    panels = [axes for axes in fig.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["kind", "depth", "LYZ", "GNLY", "CD3E"]
    assert all(len(drawn_at(axes)) >= 60 for axes in panels)
    rows = {round(axes.get_subplotspec().rowspan.start) for axes in panels}
    assert rows == {0, 1}  # four in a row
    fig = umap(adata, ["kind", "depth"], basis="X_umap", title=["a", "b"], return_fig=True, save=tmp_path / "two.png")
    assert [axes.get_title() for axes in fig.axes if axes.get_title()] == ["a", "b"]
    assert (tmp_path / "two.png").stat().st_size > 0


def test_several_colours_that_can_not_be_drawn_are_refused_before_anything_is(adata):
    figures = plt.get_fignums()
    with pytest.raises(KeyError, match=r"'MS4A2' .*'MS4A1'"):
        umap(adata, ["kind", "MS4A2"], basis="X_umap")
    with pytest.raises(ValueError, match="color names nothing"):
        umap(adata, [], basis="X_umap")
    with pytest.raises(ValueError, match="title has 1 entries for 2 panels"):
        umap(adata, ["kind", "LYZ"], basis="X_umap", title="both")
    assert plt.get_fignums() == figures
    _, axes = plt.subplots()
    with pytest.raises(ValueError, match=r"ax is one.*color names 2"):
        umap(adata, ["kind", "LYZ"], basis="X_umap", ax=axes)


@pytest.mark.parametrize("lost", [np.nan, np.inf, -np.inf])
def test_cells_without_a_number_are_grey_below_the_others_and_named(adata, lost):
    adata.obs.loc[adata.obs_names[:7], "depth"] = lost
    fig = umap(adata, "depth", basis="X_umap", return_fig=True)
    (dots,) = fig.axes[0].collections
    fig.canvas.draw()
    assert sorted(map(tuple, dots.get_offsets()[:7])) == sorted(map(tuple, adata.obsm["X_umap"][:7]))  # drawn first
    assert np.allclose(dots.get_facecolors()[:7], GREY, atol=0.005)
    assert not np.isclose(dots.get_facecolors()[7:], GREY, atol=0.005).all(axis=1).any()
    assert dots.get_clim() == (adata.obs["depth"][7:].min(), adata.obs["depth"][7:].max())
    assert fig.axes[0].get_xlabel() == "UMAP 1\ngrey: NA"


def test_a_legend_names_cells_without_a_group_and_no_group_without_cells(adata):
    adata.obs.loc[adata.obs_names[::3], "kind"] = np.nan
    fig = umap(adata, "kind", basis="X_umap", legend_loc="right margin", return_fig=True)
    assert [text.get_text() for text in fig.axes[0].get_legend().get_texts()] == ["B cell", "Monocyte", "NA"]
    colours = fig.axes[0].collections[0].get_facecolors()
    assert np.isclose(colours, GREY, atol=0.005).all(axis=1).sum() == 20


def test_genes_are_read_where_it_is_asked(adata):
    adata.layers["tenfold"] = adata.X * 10
    adata.raw = adata.copy()
    adata.X = adata.X * 0
    adata.obsm["scdiva_imputed"] = pd.DataFrame({"LYZ": np.arange(60.0)}, index=adata.obs_names)
    counts = adata.raw.X.toarray()
    values = np.sort(np.log1p(1e4 * counts[:, 2] / counts.sum(axis=1)))

    def shown(**where):
        return np.asarray(
            umap(adata, "LYZ", basis="X_umap", return_fig=True, **where).axes[0].collections[0].get_array()
        )

    assert not shown().any()
    np.testing.assert_allclose(shown(use_raw=True), values)
    np.testing.assert_allclose(shown(layer="tenfold"), values)  # of one total
    adata.layers["log"] = np.log1p(counts)
    np.testing.assert_allclose(shown(layer="log"), np.sort(np.log1p(counts[:, 2])))  # as it is
    np.testing.assert_array_equal(shown(layer="scdiva_imputed"), np.arange(60.0))


def test_genes_that_are_asked_for_elsewhere_are_refused(adata):
    with pytest.raises(ValueError, match=r"adata\.raw is None"):
        umap(adata, "LYZ", basis="X_umap", use_raw=True)
    adata.layers["counts"] = adata.X
    with pytest.raises(KeyError, match=r"layer 'count' .*'counts'"):
        umap(adata, "LYZ", basis="X_umap", layer="count")
    with pytest.raises(ValueError, match="exclude each other"):
        umap(adata, "LYZ", basis="X_umap", layer="counts", use_raw=True)
    adata.raw = adata.copy()
    few = adata[:, :2].copy()
    with pytest.raises(KeyError, match=r"adata\.raw .*use_raw=True"):
        umap(few, "LYZ", basis="X_umap")


@pytest.mark.parametrize(
    "stored",
    [["steelblue1", "red", "blue"], ["ff0000"], np.array([b"#ff0000"]), [""], [np.nan], {"T cell": "red"}, 5],
    ids=str,
)
def test_colours_that_matplotlib_does_not_know_are_ignored_with_a_warning(adata, no_umap, stored):
    expected = umap(adata, "kind", basis="X_umap", return_fig=True).axes[0].collections[0].get_facecolors()
    adata.uns["kind_colors"] = stored
    with pytest.warns(UserWarning, match=r"adata\.uns\['kind_colors'\] is ignored"):
        fig = umap(adata, "kind", basis="X_umap", return_fig=True)
    np.testing.assert_array_equal(fig.axes[0].collections[0].get_facecolors(), expected)


def test_colours_are_kept_in_uns_and_shared_with_scanpy(adata, no_umap):
    def of(axes):
        dots = axes.collections[0]
        return {tuple(p): tuple(c) for p, c in zip(dots.get_offsets(), dots.get_facecolors(), strict=True)}

    import scanpy as sc

    ours = of(umap(adata, "kind", basis="umap", show=False))
    assert len(adata.uns["kind_colors"]) == 4  # "never seen" too, as scanpy
    assert of(sc.pl.umap(adata, color="kind", show=False)) == ours
    red = dict.fromkeys(adata.obs["kind"].cat.categories, "red")
    assert set(of(umap(adata, "kind", basis="umap", palette=red, show=False)).values()) == {(1.0, 0.0, 0.0, 1.0)}
    assert adata.uns["kind_colors"] == ["#ff0000"] * 4
    for palette in ("tab10", ["r", "g", "b", "y"], plt.rcParams["axes.prop_cycle"]):
        umap(adata, "kind", basis="umap", palette=palette)
        ours = adata.uns.pop("kind_colors")
        sc.pl.umap(adata, color="kind", palette=palette, show=False)
        assert [to_hex(colour) for colour in adata.uns["kind_colors"]] == ours
    view = adata[:30]
    umap(view, "kind", basis="umap")
    assert view.is_view
    for palette, words in (("no such map", "palette must be one of"), ({"B cell": "red"}, "no colour in palette")):
        with pytest.raises((KeyError, ValueError), match=words):
            umap(adata, "kind", basis="umap", palette=palette)


def test_unknown_cells_are_grey_unless_uns_has_their_colour(adata, no_umap):
    adata.obs["label"] = adata.obs["kind"].astype(str).replace("B cell", "unknown")
    umap(adata, "label", basis="umap")
    assert dict(zip(sorted(set(adata.obs["label"])), adata.uns["label_colors"], strict=True))["unknown"] == "#999999"
    adata.uns["label_colors"] = ["#111111", "#222222", "#333333"]
    dots = umap(adata, "label", basis="umap", show=False).collections[0]
    assert {to_hex(colour) for colour in dots.get_facecolors()} == {"#111111", "#222222", "#333333"}


def test_arguments_of_scanpy_are_passed_on(adata, no_umap):
    log = np.log1p(1e4 * adata.X.toarray() / np.asarray(adata.X.sum(axis=1)))
    fig = umap(
        adata, ["LYZ", "depth", "CD3E"], basis="umap", cmap="magma", vmin="p10", vmax=["p99", 0.5, None], ncols=2,
        frameon=False, size=7, title=["a", "b", "c"], alpha=0.4, wspace=0.3, return_fig=True,
    )  # fmt: skip
    axes = [one for one in fig.axes if one.get_label() != "<colorbar>"]
    assert [one.get_title() for one in axes] == ["a", "b", "c"]
    assert {one.get_subplotspec().rowspan.start for one in axes} == {0, 1}
    dots = [one.collections[0] for one in axes]
    assert {one.get_cmap().name for one in dots} == {"magma"}
    np.testing.assert_allclose(dots[0].get_clim(), np.percentile(log[:, 2], [10, 99]))
    assert dots[1].get_clim() == (np.percentile(adata.obs["depth"], 10), 0.5)
    assert {float(one.get_sizes()[0]) for one in dots} == {7.0}
    assert {one.get_alpha() for one in dots} == {0.4}
    assert not any(one.axison for one in axes)

    axes = umap(adata, "kind", basis="umap", groups=["B cell"], legend_fontsize=5, legend_fontweight=300, show=False)
    assert [(text.get_text(), text.get_fontsize(), text.get_weight()) for text in axes.texts] == [("B cell", 5, 300)]
    grey = np.isclose(axes.collections[0].get_facecolors(), GREY, atol=0.005).all(axis=1)
    assert grey.sum() == (adata.obs["kind"] != "B cell").sum()
    axes = umap(adata, "kind", basis="umap", legend_loc="lower left", show=False)
    assert len(axes.get_legend().get_texts()) == 3
    sizes = list(range(1, adata.n_obs + 1))
    dots = umap(adata, "depth", basis="umap", size=sizes, show=False).collections[0]
    np.testing.assert_array_equal(np.sort(dots.get_sizes()), sizes)
    for options, error, words in [
        ({"groups": "B cells"}, KeyError, "did you mean 'B cell'"),
        ({"vmax": [1, 2]}, ValueError, "vmax has 2 entries for 1 panels"),
        ({"vmax": "p101"}, ValueError, "vmax='p101'"),
        ({"size": [1.0]}, ValueError, f"{adata.n_obs} cells"),
        ({"marker": ["o", "x"]}, TypeError, "marker must be one"),
        ({"colour": "kind"}, TypeError, r"scdiva\.pl\.umap\(\) has no argument 'colour' \(did you mean 'color'"),
        ({"edges": True}, TypeError, "no argument 'edges'"),
    ]:
        with pytest.raises(error, match=words):
            umap(adata, "kind", basis="umap", **options)


def test_genes_are_named_by_a_column_of_var(adata, no_umap):
    adata.var["symbol"] = ["a", "b", "c", "d"]
    umap(adata, ["a", "depth"], basis="umap", gene_symbols="symbol")
    with pytest.raises(KeyError, match="CD3E"):
        umap(adata, "CD3E", basis="umap", gene_symbols="symbol")


def test_figures_axes_or_nothing_are_returned_as_asked(adata, no_umap, monkeypatch):
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(len(plt.get_fignums())))
    assert umap(adata, "kind", basis="umap") is None
    assert shown == []
    assert umap(adata, "kind", basis="umap", show=True) is None
    assert len(shown) == 1
    assert len(umap(adata, ["kind", "depth", "LYZ"], basis="umap", ncols=2, show=False)) == 3  # no colour bars
    ax = plt.subplots()[1]
    assert umap(adata, "depth", basis="umap", ax=ax, show=False) is ax
