"""Plots of an annotation: the map, the confusion matrix, markers, features and calibration."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import pdist

import scdiva as sd
from scdiva.metrics import calibration
from scdiva.pl import annotation, confusion_matrix, feature_heatmap, marker_heatmap, reliability
from scdiva.pl._figure import similar_order

from .conftest import colours_at, heatmap, legend, texts


def names_of(rows) -> list[str]:
    """Names without their numbers of cells."""
    return [row.rsplit(" (", 1)[0] for row in rows]


def framed(fig) -> set[tuple[int, int]]:
    """Row and column of the framed fields."""
    return {(int(patch.get_y()), int(patch.get_x())) for patch in fig.axes[0].patches}


# --- the map ----------------------------------------------------------------------------------------------------------
def test_a_name_has_one_colour_in_both_panels(annotated):
    annotated.obs.loc["cell4", "cell type"] = np.nan
    fig = annotation(annotated, "cell type", return_fig=True)
    assert [ax.get_title() for ax in fig.axes[:3]] == ["annotated: cell type", "predicted: scdiva_label", "confidence"]
    true, predicted = map(colours_at, fig.axes[:2])
    of_name: dict[str, set] = {}
    for i, point in enumerate(map(tuple, annotated.obsm["X_scdiva_umap"])):
        of_name.setdefault(str(annotated.obs["cell type"].iloc[i]), set()).add(true[point])
        of_name.setdefault(annotated.obs["scdiva_label"].iloc[i], set()).add(predicted[point])
    assert {name: len(colours) for name, colours in of_name.items()} == dict.fromkeys(of_name, 1)
    assert len(set.union(*of_name.values())) == len(of_name) == 6
    assert (of_name["nan"], of_name["unknown"]) == ({"#d4d4d4"}, {"#999999"})
    scatter = fig.axes[2].collections[0]
    assert scatter.get_clim() == (0.0, 1.0)
    np.testing.assert_allclose(np.sort(annotated.obs["scdiva_label_confidence"]), scatter.get_array())
    del annotated.obs["scdiva_label_confidence"]
    assert [ax.get_title() for ax in annotation(annotated, return_fig=True).axes] == ["predicted: scdiva_label"]


def test_scanpys_colours_are_kept_and_names_that_only_the_prediction_has_get_others(annotated):
    annotated.uns["cell type_colors"] = ["#1f77b4", "#ff0000", "#00ff00", "#0000ff"]
    annotated.obs["scdiva_label"] = annotated.obs["scdiva_label"].cat.rename_categories({"B cell": "lymphocyte"})
    true, predicted = map(colours_at, annotation(annotated, "cell type", return_fig=True).axes[:2])
    points = np.array([*map(tuple, annotated.obsm["X_scdiva_umap"])])
    assert {true[tuple(point)] for point in points[annotated.obs["cell type"] == "B cell"]} == {"#1f77b4"}
    (colour,) = {predicted[tuple(point)] for point in points[annotated.obs["scdiva_label"] == "lymphocyte"]}
    assert colour not in set(true.values())


# --- calibration ------------------------------------------------------------------------------------------------------
def test_points_whiskers_and_errors_are_those_of_the_bins(annotated):
    annotated.obs.loc["cell0", "cell type"] = np.nan  # no truth
    annotated.obsm["scdiva_label_probability"][1] = np.nan  # no known gene
    fig = reliability(annotated, labels_key="cell type", return_fig=True)
    axes = fig.axes[0]
    written = annotated.uns["scdiva"]["scdiva_label"]
    probability = annotated.obsm["scdiva_label_probability"][2:]
    right = probability.argmax(axis=1) == np.arange(160)[2:] % 4
    expected = [{**written["reliability"], "ece": written["ece"]}, calibration(probability.max(axis=1), right)]
    drawn = [collection for collection in axes.collections if len(collection.get_offsets()) > 1]
    for bins, points, whiskers in zip(expected, drawn, axes.containers, strict=True):
        filled = bins["n_cells"] > 0
        np.testing.assert_allclose(points.get_offsets().T, [bins["confidence"][filled], bins["accuracy"][filled]])
        for (low, high), y in zip(whiskers[2][0].get_segments(), bins["accuracy"][filled], strict=True):
            assert 0 <= low[1] <= y + 1e-9
            assert y - 1e-9 <= high[1] <= 1
    labels = [
        f"held-out reference: ECE {expected[0]['ece']:.3f} (80 cells)",
        f"these cells: ECE {expected[1]['ece']:.3f} (158 cells)",
    ]
    assert legend(fig) == labels
    annotated.obs["scdiva_label"] = "unknown"  # a rejected cell is scored by its most probable label
    assert legend(reliability(annotated, labels_key="cell type", return_fig=True)) == labels


def test_these_cells_alone_are_drawn_where_the_reference_held_none_out(annotated):
    written = annotated.uns["scdiva"]["scdiva_label"]
    written["reliability"] = {"confidence": np.full(15, np.nan), "accuracy": np.full(15, np.nan), "n_cells": [0] * 15}
    (label,) = legend(reliability(annotated, labels_key="cell type", return_fig=True))
    assert label.startswith("these cells")
    with pytest.raises(ValueError, match="no held-out reference cells"):
        reliability(annotated)


def test_everything_is_read_from_what_annotate_writes():
    """Nearest neighbours, at once; half the cells are the reference."""
    cells = sc.datasets.pbmc68k_reduced().raw.to_adata()
    reference, query = cells[::2].copy(), cells[1::2].copy()
    sd.tl.annotate(query, "bulk_labels", reference, method="knn", reject=0.05)
    query.obsm["X_scdiva"], query.obsm["X_scdiva_umap"] = query.obsm["X_pca"], query.obsm["X_umap"]
    assert len(annotation(query, "bulk_labels", return_fig=True).axes) == 4  # with the bar of the confidence
    held_out, query_label = legend(reliability(query, labels_key="bulk_labels", return_fig=True))
    assert held_out.startswith(f"held-out reference: ECE {query.uns['scdiva']['scdiva_label']['ece']:.3f}")
    assert query_label.endswith(f"({query.n_obs} cells)")
    _, predicted, _ = heatmap(confusion_matrix(query, "bulk_labels", return_fig=True))
    assert set(sd.get.annotation_df(query)["label"].cat.categories) == {*predicted} - {"unknown"}
    assert {*heatmap(marker_heatmap(query, return_fig=True))[0]} == {*query.obs["scdiva_label"].cat.categories}


# --- the confusion matrix ---------------------------------------------------------------------------------------------
def confusion(adata):
    """Figure, rows, columns, and the numbers written and the colours by names."""
    fig = confusion_matrix(adata, "cell type", return_fig=True)
    rows, columns, shares = heatmap(fig)
    names, written = names_of(rows), {}
    for text in fig.axes[0].texts:
        x, y = text.get_position()
        written[names[int(y)], columns[int(x)]] = int(text.get_text())
    return fig, rows, columns, written, pd.DataFrame(shares, names, columns)


def test_fields_are_the_counts_and_their_shares(annotated):
    annotated.obs.loc["cell0", "cell type"] = np.nan
    annotated.obs.loc["cell1", "scdiva_label"] = np.nan
    annotated.obs_names = ["cell"] * annotated.n_obs  # names of cells may repeat
    _, rows, columns, written, share = confusion(annotated)
    truth, predicted = annotated.obs["cell type"], annotated.obs["scdiva_label"]
    for name in truth.cat.categories:
        of_type = (truth == name).to_numpy()
        assert f"{name} ({of_type.sum()})" in rows
        for column in columns:
            in_column = predicted.isna() if column == "no label" else predicted == column
            n = int((of_type & in_column.to_numpy()).sum())
            assert written.get((name, column), 0) == n
            assert share.loc[name, column] == pytest.approx(n / of_type.sum())
    assert sum(written.values()) == 159
    assert columns[-2:] == ["unknown", "no label"]


def test_like_types_stand_together_and_what_is_right_on_the_diagonal(annotated):
    fig, rows, columns, *_ = confusion(annotated)
    names = names_of(rows)
    assert names == columns[:4]
    assert abs(names.index("CD4+ memory T cell") - names.index("CD8+ T cell")) == 1
    assert framed(fig) == {(i, i) for i in range(4)}


def test_types_that_only_one_side_has(annotated):
    """The annotator knows no monocytes but macrophages, never gives B cell, and one cell is called a parent's name."""
    annotated.uns["scdiva"]["scdiva_label"]["labels"] = ["B cell", "CD4+ memory T cell", "CD8+ T cell", "macrophage"]
    label = annotated.obs["scdiva_label"].astype(object).replace({"Monocyte": "macrophage", "B cell": "unknown"})
    label.iloc[1] = "T cell"
    annotated.obs["scdiva_label"] = label
    fig, rows, columns, written, _ = confusion(annotated)
    names = names_of(rows)
    annotator_types = [name for name in names if name != "Monocyte"]
    assert columns[:3] == annotator_types  # B cell too, though its column is empty: it could have been found
    assert not [key for key in written if key[1] == "B cell"]
    assert set(columns[3:5]) == {"T cell", "macrophage"}
    assert columns[5] == "unknown"
    assert framed(fig) == {(names.index(name), columns.index(name)) for name in annotator_types}


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=9))
@settings(deadline=None)
def test_an_order_is_a_permutation_whatever_the_rows(rows):
    order = similar_order(np.array(rows))
    assert sorted(order) == list(range(len(rows)))
    assert order[0] <= order[-1]


