"""Read and write h5ad and zarr files; errors name a damaged file, and no temporary file is left."""

from __future__ import annotations

import shutil

import anndata as ad
import h5py
import numpy as np
import pytest

import scdiva as sd
from scdiva.embedding import embed_file as _embed_file


@pytest.fixture(scope="module")
def folder(adata, tmp_path_factory):
    """The same cells as h5ad and zarr; with missing values, booleans and text in obs."""
    folder = tmp_path_factory.mktemp("cells")
    cells = adata.copy()
    cells.obs["flag"] = np.arange(90) % 3 == 0
    cells.obs["text"] = [f"é{i}" for i in range(90)]
    cells.obs["cell_type"] = cells.obs["cell_type"].where(np.arange(90) > 4)
    cells.write_h5ad(folder / "cells.h5ad")
    cells.write_zarr(folder / "cells.zarr")
    return folder


@pytest.mark.parametrize("source", ["cells.h5ad", "cells.zarr"])
@pytest.mark.parametrize("target", ["z.h5ad", "z.zarr"])
def test_either_kind_gives_the_same(one, folder, tmp_path, source, target):
    out = sd.tl.embed_file(folder / source, tmp_path / "deep" / target, model=one, batch_size=4)
    result = ad.read_zarr(out) if target.endswith("zarr") else ad.read_h5ad(out)
    cells = ad.read_h5ad(folder / "cells.h5ad")
    sd.tl.embed(cells, one)
    np.testing.assert_allclose(result.obsm["X_scdiva"], cells.obsm["X_scdiva"], atol=1e-6)
    assert (result.shape, result.obsm["X_scdiva"].dtype) == ((90, 0), np.float32)
    assert result.obs.equals(cells.obs)
    assert result.uns["scdiva"]["X_scdiva"] == cells.uns["scdiva"]["X_scdiva"]
    assert [path.name for path in out.parent.iterdir()] == [target]


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def without(*names):
    def change(path):
        with h5py.File(path, "r+") as file:
            for name in names:
                del file[name]

    return change


DAMAGE = {
    "truncated": cut,
    "foreign": without("obs", "var", "X"),
    "no X": without("X"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named(one, folder, tmp_path, damage):
    path = tmp_path / "bad_one.h5ad"
    shutil.copy(folder / "cells.h5ad", path)
    DAMAGE[damage](path)
    with pytest.raises((ValueError, KeyError), match=r"bad_one\.h5ad"):
        sd.tl.embed_file(path, tmp_path / "z.h5ad", model=one)
    assert [left.name for left in tmp_path.iterdir()] == ["bad_one.h5ad"]


def test_a_model_that_is_not_there_is_not_blamed_on_the_file(folder, tmp_path):
    with pytest.raises((FileNotFoundError, ValueError), match="nowhere") as caught:
        sd.tl.embed_file(folder / "cells.h5ad", tmp_path / "z.h5ad", model=tmp_path / "nowhere")
    assert "cells.h5ad" not in str(caught.value)


def test_what_stands_is_not_replaced_unasked(one, folder, tmp_path):
    file, out = folder / "cells.h5ad", tmp_path / "z.h5ad"
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
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sd.tl.embed_file(tmp_path / "nowhere.h5ad", out, model=one)


def test_a_run_that_did_nothing_leaves_nothing_behind(one, folder, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("the power went")

    monkeypatch.setattr(_embed_file, "embed_cells", broken)
    with pytest.raises(RuntimeError, match="power"):
        sd.tl.embed_file(folder / "cells.h5ad", tmp_path / "z.h5ad", model=one)
    assert not list(tmp_path.iterdir())


def test_categories_of_older_files_are_copied(one, folder, tmp_path):
    """anndata 0.7 kept categories apart and referred to them; a reference copied to another file points anywhere."""
    file = shutil.copy(folder / "cells.h5ad", tmp_path)
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
    expected = ad.read_h5ad(folder / "cells.h5ad").obs
    for column in ("cell_type", "batch"):
        assert out.obs[column].astype(str).tolist() == expected[column].astype(str).tolist()
