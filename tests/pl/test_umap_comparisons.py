"""`pl.integration` and `pl.generated`: maps before and after, of real and of generated cells."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest

from scdiva.data.cells import log_normalised
from scdiva.pl import generated, integration

from .conftest import colours_at, dots, legend, texts

MAPS = ("X_scdiva_umap", "X_scdiva_integrated_umap")


# --- before and after -------------------------------------------------------------------------------------------------
def test_rows_are_the_columns_of_obs_and_columns_before_and_after(integrated):
    fig = integration(integrated, ["donor", "run"], "cell type", return_fig=True)
    panels = np.array(fig.axes).reshape(3, 2)
    assert [row[0].get_ylabel() for row in panels] == ["donor", "run", "cell type"]
    assert [ax.get_title() for ax in panels[0]] == ["before: UMAP of X_scdiva", "after: UMAP of X_scdiva_integrated"]
    for column, key in enumerate(MAPS):
        for ax in panels[:, column]:
            assert sorted(map(tuple, dots(ax))) == sorted(map(tuple, integrated.obsm[key]))
    names = [texts(row[1].get_legend().get_texts()) for row in panels[:2]]
    assert names == [["Anna", "Ben"], ["9", "10"]]  # numbers name batches, in their order
    assert all(ax.get_legend() is None for ax in [*panels[:, 0], panels[2, 1]])
    assert [sorted(texts(ax.texts)) for ax in panels[2]] == [["B cell", "Monocyte", "T cell"]] * 2


def test_a_cell_has_the_same_colour_before_and_after(integrated):
    integrated.uns["donor_colors"] = ["#ff0000", "#0000ff"]
    integrated.obs.loc["cell7", "donor"] = np.nan
    colours = integrated.obs["donor"].astype(object).map({"Anna": "#ff0000", "Ben": "#0000ff"}).fillna("#d4d4d4")
    for ax, key in zip(integration(integrated, "donor", return_fig=True).axes, MAPS, strict=True):
        assert colours_at(ax) == dict(zip(map(tuple, integrated.obsm[key]), colours, strict=True))


def test_both_maps_are_computed_once_and_kept(integrated, monkeypatch):
    for key in MAPS:
        del integrated.obsm[key]
    integration(integrated, "donor", "cell type", rng=3)
    assert set(integrated.obsm) == {"X_scdiva", "X_scdiva_integrated", *MAPS}
    assert set(integrated.uns["scdiva"]["umap"]) == {*MAPS}
    monkeypatch.delattr("scdiva.embedding.umap.umap_of")
    integration(integrated, "donor", rng=3)
    integrated.obsm["X_scdiva_integrated"][4:] = np.nan
    with pytest.raises(ValueError, match=r"X_scdiva_integrated'\] has 4 finite rows of 90"):
        integration(integrated, "donor")


def test_without_an_embedding_from_before_components_of_the_expression_are_drawn(integrated, components):
    counts = np.random.default_rng(0).poisson(3.0, (90, 12)).astype(np.float32)
    after = {key: integrated.obsm[key] for key in ("X_scdiva_integrated", "X_scdiva_integrated_umap")}
    adata = ad.AnnData(counts, obs=integrated.obs, obsm=dict(after))
    fig = integration(adata, "donor", return_fig=True)
    assert fig.axes[0].get_title() == "before: UMAP of principal components"
    assert set(adata.obsm) == set(after)
    log = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))
    values = np.linalg.svd(log - log.mean(axis=0), full_matrices=False)
    expected = np.abs((values[0] * values[1])[:, :2])
    np.testing.assert_allclose(np.sort(np.abs(dots(fig.axes[0])), axis=0), np.sort(expected, axis=0), atol=1e-3)
    adata.obsm["X_pca"] = np.arange(180.0).reshape(90, 2)
    assert integration(adata, "donor", return_fig=True).axes[0].get_title() == "before: X_pca"
    scaled = ad.AnnData(counts - 3, obs=integrated.obs, obsm=dict(after))
    with pytest.raises(KeyError, match=r"call scdiva\.tl\.embed\(adata\) first"):
        integration(scaled, "donor")


# --- real and generated -----------------------------------------------------------------------------------------------
def test_the_map_is_made_of_components_of_the_real_cells(real_and_made, components):
    real, synthetic = real_and_made
    generated(real, synthetic, rng=3)
    ((z, seed),) = components
    assert (z.shape, seed) == ((120, 30), 3)
    x = log_normalised(real)[0].toarray()
    axes = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)[2][:4]
    expected = (np.concatenate([x, synthetic.X.toarray()]) - x.mean(axis=0)) @ axes.T
    turned = np.sign((z[:90, :4] * expected[:90]).sum(axis=0))
    np.testing.assert_allclose(z[:, :4], expected * turned, atol=1e-3)


def test_unit_total_and_order_of_genes_change_nothing(real_and_made, components):
    real, synthetic = real_and_made
    logged, part = real.copy(), real.copy()
    logged.X = log_normalised(real)[0].astype(np.float32)
    part.X = logged.X.copy()
    part.X.data = np.log1p(0.2 * np.expm1(part.X.data))  # a panel that was cut out of log-normalised data
    generated(real, synthetic)
    generated(real, synthetic[:, ::-1].copy())
    generated(logged, synthetic)
    generated(part, synthetic)
    (first, _), (reversed_, _), (of_logs, _), (of_part, _) = components
    np.testing.assert_allclose(reversed_, first, atol=1e-4)
    np.testing.assert_allclose(of_logs, first, atol=1e-4)
    turned = np.sign((first * of_part).sum(axis=0))
    np.testing.assert_allclose(of_part[:, :10] * turned[:10], first[:, :10], atol=0.01)


def test_genes_that_are_not_generated_are_left_out(real_and_made, components):
    real, synthetic = real_and_made
    fewer = synthetic[:, 10:].copy()
    generated(real, fewer)
    generated(real[:, fewer.var_names].copy(), fewer)
    np.testing.assert_array_equal(components[0][0], components[1][0])


def test_cells_have_the_colours_of_their_origin_and_group(real_and_made, components):
    real, synthetic = real_and_made
    synthetic.obs["cell_type"] = synthetic.obs["cell_type"].astype(str).replace("type B", "new type")
    synthetic.obs.iloc[4, synthetic.obs.columns.get_loc("cell_type")] = np.nan
    fig = generated(real, synthetic, color="cell_type", return_fig=True)
    points = [*map(tuple, components[0][0][:, :2])]
    origin, group = map(colours_at, fig.axes)
    assert [origin[point] for point in points] == ["#999999"] * 90 + ["#d1495b"] * 30
    colours: dict[str, set[str]] = {}
    for point, name in zip(
        points, [*real.obs["cell_type"].astype(str), *synthetic.obs["cell_type"].astype(str)], strict=True
    ):
        colours.setdefault(name, set()).add(group[point])
    assert colours.pop("nan") == {"#d4d4d4"}
    assert set(colours) == {*texts(fig.axes[1].texts)} == {"type A", "type B", "type C", "type D", "new type"}
    assert all(len(group_colours) == 1 for group_colours in colours.values())
    assert len(set.union(*colours.values())) == 5
    assert legend(fig) == ["real (90)", "generated (30)"]
