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


def read(matrix, block_rows: int = 5) -> np.ndarray:
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
        expected_start += block.shape[0]
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return random_counts()


@pytest.mark.parametrize("block_rows", [1, 5, 23, 1000])
@pytest.mark.parametrize(
    "store",
    [
        sp.csr_matrix,
        sp.csc_matrix,
        sp.csr_array,
        sp.csc_array,
        sp.coo_matrix,
        sp.lil_matrix,
        np.asarray,
        np.asfortranarray,
        np.asmatrix,
        lambda x: x.astype(np.int64),
        lambda x: sp.csr_matrix(x.astype(np.float64)),
        lambda x: sp.csr_matrix(x.astype(np.uint16)),
        lambda x: zarr.array(x, chunks=(4, 3)),
        lambda x: da.from_array(x, chunks=(7, 4)),
        lambda x: da.from_array(x, chunks=(7, 11)).map_blocks(sp.csr_matrix),
        lambda x: da.from_array(x, chunks=(7, 11)).map_blocks(sp.csc_matrix),
    ],
)
def test_every_storage_gives_the_same_blocks(x, store, block_rows):
    np.testing.assert_array_equal(read(store(x), block_rows), x)


@pytest.mark.parametrize("backend", ["h5ad", "zarr"])
@pytest.mark.parametrize("store", [sp.csr_matrix, sp.csc_matrix, np.asarray])
def test_files_read_by_rows_equal_memory(x, store, backend, tmp_path):
    adata = ad.AnnData(store(x), layers={"doubled": store(2 * x)})
    adata.raw = ad.AnnData(store(3 * x), var=adata.var)
    path = tmp_path / f"cells.{backend}"
    getattr(adata, f"write_{backend}")(path)
    with open_matrix(path) as opened:
        assert opened.shape == x.shape
        assert list(opened.obs_names) == list(adata.obs_names)
        assert list(opened.var.index) == list(adata.var_names)
        np.testing.assert_array_equal(read(opened.matrix), x)
    with open_matrix(str(path), layer="doubled") as opened:
        np.testing.assert_array_equal(read(opened.matrix), 2 * x)
    with open_matrix(path, use_raw=True) as opened:
        np.testing.assert_array_equal(read(opened.matrix), 3 * x)
    if backend == "h5ad":
        backed = ad.read_h5ad(path, backed="r")
        np.testing.assert_array_equal(read(open_matrix(backed).matrix), x)
        np.testing.assert_array_equal(read(open_matrix(backed[4:17, [1, 2, 8]]).matrix), x[4:17, [1, 2, 8]])
        np.testing.assert_array_equal(read(open_matrix(backed, use_raw=True).matrix), 3 * x)
        backed.file.close()


@pytest.mark.parametrize("store", [sp.csr_matrix, sp.csc_matrix, np.asarray])
def test_views_are_read_and_stay_views(x, store):
    adata = ad.AnnData(store(x), layers={"doubled": store(2 * x)})
    adata.raw = adata.copy()
    view = adata[[7, 3, 3, 20], [10, 0, 5]]
    opened = open_matrix(view)
    matrix, names = opened.matrix, opened.var.index
    np.testing.assert_array_equal(read(matrix, 3), x[[7, 3, 3, 20]][:, [10, 0, 5]])
    assert list(names) == ["10", "0", "5"]
    np.testing.assert_array_equal(read(open_matrix(view, layer="doubled").matrix), 2 * x[[7, 3, 3, 20]][:, [10, 0, 5]])
    opened = open_matrix(view, use_raw=True)
    matrix, names = opened.matrix, opened.var.index
    np.testing.assert_array_equal(read(matrix), x[[7, 3, 3, 20]])
    assert len(names) == 11
    assert view.is_view


