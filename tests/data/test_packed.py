from __future__ import annotations

import shutil

import fsspec
import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scdiva.data.cells import open_cells, take_cells
from scdiva.data.corpus import study_names
from scdiva.data.datamodule import CellDataModule
from scdiva.data.packed import PackedCells, is_packed
from scdiva.data.packing import pack_files


@pytest.fixture(scope="module")
def packed_path(study_files, vocabulary, tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "corpus"
    with pytest.warns(UserWarning, match="study2: 2 of 131 cells .*vocabulary"):
        pack_files(study_files, vocabulary, path, max_length=30, part_cells=50).close()
    return path


@pytest.fixture(scope="module")
def single_path(packed_path):
    """A part, which is a corpus by itself."""
    return sorted(packed_path.glob("part-*.h5"))[0]


@given(st.lists(st.tuples(st.integers(0, 214), st.integers(0, 214)).map(sorted), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_ranges_are_those_of_the_whole(packed_path, ranges):
    packed = PackedCells(packed_path)
    whole = packed.read(0, 214)
    rows = np.concatenate([np.arange(*one) for one in ranges])
    for a, b in zip(packed.read_ranges(ranges), take_cells(whole, rows), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_part_is_a_corpus_by_itself(packed_path):
    packed, n = PackedCells(packed_path), 0
    for path, first in zip(sorted(packed_path.glob("part-*.h5")), packed.bounds, strict=False):
        part = PackedCells(path)
        assert part.study_names == [packed.study_names[packed.study[first]]]
        for a, b in zip(part.read(0, part.n_obs), packed.read(first, first + part.n_obs), strict=True):
            np.testing.assert_array_equal(a, b)
        n += part.n_obs
    assert n == packed.n_obs


@pytest.fixture
def memory(packed_path):
    """A store that is no disk, with the corpus in a bucket."""
    store = fsspec.filesystem("memory")
    store.put(str(packed_path), "/bucket/corpus", recursive=True)
    yield store
    store.rm("/bucket", recursive=True)


def test_packed_cells_equal_the_files(packed_path, study_files, vocabulary):
    packed = PackedCells(packed_path, vocabulary)
    assert (packed.n_obs, packed.max_length, packed.study_names) == (214, 30, ["study0", "study1", "study2"])
    np.testing.assert_array_equal(np.bincount(packed.study), [60, 25, 129])
    at = 0
    for number, path in enumerate(study_files):
        source = open_cells(path, vocabulary, max_length=30, empty="nan")
        np.testing.assert_array_equal(np.flatnonzero(packed.measured[number]), source.measured_tokens)
        for row in np.flatnonzero(source.lengths):
            for a, b in zip(packed.read(at, at + 1), source.read(row, row + 1), strict=True):
                np.testing.assert_array_equal(a, b)
            assert packed.study[at] == number
            at += 1
        source.close()
    assert at == packed.n_obs
    np.testing.assert_array_equal(packed.lengths, np.diff(packed.read(0, 214)[0]))
    assert packed.lengths.max() == 30


def test_ranges_types_and_a_closed_file(packed_path):
    packed = PackedCells(packed_path)
    indptr, tokens, values = packed.read(50, 70)
    assert (indptr.dtype, tokens.dtype, values.dtype) == (np.int64, np.int32, np.float32)
    assert indptr[0] == 0
    assert indptr[-1] == len(tokens) == len(values)
    packed.close()
    for a, b in zip(packed.read(50, 70), (indptr, tokens, values), strict=True):  # opened anew
        np.testing.assert_array_equal(a, b)


def test_min_genes(study_files, vocabulary, tmp_path, packed_path):
    with pytest.warns(UserWarning, match="lack 30 genes of the vocabulary"):
        fewer = pack_files(study_files, vocabulary, tmp_path / "fewer.h5", max_length=30, min_genes=30)
    assert fewer.lengths.min() == 30
    full = PackedCells(packed_path)
    kept = np.flatnonzero(full.lengths >= 30)
    assert fewer.n_obs == len(kept)
    for a, b in zip(fewer.read(0, 1), full.read(int(kept[0]), int(kept[0]) + 1), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_failed_pack_leaves_nothing(study_files, vocabulary, tmp_path):
    bad = tmp_path / "bad.h5ad"
    bad.write_bytes(study_files[0].read_bytes())
    with h5py.File(bad, "r+") as file:
        file["X/data"][5] = np.nan
    with pytest.raises(ValueError, match=r"bad\.h5ad: .*1 NaN values"):
        pack_files([bad, study_files[1]], vocabulary, tmp_path / "corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.h5ad"]


def test_another_vocabulary_is_refused(packed_path, vocabulary):
    with pytest.raises(ValueError, match="packed with another vocabulary"):
        PackedCells(packed_path, vocabulary.subset(vocabulary.tokens[:-1]))
    other = vocabulary.with_entropy(vocabulary.entropy[3:] + 1)
    with pytest.raises(ValueError, match="packed with other entropies"):
        PackedCells(packed_path, other)


def test_foreign_and_damaged_files_are_refused(packed_path, single_path, study_files, tmp_path):
    with pytest.raises(ValueError, match="is no packed corpus"):
        PackedCells(study_files[0])
    with pytest.raises(FileNotFoundError, match="no file"):
        PackedCells(tmp_path / "absent.h5")
    assert is_packed(packed_path)
    assert not is_packed(tmp_path)
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(single_path.read_bytes())
    with h5py.File(damaged, "r+") as file:
        del file["tokens"]
        file["tokens"] = np.zeros(7, np.uint16)
    with pytest.raises(ValueError, match="its columns do not fit"):
        PackedCells(damaged)
    with h5py.File(damaged, "r+") as file:
        del file["tokens"]
    with pytest.raises(ValueError, match=r"is damaged: .*tokens"):
        PackedCells(damaged)


@pytest.mark.parametrize(("part", "at", "value"), [("study", 5, 3), ("study", 5, -1), ("indptr", 5, 10**6)])
def test_numbers_that_do_not_fit_are_refused(single_path, tmp_path, part, at, value):
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(single_path.read_bytes())
    with h5py.File(damaged, "r+") as file:
        file[part][at] = value
    with pytest.raises(ValueError, match="its columns do not fit"):
        PackedCells(damaged)
    damaged.write_bytes(single_path.read_bytes())
    with h5py.File(damaged, "r+") as file:
        del file.attrs["max_length"]
    with pytest.raises(ValueError, match=r"is damaged: .*max_length"):
        PackedCells(damaged)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("index.json", "or it is of another version"),
        ("lengths-*", "or it is of another version"),
        ("part-study0-000000000-*", "or it is of another version"),
    ],
)
def test_a_damaged_folder_is_named(packed_path, tmp_path, name, said):
    for cut in (True, False):
        shutil.copytree(packed_path, tmp_path / "corpus")
        (file,) = (tmp_path / "corpus").glob(name)
        if cut:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        else:
            file.unlink()
        with pytest.raises(
            ValueError, match=f"corpus'.* {said}" if cut or name != "index.json" else "no packed corpus"
        ):
            PackedCells(tmp_path / "corpus").read(0, 60)
        shutil.rmtree(tmp_path / "corpus")


def test_a_file_that_was_cut_off_is_named(single_path, study_files, vocabulary, tmp_path):
    for whole in (single_path, study_files[0]):
        cut = tmp_path / whole.name
        cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
        with pytest.raises(ValueError, match=rf"{whole.name}' can't be opened: it is truncated"):
            CellDataModule(cut, vocabulary=vocabulary).setup()


def test_arguments_are_checked(study_files, vocabulary, tmp_path):
    with pytest.raises(ValueError, match="no files were given"):
        pack_files([], vocabulary, tmp_path / "x.h5")
    with pytest.raises(ValueError, match=r"1 names .*file.*'study0'"):
        study_names([study_files[0], study_files[0]])
    with pytest.raises(ValueError, match="min_genes must be at least 1"):
        pack_files(study_files, vocabulary, tmp_path / "x.h5", min_genes=0)
    with pytest.raises(ValueError, match="is a URL"):
        pack_files(study_files, vocabulary, "s3://bucket/corpus")
    with pytest.raises(ValueError, match=r"shard must be .* got \(3, 3\)"):
        pack_files(study_files, vocabulary, tmp_path / "x", shard=(3, 3))


def test_a_file_that_is_read_is_not_written(study_files, vocabulary, tmp_path):
    own = tmp_path / "own.h5ad"
    own.write_bytes(study_files[0].read_bytes())
    with pytest.raises(NotADirectoryError, match=r"own.h5ad' is no folder"):
        pack_files([study_files[1], tmp_path], vocabulary, own)
    with pytest.raises(FileExistsError, match=r"is a folder that holds 'own.h5ad' and is no corpus"):
        pack_files([study_files[1]], vocabulary, tmp_path)
    assert own.read_bytes() == study_files[0].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["own.h5ad"]


def test_taking_cells():
    ragged = np.int64([0, 2, 2, 5]), np.int32([10, 11, 12, 13, 14]), np.float32([1, 2, 3, 4, 5])
    indptr, tokens, values = take_cells(ragged, np.array([2, 1, 0, 2]), 2)
    np.testing.assert_array_equal(indptr, [0, 2, 2, 4, 6])
    np.testing.assert_array_equal(tokens, [12, 13, 10, 11, 12, 13])
    np.testing.assert_array_equal(values, [3, 4, 1, 2, 3, 4])
    assert take_cells(ragged, np.array([], dtype=int))[0].tolist() == [0]
