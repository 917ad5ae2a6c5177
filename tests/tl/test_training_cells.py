"""Cells as they are trained on, beside the matrix they come from."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.tl._training_cells import batch_numbers, training_cells

READING = {"layer": None, "use_raw": False, "input": "auto", "gene_ids": None, "duplicates": "sum"}


@pytest.fixture(scope="module")
def data(adata):
    made = sd.datasets.toy(60, 60, n_batches=3, rng=1)
    matrix = made.X.toarray()
    matrix[[4, 9]] = 0
    made.X = sp.csr_matrix(matrix)
    return made


def test_batches_are_numbered_by_name(data):
    numbers = batch_numbers(data, "batch")
    assert numbers.dtype == np.int64
    assert (numbers == data.obs["batch"].cat.codes).all()
    assert not batch_numbers(data, None).any()
    data = data.copy()
    data.obs["number"] = np.where(np.arange(60) < 30, 10, 9)
    assert set(batch_numbers(data, "number")[:30]) == {0}  # names are text: "10" before "9"


@pytest.mark.parametrize("whole", [False, True])
def test_cells_are_ordered_by_batch_and_empty_ones_left_out(build, data, whole, recwarn):
    model = build(anchor="learned")
    cells, rows = training_cells(data, model, batch_numbers(data, "batch"), whole=whole, **READING)
    assert sorted(rows) == [i for i in range(60) if i not in (4, 9)]
    assert (np.diff(cells.batch) >= 0).all()
    np.testing.assert_array_equal(cells.batch, data.obs["batch"].cat.codes.to_numpy()[rows])
    assert cells.n_batches == 3
    assert any("2 of 60 cells are left out" in str(one.message) for one in recwarn) != whole
    tokens = model.vocabulary.match(list(data.var_names)).tokens
    column = {token: place for place, token in enumerate(tokens) if token >= N_SPECIAL}
    counts = data.X.toarray()
    expected = np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True).clip(1))
    lengths = []
    for i, row in enumerate(rows):
        at = slice(cells.indptr[i], cells.indptr[i + 1])
        places = [column[token] for token in cells.tokens[at]]
        np.testing.assert_allclose(cells.values[at], expected[row, places], rtol=1e-5)
        lengths.append(len(places))
        n_known = (counts[row, list(column.values())] > 0).sum()
        assert len(places) == (n_known if whole else min(n_known, 40))
    assert (max(lengths) > 40) == whole


def test_a_batch_of_empty_cells_is_none(build, data):
    numbers = np.where(np.isin(np.arange(60), [4, 9]), 7, np.arange(60) % 2)
    with pytest.warns(UserWarning, match="left out"):
        cells, _ = training_cells(data, build(anchor="learned"), numbers, **READING)
    assert cells.n_batches == 2
    assert set(cells.batch) == {0, 1}
