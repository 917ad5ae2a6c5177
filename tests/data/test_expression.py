"""A matrix whole, log-normalised."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from anndata import AnnData

from scdiva.data.cells import log_normalised


@pytest.fixture
def counts():
    return np.random.default_rng(0).poisson(1.0, (30, 12)).astype(np.float32) * 3


def test_counts_are_divided_by_their_total_whatever_the_genes_are_called(counts):
    counts[4] = 0
    adata = AnnData(counts, var={"name": [f"no gene {j}" for j in range(12)]})
    values, var = log_normalised(adata)
    total = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    np.testing.assert_allclose(values.toarray(), np.log1p(counts / total * 1e4), rtol=1e-6)
    assert var is adata.var or var.equals(adata.var)
    assert values[4].nnz == 0


def test_a_layer_and_what_is_log_normalised_already_is_taken_as_it_is(counts):
    adata = AnnData(sp.csr_matrix(counts), layers={"log": np.log1p(counts / 2)})
    values, _ = log_normalised(adata, layer="log", input="lognorm")
    np.testing.assert_allclose(values.toarray(), np.log1p(counts / 2), rtol=1e-6)


def test_bad_values_are_refused(counts):
    counts[2, 3] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        log_normalised(AnnData(counts))
