"""Folders stand for their files, studies validate, and a resumed run notices a file that is not what it was."""

from __future__ import annotations

import hashlib
import os
import shutil

import anndata as ad
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scdiva.data.corpus import data_files, file_note, held_out_studies
from scdiva.data.datamodule import CellDataModule, check_manifest
from scdiva.data.packing import pack_files

pytestmark = pytest.mark.filterwarnings("ignore:(study|adata)2", "ignore:Writing zarr v2")


@pytest.fixture
def folder(study_files, tmp_path):
    """The three studies, one of them as zarr, and things that are no data."""
    where = tmp_path / "corpus"
    where.mkdir()
    for path in study_files[:2]:
        shutil.copy(path, where)
    ad.read_h5ad(study_files[2]).write_zarr(where / "study2.zarr")
    (where / "notes.txt").write_text("no cells")
    (where / "empty").mkdir()
    return where


def module_of(train, vocabulary, **options) -> CellDataModule:
    return CellDataModule(train, vocabulary=vocabulary, batch_size=8, context=20, block_rows=5, n_blocks=4, **options)


def test_a_folder_is_its_files_by_name(folder, study_files):
    files = [folder / "study0.h5ad", folder / "study1.h5ad", folder / "study2.zarr"]
    adata = object()
    assert data_files([adata, study_files[0], folder, "absent.h5ad"]) == [adata, study_files[0], *files, "absent.h5ad"]
    with pytest.raises(ValueError, match=r"folder '.*empty' .*\.h5ad or \.zarr"):
        data_files([folder / "empty"])
    (folder / "a" / "b").mkdir(parents=True)
    below = [folder / "a" / "b" / "study0.h5ad", folder / "a" / "study2.zarr"]
    files[0].rename(below[0])
    files[2].rename(below[1])
    assert data_files([str(folder)]) == [*below, files[1]]
    assert data_files([files[1], folder / "a"]) == [files[1], *below]


@pytest.mark.parametrize("large", [False, True])
def test_a_note_is_of_content_alone(folder, tmp_path, monkeypatch, large):
    """Files that are large are hashed in pieces."""
    file, store = folder / "study0.h5ad", folder / "study2.zarr"
    if large:
        for name, value in {"WHOLE": 100, "PIECES": 3, "PIECE": 64}.items():
            monkeypatch.setattr(f"scdiva.data.corpus.{name}", value)
    else:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert file_note(file) == {"size": file.stat().st_size, "sha256": digest}
    before = file_note(file), file_note(store)
    assert before[0].keys() == before[1].keys() == {"size", "sampled_sha256" if large else "sha256"}
    os.utime(file, (0, 0))
    shutil.copytree(store, tmp_path / "copy.zarr")
    assert (file_note(file), file_note(tmp_path / "copy.zarr")) == before
    # as large as before: a byte of the last piece; a file of the folder by another name
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)
    chunk = next(path for path in sorted((store / "X" / "data").rglob("*")) if path.name != ".zarray")
    chunk.rename(chunk.with_name("moved"))
    for then, now in zip(before, (file_note(file), file_note(store)), strict=True):
        assert now["size"] == then["size"]
        assert now != then


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "1", "b": "3"}, "1 of 2 files have changed .*'b'"),
        ({"a": "1"}, r"1 of 2 files are no longer given .*'b'"),
        ({"a": "1", "b": "2", "c": "1"}, r"1 of 2 files are new .*'c'"),
        ({"b": "2", "a": "1"}, r"2 of 2 files stand in another order"),
    ],
)
def test_what_differs_is_named(files, message):
    check_manifest({"a": "1", "b": "2"}, {"a": "1", "b": "2"})
    with pytest.raises(ValueError, match=message):
        check_manifest({"a": "1", "b": "2"}, files)


@pytest.mark.parametrize("packed", [False, True])
def test_a_resumed_run_refuses_a_changed_file(folder, vocabulary, tmp_path, packed):
    train, changed = folder, folder / "study1.h5ad"
    if packed:
        train = changed = tmp_path / "corpus.h5"
        pack_files([folder], vocabulary, train, max_length=25).close()
    noted = module_of(train, vocabulary).state_dict()
    module_of(train, vocabulary).load_state_dict(noted)
    if packed:
        pack_files([folder], vocabulary, train, max_length=24).close()
    else:
        adata = ad.read_h5ad(changed)
        adata.X.data[3] += 1  # as many bytes as before
        adata.write_h5ad(tmp_path / "new.h5ad")
        validates = {"files": {"validation": {changed.name: file_note(changed)}}}
        os.replace(tmp_path / "new.h5ad", changed)
        with pytest.raises(ValueError, match="have changed"):
            module_of(folder / "study0.h5ad", vocabulary, validation=changed).load_state_dict(validates)
    with pytest.raises(ValueError, match=rf"1 of \d files have changed .*'{changed.name}'"):
        module_of(train, vocabulary).load_state_dict(noted)


NAMES = ["lung", "blood", "skin", "colon", "brain"]


@given(st.floats(0.01, 0.85), st.integers(0, 50), st.permutations(NAMES))
def test_a_share_is_drawn_from_the_seed_whatever_the_order_of_files(share, seed, names):
    held = held_out_studies(names, share, seed)
    assert len(held) == max(1, round(share * 5))
    assert set(held) == set(held_out_studies(NAMES, share, seed))
    assert held == [name for name in names if name in held]
    assert held_out_studies(NAMES, None, 0) == []
    assert held_out_studies(NAMES, ["skin", "lung"], 3) == ["lung", "skin"]
    assert held_out_studies(NAMES, "skin", 3) == ["skin"]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (["blod"], "study 'blod' .*'blood'"),
        (["liver x"], r"no study 'liver x'\.$"),
        (["skin", "skin"], "names a study twice"),
        (NAMES, "all 5 studies would validate"),
        (0.95, "all 5 studies would validate"),
        (1.0, "share between 0 and 1; got 1.0"),
        (0, "share between 0 and 1; got 0"),
        (True, "got True"),
    ],
)
def test_impossible_splits_are_refused(selection, message):
    with pytest.raises(ValueError, match=message):
        held_out_studies(NAMES, selection, 0)
