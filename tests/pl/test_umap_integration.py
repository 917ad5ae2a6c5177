from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scdiva.pl import _umap, integration


def cells(n: int = 90) -> ad.AnnData:
    """Three types in two batches, apart before and mixed after; the maps stand there, so that none is computed."""
    rng = np.random.default_rng(0)
    kind, batch = np.arange(n) % 3, np.arange(n) // 3 % 2
    place = np.array([[0.0, 0.0], [9.0, 1.0], [4.0, 8.0]])[kind]
    adata = ad.AnnData(np.zeros((n, 1), np.float32), obs=pd.DataFrame(index=[f"cell{i}" for i in range(n)]))
    adata.obs["cell type"] = pd.Categorical.from_codes(kind, ["T cell", "B cell", "Monocyte"])
    adata.obs["donor"] = pd.Categorical.from_codes(batch, ["Anna", "Ben"])
    adata.obs["run"] = batch + 9
    noise = rng.normal(size=(2, n, 2))
    adata.obsm["X_scdiva_umap"] = place + noise[0] + 3.0 * batch[:, None]
    adata.obsm["X_scdiva_integrated_umap"] = place + noise[1]
    adata.obsm["X_scdiva"] = rng.normal(size=(n, 4)).astype(np.float32)
    adata.obsm["X_scdiva_integrated"] = rng.normal(size=(n, 4)).astype(np.float32)
    return adata


def test_rows_are_the_columns_of_obs_and_columns_before_and_after():
    adata = cells()
    fig = integration(adata, ["donor", "run"], "cell type", return_fig=True)
    panels = np.array(fig.axes).reshape(3, 2)
    assert [row[0].get_ylabel() for row in panels] == ["donor", "run", "cell type"]
    assert [ax.get_title() for ax in panels[0]] == ["before: UMAP of X_scdiva", "after: UMAP of X_scdiva_integrated"]
    for column, key in enumerate(("X_scdiva_umap", "X_scdiva_integrated_umap")):
        for ax in panels[:, column]:
            dots = np.asarray(ax.collections[0].get_offsets())
            assert np.array_equal(dots[np.lexsort(dots.T)], adata.obsm[key][np.lexsort(adata.obsm[key].T)])
    names = [[text.get_text() for text in row[1].get_legend().get_texts()] for row in panels[:2]]
    assert names == [["Anna", "Ben"], ["9", "10"]]  # numbers name batches, in their order
    assert all(ax.get_legend() is None for ax in [*panels[:, 0], panels[2, 1]])
    for ax in panels[2]:
        assert sorted(text.get_text() for text in ax.texts) == ["B cell", "Monocyte", "T cell"]


def test_a_cell_has_the_same_colour_before_and_after():
    adata = cells()
    adata.uns["donor_colors"] = ["#ff0000", "#0000ff"]
    adata.obs.loc["cell7", "donor"] = np.nan
    fig = integration(adata, "donor", return_fig=True)
    assert len(fig.axes) == 2
    for ax, key in zip(fig.axes, ("X_scdiva_umap", "X_scdiva_integrated_umap"), strict=True):
        dots = ax.collections[0]
        at = {tuple(p): tuple(c) for p, c in zip(dots.get_offsets(), dots.get_facecolors()[:, :3], strict=True)}
        for i, donor in enumerate(adata.obs["donor"]):
            expected = (212 / 255,) * 3 if i == 7 else {"Anna": (1.0, 0.0, 0.0), "Ben": (0.0, 0.0, 1.0)}[donor]
            assert at[tuple(adata.obsm[key][i])] == expected


def test_both_maps_are_computed_once_and_kept(monkeypatch):
    adata = cells()
    del adata.obsm["X_scdiva_umap"], adata.obsm["X_scdiva_integrated_umap"]
    before = adata.copy()
    integration(adata, "donor", "cell type", rng=3)
    assert set(adata.obsm) == {*before.obsm, "X_scdiva_umap", "X_scdiva_integrated_umap"}
    assert set(adata.uns["scdiva"]["umap"]) == {"X_scdiva_umap", "X_scdiva_integrated_umap"}
    assert adata.obsm["X_scdiva_umap"].shape == (90, 2)
    pd.testing.assert_frame_equal(adata.obs, before.obs)
    monkeypatch.delattr("scdiva.embedding.umap.umap_of")
    integration(adata, "donor", rng=3)


