"""Goals follow from the slope of time and the growth of memory."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest


def test_files_begin_with_the_same_cells(script, tmp_path):
    scaling = script("scaling")
    scaling.BLOCK = 60
    n_stored = scaling.write_cells(tmp_path / "large.h5ad", 100, 20_000)
    scaling.write_cells(tmp_path / "small.h5ad", 30, 20_000)
    large, small = (ad.read_h5ad(tmp_path / f"{name}.h5ad") for name in ("large", "small"))
    assert (large.shape, large.X.nnz, large.X.has_canonical_format) == ((100, 20_000), n_stored, True)
    assert (large.X[:30] != small.X).nnz == 0
    assert 20 < large.obs["cell_type"].notna().sum() < 80
    assert 800 < n_stored / 100 < 1600
    assert np.array_equal(np.unique(large.X.data % 1), [0])


def test_memory_is_extrapolated_from_the_last_two_sizes(script):
    scaling = script("scaling")
    rows = [
        {"part": "cells", "call": "tl.annotate", "n_cells": n, "n_genes": 9, "n_stored": 100 * n, "cpu_seconds": 1.0,
         "peak_mib": peak}
        for n, peak in ((50_000, 700.0), (100_000, 800.0), (200_000, 1000.0))
    ]  # fmt: skip
    each, total = scaling.goals(rows)
    assert each["value"] == pytest.approx(200 * 2**20 / 100_000 / 1e3 - 0.8)
    assert total["value"] == pytest.approx((1000 + 200 * 3) * 2**20 / 1e9)
    rows[1]["peak_mib"] = 1100.0  # fitted to more cells
    assert scaling.growth(rows) == pytest.approx(300 * 2**20 / 150_000)
