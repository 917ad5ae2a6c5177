from __future__ import annotations

import shutil

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scdiva.data.cells import open_cells, take_cells
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
    all_cells = packed.read(0, 214)
    rows = np.concatenate([np.arange(*one) for one in ranges])
    for a, b in zip(packed.read_ranges(ranges), take_cells(all_cells, rows), strict=True):
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


def test_packed_cells_equal_the_files(packed_path, study_files, vocabulary):
    packed = PackedCells(packed_path, vocabulary)
    assert (packed.n_obs, packed.max_length, packed.study_names) == (214, 30, ["study0", "study1", "study2"])
    np.testing.assert_array_equal(packed.study, np.repeat([0, 1, 2], [60, 25, 129]))
    all_cells = packed.read(0, 214)
    assert [part.dtype for part in all_cells] == [np.int64, np.int32, np.float32]
    at = 0
    for number, path in enumerate(study_files):
        source = open_cells(path, vocabulary, max_length=30, empty="nan")
        np.testing.assert_array_equal(np.flatnonzero(packed.measured[number]), source.measured_tokens)
        rows = np.flatnonzero(source.lengths)
        cells = take_cells(source.read(0, source.n_obs), rows)
        for a, b in zip(packed.read(at, at + len(rows)), cells, strict=True):
            np.testing.assert_array_equal(a, b)
        at += len(rows)
        source.close()
    assert at == packed.n_obs
    np.testing.assert_array_equal(packed.lengths, np.diff(all_cells[0]))
    assert packed.lengths.max() == 30
    packed.close()
    for a, b in zip(packed.read(0, 214), all_cells, strict=True):  # opened anew
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
    altered = vocabulary.with_entropy(vocabulary.entropy[3:] + 1)
    with pytest.raises(ValueError, match="packed with entropies of another vocabulary"):
        PackedCells(packed_path, altered)


def test_a_file_that_is_read_is_not_written(study_files, vocabulary, tmp_path):
    file = tmp_path / "own.h5ad"
    file.write_bytes(study_files[0].read_bytes())
    with pytest.raises(NotADirectoryError, match=r"own.h5ad' is not a folder"):
        pack_files([study_files[1], tmp_path], vocabulary, file)
    with pytest.raises(FileExistsError, match=r"is a folder with 'own.h5ad' and is not a corpus"):
        pack_files([study_files[1]], vocabulary, tmp_path)
    assert file.read_bytes() == study_files[0].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["own.h5ad"]


def test_taking_cells():
    ragged = np.int64([0, 2, 2, 5]), np.int32([10, 11, 12, 13, 14]), np.float32([1, 2, 3, 4, 5])
    indptr, tokens, values = take_cells(ragged, np.array([2, 1, 0, 2]), 2)
    np.testing.assert_array_equal(indptr, [0, 2, 2, 4, 6])
    np.testing.assert_array_equal(tokens, [12, 13, 10, 11, 12, 13])
    np.testing.assert_array_equal(values, [3, 4, 1, 2, 3, 4])
    assert take_cells(ragged, np.array([], dtype=int))[0].tolist() == [0]


def without(*names):
    def change(file):
        for name in names:
            del (file if name in file else file.attrs)[name]

    return change


def set_to(part, value):
    def change(file):
        file[part][5] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to("study", 3), "its columns do not fit"),
        (set_to("study", -1), "its columns do not fit"),
        (set_to("indptr", 10**6), "its columns do not fit"),
        (without("tokens"), r"is damaged: .*tokens"),
        (without("max_length"), r"is damaged: .*max_length"),
        (None, "can't be opened: it is truncated"),
    ],
)
def test_damaged_files_are_refused(single_path, tmp_path, vocabulary, change, message):
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(single_path.read_bytes()[: None if change else single_path.stat().st_size // 2])
    if change:
        with h5py.File(damaged, "r+") as file:
            change(file)
    with pytest.raises(ValueError, match=rf"damaged\.h5' .*{message}"):
        CellDataModule(damaged, vocabulary=vocabulary).setup()


@pytest.mark.parametrize("name", ["index.json", "lengths-*", "part-study0-000000000-*"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_folder_is_named(packed_path, tmp_path, name, cut):
    shutil.copytree(packed_path, tmp_path / "corpus")
    (file,) = (tmp_path / "corpus").glob(name)
    content = file.read_bytes()
    file.unlink()
    if cut:
        file.write_bytes(content[: len(content) // 2])
    message = "corpus'.* or it is of another version" if cut or name != "index.json" else "not a packed corpus"
    with pytest.raises(ValueError, match=message):
        PackedCells(tmp_path / "corpus").read(0, 60)


def test_foreign_files_and_wrong_calls_are_refused(packed_path, study_files, vocabulary, tmp_path):
    assert is_packed(packed_path)
    assert not is_packed(tmp_path)
    with pytest.raises(ValueError, match="is not a packed corpus"):
        PackedCells(study_files[0])
    with pytest.raises(FileNotFoundError, match="no file"):
        PackedCells(tmp_path / "absent.h5")
    for files, options, message in (
        ([], {}, "no files were given"),
        ([study_files[0]] * 2, {}, r"1 names .*file.*'study0'"),
        (study_files, {"min_genes": 0}, "min_genes must be at least 1"),
        (study_files, {"out": "s3://bucket/corpus"}, "is a URL"),
        (study_files, {"shard": (3, 3)}, r"shard must be .* got \(3, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_files(files, vocabulary, **{"out": tmp_path / "x.h5"} | options)
    assert list(tmp_path.iterdir()) == []