def test_rows_on_a_line_are_ordered_along_it():
    assert similar_order(np.array([[4.0], [0.0], [3.0], [1.0], [2.2]])).tolist() == [0, 2, 4, 3, 1]


# --- markers ----------------------------------------------------------------------------------------------------------
def markers(adata, key="cell type", **options):
    """Types, genes, colours, and each type's own genes, which are framed."""
    fig = marker_heatmap(adata, key, return_fig=True, **options)
    types, genes, colours = heatmap(fig)
    marker_genes: dict[str, list[str]] = {}
    for patch in fig.axes[0].patches:
        marker_genes.setdefault(types[int(patch.get_y())], []).append(genes[int(patch.get_x())])
    return types, genes, colours, marker_genes


def test_each_type_shows_its_own_genes(annotated):
    """By the true types: three genes each, made nine times as high as elsewhere; the last two genes tell nothing."""
    types, genes, _, marker_genes = markers(annotated, n_genes=3, gene_symbols="symbol")
    for i, name in enumerate(annotated.obs["cell type"].cat.categories):
        assert set(marker_genes[name]) == {f"G{3 * i}", f"G{3 * i + 1}", f"G{3 * i + 2}"}
    assert genes == [
        gene for name in types for gene in marker_genes[name]
    ]  # in the order of the types: along the diagonal


