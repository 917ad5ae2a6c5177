"""Matrices in files of all formats equal those in memory; errors name damaged or unsupported files."""

from __future__ import annotations

import shutil
import warnings

import anndata as ad
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva.data import matrix as blocks
from scdiva.data.backed import StoredRows, checked_array
from scdiva.data.matrix import open_matrix, read_ranges, row_blocks, row_readable

FORMATS = ["h5ad", "zarr2", "zarr3"]


def counts(n_obs: int = 57, n_vars: int = 30, seed: int = 0) -> sp.csr_matrix:
    x = np.random.default_rng(seed).poisson(0.4, (n_obs, n_vars)).astype(np.float32)
    x[[0, 20, 21, n_obs - 1]] = 0
    return sp.csr_matrix(x)


def write(folder, matrix, kind: str, name: str = "cells"):
    adata = ad.AnnData(matrix, layers={"same": matrix})
    path = folder / f"{name}.{kind[:4]}"
    if kind == "h5ad":
        adata.write_h5ad(path)
        return path
    with warnings.catch_warnings(), ad.settings.override(zarr_write_format=int(kind[-1])):
        warnings.simplefilter("ignore")
        adata.write_zarr(path)
    assert zarr.open_group(path, mode="r").metadata.zarr_format == int(kind[-1])
    return path


@pytest.fixture(scope="module", params=FORMATS)
def file(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp("stored"), counts(), request.param)


spans = st.tuples(st.integers(0, 57), st.integers(0, 57)).map(lambda pair: (min(pair), max(pair)))


@settings(max_examples=25, deadline=None)
@given(st.lists(spans, min_size=1, max_size=6))
def test_any_ranges_are_the_rows_of_memory(file, ranges):
    expected = sp.vstack([counts()[a:b] for a, b in ranges], format="csr")
    with open_matrix(file) as opened:
        assert isinstance(opened.matrix, StoredRows)
        for matrix in (opened.matrix, counts(), counts().toarray()):
            block = read_ranges(matrix, ranges)
            assert block.dtype == np.float32
            assert block.has_canonical_format
            np.testing.assert_array_equal(block.toarray(), expected.toarray())


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, np.float64])
def test_types_of_values_and_indices(dtype, tmp_path):
    x = counts().astype(dtype)
    path = write(tmp_path, x, "h5ad")
    with h5py.File(path, "r+") as root:
        for name in ("indices", "indptr"):
            values = root["X"][name][:]
            del root["X"][name]
            root["X"][name] = values.astype(np.int64)
    with open_matrix(path) as opened:
        assert opened.matrix.dtype == dtype
        np.testing.assert_array_equal(read_ranges(opened.matrix, [(3, 9)]).toarray(), x[3:9].toarray())


def broken(tmp_path, change):
    """Write a file with a change in its root group."""
    path = write(tmp_path, counts(), "h5ad", "broken")
    with h5py.File(path, "r+") as root:
        change(root)
    return path


def without(*path):
    def change(root):
        for part in path[:-1]:
            root = root[part]
        del root[path[-1]]

    return change


def set_(path, value):
    def change(root):
        root[path][...] = value(root[path][...])

    return change


def short_names(root):
    index = ad.io.read_elem(root["var"]["_index"])[:-1]
    del root["var"]["_index"]
    ad.io.write_elem(root["var"], "_index", np.asarray(index, dtype=object))  # one array, of any pandas


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("var"), "has no obs and var"),
        (lambda root: root["obs"].attrs.pop("_index"), "has no names of its cells"),
        (without("var", "_index"), "has no names of its genes"),
        (without("X", "indices"), "is damaged: it lacks indices"),
        (set_("X/indptr", lambda p: p + (np.arange(len(p)) == len(p) - 1)), "is damaged: indptr ends at"),
        (set_("X/indptr", lambda p: p[[*range(5), 9, 6, 7, 8, 5, *range(10, 58)]]), "is damaged: indptr descends"),
        (set_("X/indices", lambda i: i + 1), "column indices run from"),
        (lambda root: root["X"].attrs.modify("encoding-type", "dict"), "is not a matrix"),
        (short_names, "is 57 × 30, but there are names of 57 cells and 29 genes"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_is_no_sound_file_is_refused_by_name(change, message, tmp_path):
    path = broken(tmp_path, change)
    with pytest.raises(ValueError, match="broken") as caught, open_matrix(path) as opened:
        list(row_blocks(opened.matrix, 20))
    assert message in str(caught.value)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"broken\.h5ad'.*truncated"):
        open_matrix(path)


