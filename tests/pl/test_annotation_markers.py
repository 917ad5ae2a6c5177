from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from scdiva.pl import marker_heatmap


def parts(fig) -> tuple[list[str], list[str], np.ndarray, dict[str, list[str]]]:
    """Names of types and genes, the colours (types × genes), and each type's own genes, which are framed."""
    axes = fig.axes[0]
    types = [text.get_text() for text in axes.get_yticklabels()]
    genes = [text.get_text() for text in axes.get_xticklabels()]
    own: dict[str, list[str]] = {}
    for patch in axes.patches:
        own.setdefault(types[int(patch.get_y())], []).append(genes[int(patch.get_x())])
    return types, genes, np.asarray(axes.collections[0].get_array()).reshape(len(types), len(genes)), own


def test_looks_as_it_did(annotated, looks_as_it_did):
    looks_as_it_did(marker_heatmap(annotated, n_genes=3, return_fig=True), "marker_heatmap")


def test_each_type_shows_its_own_genes(annotated):
    """By the true types: three genes each, made nine times as high as elsewhere; the last two genes tell nothing."""
    before = annotated.copy()
    fig = marker_heatmap(annotated, "cell type", n_genes=3, gene_symbols="symbol", return_fig=True)
    types, genes, _, own = parts(fig)
    for i, name in enumerate(annotated.obs["cell type"].cat.categories):
        assert set(own[name]) == {f"G{3 * i}", f"G{3 * i + 1}", f"G{3 * i + 2}"}
    assert genes == [gene for name in types for gene in own[name]]  # in the order of the types: along the diagonal
    assert np.array_equal(annotated.X, before.X)
    assert set(annotated.uns) == set(before.uns)
    pd.testing.assert_frame_equal(annotated.obs, before.obs)


@pytest.mark.parametrize("dtype", ["int64", "category"])
def test_types_may_be_numbers(annotated, dtype):
    numbers = annotated.obs["cell type"].cat.codes.astype("int64")
    annotated.obs["cluster"], annotated.obs["name"] = numbers.astype(dtype), numbers.astype(str)
    found, expected = (parts(marker_heatmap(annotated, key, return_fig=True)) for key in ("cluster", "name"))
    assert found[:2] == expected[:2]


@pytest.mark.parametrize("step", [1, -1])
def test_colours_are_mean_log_expression_standardised_by_gene(annotated, step):
    names = annotated.obs["cell type"].cat.categories[::step]  # in any order of the categories
    annotated.obs["cell type"] = annotated.obs["cell type"].cat.reorder_categories(names)
    annotated.obs.loc["cell0", "cell type"] = np.nan
    types, genes, colour, _ = parts(marker_heatmap(annotated, "cell type", n_genes=2, return_fig=True))
    x = np.log1p(1e4 * annotated.X / annotated.X.sum(axis=1, keepdims=True))
    means = np.array([x[(annotated.obs["cell type"] == name).to_numpy()].mean(axis=0) for name in types])
    shown = means[:, annotated.var_names.get_indexer(genes)]
    np.testing.assert_allclose(colour, (shown - shown.mean(axis=0)) / shown.std(axis=0), rtol=1e-4, atol=1e-4)


def test_types_of_one_cell_are_drawn_without_markers_of_their_own(annotated):
    annotated.obs["cell type"] = annotated.obs["cell type"].astype(object)
    annotated.obs.loc["cell0", "cell type"] = "lonely"
    types, _, colour, own = parts(marker_heatmap(annotated, "cell type", return_fig=True))
    assert "lonely" in types
    assert "lonely" not in own
    assert np.isfinite(colour).all()
    two = annotated[annotated.obs["cell type"].isin(["lonely", "B cell"])].copy()
    assert set(parts(marker_heatmap(two, "cell type", return_fig=True))[3]) == {"B cell"}


def test_bad_input_is_refused(annotated, tmp_path):
    annotated.obs["one"] = "T cell"
    annotated.obs["two"] = pd.Categorical(["a", "b"] + [np.nan] * 158)
    scaled = annotated.copy()
    scaled.X = scaled.X - scaled.X.mean(axis=0)
    flat = annotated.copy()
    flat.X = np.full(flat.shape, 400.0, np.float32)
    for given, key, options, error, words in [
        (annotated, "mine", {}, KeyError, "call scdiva.tl.annotate"),
        (annotated, "one", {}, ValueError, "holds 1 types, the largest of 160 cells"),
        (annotated, "two", {}, ValueError, "holds 2 types, the largest of 1 cells"),
        (annotated, "cell type", {"n_genes": 0}, ValueError, "n_genes must be at least 1"),
        (annotated, "cell type", {"layer": "counts"}, KeyError, "no layer 'counts'"),
        (annotated, "cell type", {"gene_symbols": "name"}, KeyError, "adata.var has no column 'name'; it has 'symbol'"),
        (annotated, "cell type", {"save": tmp_path / "map"}, ValueError, "must end in a picture format"),
        (scaled, "cell type", {}, ValueError, "negative values"),
        (flat, "cell type", {}, ValueError, "no gene is higher in one type"),
    ]:
        with pytest.raises(error, match=words):
            marker_heatmap(given, key, **options)
    assert plt.get_fignums() == []