@pytest.mark.parametrize("dtype", ["int64", "category"])
def test_types_may_be_numbers(annotated, dtype):
    numbers = annotated.obs["cell type"].cat.codes.astype("int64")
    annotated.obs["cluster"], annotated.obs["name"] = numbers.astype(dtype), numbers.astype(str)
    assert markers(annotated, "cluster")[:2] == markers(annotated, "name")[:2]


@pytest.mark.parametrize("step", [1, -1])
def test_colours_are_mean_log_expression_standardised_by_gene(annotated, step):
    names = annotated.obs["cell type"].cat.categories[::step]  # in any order of the categories
    annotated.obs["cell type"] = annotated.obs["cell type"].cat.reorder_categories(names)
    annotated.obs.loc["cell0", "cell type"] = np.nan
    types, genes, colour, _ = markers(annotated, n_genes=2)
    x = np.log1p(1e4 * annotated.X / annotated.X.sum(axis=1, keepdims=True))
    means = np.array([x[(annotated.obs["cell type"] == name).to_numpy()].mean(axis=0) for name in types])
    marker_means = means[:, annotated.var_names.get_indexer(genes)]
    np.testing.assert_allclose(
        colour, (marker_means - marker_means.mean(axis=0)) / marker_means.std(axis=0), rtol=1e-4, atol=1e-4
    )


