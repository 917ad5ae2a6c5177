"""Faults of the matrix: values that are no expression, through every way into the package."""

from __future__ import annotations

import numpy as np
import pytest
import scanpy as sc
import scipy.sparse as sp

import scdiva as sd


def put(value, n=1):
    """Give a function that puts a value into the matrix of a copy of cells, `n` times."""

    def spoil(cells):
        cells.X.data[cells.X.indptr[3] : cells.X.indptr[3] + n] = value
        return cells

    return spoil


def scaled(cells):
    sc.pp.normalize_total(cells)
    sc.pp.log1p(cells)
    cells.X = cells.X.toarray()
    sc.pp.scale(cells)
    return cells


def scaled_up(cells):
    """Scaled, then shifted to positive values, so that no negative value reveals the scaling."""
    cells = scaled(cells)
    cells.X = (cells.X - cells.X.min() + 0.1).astype(np.float32)
    return cells


def mixed(cells):
    """Cells of counts joined with cells of logarithms."""
    half = cells.X.toarray()
    half[40:] = np.log1p(half[40:] * 1e4 / half[40:].sum(1, keepdims=True))
    cells.X = sp.csr_matrix(half)
    return cells


def emptied(cells):
    cells.X = sp.csr_matrix(cells.shape, dtype=np.float32)
    return cells


FAULTS = {
    "NaN": (put(np.nan, 2), "holds 2 NaN values", "first nan at cell 'cell3', gene '", "nan_to_num"),
    "Inf": (put(np.inf), "holds 1 infinite values", "first inf at cell '", "gene '", "nan_to_num"),
    "negative": (put(-1.0, 3), "holds 3 negative values", "first -1 at cell '", "gene '", "layer=|use_raw"),
    "scaled": (scaled, "negative values|is scaled", "first ", "layer=|use_raw"),
    "scaled, positive": (scaled_up, "is scaled", "first ", "layer=|use_raw"),
    "mixed scales": (mixed, "mixes scales: 40 cells", "40 cells hold log-normalised", "first: '", "expm1"),
    "huge values": (put(1e30, 2), "holds 2 values of 2,147,483,647 or more", "first 1e.30 at cell '", "gene '", "= 0"),
    "0 cells": (lambda cells: cells[:0].copy(), "0 cells"),
    "0 genes": (lambda cells: cells[:, :0].copy(), "0 genes|no genes|no columns"),
    "all-zero cells": (emptied, "no counts|all values"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.fault(name), id=name) for name in FAULTS])
def test_a_bad_matrix_is_refused(cells, enter, refused, name):
    spoil, *patterns = FAULTS[name]
    refused(enter, spoil(cells), ValueError, *patterns)


# --- empty cells, and cells of few genes ------------------------------------------------------------------------------
@pytest.mark.fault("all-zero cells")
@pytest.mark.parametrize("call", [sd.tl.embed, sd.tl.grn, sd.pp.entropy_serialize])
def test_empty_cells_are_named_or_kept_without_a_result(cells, model, refused, call):
    options = {"vocabulary": model.vocabulary} if call is sd.pp.entropy_serialize else {"model": model}
    cells.X[[3, 7]] = 0
    cells.X.eliminate_zeros()
    refused(
        lambda a: call(a, **options),
        cells,
        ValueError,
        "2 of 80 cells have no counts",
        "first: 'cell3', 'cell7'",
        "sum",
    )
    call(cells, empty="nan", **options)
    if call is sd.tl.embed:
        assert np.flatnonzero(np.isnan(cells.obsm["X_scdiva"]).all(1)).tolist() == [3, 7]
    if call is sd.pp.entropy_serialize:
        assert np.flatnonzero(cells.layers["scdiva_rank"].getnnz(1) == 0).tolist() == [3, 7]
