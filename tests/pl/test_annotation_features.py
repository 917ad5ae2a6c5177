"""The heatmap of an embedding's features by cell type."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import pdist

from scdiva.pl import feature_heatmap


@pytest.fixture
def embedded(annotated):
    """Types at known places: B cells and monocytes alike, the T cells alike, in features of very different sizes."""
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(2, 12))
    kind = annotated.obs["cell type"].cat.codes.to_numpy()
    z = centres[np.array([0, 1, 1, 0])[kind]] + 0.3 * rng.normal(size=(4, 12))[kind]
    z = z + 0.2 * rng.normal(size=(160, 12))
    annotated.obsm["X_scdiva"] = (z * 10.0 ** np.arange(-3, 9)).astype(np.float64)
    return annotated


def drawn(fig):
    axes = fig.axes[0]
    rows = [text.get_text() for text in axes.get_yticklabels()]
    columns = [int(text.get_text()) for text in axes.get_xticklabels()]
    values = np.asarray(axes.collections[0].get_array())
    return rows, columns, values.reshape(-1, len(columns))


def standardised(adata, kept=slice(None)):
    z = np.asarray(adata.obsm["X_scdiva"])[kept]
    return (z - z.mean(axis=0)) / z.std(axis=0)


def test_looks_as_it_did(embedded, looks_as_it_did):
    looks_as_it_did(feature_heatmap(embedded, "cell type", n_cells=15, return_fig=True), "feature_heatmap")


def test_rows_are_means_of_types_in_the_order_of_the_clustering(embedded):
    before = embedded.copy()
    rows, columns, values = drawn(feature_heatmap(embedded, "cell type", return_fig=True))
    z, types = standardised(embedded), embedded.obs["cell type"]
    names = [row.rsplit(" (", 1)[0] for row in rows]
    expected = np.array([[z[(types == name).to_numpy(), column].mean() for column in columns] for name in names])
    np.testing.assert_allclose(values, expected, atol=1e-9)
    assert rows[0].endswith("(40)")
    assert sorted(columns) == list(range(12))
    # scipy's leaf order of the means, forwards or backwards
    means = pd.DataFrame(z).groupby(types.to_numpy(), observed=True).mean()
    for labels, shown, distance in (
        (list(means.index), names, pdist(means)),
        (list(range(12)), columns, pdist(means.T, "correlation")),
    ):
        order = [labels[i] for i in leaves_list(linkage(distance, "average", optimal_ordering=True))]
        assert shown in (order, order[::-1])
    assert {frozenset(names[:2]), frozenset(names[2:])} == {
        frozenset(["B cell", "Monocyte"]), frozenset(["CD4+ memory T cell", "CD8+ T cell"]),
    }  # fmt: skip
    assert np.array_equal(embedded.obsm["X_scdiva"], before.obsm["X_scdiva"])
    assert embedded.uns.keys() == before.uns.keys()


def test_rows_are_cells_grouped_by_type(embedded):
    fig = feature_heatmap(embedded, "cell type", n_cells=7, return_fig=True)
    rows, columns, values = drawn(fig)
    assert values.shape == (28, 12)
    z, types = standardised(embedded), embedded.obs["cell type"]
    for number, row in enumerate(rows):
        own = z[(types == row.rsplit(" (", 1)[0]).to_numpy()][:, columns]
        for cell in values[7 * number : 7 * number + 7]:
            assert np.abs(own - cell).max(axis=1).min() < 1e-9
        assert fig.axes[0].get_yticks()[number] == 7 * number + 3.5
    few = drawn(feature_heatmap(embedded[::20].copy(), "cell type", n_cells=99, return_fig=True))[2]
    assert few.shape == (8, 12)


def test_cells_without_type_or_embedding_are_not_drawn(embedded):
    embedded.obs.loc["cell3", "cell type"] = np.nan
    embedded.obsm["X_scdiva"][:3] = np.nan
    with pytest.warns(UserWarning, match="3 of 159 cells have no finite embedding"):
        rows, columns, values = drawn(feature_heatmap(embedded, "cell type", return_fig=True))
    z, types = standardised(embedded, slice(4, None)), embedded.obs["cell type"].iloc[4:]
    names = [row.rsplit(" (", 1)[0] for row in rows]
    expected = np.array([z[(types == name).to_numpy()].mean(axis=0) for name in names])
    np.testing.assert_allclose(values, expected[:, columns], atol=1e-9)
    assert [row for row in rows if row.startswith("Monocyte")] == ["Monocyte (39)"]


def test_other_embeddings_and_axes(embedded, tmp_path):
    embedded.obsm["X_pca"] = sp.csr_matrix(embedded.obsm["X_scdiva"][:, :5])
    embedded.obsm["X_wide"] = np.random.default_rng(0).normal(size=(160, 300))
    embedded.obsm["X_wide"][:, 7] = 2.0  # says nothing
    assert len(drawn(feature_heatmap(embedded, "cell type", basis="X_pca", return_fig=True))[1]) == 5
    fig = feature_heatmap(embedded, "cell type", basis="X_wide", return_fig=True)
    assert np.asarray(fig.axes[0].collections[0].get_array()).size == 4 * 299
    _, (left, right) = plt.subplots(1, 2)
    assert feature_heatmap(embedded, "cell type", ax=right, save=tmp_path / "a.png") is None
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert right.collections
    assert not left.collections
    embedded.obs["one"] = "all"
    rows, _, values = drawn(feature_heatmap(embedded, "one", return_fig=True))
    assert rows == ["all (160)"]
    np.testing.assert_allclose(values, 0, atol=1e-9)


def test_what_cannot_be_drawn_is_refused(embedded, tmp_path):
    embedded.obsm["X_flat"] = np.ones((160, 3))
    embedded.obs["none"] = pd.Categorical([np.nan] * 160, categories=["a"])
    for options, error, words in [
        ({"groupby": "type"}, KeyError, "type"),
        ({"basis": "X_no"}, KeyError, "scdiva.tl.embed"),
        ({"basis": "X_flat"}, ValueError, "is the same in all 160 cells"),
        ({"n_cells": 0}, ValueError, "n_cells must be"),
        ({"groupby": "none"}, ValueError, "1 to 100 groups"),
        ({"save": tmp_path / "picture"}, ValueError, "picture format"),
    ]:
        with pytest.raises(error, match=words):
            feature_heatmap(embedded, **options)
    assert plt.get_fignums() == []
