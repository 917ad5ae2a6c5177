"""`pl.umap`: maps that are there already, several colours, values that are missing, and where genes are read."""

from __future__ import annotations

import dask.array as da
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from matplotlib.colors import to_hex

import scdiva as sd
from scdiva.pl import umap

from .conftest import GREY, colours_at, dots, legend, texts

pytestmark = pytest.mark.usefixtures("no_umap")


def map_of(adata, color, **options):
    return umap(adata, color, basis="umap", return_fig=True, **options)


def grey(axes) -> np.ndarray:
    """Which dots are grey, in the order in which they are drawn."""
    return np.isclose(axes.collections[0].get_facecolors(), GREY, atol=0.005).all(axis=1)


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
def test_a_map_is_drawn_as_it_is_and_nothing_is_written(mapped, hashed, basis, shape, axis):
    mapped.obsm[basis] = coordinates = np.random.default_rng(1).normal(1e4, 1.0, size=(60, shape))
    before = hashed(mapped)
    axes = umap(mapped, basis=basis, return_fig=True).axes[0]
    assert sorted(map(tuple, dots(axes))) == sorted(map(tuple, coordinates[:, :2]))
    assert (axes.get_xlabel(), axes.get_ylabel()) == (f"{axis} 1", f"{axis} 2")
    assert hashed(mapped) == before
    mapped.obs["batch"] = ["one", "two"] * 30
    fig = sd.pl.integration(mapped, "batch", before=basis, after="X_umap", return_fig=True)
    assert [set(map(tuple, mapped.obsm[key][:, :2])) <= set(map(tuple, dots(ax))) for key, ax in
            zip((basis, "X_umap"), fig.axes, strict=True)] == [True, True]  # fmt: skip
    mapped.obs["scdiva_label"] = mapped.obs["kind"]
    drawn = dots(sd.pl.annotation(mapped, basis=basis, return_fig=True).axes[0])
    assert set(map(tuple, coordinates[:, :2])) <= set(map(tuple, drawn))


def test_a_map_of_few_cells_will_do(mapped):
    subset = mapped[:3].copy()
    assert len(dots(map_of(subset, None).axes[0])) == 3
    subset.obsm["X_umap"][0] = np.nan
    with pytest.warns(UserWarning, match=r"1 of 3 cells .*embedding") as caught:
        umap(subset, basis="X_umap")
    assert caught[0].filename == __file__


def test_colours_follow_the_kind_of_column(mapped):
    fig = map_of(mapped, "kind")
    assert sorted(texts(fig.axes[0].texts)) == ["B cell", "Monocyte", "T cell"]
    assert len(set(colours_at(fig.axes[0]).values())) == 3
    mapped.obs["flag"] = np.arange(60) % 3 == 1
    fig = map_of(mapped, "flag", legend_loc="right margin")
    assert legend(fig) == ["False", "True"]
    assert len(fig.axes[0].texts) == 0
    for number, unit in (("depth", ""), ("LYZ", "log-normalised")):
        plot, bar = map_of(mapped, number).axes
        counts = mapped.X.toarray()
        values = mapped.obs["depth"] if number == "depth" else np.log1p(1e4 * counts[:, 2] / counts.sum(axis=1))
        np.testing.assert_allclose(plot.collections[0].get_array(), np.sort(values), rtol=1e-6)
        assert bar.get_ylabel() == unit


