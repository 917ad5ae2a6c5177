"""Whatever a matrix is stored as, its cells come out the same; what can't be read is refused by name."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd

CALLS = {
    "tl.embed": lambda a, m: sd.tl.embed(a, m, key_added="found") or a.obsm["found"],
    "tl.grn": lambda a, m: sd.tl.grn(a, "correlation", model=m, key_added="found") or a.varp["found"].toarray(),
}


@pytest.fixture(scope="module")
def small(drawn):
    """Counts below 128, which every type of number holds."""
    adata = ad.AnnData(drawn.X.copy(), obs=drawn.obs.copy(), var=drawn.var.copy())
    adata.X.data = np.minimum(adata.X.data, 100)
    return adata


@pytest.fixture(scope="module")
def expected(small, model):
    """Results with a sparse matrix of float32."""
    results = {name: call(small.copy(), model) for name, call in CALLS.items()}
    return lambda call: results[call]


def stored(small, matrix):
    return ad.AnnData(matrix, obs=small.obs.copy(), var=small.var.copy())


@pytest.mark.fault("every dtype")
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ">f4", ">i8"])
def test_every_type_of_number(small, model, expected, dtype):
    adata = stored(small, small.X.toarray().astype(dtype))
    assert np.array_equal(CALLS["tl.embed"](adata, model), expected("tl.embed"))


def unsorted(x):
    """Entries of each row from the last to the first; scipy is told that they are in order."""
    x = sp.csr_matrix(x)
    for a, b in zip(x.indptr[:-1], x.indptr[1:], strict=True):
        x.data[a:b], x.indices[a:b] = x.data[a:b][::-1].copy(), x.indices[a:b][::-1].copy()
    x.has_sorted_indices = True
    return x


def twice(x):
    """Each count above one as two entries at one place."""
    x = sp.csr_matrix(x).tocoo()
    part = np.floor(x.data / 2)
    entries = np.tile(x.row, 2), np.tile(x.col, 2)
    order = np.lexsort((entries[1], entries[0]))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(entries[0], minlength=x.shape[0]))])
    return sp.csr_matrix((np.concatenate([part, x.data - part])[order], entries[1][order], indptr), shape=x.shape)


def with_zeros(x):
    """All zeros stored."""
    n, m = x.shape
    return sp.csr_matrix((x.toarray().ravel(), np.tile(np.arange(m), n), np.arange(n + 1) * m), shape=(n, m))


def long_indices(x):
    x = sp.csr_matrix(x)
    x.indices, x.indptr = x.indices.astype(np.int64), x.indptr.astype(np.int64)
    return x


@pytest.mark.fault("every sparse format")
@pytest.mark.parametrize(
    "form",
    [
        sp.csr_matrix, sp.csc_matrix, sp.csr_array, sp.csc_array, unsorted, twice, with_zeros, long_indices,
        lambda x: x.toarray(), lambda x: np.asfortranarray(x.toarray()),
    ],
)  # fmt: skip
def test_every_form_that_anndata_holds(small, model, expected, hashed, form):
    adata = stored(small, form(small.X))
    before = hashed(ad.AnnData(adata.X, obs=adata.obs, var=adata.var))
    assert np.array_equal(CALLS["tl.embed"](adata, model), expected("tl.embed"))
    assert hashed(ad.AnnData(adata.X, obs=adata.obs, var=adata.var)) == before


@pytest.mark.fault("dask")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", ["dense", "sparse", "columns"])
def test_dask_arrays(small, model, expected, call, form):
    da = pytest.importorskip("dask.array")
    x = small.X.toarray() if form != "sparse" else small.X
    matrix = da.from_array(x, chunks=(17, 20 if form == "columns" else 60), asarray=False)
    assert np.array_equal(CALLS[call](stored(small, matrix), model), expected(call))


@pytest.fixture
def backed(small, tmp_path):
    """Open the cells as a file, its matrix in one of three forms."""
    files = []

    def open_as(form, spoil=None):
        x = small.X.toarray()
        if spoil is not None:
            x[50, 7] = spoil
        make = {"csr": sp.csr_matrix, "csc": sp.csc_matrix, "dense": np.asarray}[form]
        stored(small, make(x)).write_h5ad(tmp_path / "cells.h5ad")
        files.append(ad.read_h5ad(tmp_path / "cells.h5ad", backed="r"))
        return files[-1], tmp_path / "cells.h5ad"

    yield open_as
    for adata in files:
        adata.file.close()


@pytest.mark.fault("backed")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", ["csr", "csc", "dense"])
def test_backed_files(backed, model, expected, call, form):
    adata, file = backed(form)
    before = file.read_bytes()
    assert np.array_equal(CALLS[call](adata, model), expected(call))
    assert file.read_bytes() == before
    assert adata.isbacked


@pytest.mark.fault("backed")
@pytest.mark.parametrize("do", [sd.tl.embed, sd.tl.grn, sd.tl.impute, sd.tl.reconstruct])
def test_a_copy_of_a_backed_file_is_refused(backed, model, do):
    adata, _ = backed("csr")
    with pytest.raises(ValueError, match=r"copy=True needs a copy of it.*adata = adata\.to_memory\(\)"):
        do(adata, model=model, copy=True)


VIEWS = {
    "rows": lambda a: a[5:40],
    "scattered rows": lambda a: a[[30, 2, 61]] if a.n_obs < 20 else a[np.arange(0, 80, 3)],
    "columns": lambda a: a[:, ::-1],
    "both": lambda a: a[20:, 3:],
}


@pytest.mark.fault("views")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_what_its_copy_is(small, model, call, hashed, view):
    parent = small.copy()
    before = hashed(parent)
    with pytest.warns(ad.ImplicitModificationWarning):
        actual = CALLS[call](VIEWS[view](parent), model)
    assert np.array_equal(actual, CALLS[call](VIEWS[view](parent).copy(), model))
    assert hashed(parent) == before