def test_broken_indices_are_mended_on_a_copy(x):
    good = sp.csr_matrix(x)
    # Each row backwards, its first entry split in two halves, an explicit zero at the unseen gene.
    data, indices, indptr = [], [], [0]
    for i in range(x.shape[0]):
        columns = good.indices[good.indptr[i] : good.indptr[i + 1]][::-1]
        values = x[i, columns]
        if len(columns):
            columns = np.concatenate([columns, columns[:1], [5]])
            values = np.concatenate([values, values[:1] / 2, [0]])
            values[0] /= 2
        data.append(values)
        indices.append(columns)
        indptr.append(indptr[-1] + len(columns))
    broken = sp.csr_matrix((np.concatenate(data), np.concatenate(indices).astype(np.int32), indptr), shape=x.shape)
    broken.has_sorted_indices = True  # what scipy would believe after a careless in-place edit
    broken.has_canonical_format = True
    before = broken.data.copy(), broken.indices.copy(), broken.indptr.copy()
    np.testing.assert_array_equal(read(broken), x)
    for now, then in zip((broken.data, broken.indices, broken.indptr), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_blocks_do_not_share_memory_with_the_matrix(x):
    for matrix in (sp.csr_matrix(x), x.copy()):
        for _, block in row_blocks(matrix, 4):
            block.data[:] = -1
        np.testing.assert_array_equal(matrix.toarray() if sp.issparse(matrix) else matrix, x)


def test_nan_and_infinity_pass_through():
    x = np.array([[0, np.nan], [np.inf, 1e300]])
    (_, block), *rest = row_blocks(x)
    assert not rest
    np.testing.assert_array_equal(block.toarray(), np.array([[0, np.nan], [np.inf, np.inf]], dtype=np.float32))


def test_ranges_and_their_errors(x):
    assert [(start, block.shape[0]) for start, block in row_blocks(x[:9], 4)] == [(0, 4), (4, 4), (8, 1)]
    assert list(row_blocks(x[:0], 4)) == []
    with pytest.raises(ValueError, match=r"block_rows .*got 0"):
        next(row_blocks(x, 0))
    with pytest.raises(ValueError, match="cells × genes"):
        next(row_blocks(x[0]))


def test_what_is_no_matrix_of_numbers_is_refused(x):
    with pytest.raises(TypeError, match="has a mask"):
        list(row_blocks(np.ma.masked_array(x.toarray() if sp.issparse(x) else x, mask=False)))
    with pytest.raises(TypeError, match="dtype <U1, which is not a dtype of real numbers"):
        next(row_blocks(np.array([["a"]])))
    with pytest.raises(TypeError, match="complex"):
        next(row_blocks(x.astype(complex)))
    damaged = sp.csr_matrix(x)
    damaged.indices[4] = 11
    with pytest.raises(ValueError, match=r"indices .*0 to 11.*11 columns"):
        list(row_blocks(damaged))


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(("part", "value"), [("indptr", 10**8), ("indptr", -5), ("indices", 10**8)])
@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_damaged_sparse_arrays_are_refused(x, tmp_path, kind, part, value, in_file):
    """Scipy would read and write outside the arrays, which ends the process."""
    matrix = sp.csr_matrix(x).asformat(kind)
    if in_file:
        ad.AnnData(matrix).write_h5ad(tmp_path / "cells.h5ad")
        with h5py.File(tmp_path / "cells.h5ad", "r+") as file:
            file[f"X/{part}"][3] = value
        with pytest.raises(ValueError, match="damaged"), open_matrix(tmp_path / "cells.h5ad") as opened:
            list(row_blocks(opened.matrix))
    else:
        getattr(matrix, part)[3] = value
        with pytest.raises(ValueError, match="damaged"):
            list(row_blocks(matrix))


@pytest.mark.parametrize("kind", ["object", "text", "nullable", "mask", "stray text", "missing"])
@pytest.mark.parametrize("place", ["X", "layers['a of b']", "raw.X"])
def test_the_remedy_for_other_dtypes_gives_the_numbers(kind, place):
    counts = np.arange(12.0).reshape(3, 4)
    matrix = {
        "object": counts.astype(object),
        "text": counts.astype(str),
        "nullable": pd.DataFrame(counts.astype(int)).astype("Int64").to_numpy(),
        "mask": np.ma.masked_array(counts, counts == 0),
        "stray text": counts.astype(object),
        "missing": counts.astype(object),
    }[kind]
    matrix[0, 0] = {"stray text": "T cell", "missing": pd.NA}.get(kind, matrix[0, 0])
    holder = ad.AnnData(None if place[0] == "l" else matrix, obs=pd.DataFrame(index=list("abc")), var=_four_genes())
    if place == "raw.X":
        adata = ad.AnnData(counts, obs=holder.obs, var=holder.var)
        adata.raw = holder
    else:
        adata = holder
        if place[0] == "l":
            adata.layers["a of b"] = matrix
    reading = {"layer": "a of b"} if place[0] == "l" else {"use_raw": place == "raw.X"}
    with pytest.raises(TypeError, match=rf"adata\.{re.escape(place)} has ") as said:
        open_matrix(adata, **reading)
    message, names = str(said.value), {"adata": adata, "np": np, "pd": pd}
    if kind == "stray text":
        assert "'T cell' at cell 'a', gene 'g0'" in message
    exec(message.split(": ")[-1].rstrip("."), names)
    found = names["adata"]
    found = found.layers["a of b"] if place[0] == "l" else found.X
    np.testing.assert_array_equal(found, counts[:, 1:] if kind == "stray text" else counts)


def _four_genes():
    return pd.DataFrame(index=[f"g{i}" for i in range(4)])


def test_choosing_a_matrix_names_what_exists(x, tmp_path):
    adata = ad.AnnData(x, layers={"counts": x, "spliced": x})
    with pytest.raises(KeyError, match=r"layer 'count'.*layer='counts' or layer='spliced'"):
        open_matrix(adata, layer="count")
    with pytest.raises(ValueError, match="adata has no raw"):
        open_matrix(adata, use_raw=True)
    with pytest.raises(ValueError, match="exclude each other"):
        open_matrix(adata, layer="counts", use_raw=True)
    with pytest.raises(ValueError, match=r"adata has no X\. Pass layer='counts'"):
        open_matrix(ad.AnnData(obs=adata.obs, var=adata.var, layers={"counts": x}))
    with pytest.raises(TypeError, match="expected an AnnData object, got ndarray"):
        open_matrix(x)

    path = tmp_path / "cells.h5ad"
    ad.AnnData(obs=adata.obs, var=adata.var, layers={"counts": x}).write_h5ad(path)
    with pytest.raises(KeyError, match=r"layer 'count'.*layer='counts'"):
        open_matrix(path, layer="count")
    with pytest.raises(ValueError, match="has no raw"):
        open_matrix(path, use_raw=True)
    with pytest.raises(ValueError, match=r"has no X\. Pass layer='counts'"):
        open_matrix(path)
    with pytest.raises(FileNotFoundError, match=r"no file .*absent\.h5ad"):
        open_matrix(tmp_path / "absent.h5ad")
    (tmp_path / "text.h5ad").write_text("cells")
    with pytest.raises(ValueError, match="is no HDF5 file"):
        open_matrix(tmp_path / "text.h5ad")


def test_small_types_do_not_overflow(x):
    twice = sp.csr_matrix((np.full(4, 200, np.uint8), np.array([1, 1, 2, 2]), np.array([0, 4])), shape=(1, 5))
    np.testing.assert_array_equal(read(twice), [[0, 400, 400, 0, 0]])
    np.testing.assert_array_equal(read(x.astype(np.float16)), x.astype(np.float16).astype(np.float32))
