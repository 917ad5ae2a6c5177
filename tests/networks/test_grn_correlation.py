"""Correlations beside numpy's, group by group."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd


@pytest.fixture
def cells(adata):
    cells = adata.copy()
    cells.obs["kind"] = np.array(["A", "B", "C"])[np.arange(90) % 7 % 3]
    return cells


def by_hand(cells, known, rows=slice(None)) -> np.ndarray:
    """All genes × all genes; NaN where one is unknown, does not vary, or is the other."""
    counts = np.asarray(sp.csr_matrix(cells.X).todense(), dtype=np.float64)
    values = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True))[rows]
    found = np.full((cells.n_vars,) * 2, np.nan)
    these = np.flatnonzero(known & (values.std(axis=0) > 0))
    found[np.ix_(these, these)] = np.corrcoef(values[:, these].T)
    np.fill_diagonal(found, np.nan)
    return found


@pytest.fixture
def known(cells, one):
    return one.vocabulary.match(list(cells.var_names)).tokens >= 0


def correlate(cells, model, **options):
    sd.tl.grn(cells, "correlation", model=model, **{"n_targets": None, "min_fraction": 0} | options)


def test_are_pearsons(cells, one, known, edges):
    correlate(cells, one)
    assert 50 < known.sum() < 60
    np.testing.assert_allclose(edges(cells), by_hand(cells, known), atol=1e-6)
    assert cells.uns["scdiva"]["scdiva_grn"]["signed"]


def test_of_groups_and_their_differences(cells, one, known, edges):
    of = {name: by_hand(cells, known, (cells.obs["kind"] == name).to_numpy()) for name in "ABC"}
    correlate(cells, one, groupby="kind")
    for name in "ABC":
        np.testing.assert_allclose(edges(cells, f"scdiva_grn_{name}"), of[name], atol=1e-6)
    correlate(cells, one, groupby="kind", reference="B", key_added="d")
    assert sorted(key for key in cells.varp if key.startswith("d")) == ["d_A", "d_C"]
    np.testing.assert_allclose(edges(cells, "d_C"), of["C"] - of["B"], atol=1e-6)
