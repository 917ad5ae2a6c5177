from __future__ import annotations

import re

import anndata as ad
import dask.array as da
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr

from scdiva.data.matrix import open_matrix, row_blocks


def random_counts(n_obs: int = 23, n_vars: int = 11, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.poisson(0.6, (n_obs, n_vars)).astype(np.float32)
    x[3] = 0  # an empty cell
    x[:, 5] = 0  # an unseen gene
    return x


def join_blocks(matrix, block_rows: int = 5) -> np.ndarray:
    """Blocks put together densely, checked to be canonical on the way."""
    parts, expected_start = [], 0
    for start, block in row_blocks(matrix, block_rows):
        assert start == expected_start
        assert type(block) is sp.csr_matrix
        assert block.dtype == np.float32
        for i in range(block.shape[0]):
            assert (np.diff(block.indices[block.indptr[i] : block.indptr[i + 1]]) > 0).all()
        assert (block.data != 0).all()
        parts.append(block.toarray())
        block.data[:] = -1  # shares no memory with the matrix
        expected_start += block.shape[0]
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return random_counts()


@pytest.mark.parametrize("block_rows", [1, 5, 1000])
@pytest.mark.parametrize(
    "store",
    [
        *(sp.csr_matrix, sp.csc_matrix, sp.csr_array, sp.csc_array, sp.coo_matrix, sp.lil_matrix),
        *(np.asarray, np.asfortranarray, np.asmatrix, lambda x: x.astype(np.int64)),
        *(lambda x, dtype=dtype: sp.csr_matrix(x.astype(dtype)) for dtype in (np.float64, np.uint16)),
        lambda x: zarr.array(x, chunks=(4, 3)),
        lambda x: da.from_array(x, chunks=(7, 4)),
        *(lambda x, kind=kind: da.from_array(x, (7, 11)).map_blocks(kind) for kind in (sp.csr_matrix, sp.csc_matrix)),
    ],
)
def test_every_storage_gives_the_same_blocks(x, store, block_rows):
    matrix = store(x)
    np.testing.assert_array_equal(join_blocks(matrix, block_rows), x)
    np.testing.assert_array_equal(join_blocks(matrix, block_rows), x)


@pytest.mark.parametrize("backend", ["h5ad", "zarr"])
@pytest.mark.parametrize("store", [sp.csr_matrix, sp.csc_matrix, np.asarray])
def test_files_read_by_rows_equal_memory(x, store, backend, tmp_path):
    adata = ad.AnnData(store(x), layers={"doubled": store(2 * x)})
    adata.raw = ad.AnnData(store(3 * x), var=adata.var)
    path = tmp_path / f"cells.{backend}"
    getattr(adata, f"write_{backend}")(path)
    sources = [path, str(path)]
    if backend == "h5ad":
        sources.append(ad.read_h5ad(path, backed="r"))
        np.testing.assert_array_equal(join_blocks(open_matrix(sources[-1][4:17, [1, 2, 8]]).matrix), x[4:17, [1, 2, 8]])
    for source in sources:
        for factor, reading in ((1, {}), (2, {"layer": "doubled"}), (3, {"use_raw": True})):
            with open_matrix(source, **reading) as opened:
                assert list(opened.obs_names) == list(adata.obs_names)
                assert list(opened.var.index) == list(adata.var_names)
                np.testing.assert_array_equal(join_blocks(opened.matrix), factor * x)


def test_broken_indices_are_mended_on_a_copy(x):
    """Each row backwards, its entries split in two halves, two of them set to zero."""
    turned = sp.csr_matrix(x[::-1])
    halves, columns = np.repeat(turned.data / 2, 2)[::-1].copy(), np.repeat(turned.indices, 2)[::-1].copy()
    broken = sp.csr_matrix((halves, columns, 2 * (turned.nnz - turned.indptr[::-1])), shape=x.shape)
    broken.data[:2] = 0
    expected = x.copy()
    expected[0, broken.indices[0]] = 0
    broken.has_sorted_indices = True  # flags that an in-place edit can leave outdated
    broken.has_canonical_format = True
    before = broken.data.copy(), broken.indices.copy(), broken.indptr.copy()
    np.testing.assert_array_equal(join_blocks(broken), expected)
    for now, then in zip((broken.data, broken.indices, broken.indptr), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_ranges_and_values(x):
    assert [(start, block.shape[0]) for start, block in row_blocks(x[:9], 4)] == [(0, 4), (4, 4), (8, 1)]
    assert list(row_blocks(x[:0], 4)) == []
    ((_, block),) = row_blocks(np.array([[0, np.nan], [np.inf, 1e300]]))
    np.testing.assert_array_equal(block.toarray(), np.array([[0, np.nan], [np.inf, np.inf]], dtype=np.float32))
    twice = sp.csr_matrix((np.full(4, 200, np.uint8), np.array([1, 1, 2, 2]), np.array([0, 4])), shape=(1, 5))
    np.testing.assert_array_equal(join_blocks(twice), [[0, 400, 400, 0, 0]])
    np.testing.assert_array_equal(join_blocks(x.astype(np.float16)), x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda x: np.ma.masked_array(x, mask=False), TypeError, "has a mask"),
        (lambda x: np.array([["a"]]), TypeError, "dtype <U1, which is not a dtype of real numbers"),
        (lambda x: x.astype(complex), TypeError, "complex"),
        (lambda x: x[0], ValueError, "cells × genes"),
        (lambda x: x.astype(bool), ValueError, "is binary"),
    ],
)
def test_what_is_no_matrix_of_numbers_is_refused(x, build, error, message):
    with pytest.raises(error, match=message):
        next(row_blocks(build(x)))
    with pytest.raises(ValueError, match=r"block_rows .*got 0"):
        next(row_blocks(x, 0))


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(("part", "value"), [("indptr", 10**8), ("indptr", -5), ("indices", 10**8), ("indices", None)])
@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_damaged_sparse_arrays_are_refused(x, tmp_path, kind, part, value, in_file):
    """Scipy would read and write outside the arrays, which ends the process."""
    matrix = sp.csr_matrix(x).asformat(kind)
    value = x.shape[kind == "csr"] if value is None else value  # the first that does not exist
    if in_file:
        ad.AnnData(matrix).write_h5ad(tmp_path / "cells.h5ad")
        with h5py.File(tmp_path / "cells.h5ad", "r+") as file:
            file[f"X/{part}"][3] = value
    else:
        getattr(matrix, part)[3] = value
    with pytest.raises(ValueError, match="damaged"):
        list(row_blocks(open_matrix(tmp_path / "cells.h5ad").matrix if in_file else matrix))


