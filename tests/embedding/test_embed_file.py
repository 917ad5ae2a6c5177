from __future__ import annotations

import anndata as ad
import h5py
import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva.embedding import embed_file as _embed_file


@pytest.fixture
def file(adata, tmp_path):
    path = tmp_path / "cells.h5ad"
    adata.write_h5ad(path)
    return path


def test_gives_what_embed_gives(adata, one, file, tmp_path):
    before = file.read_bytes()
    out = sd.tl.embed_file(file, tmp_path / "deep" / "z.h5ad", model=one, batch_size=4)
    z = ad.read_h5ad(out)
    expected = sd.tl.embed(adata, one, copy=True)
    np.testing.assert_allclose(z.obsm["X_scdiva"], expected.obsm["X_scdiva"], atol=1e-6)
    assert z.obsm["X_scdiva"].dtype == np.float32
    assert z.obs.equals(adata.obs)
    assert z.shape == (90, 0)
    assert z.uns["scdiva"]["X_scdiva"] == expected.uns["scdiva"]["X_scdiva"]
    assert file.read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["z.h5ad"]


def test_left_out_cells_are_nan(adata, one, tmp_path):
    cells = adata.copy()
    cells.X = sp.csr_matrix(cells.X.multiply(~np.isin(np.arange(90), [0, 4, 5, 89])[:, None]))
    cells.write_h5ad(tmp_path / "cells.h5ad")
    out = sd.tl.embed_file(tmp_path / "cells.h5ad", tmp_path / "z.h5ad", model=one, empty="nan")
    z = ad.read_h5ad(out).obsm["X_scdiva"]
    np.testing.assert_array_equal(z, sd.tl.embed(cells, one, empty="nan", copy=True).obsm["X_scdiva"])
    assert np.flatnonzero(np.isnan(z).any(axis=1)).tolist() == [0, 4, 5, 89]


def test_what_stands_is_not_replaced_unasked(one, file, tmp_path):
    out = tmp_path / "z.h5ad"
    out.write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        sd.tl.embed_file(file, out, model=one)
    assert out.read_text() == "mine"
    sd.tl.embed_file(file, out, model=one, overwrite=True)
    assert "X_scdiva" in ad.read_h5ad(out).obsm
    with pytest.raises(FileExistsError, match="not the input"):
        sd.tl.embed_file(file, file, model=one, overwrite=True)
    with pytest.raises(ValueError, match=r"\.zarr"):
        sd.tl.embed_file(file, tmp_path / "z.csv", model=one)


def test_a_run_that_did_nothing_leaves_nothing_behind(one, file, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("the power went")

    monkeypatch.setattr(_embed_file, "embed_cells", broken)
    with pytest.raises(RuntimeError, match="power"):
        sd.tl.embed_file(file, tmp_path / "z.h5ad", model=one)
    assert [path.name for path in tmp_path.iterdir()] == ["cells.h5ad"]


def test_no_file_or_another_kind_is_refused(one, adata, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sd.tl.embed_file(tmp_path / "nowhere.h5ad", tmp_path / "z.h5ad", model=one)
    (tmp_path / "text.h5ad").write_text("cells")
    with pytest.raises(ValueError, match=r"text\.h5ad' is no HDF5 file"):
        sd.tl.embed_file(tmp_path / "text.h5ad", tmp_path / "z.h5ad", model=one)


def test_categories_of_older_files_are_copied(one, adata, file, tmp_path):
    """anndata 0.7 kept categories apart and referred to them; a reference copied to another file points anywhere."""
    with h5py.File(file, "r+") as h5:
        obs = h5["obs"]
        for column in ("cell_type", "batch"):
            codes, names = obs[column]["codes"][:], obs[column]["categories"][:]
            del obs[column]
            obs.create_dataset(column, data=codes)
            obs.require_group("__categories").create_dataset(column, data=names, dtype=h5py.string_dtype())
            obs[column].attrs["categories"] = obs["__categories"][column].ref
        obs.attrs["encoding-version"] = "0.1.0"
    out = ad.read_h5ad(sd.tl.embed_file(file, tmp_path / "z.h5ad", model=one))
    for column in ("cell_type", "batch"):
        assert out.obs[column].tolist() == adata.obs[column].tolist()