def test_types_of_one_cell_are_drawn_without_markers_of_their_own(annotated):
    annotated.obs["cell type"] = annotated.obs["cell type"].astype(object)
    annotated.obs.loc["cell0", "cell type"] = "lonely"
    types, _, colour, marker_genes = markers(annotated)
    assert ("lonely" in types, "lonely" in marker_genes) == (True, False)
    assert np.isfinite(colour).all()
    assert set(markers(annotated[annotated.obs["cell type"].isin(["lonely", "B cell"])].copy())[3]) == {"B cell"}


# --- features ---------------------------------------------------------------------------------------------------------
def features(adata, groupby="cell type", **options):
    fig = feature_heatmap(adata, groupby, return_fig=True, **options)
    columns = texts(fig.axes[0].get_xticklabels())
    values = np.asarray(fig.axes[0].collections[0].get_array())
    return texts(fig.axes[0].get_yticklabels()), [*map(int, columns)], values.reshape(-1, len(columns) or 1)


def means_of(adata, names, rows=slice(None)):
    """Standardised features and their means by type."""
    z = np.asarray(adata.obsm["X_scdiva"])[rows]
    z, types = (z - z.mean(axis=0)) / z.std(axis=0), adata.obs["cell type"].iloc[rows]
    return z, np.array([z[(types == name).to_numpy()].mean(axis=0) for name in names])


def test_rows_are_means_of_types_in_the_order_of_the_clustering(embedded):
    rows, columns, values = features(embedded)
    names = names_of(rows)
    z, means = means_of(embedded, names)
    np.testing.assert_allclose(values, means[:, columns], atol=1e-9)
    assert rows[0].endswith("(40)")
    assert sorted(columns) == list(range(12))
    # scipy's leaf order of the means, forwards or backwards
    sorted_means = pd.DataFrame(z).groupby(embedded.obs["cell type"].to_numpy(), observed=True).mean()
    for labels, drawn, distance in (
        (list(sorted_means.index), names, pdist(sorted_means)),
        (list(range(12)), columns, pdist(sorted_means.T, "correlation")),
    ):
        order = [labels[i] for i in leaves_list(linkage(distance, "average", optimal_ordering=True))]
        assert drawn in (order, order[::-1])
    assert {*names[:2]} in ({"B cell", "Monocyte"}, {"CD4+ memory T cell", "CD8+ T cell"})


def test_rows_are_cells_grouped_by_type(embedded):
    rows, columns, values = features(embedded, n_cells=7)
    assert values.shape == (28, 12)
    z, types = means_of(embedded, ())[0], embedded.obs["cell type"]
    for number, name in enumerate(names_of(rows)):
        type_cells = z[(types == name).to_numpy()][:, columns]
        for cell in values[7 * number : 7 * number + 7]:
            assert np.abs(type_cells - cell).max(axis=1).min() < 1e-9
    assert features(embedded[::20].copy(), n_cells=99)[2].shape == (8, 12)


def test_cells_without_type_or_embedding_are_not_drawn(embedded):
    embedded.obs.loc["cell3", "cell type"] = np.nan
    embedded.obsm["X_scdiva"][:3] = np.nan
    with pytest.warns(UserWarning, match="3 of 159 cells have no finite embedding"):
        rows, columns, values = features(embedded)
    _, means = means_of(embedded, names_of(rows), slice(4, None))
    np.testing.assert_allclose(values, means[:, columns], atol=1e-9)
    assert "Monocyte (39)" in rows


def test_other_embeddings(embedded):
    embedded.obsm["X_pca"] = sp.csr_matrix(embedded.obsm["X_scdiva"][:, :5])
    embedded.obsm["X_wide"] = np.random.default_rng(0).normal(size=(160, 300))
    embedded.obsm["X_wide"][:, 7] = 2.0  # says nothing
    assert len(features(embedded, basis="X_pca")[1]) == 5
    assert features(embedded, basis="X_wide")[2].size == 4 * 299
    embedded.obs["one"] = "all"
    rows, _, values = features(embedded, "one")
    assert rows == ["all (160)"]
    np.testing.assert_allclose(values, 0, atol=1e-9)