@pytest.mark.parametrize("kind", ["object", "text", "nullable", "mask", "stray text", "missing"])
@pytest.mark.parametrize("element", ["X", "layers['a of b']", "raw.X"])
def test_the_remedy_for_other_dtypes_gives_the_numbers(kind, element):
    counts = np.arange(12.0).reshape(3, 4)
    matrix = {
        "text": counts.astype(str),
        "nullable": pd.DataFrame(counts.astype(int)).astype("Int64").to_numpy(),
        "mask": np.ma.masked_array(counts, counts == 0),
    }.get(kind, counts.astype(object))
    matrix[0, 0] = {"stray text": "T cell", "missing": pd.NA}.get(kind, matrix[0, 0])
    names = pd.DataFrame(index=list("abc")), pd.DataFrame(index=[f"g{i}" for i in range(4)])
    adata = ad.AnnData(matrix if element == "X" else counts if element == "raw.X" else None, *names)
    if element == "raw.X":
        adata.raw = ad.AnnData(matrix, *names)
    elif element != "X":
        adata.layers["a of b"] = matrix
    reading = {"use_raw": element == "raw.X", "layer": "a of b" if element[0] == "l" else None}
    with pytest.raises(TypeError, match=rf"adata\.{re.escape(element)} has ") as error:
        open_matrix(adata, **reading)
    assert kind != "stray text" or "'T cell' at cell 'a', gene 'g0'" in str(error.value)
    scope = {"adata": adata, "np": np, "pd": pd}
    exec(str(error.value).split(": ")[-1].rstrip("."), scope)
    actual = scope["adata"].layers["a of b"] if element[0] == "l" else scope["adata"].X
    np.testing.assert_array_equal(actual, counts[:, 1:] if kind == "stray text" else counts)


@pytest.mark.parametrize(
    ("of", "reading", "error", "message"),
    [
        ("memory", {"layer": "count"}, KeyError, r"layer 'count'.*layer='counts' or layer='spliced'"),
        ("memory", {"use_raw": True}, ValueError, "adata has no raw"),
        ("memory", {"layer": "counts", "use_raw": True}, ValueError, "exclude each other"),
        ("memory", {}, ValueError, r"adata has no X\. Pass layer='counts'"),
        ("array", {}, TypeError, "expected an AnnData object, got ndarray"),
        ("file", {"layer": "count"}, KeyError, r"layer 'count'.*layer='counts'"),
        ("file", {"use_raw": True}, ValueError, "has no raw"),
        ("file", {}, ValueError, r"has no X\. Pass layer='counts'"),
        ("absent", {}, FileNotFoundError, r"no file .*absent\.h5ad"),
        ("text", {}, ValueError, "is not an HDF5 file"),
    ],
)
def test_choosing_a_matrix_names_what_exists(x, tmp_path, of, reading, error, message):
    adata = ad.AnnData(None, *(pd.DataFrame(index=list(map(str, range(n)))) for n in x.shape))
    adata.layers["counts"] = adata.layers["spliced"] = x
    path = tmp_path / f"{of}.h5ad"
    if of == "file":
        adata.write_h5ad(path)
    elif of == "text":
        path.write_text("cells")
    with pytest.raises(error, match=message):
        open_matrix({"memory": adata, "array": x}.get(of, path), **reading)
