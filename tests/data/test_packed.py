from __future__ import annotations

import subprocess
import sys

import h5py
import numpy as np
import pytest

from scdiva.data.cells import open_cells
from scdiva.data.corpus import PackedCells, is_packed, pack_files, study_names, take_cells
from scdiva.data.datamodule import CellDataModule
from scdiva.data.order import Order
from scdiva.data.pool import CellPool
from scdiva.data.stream import TrainingStream


@pytest.fixture(scope="module")
def packed_path(study_files, vocabulary, tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "corpus.h5"
    with pytest.warns(UserWarning, match="study2: 2 of 131 cells .*vocabulary"):
        pack_files(study_files, vocabulary, path, max_length=30).close()
    return path


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


def test_it_is_read_without_anndata_and_scanpy(packed_path):
    code = (
        "import sys; sys.modules.update(anndata=None, scanpy=None)\n"  # None makes an import fail
        "from scdiva.data.corpus import PackedCells\n"
        "from scdiva.data.order import Order\n"
        "from scdiva.data.stream import CellPool, TrainingStream\n"
        f"packed = PackedCells({str(packed_path)!r})\n"
        "pool = CellPool([packed], [packed.study], 1, 1200, 8)\n"
        "print(TrainingStream(Order(pool, 0, 5, n_blocks=4)).batch(2).tokens.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    packed = PackedCells(packed_path)
    pool = CellPool([packed], [packed.study], 1, 1200, 8)
    stream = TrainingStream(Order(pool, 0, 5, n_blocks=4))
    assert done.stdout.strip() == str(stream.batch(2).tokens.tolist())


def test_a_failed_pack_leaves_the_older_file(study_files, vocabulary, tmp_path, packed_path):
    out = tmp_path / "corpus.h5"
    out.write_bytes(packed_path.read_bytes())
    bad = tmp_path / "bad.h5ad"
    bad.write_bytes(study_files[0].read_bytes())
    with h5py.File(bad, "r+") as file:
        file["X/data"][5] = np.nan
    with pytest.raises(ValueError, match=r"bad\.h5ad: .*1 NaN values"):
        pack_files([study_files[1], bad], vocabulary, out)
    assert out.read_bytes() == packed_path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.h5ad", "corpus.h5"]


def test_another_vocabulary_is_refused(packed_path, vocabulary):
    with pytest.raises(ValueError, match="packed with another vocabulary"):
        PackedCells(packed_path, vocabulary.subset(vocabulary.tokens[:-1]))
    other = vocabulary.with_entropy(vocabulary.entropy[3:] + 1)
    with pytest.raises(ValueError, match="packed with other entropies"):
        PackedCells(packed_path, other)


def test_foreign_and_damaged_files_are_refused(packed_path, study_files, tmp_path):
    with pytest.raises(ValueError, match="is no packed corpus"):
        PackedCells(study_files[0])
    with pytest.raises(FileNotFoundError, match="no file"):
        PackedCells(tmp_path / "absent.h5")
    assert is_packed(packed_path)
    assert not is_packed(tmp_path)
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(packed_path.read_bytes())
    with h5py.File(damaged, "r+") as file:
        file["tokens"].resize((7,))
    with pytest.raises(ValueError, match="its parts do not fit"):
        PackedCells(damaged)
    with h5py.File(damaged, "r+") as file:
        del file["tokens"]
    with pytest.raises(ValueError, match=r"lacks \['tokens'\]"):
        PackedCells(damaged)


@pytest.mark.parametrize(("part", "at", "value"), [("study", 5, 3), ("study", 5, -1), ("indptr", 5, 10**6)])
def test_numbers_that_do_not_fit_are_refused(packed_path, tmp_path, part, at, value):
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(packed_path.read_bytes())
    with h5py.File(damaged, "r+") as file:
        file[part][at] = value
    with pytest.raises(ValueError, match="its parts do not fit"):
        PackedCells(damaged)
    with h5py.File(damaged, "r+") as file:
        del file.attrs["max_length"]
    with pytest.raises(ValueError, match=r"lacks \['max_length'\]"):
        PackedCells(damaged)


def test_a_file_that_was_cut_off_is_named(packed_path, study_files, vocabulary, tmp_path):
    for whole in (packed_path, study_files[0]):
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
    with pytest.raises(TypeError, match=r"study0.h5ad' must be a list of files"):
        pack_files(str(study_files[0]), vocabulary, tmp_path / "x.h5")


def test_a_file_that_is_read_is_not_written(study_files, vocabulary, tmp_path):
    own = tmp_path / "own.h5ad"
    own.write_bytes(study_files[0].read_bytes())
    with pytest.raises(FileExistsError, match="is the file that is read"):
        pack_files([study_files[1], tmp_path], vocabulary, own)
    assert own.read_bytes() == study_files[0].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["own.h5ad"]


def test_taking_cells():
    ragged = np.int64([0, 2, 2, 5]), np.int32([10, 11, 12, 13, 14]), np.float32([1, 2, 3, 4, 5])
    indptr, tokens, values = take_cells(ragged, np.array([2, 1, 0, 2]), 2)
    np.testing.assert_array_equal(indptr, [0, 2, 2, 4, 6])
    np.testing.assert_array_equal(tokens, [12, 13, 10, 11, 12, 13])
    np.testing.assert_array_equal(values, [3, 4, 1, 2, 3, 4])
    assert take_cells(ragged, np.array([], dtype=int))[0].tolist() == [0]
