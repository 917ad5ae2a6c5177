"""Cells in memory: parts of them, held out or taken."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.data import batch as A
from scdiva.data.cells import open_cells, take_cells
from scdiva.tokenizer import Vocabulary


@pytest.fixture(scope="module")
def data():
    """Cells of three batches, two of them empty."""
    made = sd.datasets.toy(60, 60, n_batches=3, rng=1)
    matrix = made.X.toarray()
    matrix[[4, 9]] = 0
    made.X = sp.csr_matrix(matrix)
    return made


@pytest.fixture(scope="module")
def opened(data):
    human = Vocabulary.human()
    tokens = human.match(list(data.var_names[:55])).tokens  # five genes stay unknown
    return open_cells(data, human.subset(np.sort(tokens[tokens >= 0])), max_length=40, empty="nan")


@pytest.mark.parametrize("whole", [False, True])
def test_cells_are_ordered_by_batch_and_empty_ones_left_out(opened, data, whole, recwarn):
    batch = data.obs["batch"].cat.codes.to_numpy()
    cells, rows = A.read_cells(opened, batch, whole=whole, trains=not whole)
    assert sorted(rows) == [i for i in range(60) if i not in (4, 9)]
    assert (np.diff(cells.batch) >= 0).all()
    np.testing.assert_array_equal(cells.batch, batch[rows])
    assert cells.n_batches == 3
    assert any("2 of 60 cells are left out" in str(one.message) for one in recwarn) != whole
    every = replace(opened, max_length=60 if whole else 40).read(0, 60)
    for found, expected in zip((cells.indptr, cells.tokens, cells.values), take_cells(every, rows), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert (np.diff(cells.indptr).max() > 40) == whole


@pytest.mark.parametrize("block_rows", [7, 60])
def test_of_many_cells_some_are_drawn_and_no_other_is_held(opened, data, block_rows):
    batch, source = data.obs["batch"].cat.codes.to_numpy(), replace(opened, block_rows=block_rows)
    whole, of_whole = A.read_cells(opened, batch, trains=False)
    cells, rows = A.read_cells(source, batch, trains=False, most=20, seed=3)
    drawn = np.sort(np.random.default_rng([3, 1]).choice(58, 20, replace=False))
    np.testing.assert_array_equal(rows, of_whole[drawn])
    expected = whole.subset(drawn)
    for name in ("indptr", "tokens", "values", "batch"):
        np.testing.assert_array_equal(getattr(cells, name), getattr(expected, name))
    again, of_again = A.read_cells(source, batch, trains=False, most=58)
    np.testing.assert_array_equal(of_again, of_whole)
    np.testing.assert_array_equal(again.values, whole.values)


@pytest.mark.parametrize("whole", [False, True])
def test_columns_of_one_gene_are_added(opened, data, whole):
    made, names = data.copy(), list(data.var_names)
    names[3:6] = opened.vocabulary.ensembl_ids[opened.tokens[:3] - N_SPECIAL]
    made.var_names = names
    source = open_cells(made, opened.vocabulary, max_length=40, empty="nan")
    cells, rows = A.read_cells(source, data.obs["batch"].cat.codes.to_numpy(), whole=whole, trains=False)
    all_cells = replace(source, max_length=60 if whole else 40).read(0, 60)
    for found, expected in zip((cells.indptr, cells.tokens, cells.values), take_cells(all_cells, rows), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert cells.indptr[-1] < source.lengths.sum()


def test_cells_are_held_once():
    data = sd.datasets.toy(4000, 200, rng=1)
    source = open_cells(data, block_rows=100)
    tracemalloc.start()
    cells, _ = A.read_cells(source, np.arange(4000) % 3, trains=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * (cells.tokens.nbytes + cells.values.nbytes)


def test_a_balanced_sample_takes_equally_many_cells_of_each_group():
    group = np.random.default_rng(0).permutation(np.repeat([3, 1, 7], [50, 4, 20]))
    seen = np.zeros(len(group))
    for seed in range(200):
        rows = A.balanced_sample(group, 24, np.random.default_rng(seed))
        assert len(set(rows)) == 24
        assert (np.diff(rows) > 0).all()
        assert np.bincount(group[rows])[[3, 1, 7]].tolist() == [10, 4, 10]
        seen[rows] += 1
    for number, share in ((3, 0.2), (1, 1), (7, 0.5)):
        np.testing.assert_allclose(seen[group == number] / 200, share, atol=0.15)
    np.testing.assert_array_equal(A.balanced_sample(group, 74, np.random.default_rng(0)), np.arange(74))