def test_other_embeddings_can_be_compared():
    adata = cells()
    for key in ("X_pca", "X_harmony"):
        adata.obsm[key] = adata.obsm["X_scdiva"]
        adata.obsm[f"{key}_umap"] = adata.obsm["X_scdiva_umap"]
    fig = integration(adata, "donor", before="X_pca", after="X_harmony", return_fig=True)
    assert [ax.get_title() for ax in fig.axes] == ["before: UMAP of X_pca", "after: UMAP of X_harmony"]


def test_bad_input_is_refused_and_adata_left_alone(tmp_path):
    adata = cells()
    del adata.obsm["X_scdiva_umap"], adata.obsm["X_scdiva_integrated_umap"]
    adata.obs["depth"] = np.linspace(0, 1, 90)
    adata.obs["nothing"] = np.nan
    adata.obs["depth"] = np.arange(90) / 7
    large = ad.concat([adata, adata], index_unique="-")
    large.obs["depth"] = np.arange(180) / 7
    without, empty = adata.copy(), adata.copy()
    del without.obsm["X_scdiva_integrated"]
    empty.obsm["X_scdiva_integrated"][4:] = np.nan
    calls = [
        (adata, ("Donor",), {}, KeyError, "adata.obs has no column 'Donor'.*; it has 'cell type', 'donor', 'run'"),
        (adata, ("donor", "kind"), {}, KeyError, "adata.obs has no column 'kind'"),
        (adata, ([],), {}, ValueError, "batch_key must name a column of adata.obs, or several; got none"),
        (adata, ("nothing",), {}, ValueError, r"'nothing'\] has 0 different values in 90 cells"),
        (large, ("depth",), {}, ValueError, r"'depth'\] has 180 different values"),
        (adata, ("donor",), {"save": tmp_path / "map"}, ValueError, "must end in a picture format"),
        (without, ("donor",), {}, KeyError, r"no 'X_scdiva_integrated', .* call scdiva.tl.integrate\(adata, 'donor'\)"),
        (empty, ("donor",), {}, ValueError, r"X_scdiva_integrated'\] has 4 finite rows of 90"),
        ("file.h5ad", ("donor",), {}, TypeError, "expected an AnnData object"),
    ]
    for given, keys, options, error, words in calls:
        with pytest.raises(error, match=words):
            integration(given, *keys, **options)
        if given is not calls[-1][0]:
            assert not [key for key in given.obsm if key.endswith("umap")]
            assert dict(given.uns) == {}


def test_without_an_embedding_from_before_components_of_the_expression_are_drawn(monkeypatch):
    monkeypatch.setattr(_umap, "umap_of", lambda z, seed: z[:, :2])
    adata = cells()
    counts = np.random.default_rng(0).poisson(3.0, (90, 12)).astype(np.float32)
    adata = ad.AnnData(counts, obs=adata.obs, obsm=dict(adata.obsm))
    del adata.obsm["X_scdiva"], adata.obsm["X_scdiva_umap"]
    before = adata.copy()
    fig = integration(adata, "donor", return_fig=True)
    assert fig.axes[0].get_title() == "before: UMAP of principal components"
    assert set(adata.obsm) == set(before.obsm)
    log = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))
    values = np.linalg.svd(log - log.mean(axis=0), full_matrices=False)
    expected = np.abs((values[0] * values[1])[:, :2])
    shown = np.abs(np.asarray(fig.axes[0].collections[0].get_offsets()))
    np.testing.assert_allclose(np.sort(shown, axis=0), np.sort(expected, axis=0), atol=1e-3)
    adata.obsm["X_pca"] = np.arange(180.0).reshape(90, 2)
    assert integration(adata, "donor", return_fig=True).axes[0].get_title() == "before: X_pca"
    scaled = ad.AnnData(counts - 3, obs=adata.obs, obsm=dict(before.obsm))
    with pytest.raises(KeyError, match=r"call scdiva\.tl\.embed\(adata\) first"):
        integration(scaled, "donor")