def test_several_colours_have_a_panel_each(mapped):
    fig = map_of(mapped, ["kind", "depth", "LYZ", "GNLY", "CD3E"])
    panels = [axes for axes in fig.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["kind", "depth", "LYZ", "GNLY", "CD3E"]
    assert all(len(dots(axes)) >= 60 for axes in panels)
    assert [axes.get_subplotspec().rowspan.start for axes in panels] == [0, 0, 0, 0, 1]  # four in a row
    with pytest.raises(ValueError, match=r"ax is one.*color names 2"):
        umap(mapped, ["kind", "LYZ"], basis="X_umap", ax=plt.subplots()[1])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_cells_without_a_number_are_grey_below_the_others_and_named(mapped, value):
    mapped.obs.loc[mapped.obs_names[:7], "depth"] = value
    fig = map_of(mapped, "depth")
    (cells,) = fig.axes[0].collections
    fig.canvas.draw()
    assert sorted(map(tuple, cells.get_offsets()[:7])) == sorted(map(tuple, mapped.obsm["X_umap"][:7]))  # drawn first
    assert grey(fig.axes[0]).tolist() == [True] * 7 + [False] * 53
    assert cells.get_clim() == (mapped.obs["depth"][7:].min(), mapped.obs["depth"][7:].max())
    assert fig.axes[0].get_xlabel() == "UMAP 1\ngrey: NA"


@pytest.mark.parametrize(
    "values", [pd.array([None, *range(59)], dtype="Int64"), np.full(60, np.nan)], ids=["NA", "all"]
)
def test_no_cell_leaves_the_picture_for_a_missing_number(mapped, values):
    mapped.obs["number"] = values
    axes = map_of(mapped, "number").axes[0]
    assert set(map(tuple, dots(axes))) == set(map(tuple, mapped.obsm["X_umap"]))
    assert "grey: NA" in axes.get_xlabel()


@pytest.mark.parametrize("missing", [np.nan, "nan"])
def test_a_legend_names_cells_without_a_group_and_no_group_without_cells(mapped, missing):
    mapped.obs["kind"] = mapped.obs["kind"].cat.add_categories("nan")
    mapped.obs.loc[mapped.obs_names[::3], "kind"] = missing
    if missing == "nan":
        with pytest.warns(UserWarning, match="'nan' for 20 of 60 cells"):
            fig = map_of(mapped, "kind", legend_loc="right margin")
    else:
        fig = map_of(mapped, "kind", legend_loc="right margin")
    assert legend(fig) == ["B cell", "Monocyte", "NA"]
    assert grey(fig.axes[0]).sum() == 20


def test_many_groups_get_distinct_colours_and_a_legend_at_the_side(mapped):
    mapped.obs["clone"] = pd.Categorical([f"clone {i:02d}" for i in range(60)])
    fig = map_of(mapped, "clone")
    assert len(fig.axes[0].texts) == 0
    assert len(legend(fig)) == len(set(colours_at(fig.axes[0]).values())) == 60


def test_genes_are_read_where_it_is_asked(mapped):
    counts = mapped.X.toarray()
    mapped.layers["tenfold"], mapped.layers["log"] = mapped.X * 10, np.log1p(counts)
    mapped.raw = mapped.copy()
    mapped.X = mapped.X * 0
    mapped.obsm["scdiva_imputed"] = pd.DataFrame({"LYZ": np.arange(60.0)}, index=mapped.obs_names)
    mapped.var["symbol"] = ["a", "b", "c", "d"]
    values = np.log1p(1e4 * counts[:, 2] / counts.sum(axis=1))
    for where, gene, expected in [
        ({}, "LYZ", np.zeros(60)),
        ({"use_raw": True}, "LYZ", values),
        ({"layer": "tenfold"}, "LYZ", values),  # of one total
        ({"layer": "tenfold", "gene_symbols": "symbol"}, "c", values),
        ({"layer": "log"}, "LYZ", np.log1p(counts[:, 2])),  # as it is
        ({"layer": "scdiva_imputed"}, "LYZ", np.arange(60.0)),
    ]:
        drawn = map_of(mapped, gene, **where).axes[0].collections[0].get_array()
        np.testing.assert_allclose(drawn, np.sort(expected), rtol=1e-6)
    with pytest.raises(KeyError, match=r"adata\.raw .*use_raw=True"):
        umap(mapped[:, :2].copy(), "LYZ", basis="X_umap")


@pytest.mark.parametrize("store", ["dask", "dask sparse", "csr_array"])
def test_a_gene_is_drawn_from_any_storage(mapped, store):
    x = mapped.X.toarray()
    mapped.X = {
        "dask": lambda: da.from_array(x, chunks=(20, 4)),
        "dask sparse": lambda: da.from_array(x, chunks=(20, 4)).map_blocks(sp.csr_matrix),
        "csr_array": lambda: sp.csr_array(x),
    }[store]()
    for factor, expected in ((1, np.log1p(1e4 * x[:, 2] / x.sum(axis=1))), (0.5, x[:, 2] * 0.5)):  # no counts: as it is
        mapped.X = mapped.X * factor
        drawn = map_of(mapped, "LYZ").axes[0].collections[0].get_array()
        np.testing.assert_allclose(drawn, np.sort(expected), rtol=1e-6)


@pytest.mark.parametrize(
    "stored",
    [["steelblue1", "red", "blue"], ["ff0000"], np.array([b"#ff0000"]), [""], [np.nan], {"T cell": "red"}, 5],
    ids=str,
)
def test_colours_that_matplotlib_does_not_know_are_ignored_with_a_warning(mapped, stored):
    expected = colours_at(map_of(mapped, "kind").axes[0])
    mapped.uns["kind_colors"] = stored
    with pytest.warns(UserWarning, match=r"adata\.uns\['kind_colors'\] is ignored"):
        fig = map_of(mapped, "kind")
    assert colours_at(fig.axes[0]) == expected


def test_colours_are_kept_in_uns_and_shared_with_scanpy(mapped):
    import scanpy as sc

    colours = colours_at(map_of(mapped, "kind").axes[0])
    assert len(mapped.uns["kind_colors"]) == 4  # "never seen" too, as scanpy
    assert colours_at(sc.pl.umap(mapped, color="kind", show=False)) == colours
    red = dict.fromkeys(mapped.obs["kind"].cat.categories, "red")
    assert set(colours_at(map_of(mapped, "kind", palette=red).axes[0]).values()) == {"#ff0000"}
    assert mapped.uns["kind_colors"] == ["#ff0000"] * 4
    for palette in ("tab10", ["r", "g", "b", "y"], plt.rcParams["axes.prop_cycle"]):
        umap(mapped, "kind", basis="umap", palette=palette)
        colours = mapped.uns.pop("kind_colors")
        sc.pl.umap(mapped, color="kind", palette=palette, show=False)
        assert [to_hex(colour) for colour in mapped.uns["kind_colors"]] == colours
    view = mapped[:30]
    umap(view, "kind", basis="umap")
    assert view.is_view


def test_unknown_cells_are_grey_unless_uns_has_their_colour(mapped):
    mapped.obs["label"] = mapped.obs["kind"].astype(str).replace("B cell", "unknown")
    umap(mapped, "label", basis="umap")
    assert dict(zip(sorted(set(mapped.obs["label"])), mapped.uns["label_colors"], strict=True))["unknown"] == "#999999"
    mapped.uns["label_colors"] = ["#111111", "#222222", "#333333"]
    assert set(colours_at(map_of(mapped, "label").axes[0]).values()) == {"#111111", "#222222", "#333333"}


def test_arguments_of_scanpy_are_passed_on(mapped):
    log = np.log1p(1e4 * mapped.X.toarray() / np.asarray(mapped.X.sum(axis=1)))
    fig = map_of(
        mapped, ["LYZ", "depth", "CD3E"], cmap="magma", vmin="p10", vmax=["p99", 0.5, None], ncols=2,
        frameon=False, size=7, title=["a", "b", "c"], alpha=0.4, wspace=0.3,
    )  # fmt: skip
    axes = [one for one in fig.axes if one.get_label() != "<colorbar>"]
    assert [one.get_title() for one in axes] == ["a", "b", "c"]
    assert {one.get_subplotspec().rowspan.start for one in axes} == {0, 1}
    cells = [one.collections[0] for one in axes]
    np.testing.assert_allclose(cells[0].get_clim(), np.percentile(log[:, 2], [10, 99]))
    assert cells[1].get_clim() == (np.percentile(mapped.obs["depth"], 10), 0.5)
    styles = {(one.get_cmap().name, float(one.get_sizes()[0]), one.get_alpha()) for one in cells}
    assert styles == {("magma", 7.0, 0.4)}
    assert not any(one.axison for one in axes)
    axes = map_of(mapped, "kind", groups=["B cell"], legend_fontsize=5, legend_fontweight=300).axes[0]
    assert [(text.get_text(), text.get_fontsize(), text.get_weight()) for text in axes.texts] == [("B cell", 5, 300)]
    assert grey(axes).sum() == (mapped.obs["kind"] != "B cell").sum()
    assert len(legend(map_of(mapped, "kind", legend_loc="lower left"))) == 3
    sizes = list(range(1, mapped.n_obs + 1))
    cells = map_of(mapped, "depth", size=sizes).axes[0].collections[0]
    np.testing.assert_array_equal(np.sort(cells.get_sizes()), sizes)
