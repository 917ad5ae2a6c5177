from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from scdiva.metrics import calibration
from scdiva.pl import annotation, reliability

GREY, UNKNOWN = "#d4d4d4", "#999999"


def colours_at(ax) -> dict[tuple, tuple]:
    """Colour of the cell at each place."""
    dots = ax.collections[0]
    return {tuple(p): mpl.colors.to_hex(c) for p, c in zip(dots.get_offsets(), dots.get_facecolors(), strict=True)}


def legend_of(fig):
    return fig.axes[0].get_legend()


def test_the_map_looks_as_it_did(annotated, looks_as_it_did):
    looks_as_it_did(annotation(annotated, "cell type", return_fig=True), "annotation")


def test_a_name_has_one_colour_in_both_panels(annotated):
    annotated.obs.loc["cell4", "cell type"] = np.nan
    fig = annotation(annotated, "cell type", return_fig=True)
    assert [ax.get_title() for ax in fig.axes[:3]] == ["annotated: cell type", "predicted: scdiva_label", "confidence"]
    true, predicted = map(colours_at, fig.axes[:2])
    of_name: dict[str, set] = {}
    for i, place in enumerate(map(tuple, annotated.obsm["X_scdiva_umap"])):
        of_name.setdefault(str(annotated.obs["cell type"].iloc[i]), set()).add(true[place])
        of_name.setdefault(annotated.obs["scdiva_label"].iloc[i], set()).add(predicted[place])
    assert {name: len(colours) for name, colours in of_name.items()} == dict.fromkeys(of_name, 1)
    assert len(set.union(*of_name.values())) == len(of_name) == 6
    assert of_name["nan"] == {GREY}
    assert of_name["unknown"] == {UNKNOWN}
    shown = fig.axes[2].collections[0]
    assert shown.get_clim() == (0.0, 1.0)
    np.testing.assert_allclose(np.sort(annotated.obs["scdiva_label_confidence"]), shown.get_array())
    assert {text.get_text() for text in fig.axes[1].texts} == {*of_name} - {"nan"}


def test_scanpys_colours_are_kept_and_names_that_only_the_prediction_has_get_others(annotated):
    annotated.uns["cell type_colors"] = ["#1f77b4", "#ff0000", "#00ff00", "#0000ff"]
    annotated.obs["scdiva_label"] = annotated.obs["scdiva_label"].cat.rename_categories({"B cell": "lymphocyte"})
    fig = annotation(annotated, "cell type", return_fig=True)
    true, predicted = map(colours_at, fig.axes[:2])
    at = dict(zip(annotated.obs_names, map(tuple, annotated.obsm["X_scdiva_umap"]), strict=True))
    first = annotated.obs_names[(annotated.obs["cell type"] == "B cell").to_numpy()][0]
    assert true[at[first]] == "#1f77b4"
    renamed = annotated.obs_names[(annotated.obs["scdiva_label"] == "lymphocyte").to_numpy()]
    assert len({predicted[at[cell]] for cell in renamed}) == 1
    assert predicted[at[renamed[0]]] not in set(true.values())


def test_panels_without_anything_to_show_are_left_out(annotated):
    assert len(annotation(annotated, return_fig=True).axes) == 3  # predicted, confidence and its bar
    del annotated.obs["scdiva_label_confidence"]
    fig = annotation(annotated, return_fig=True)
    assert [ax.get_title() for ax in fig.axes] == ["predicted: scdiva_label"]
    assert len(annotation(annotated, "cell type", return_fig=True).axes) == 2


def test_the_map_is_computed_once_and_nothing_else_changes(annotated, tmp_path):
    del annotated.obsm["X_scdiva_umap"]
    before, figures = annotated.copy(), plt.get_fignums()
    assert annotation(annotated, "cell type", save=tmp_path / "a.png") is None
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert plt.get_fignums() == figures
    assert set(annotated.obsm) == {*before.obsm, "X_scdiva_umap"}
    pd.testing.assert_frame_equal(annotated.obs, before.obs)


def test_maps_that_cannot_be_drawn_are_refused(annotated, tmp_path):
    del annotated.obsm["X_scdiva_umap"]
    for keys, options, error, words in [
        (("type",), {}, KeyError, "no column 'type'"),
        ((), {"key": "mine"}, KeyError, r"no 'mine', it has .*annotate\(adata, ..., key_added='mine'\)"),
        ((), {"basis": "X_pca"}, KeyError, "no 'X_pca'.*call scdiva.tl.embed"),
        ((), {"save": tmp_path / "map"}, ValueError, "must end in a picture format"),
    ]:
        with pytest.raises(error, match=words):
            annotation(annotated, *keys, **options)
    assert "X_scdiva_umap" not in annotated.obsm


