from __future__ import annotations

import contextlib
from types import SimpleNamespace

import anndata as ad
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
    with contextlib.suppress(OSError), whole_or_not(out) as new:
        fill(new, "half")
        raise OSError("no space left")
    assert [(path.name, text_of(path)) for path in tmp_path.iterdir()] == ([(name, "old")] if before else [])
    fill(tmp_path / f".z.new{out.suffix}", "left by a kill")
    with whole_or_not(out) as new:
        assert not new.exists()
        fill(new, "whole")
        assert out.exists() == bool(before)
        with pytest.raises(RuntimeError, match="in use: another call is writing"), whole_or_not(out):
            pytest.fail("both write")
    assert [(path.name, text_of(path)) for path in tmp_path.iterdir()] == [(name, "whole")]


def test_a_folder_that_could_not_be_put_in_place_gives_the_old_one_back(tmp_path, monkeypatch):
    out = tmp_path / "z.zarr"
    fill(out, "old")

    def failing(self, target):
        raise OSError("not allowed")

    with contextlib.suppress(OSError), whole_or_not(out) as new:
        fill(new, "whole")
        monkeypatch.setattr(type(out), "replace", failing)
    assert [(path.name, text_of(path)) for path in tmp_path.iterdir()] == [("z.zarr", "old")]


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
    columns = {
        "category": pd.Categorical(["b", None, "a"], ["b", "a"], ordered=True),
        "whole": pd.array([1, None, 3], dtype="Int64"),
        "yes": [True, False, True],
        "text": ["é", "", "c/d"],
        "number": [1.5, float("nan"), 2.0],
    }
    frame = pd.DataFrame(columns, index=pd.Index(["x", "y", "z"], name="barcode"))
    frames = {"obs": frame, "var": frame[[]]}
    with open_store(tmp_path / source, "w") as file:
        for name, one in frames.items():
            ad.io.write_elem(file, name, one)
    with open_store(tmp_path / source) as file, open_store(tmp_path / target, "w") as copied:
        for name in frames:
            copy_frame(file[name], copied, name)
    with open_store(tmp_path / target) as copied:
        for name, one in frames.items():
            pd.testing.assert_frame_equal(ad.io.read_elem(copied[name]), one, check_column_type=name == "obs")


@pytest.mark.parametrize("name", ["deep/er/cells.h5ad", "deep/cells.zarr"])
def test_cells_are_written_whole_into_folders_that_are_made(tmp_path, name, monkeypatch):
    adata = sd.datasets.toy(12, 30)
    out = tmp_path / name
    assert write_cells(adata, out) == out
    load = ad.read_zarr if name.endswith("zarr") else ad.read_h5ad
    assert (load(out).X != adata.X).nnz == 0
    adata.obsm["wide"] = np.ones((12, 5000))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=12 * 5000 * 8))
    if name.endswith("h5ad"):  # a .zarr is compressed: what it takes is not known before
        with pytest.raises(OSError, match=r"No space .*0\.5 MiB"):
            write_cells(adata, out)
        assert "wide" not in load(out).obsm
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_link_to_a_folder_is_replaced_and_the_folder_stays(tmp_path):
    (tmp_path / "real.zarr").mkdir()
    (tmp_path / "link.zarr").symlink_to(tmp_path / "real.zarr")
    with whole_or_not(tmp_path / "link.zarr") as new:
        new.mkdir()
    assert not (tmp_path / "link.zarr").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.zarr", "real.zarr"]
