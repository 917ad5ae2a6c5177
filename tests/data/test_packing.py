"""A packed corpus does not depend on the number or order of jobs, nor on interruptions."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from scdiva.data import packing
from scdiva.data.cells import open_cells
from scdiva.data.datamodule import CellDataModule
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files

pytestmark = pytest.mark.filterwarnings("ignore:study2")
HOW = {"max_length": 30, "part_cells": 40}


def content(out: Path) -> dict[str, str]:
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in out.rglob("*")}


@pytest.fixture(scope="module")
def files(study_files, tmp_path_factory):
    """Copies, so that they may be changed."""
    return [Path(shutil.copy2(path, tmp_path_factory.getbasetemp() / path.name)) for path in study_files]


@pytest.fixture(scope="module")
def straight(files, vocabulary, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "corpus"
    pack_files(files, vocabulary, out, **HOW)
    return content(out)


@pytest.fixture
def packed_now(monkeypatch):
    """The parts that are packed, by name, as they come."""
    names, pack = [], packing._pack
    monkeypatch.setattr(packing, "_pack", lambda task, job: (pack(task, job), names.append(task.name))[0])
    return names


def test_processes_and_jobs_pack_the_same(files, vocabulary, straight, tmp_path):
    """The last job writes the index."""
    assert len([name for name in straight if name.startswith("part-")]) == 7
    assert pack_files(files, vocabulary, tmp_path / "processes", workers=2, **HOW).n_obs == 214
    assert content(tmp_path / "processes") == straight
    jobs = [pack_files(files, vocabulary, tmp_path / "corpus", shard=(i, 3), **HOW) for i in (2, 0, 2)]
    assert jobs == [None] * 3
    assert len(list((tmp_path / "corpus").glob("part-*"))) == 5
    with pytest.raises(ValueError, match="is not a packed corpus"):
        PackedCells(tmp_path / "corpus")
    assert pack_files(files, vocabulary, tmp_path / "corpus", shard=(1, 3), **HOW).n_obs == 214
    assert content(tmp_path / "corpus") == straight


def test_a_call_goes_on_where_it_was_cut_off(files, vocabulary, straight, tmp_path, packed_now, monkeypatch):
    out, write = tmp_path / "corpus", packing.whole_or_not

    def cut_off(path):
        if len(packed_now) == 3:
            path.with_name(f".{path.stem}.new.h5").write_bytes(b"half a part")
            raise KeyboardInterrupt
        return write(path)

    monkeypatch.setattr(packing, "whole_or_not", cut_off)
    with pytest.raises(KeyboardInterrupt):
        pack_files(files, vocabulary, out, **HOW)
    monkeypatch.setattr(packing, "whole_or_not", write)
    inodes = {name: (out / name).stat().st_ino for name in packed_now}
    assert len(inodes) == 3
    left = ["index.json", "lengths-0123456789ab.npy", "denominator-0123456789ab.npy"]  # by a kill
    left = [out / f".{'0f' * 16}.{name}" for name in left]
    for file in (*left, out / ".mine"):
        file.touch()
    for n in (7, 7):  # the second time there is nothing to do
        pack_files(files, vocabulary, out, **HOW)
        assert len(packed_now) == len(set(packed_now)) == n
        assert not any(file.exists() for file in left)
        assert {name: sums for name, sums in content(out).items() if name != ".mine"} == straight
    assert {name: (out / name).stat().st_ino for name in inodes} == inodes
    assert (out / ".mine").exists()


def test_what_has_changed_is_packed_anew(files, vocabulary, tmp_path, packed_now):
    copies = [Path(shutil.copy(path, tmp_path)) for path in files]
    pack_files(copies, vocabulary, tmp_path / "corpus", **HOW)
    before = PackedCells(tmp_path / "corpus").read(0, 60)
    packed_now.clear()
    cells = ad.read_h5ad(copies[1])
    cells[:20].copy().write_h5ad(copies[1])
    packed = pack_files(copies, vocabulary, tmp_path / "corpus", **HOW)
    assert [name[:11] for name in packed_now] == ["part-study1"]
    assert np.bincount(packed.study).tolist() == [60, 20, 129]
    assert all(np.array_equal(*pair) for pair in zip(packed.read(0, 60), before, strict=True))
    packed_now.clear()
    pack_files(copies, vocabulary, tmp_path / "corpus", **HOW | {"max_length": 20})
    assert len(packed_now) == 7
    assert len(list((tmp_path / "corpus").iterdir())) == 7 + 5  # parts, the index, its four arrays


def test_studies_are_appended(files, vocabulary, straight, tmp_path, packed_now):
    out = tmp_path / "corpus"
    first = pack_files(files[:2], vocabulary, out, append=True, **HOW)
    before, cells = content(out), first.read(0, 85)
    appended = pack_files(files[2], vocabulary, out, append=True, **HOW)
    assert content(out) == straight
    assert {name for name in before if name.startswith("part-")} < straight.keys()
    assert appended.study_names == ["study0", "study1", "study2"]
    for a, b in zip(first.read(0, 85), cells, strict=True):  # who had it open still reads it
        np.testing.assert_array_equal(a, b)
    assert len(packed_now) == 7
    assert pack_files(files[1:], vocabulary, out, append=True, **HOW).n_obs == 214  # they are there
    with pytest.raises(ValueError, match=r"packed with max_length 30, not 20. Append with the same"):
        pack_files(files[2], vocabulary, out, append=True, max_length=20)
    with pytest.raises(ValueError, match="holds 'study2', of another file or arguments, already"):
        pack_files(files[2], vocabulary, out, append=True, max_length=30, part_cells=7)
    with pytest.raises(FileExistsError, match=r"holds 2 studies that are not to be packed \(first: 'study0'\)"):
        pack_files(files[2], vocabulary, out, **HOW)
    assert content(out) == straight


def test_a_file_that_changes_meanwhile_is_no_part(files, vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "file_note", lambda path: path.touch() or {})
    file = Path(shutil.copy(files[0], tmp_path))
    with pytest.raises(ValueError, match=r"study0.h5ad' was changed while it was packed"):
        pack_files(file, vocabulary, tmp_path / "corpus")
    assert not list((tmp_path / "corpus").iterdir())


def test_the_index_says_what_there_is(files, vocabulary, tmp_path):
    packed = pack_files(files, vocabulary, tmp_path / "corpus", min_genes=30, **HOW)
    index = json.loads((tmp_path / "corpus" / "index.json").read_text())
    assert index["fingerprint"] == vocabulary.fingerprint
    of_files = [open_cells(file, vocabulary, empty="nan").lengths for file in files]
    assert any((lengths == 30).any() for lengths in of_files)
    assert np.bincount(packed.study).tolist() == [(lengths >= 30).sum() for lengths in of_files]
    assert [part["cells"] for part in index["parts"]] == np.diff(packed.bounds).tolist()
    assert sum(part["cells_dropped"] for part in index["parts"]) == 216 - packed.n_obs > 2
    first = index["parts"][0]
    indptr, tokens, values = PackedCells(tmp_path / "corpus" / first["file"]).read(0, 40)
    data = b"".join(array.tobytes() for array in (indptr, tokens.astype(np.uint16), values))
    assert hashlib.sha256(data).hexdigest() == first["sha256"]
    source = {"size": files[0].stat().st_size, "sha256": hashlib.sha256(files[0].read_bytes()).hexdigest()}
    assert first["source"] == {"file": files[0].name, "first": 0} | source
    note = CellDataModule(tmp_path / "corpus", vocabulary=vocabulary, context=20).manifest()["files"]["train"]
    assert note["corpus"]["sha256"] == index["sha256"]


@pytest.fixture
def broken(files, tmp_path):
    """A folder with two valid files, one with negative values, one with complex values, and one that is not HDF5."""
    folder = tmp_path / "studies"
    folder.mkdir()
    for file in files[:2]:
        shutil.copy2(file, folder)
    adata = ad.read_h5ad(files[0])
    for name, factor in (("negative", -1), ("complex", 1j)):
        adata.X = adata.X * factor
        adata.write_h5ad(folder / f"{name}.h5ad")
    (folder / "torn.h5ad").write_bytes(files[0].read_bytes()[:1000])
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_check_lists_all_unusable_files_and_writes_nothing(broken, vocabulary, tmp_path, workers):
    with pytest.raises(ValueError, match=r"3 of 5 files .*complex.h5ad: .*complex.*; negative.h5ad: .*; torn.h5ad"):
        pack_files(broken, vocabulary, tmp_path / "corpus", check=True, workers=workers, **HOW)
    for name in ("complex", "negative", "torn"):
        (broken / f"{name}.h5ad").unlink()
    assert pack_files(broken, vocabulary, check=True, **HOW) is None
    with pytest.raises(ValueError, match="out"):
        pack_files(broken, vocabulary, **HOW)
    assert not (tmp_path / "corpus").exists()


def test_unusable_files_are_skipped_on_request(broken, files, vocabulary, tmp_path):
    with pytest.warns(UserWarning, match=r"3 of 5 files can't be packed and are left out\. complex.h5ad"):
        packed = pack_files(broken, vocabulary, tmp_path / "corpus", skip_unusable=True, **HOW)
    assert packed.study_names == [file.stem for file in files[:2]]
    pack_files(files[:2], vocabulary, tmp_path / "usable", **HOW)
    assert content(tmp_path / "corpus") == content(tmp_path / "usable")
    (broken / files[0].name).write_bytes(b"being written")
    with pytest.raises(ValueError, match=f"holds '{files[0].stem}', whose file can't be packed any more"):
        pack_files(broken, vocabulary, tmp_path / "corpus", skip_unusable=True, **HOW)
    assert content(tmp_path / "corpus") == content(tmp_path / "usable")
    for file in files[:2]:
        (broken / file.name).unlink()
    with pytest.raises(ValueError, match="3 of 3 files can't be packed"):
        pack_files(broken, vocabulary, tmp_path / "none", skip_unusable=True, **HOW)
