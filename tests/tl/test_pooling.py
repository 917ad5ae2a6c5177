from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import torch

import scdiva as sd


@pytest.fixture(scope="module")
def light(build):
    """A model as the bundled one: its cell state needs no transformer."""
    return build(anchor="encoder", anchor_residual=False)


@pytest.fixture(scope="module", params=("learned", "encoder", "light"))
def model(request, build, light):
    return light if request.param == "light" else build(anchor=request.param)


def embedded(adata, model, **options):
    return sd.tl.embed(adata, model, copy=True, **options).obsm["X_scdiva"]


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def serialised(adata, model, cell):
    """One cell from raw counts to ranked tokens and values, by hand."""
    counts = np.asarray(adata.X[cell].todense(), dtype=np.float64).ravel()
    tokens = model.vocabulary.match(list(adata.var_names)).tokens
    v = np.log1p(counts / counts.sum() * 1e4).astype(np.float32)
    score = v / (np.maximum(model.vocabulary.entropy[tokens], model.config.entropy_floor) + 1e-6)
    kept = [i for i in np.argsort(-score, kind="stable") if tokens[i] >= 0 and v[i] > 0]
    return torch.tensor(tokens[kept].astype(np.int64)), torch.tensor(v[kept])


@pytest.mark.parametrize("n_kept", [40, 6])
def test_the_mean_is_that_of_a_forward_pass_written_out(adata, build, n_kept):
    """Cells longer than max_length too: the transformer sees their first genes, the set encoder all."""
    model = build(anchor="encoder", anchor_residual=False)
    object.__setattr__(model.config, "max_length", n_kept)
    tokens, values = serialised(adata, model, 7)
    assert 6 < len(tokens) < 40
    whole = torch.tensor([0, len(tokens)], dtype=torch.int32)
    cut = torch.tensor([0, min(len(tokens), n_kept)], dtype=torch.int32)
    with torch.no_grad():
        z = model.encode_anchor(tokens, values, whole)
        out = model(tokens[:n_kept], values[:n_kept], cut, anchor_state=z)
    assert len(out.hidden) == min(len(tokens), n_kept)
    np.testing.assert_allclose(embedded(adata, model, pooling="mean")[7], out.hidden.mean(0).numpy(), atol=1e-5)


def test_both_are_side_by_side_at_length_one(adata, model):
    lat, mean, both = (embedded(adata, model, pooling=how) for how in ("lat", "mean", "lat+mean"))
    width = model.state_dim
    assert (lat.shape[1], mean.shape[1], both.shape[1]) == (width, 16, width + 16)
    np.testing.assert_allclose(both[:, :width], unit(lat), atol=1e-6)
    np.testing.assert_allclose(both[:, width:], unit(mean), atol=1e-6)
    np.testing.assert_array_equal(embedded(adata, model), lat)


def test_a_cell_is_embedded_alike_whatever_is_beside_it(adata, model, monkeypatch):
    pooling = "lat+mean"
    z = embedded(adata, model, pooling=pooling)
    assert np.abs(z[0] - z[1]).max() > 1e-3 * np.abs(z).max()
    rows = np.random.default_rng(0).permutation(90)
    columns = np.random.default_rng(1).permutation(adata.n_vars)
    np.testing.assert_array_equal(
        embedded(adata[rows][:, columns].copy(), model, pooling=pooling, batch_size=7), z[rows]
    )
    monkeypatch.setattr("scdiva.data.batch.WINDOW", 20)
    monkeypatch.setattr("scdiva.data.blocks.BLOCK_ROWS", 8)
    with sd.settings.override(threads=3):
        np.testing.assert_array_equal(embedded(adata, model, pooling=pooling), z)


def test_what_ran_is_written_down(adata, light, tmp_path):
    for pooling, precision in (("lat", "fp32"), ("mean", "bf16"), ("lat+mean", "bf16")):
        cells = sd.tl.embed(adata, light, pooling=pooling, precision="bf16", copy=True)
        said = cells.uns["scdiva"]["X_scdiva"]
        assert (said["pooling"], said["precision"]) == (pooling, precision)
    full, low = embedded(adata, light, pooling="lat+mean"), cells.obsm["X_scdiva"]
    np.testing.assert_array_equal(low[:, : light.state_dim], full[:, : light.state_dim])  # no transformer in it
    assert 1e-6 < np.abs(low - full).max() < 0.05


def test_a_file_gives_what_adata_gives(adata, light, tmp_path):
    adata.write_h5ad(tmp_path / "a.h5ad")
    out = sd.tl.embed_file(tmp_path / "a.h5ad", tmp_path / "z.h5ad", model=light, pooling="lat+mean")
    z, expected = ad.read_h5ad(out), sd.tl.embed(adata, light, pooling="lat+mean", copy=True)
    np.testing.assert_allclose(z.obsm["X_scdiva"], expected.obsm["X_scdiva"], atol=1e-6)
    assert z.uns["scdiva"]["X_scdiva"] == expected.uns["scdiva"]["X_scdiva"]


@pytest.mark.parametrize("pooling", ["max", "genes", None])
def test_another_pooling_is_refused(adata, light, pooling):
    cells = adata.copy()
    with pytest.raises(ValueError, match=r"pooling must be 'lat', 'mean' or 'lat\+mean'"):
        sd.tl.embed(cells, light, pooling=pooling)
    assert not cells.obsm


def test_the_bundled_model_has_a_mean():
    cells = sd.datasets.pbmc68k_reduced()[:12].copy()
    sd.tl.embed(cells, use_raw=True, pooling="lat+mean")
    assert cells.obsm["X_scdiva"].shape == (12, 320)
    np.testing.assert_allclose((cells.obsm["X_scdiva"] ** 2).sum(1), 2, rtol=1e-5)
