"""Files of either kind, in and out; damaged ones are named and nothing is left behind."""

from __future__ import annotations

import shutil

import anndata as ad
import h5py
import numpy as np
import pytest

import scdiva as sd


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
    out = sd.tl.embed_file(folder / source, tmp_path / target, model=one)
    found = ad.read_zarr(out) if target.endswith("zarr") else ad.read_h5ad(out)
    cells = ad.read_h5ad(folder / "cells.h5ad")
    sd.tl.embed(cells, one)
    np.testing.assert_array_equal(found.obsm["X_scdiva"], cells.obsm["X_scdiva"])
    assert found.obs.equals(cells.obs)
    assert found.uns["scdiva"]["X_scdiva"] == cells.uns["scdiva"]["X_scdiva"]
    assert [path.name for path in tmp_path.iterdir()] == [target]


def test_a_zarr_is_replaced_whole_and_other_folders_never(one, folder, tmp_path):
    out = tmp_path / "z.zarr"
    shutil.copytree(folder / "cells.zarr", out)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        sd.tl.embed_file(folder / "cells.h5ad", out, model=one)
    sd.tl.embed_file(folder / "cells.h5ad", out, model=one, overwrite=True)
    assert ad.read_zarr(out).shape == (90, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["z.zarr"]
    (tmp_path / "mine.h5ad").mkdir()
    (tmp_path / "mine.zarr").mkdir()
    for name in ("mine.h5ad", "mine.zarr"):
        with pytest.raises(FileExistsError, match=r"no \.zarr"):
            sd.tl.embed_file(folder / "cells.h5ad", tmp_path / name, model=one, overwrite=True)
    (tmp_path / "file.zarr").write_text("mine")
    with pytest.raises(FileExistsError, match="is a file"):
        sd.tl.embed_file(folder / "cells.h5ad", tmp_path / "file.zarr", model=one, overwrite=True)


def cut(path):
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])


def without(*names):
    def change(path):
        with h5py.File(path, "r+") as file:
            for name in names:
                del file[name]

    return change


def spoilt_index(path):
    with h5py.File(path, "r+") as file:
        file["X/indices"][5] = 10_000


def no_names(path):
    with h5py.File(path, "r+") as file:
        del file["var"][file["var"].attrs["_index"]]


DAMAGE = {
    "truncated": cut,
    "foreign": without("obs", "var", "X"),
    "no X": without("X"),
    "no var": without("var"),
    "no names of genes": no_names,
    "no values of X": without("X/data"),
    "indices outside": spoilt_index,
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
