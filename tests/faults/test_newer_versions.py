"""Read-only arrays, string dtypes other than `object`, and X as a layer, as newer pandas and anndata return them.

These are the default in pandas 3; with earlier versions they are enabled, so that the tests are the same on both.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from .conftest import CALLS, ENTRIES

LABELLED = {
    "tl.integrate, labels": {"labels_key": "cell_type", "unlabeled_category": "type A"},
    "tl.annotate, unlabelled": {"batch_key": "batch", "unlabeled_category": "type A"},
    "tl.annotate, linear": {"method": "linear", "unlabeled_category": "type A"},
    "tl.annotate, reference": {"unlabeled_category": None, "key_added": "found"},
    "tl.adapt": {"batch_key": "batch"},
    "tl.generate, groups": {"groupby": "cell_type"},
    "tl.grn, groups": {"method": "correlation", "groupby": "batch"},
    "pp.split_perturbations": {"key_added": "split"},
}
"""Options of calls that read labels."""
NAMES = [*ENTRIES, *LABELLED]


def run(name, adata, model):
    more = {"reference": adata[:60].copy()} if name.endswith("reference") else {}
    return CALLS[name.partition(",")[0]](adata, model, **LABELLED.get(name, {}) | more)


def dense(values):
    return values.toarray() if sp.issparse(values) else np.asarray(values)


def results(name, adata, model):
    """All that a call leaves in adata or returns, by the name of its place; text as it reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*not writable")  # torch, of memory that it then writes to
        returned = run(name, adata, model)
    arrays = {}
    for owner, of in {"given": adata, "made": returned}.items():
        if isinstance(of, ad.AnnData):
            arrays |= {f"{owner} X": dense(of.X), f"{owner} names": np.array([*map(str, of.var_names)])}
            for part in ("layers", "obsm", "varm", "obsp", "varp"):
                arrays |= {f"{owner} {part} {key}": dense(getattr(of, part)[key]) for key in getattr(of, part)}
            for part in ("obs", "var"):
                table = getattr(of, part)
                arrays |= {f"{owner} {part} {key}": np.array([*map(str, table[key])]) for key in table}
    return arrays


def assert_alike(actual, expected):
    assert set(actual) == set(expected)
    for key, values in expected.items():
        np.testing.assert_array_equal(actual[key], values, err_msg=key)


@pytest.fixture(scope="module")
def expected(drawn, model):
    """Results with cells as they come, each call's made once."""
    by_call = {}

    def of(name):
        if name not in by_call:
            by_call[name] = results(name, drawn.copy(), model)
        return by_call[name]

    return of


# --- arrays that can't be written to ----------------------------------------------------------------------------------
@contextmanager
def copies_on_write():
    """Pandas 3 gives read-only arrays of its columns; so does pandas 2 that was asked to."""
    if int(pd.__version__.split(".")[0]) >= 3:
        yield
    else:
        with pd.option_context("mode.copy_on_write", True):
            yield


def closed(matrix):
    """Make a matrix read-only, like that of `AnnData(frame)` of pandas 3, or of a file mapped into memory."""
    for part in (matrix,) if isinstance(matrix, np.ndarray) else (matrix.data, matrix.indices, matrix.indptr):
        part.setflags(write=False)
    return matrix


# --- text -------------------------------------------------------------------------------------------------------------
TEXT = {
    "str": pd.StringDtype("python", na_value=np.nan),
    "str, arrow": pd.StringDtype("pyarrow", na_value=np.nan),
    "string[python]": pd.StringDtype("python"),
    "string[pyarrow]": pd.StringDtype("pyarrow"),
}


def with_text(adata, dtype, categorical):
    """Names of cells and genes, and columns, of a dtype of text; columns, or categories of them."""
    cells = adata.copy()
    for table in (cells.obs, cells.var):
        for key in table:
            if not pd.api.types.is_numeric_dtype(table[key]):
                column = table[key].astype(str).astype(dtype)
                table[key] = column.astype("category") if categorical else column
    cells.obs_names, cells.var_names = cells.obs_names.astype(dtype), cells.var_names.astype(dtype)
    return cells


@pytest.mark.fault("string dtypes")
@pytest.mark.parametrize(
    ("dtype", "key"),
    [*(("str", key) for key in ("batch", "perturbation")), *((dtype, "batch") for dtype in [*TEXT][1:])],
)
def test_a_missing_text_is_missing(drawn, model, refused, dtype, key):
    cells = with_text(drawn, TEXT[dtype], False)
    cells.obs.loc[cells.obs_names[3], key] = None
    call = {"batch": "tl.integrate", "perturbation": "tl.predict_perturbation"}[key]
    refused(lambda a: ENTRIES[call](a, model), cells, ValueError, "1 of 80", "'cell3'")


# --- combinations -----------------------------------------------------------------------------------------------------
@pytest.mark.fault("read-only arrays (pandas 3)")
@pytest.mark.fault("string dtypes")
@pytest.mark.fault("a layer named None")
@pytest.mark.parametrize(
    ("name", "dtype", "categorical", "storage"),
    [(name, *(("str, arrow", True), ("string[pyarrow]", False))[i % 2], sp.csr_matrix) for i, name in enumerate(NAMES)]
    + [(name, "str", False, sp.csr_matrix.toarray) for name in ("pp.gene_entropy", "tl.embed", "tl.grn", "tl.impute")],
)
def test_newer_arrays_text_and_layers_change_nothing(drawn, model, expected, name, dtype, categorical, storage):
    """X is among the layers, by the name None, as anndata 0.13 has it."""
    with copies_on_write():
        assert not pd.Series([True]).to_numpy().flags.writeable
        cells = with_text(drawn, TEXT[dtype], categorical)
        cells.X, cells.layers["counts"] = closed(storage(drawn.X.copy())), closed(storage(drawn.X.copy()))
        if None not in cells.layers:
            cells.layers[None] = cells.X
        actual, drop = results(name, cells, model), {"given layers None", "made layers None"}
    assert_alike(
        {key: value for key, value in actual.items() if key not in drop},
        {key: value for key, value in expected(name).items() if key not in drop},
    )