@pytest.mark.parametrize(("name", "labels_key"), [("reliability", None), ("reliability_both", "cell type")])
def test_the_reliability_diagram_looks_as_it_did(annotated, looks_as_it_did, name, labels_key):
    looks_as_it_did(reliability(annotated, labels_key=labels_key, return_fig=True), name)


def test_points_whiskers_and_errors_are_those_of_the_bins(annotated):
    annotated.obs.loc["cell0", "cell type"] = np.nan  # no truth
    annotated.obsm["scdiva_label_probability"][1] = np.nan  # no known gene
    fig = reliability(annotated, labels_key="cell type", return_fig=True)
    axes = fig.axes[0]
    written = annotated.uns["scdiva"]["scdiva_label"]
    probability = annotated.obsm["scdiva_label_probability"][2:]
    right = probability.argmax(axis=1) == np.arange(160)[2:] % 4
    expected = [{**written["reliability"], "ece": written["ece"]}, calibration(probability.max(axis=1), right)]
    dots = [collection for collection in axes.collections if len(collection.get_offsets()) > 1]
    for found, drawn, whiskers in zip(expected, dots, axes.containers, strict=True):
        filled = found["n_cells"] > 0
        np.testing.assert_allclose(drawn.get_offsets().T, [found["confidence"][filled], found["accuracy"][filled]])
        for (low, high), y in zip(whiskers[2][0].get_segments(), found["accuracy"][filled], strict=True):
            assert 0 <= low[1] <= y + 1e-9
            assert y - 1e-9 <= high[1] <= 1
    assert [text.get_text() for text in legend_of(fig).get_texts()] == [
        f"held-out reference: ECE {expected[0]['ece']:.3f} (80 cells)",
        f"these cells: ECE {expected[1]['ece']:.3f} (158 cells)",
    ]
    assert expected[0]["ece"] != expected[1]["ece"]


def test_a_rejected_cell_is_scored_by_its_most_probable_label(annotated):
    before = legend_of(reliability(annotated, labels_key="cell type", return_fig=True)).get_texts()[1]
    annotated.obs["scdiva_label"] = "unknown"
    after = legend_of(reliability(annotated, labels_key="cell type", return_fig=True)).get_texts()[1]
    assert before.get_text() == after.get_text()


def test_these_cells_alone_are_drawn_where_the_reference_held_none_out(annotated):
    written = annotated.uns["scdiva"]["scdiva_label"]
    written["reliability"] = {"confidence": np.full(15, np.nan), "accuracy": np.full(15, np.nan), "n_cells": [0] * 15}
    fig = reliability(annotated, labels_key="cell type", return_fig=True)
    assert [text.get_text()[:11] for text in legend_of(fig).get_texts()] == ["these cells"]
    with pytest.raises(ValueError, match="no held-out reference cells"):
        reliability(annotated)
    annotated.obs["cell type"] = pd.Categorical([*["B cell"] * 2, *[np.nan] * 158])
    annotated.obsm["scdiva_label_probability"][:2] = np.nan
    with pytest.raises(ValueError, match="no cell has both a label"):
        reliability(annotated, labels_key="cell type")
    with pytest.raises(KeyError, match=r"call scdiva\.tl\.annotate"):
        reliability(annotated, "mine")


def test_everything_is_read_from_what_annotate_writes(tmp_path):
    """Nearest neighbours, at once; half the cells are the reference."""
    import scanpy as sc

    import scdiva as sd

    cells = sc.datasets.pbmc68k_reduced().raw.to_adata()
    reference, query = cells[::2].copy(), cells[1::2].copy()
    sd.tl.annotate(query, "bulk_labels", reference, method="knn", reject=0.05)
    query.obsm["X_scdiva"] = query.obsm["X_pca"]
    query.obsm["X_scdiva_umap"] = query.obsm["X_umap"]
    fig = annotation(query, "bulk_labels", return_fig=True)
    assert [ax.get_title() for ax in fig.axes[:3]] == [
        "annotated: bulk_labels",
        "predicted: scdiva_label",
        "confidence",
    ]
    legend = legend_of(reliability(query, labels_key="bulk_labels", return_fig=True))
    ece = query.uns["scdiva"]["scdiva_label"]["ece"]
    assert legend.get_texts()[0].get_text().startswith(f"held-out reference: ECE {ece:.3f}")
    assert legend.get_texts()[1].get_text().endswith(f"({query.n_obs} cells)")
    known = set(sd.get.annotation_df(query)["label"].cat.categories)
    matrix = sd.pl.confusion_matrix(query, "bulk_labels", return_fig=True).axes[0]
    assert known == {text.get_text() for text in matrix.get_xticklabels()} - {"unknown"}
    markers = sd.pl.marker_heatmap(query, return_fig=True).axes[0]
    named = set(query.obs["scdiva_label"].cat.categories)
    assert {text.get_text() for text in markers.get_yticklabels()} == named