def test_a_block_that_cannot_be_decompressed_names_the_file(tmp_path):
    path = tmp_path / "rotten.h5ad"
    ad.AnnData(counts()).write_h5ad(path, compression="gzip")
    with h5py.File(path, "r") as root:
        chunk = root["X/data"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    path.write_bytes(content)
    with (
        open_matrix(path) as opened,
        pytest.raises(ValueError, match=r"X of '.*rotten\.h5ad' is damaged"),
    ):
        read_ranges(opened.matrix, [(1, 4)])


@pytest.mark.parametrize("kind", FORMATS[1:])
def test_a_zarr_that_lacks_a_chunk_is_not_filled_with_zeros(kind, tmp_path):
    path = write(tmp_path, counts(), kind, "torn")
    chunk = path / "X" / "data" / ("0" if kind == "zarr2" else "c")
    shutil.rmtree(chunk) if chunk.is_dir() else chunk.unlink()
    with pytest.raises(ValueError, match=r"torn\.zarr' .*1 chunks of X/data"):
        open_matrix(path)


@pytest.mark.parametrize("kind", FORMATS[1:])
@pytest.mark.parametrize("store", [sp.csr_matrix, lambda x: x.toarray()])
def test_a_zarr_with_a_truncated_chunk_names_itself(kind, store, tmp_path):
    path = write(tmp_path, store(counts()), kind, "torn")
    array = path / "X" / "data" if store is sp.csr_matrix else path / "X"
    chunks = [file for file in array.rglob("*") if file.is_file() and not file.name.startswith((".z", "zarr"))]
    chunk = chunks[0]
    chunk.write_bytes(chunk.read_bytes()[:-9])
    # the size is checked before a codec that would not detect it
    with pytest.raises(ValueError, match=r"X of '.*torn\.zarr' is damaged"), open_matrix(path) as opened:
        list(row_blocks(opened.matrix))


@pytest.mark.parametrize("version", [2, 3])
def test_a_chunk_that_blosc_would_read_beyond_is_refused(version, tmp_path):
    from numcodecs import Blosc
    from zarr.codecs import BloscCodec

    root = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    codec = Blosc() if version == 2 else BloscCodec(cname="lz4")
    array = root.create_array("values", shape=(3000,), chunks=(1000,), dtype="f4", compressors=codec)
    array[:] = np.random.default_rng(0).poisson(1, 3000)
    (chunk,) = (path for path in (tmp_path / "x.zarr" / "values").rglob("1") if path.is_file())
    content = chunk.read_bytes()
    for end in (-1, -9, 16, 3, 0):
        chunk.write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"damaged.*chunk 1 of values"):
            checked_array(array, "values")
    chunk.write_bytes(content)
    assert checked_array(array, "values") is array


@pytest.mark.parametrize("kind", FORMATS[1:])
def test_one_gene_needs_no_chunk_of_indices(kind, tmp_path):
    one = sp.csr_matrix(np.arange(1, 31, dtype=np.float32)[:, None])
    with open_matrix(write(tmp_path, one, kind, "one")) as opened:
        (block,) = [rows for _, rows in row_blocks(opened.matrix, 30)]
    np.testing.assert_array_equal(block.toarray(), one.toarray())


def test_bounds_beyond_the_values_are_refused():
    group = zarr.group()
    group.attrs["shape"] = (4, 9)
    for name, values in (("indptr", [0, 2, 9, 4, 6]), ("indices", range(6)), ("data", range(6))):
        group.create_array(name, data=np.array(values, dtype=np.int32))
    with pytest.raises(ValueError, match="indptr points behind the end"):
        StoredRows(group).read([(1, 2)])


def test_a_large_matrix_by_columns_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path, counts().tocsc(), "h5ad")
    n_bytes = counts().nnz * 8
    mend = r"cells\.h5ad' .*CSC.*adata\.X\.tocsr\(\)"
    with open_matrix(path) as opened:
        row_readable(opened.matrix)
        monkeypatch.setattr(blocks, "CSC_LIMIT", n_bytes - 1)
        with pytest.raises(ValueError, match=mend):
            list(row_blocks(opened.matrix))
        backed = ad.read_h5ad(path, backed="r")
        with pytest.raises(ValueError, match=mend):
            row_readable(backed.X)
        backed.file.close()
