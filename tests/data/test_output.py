from __future__ import annotations

from types import SimpleNamespace

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest

import scdiva as sd
from scdiva._files import whole_or_not
from scdiva.data.output import copy_frame, open_store, refuse_target, write_cells


def fill(path, text):
    if path.suffix == ".zarr":
        path.mkdir()
        (path / "zarr.json").write_text(text)
    else:
        path.write_text(text)


def text_of(path):
    return (path / "zarr.json" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("name", ["z.h5ad", "z.zarr"])
@pytest.mark.parametrize("before", [None, "old"])
def test_a_file_is_there_whole_or_not_at_all(tmp_path, name, before):
    out = tmp_path / name
    if before:
        fill(out, before)

    def failing():
        with whole_or_not(out) as new:
            fill(new, "half")
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        failing()
    assert [path.name for path in tmp_path.iterdir()] == ([name] if before else [])
    if before:
        assert text_of(out) == "old"
    fill(tmp_path / f".z.new{out.suffix}", "left by a kill")
    with whole_or_not(out) as new:
        assert not new.exists()
        fill(new, "whole")
        assert out.exists() == bool(before)
    assert text_of(out) == "whole"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_that_could_not_be_put_in_place_gives_the_old_one_back(tmp_path, monkeypatch):
    out = tmp_path / "z.zarr"
    fill(out, "old")

    def failing(self, target):
        raise OSError("not allowed")

    def swap():
        with whole_or_not(out) as new:
            fill(new, "whole")
            monkeypatch.setattr(type(out), "replace", failing)

    with pytest.raises(OSError, match="not allowed"):
        swap()
    assert text_of(out) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["z.zarr"]


def test_what_a_kill_between_two_renames_left_is_found(tmp_path):
    """The old folder has been moved aside, and the new one is not there yet."""
    out = tmp_path / "z.zarr"
    fill(tmp_path / ".z.old.zarr", "old")
    with pytest.raises(KeyboardInterrupt), whole_or_not(out):
        raise KeyboardInterrupt
    assert text_of(out) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["z.zarr"]


def test_targets_that_are_refused(tmp_path):
    refuse_target(tmp_path / "new.h5ad", False)
    (tmp_path / "a.h5ad").write_text("")
    (tmp_path / "link.h5ad").symlink_to(tmp_path / "a.h5ad")
    refuse_target(tmp_path / "a.h5ad", True)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        refuse_target(tmp_path / "a.h5ad", False)
    with pytest.raises(FileExistsError, match="not the input"):
        refuse_target(tmp_path / "link.h5ad", True, tmp_path / "a.h5ad")


@pytest.mark.parametrize("source", ["a.h5ad", "a.zarr"])
@pytest.mark.parametrize("target", ["b.h5ad", "b.zarr"])
def test_annotation_comes_through(tmp_path, source, target):
    import anndata.io

    frame = pd.DataFrame(
        {
            "category": pd.Categorical(["b", None, "a"], ["b", "a"], ordered=True),
            "whole": pd.array([1, None, 3], dtype="Int64"),
            "yes": [True, False, True],
            "text": ["é", "", "c/d"],
            "number": [1.5, float("nan"), 2.0],
        },
        index=pd.Index(["x", "y", "z"], name="barcode"),
    )
    old, new = tmp_path / source, tmp_path / target
    with open_store(old, "w") as file:
        anndata.io.write_elem(file, "obs", frame)
        anndata.io.write_elem(file, "var", frame[[]])
    with open_store(old) as file, open_store(new, "w") as other:
        copy_frame(file["obs"], other, "obs")
        copy_frame(file["var"], other, "var")
    with open_store(new) as other:
        assert isinstance(other, h5py.File) == new.is_file()
        pd.testing.assert_frame_equal(anndata.io.read_elem(other["obs"]), frame)
        pd.testing.assert_frame_equal(anndata.io.read_elem(other["var"]), frame[[]], check_column_type=False)


@pytest.mark.parametrize("name", ["deep/er/cells.h5ad", "deep/cells.zarr"])
def test_cells_are_written_whole_into_folders_that_are_made(tmp_path, name, monkeypatch):
    adata = sd.datasets.toy(12, 30)
    out = tmp_path / name
    assert write_cells(adata, out) == out
    read = ad.read_zarr if name.endswith("zarr") else ad.read_h5ad
    assert (read(out).X != adata.X).nnz == 0
    adata.obsm["wide"] = np.ones((12, 5000))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=12 * 5000 * 8))
    if name.endswith("h5ad"):  # a .zarr is compressed: what it takes is not known before
        with pytest.raises(OSError, match=r"No space .*0\.5 MiB"):
            write_cells(adata, out)
        assert "wide" not in read(out).obsm
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_link_to_a_folder_is_replaced_and_the_folder_stays(tmp_path):
    (tmp_path / "real.zarr").mkdir()
    (tmp_path / "link.zarr").symlink_to(tmp_path / "real.zarr")
    with whole_or_not(tmp_path / "link.zarr") as new:
        new.mkdir()
    assert not (tmp_path / "link.zarr").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.zarr", "real.zarr"]


def test_two_calls_do_not_write_the_same(tmp_path):
    out = tmp_path / "cells.h5ad"
    with whole_or_not(out) as new:
        new.write_text("first")
        with pytest.raises(RuntimeError, match="in use: another call is writing"), whole_or_not(out):
            pytest.fail("both write")
    assert out.read_text() == "first"
    assert list(tmp_path.iterdir()) == [out]
