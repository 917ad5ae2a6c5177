"""Batches of cells, and cells in memory: parts of them, held out or taken."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.data.batch import balanced_sample, deal_batches, fill_batches, from_ragged, read_cells
from scdiva.data.cells import open_cells, take_cells
from scdiva.tokenizer import Vocabulary

lengths_of_cells = st.lists(st.integers(0, 60), max_size=120).map(lambda cells: np.array(cells, dtype=np.int32))


def test_ragged_cells_become_a_batch():
    tokens, values = np.int32([5, 3, 9]), np.float32([2, 1, 4])
    batch = from_ragged(np.int64([10, 12, 12, 13]), tokens, values, study=[0, 1, 1])
    assert batch.n_cells == 3
    values[:] = 0
    expected = {"tokens": [5, 3, 9], "values": [2, 1, 4], "cu_seqlens": [0, 2, 2, 3], "study": [0, 1, 1]}
    types = torch.int64, torch.float32, torch.int32, torch.int64
    for (name, numbers), dtype in zip(expected.items(), types, strict=True):
        part = getattr(batch, name)
        assert (part.tolist(), part.dtype) == (numbers, dtype)
        assert getattr(batch.to("meta"), name).device.type == "meta"
    assert from_ragged(np.int64([0, 1]), np.int32([5]), np.float32([2])).to("cpu").study is None
    for wrong in ([0, 2], [0, 2, 1]):
        with pytest.raises(ValueError, match=r"indptr spans \d positions.*1 tokens.*1 values"):
            from_ragged(np.int64(wrong), np.int32([5]), np.float32([2]))


def realistic(n: int, median: float) -> np.ndarray:
    """Genes per cell as droplet data have them, with [LAT], none longer than the model reads."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), 0.45, n)
    return np.clip(drawn, 20, 1200).astype(np.int64) + 1


@settings(max_examples=100, deadline=None)
@given(lengths_of_cells, st.integers(1, 200), st.none() | st.integers(1, 9))
def test_filled_batches_hold_every_cell_once_within_the_budget(lengths, budget, max_cells):
    batches = fill_batches(lengths, budget, max_cells)
    assert sorted(np.concatenate([*batches, []]).tolist()) == list(range(len(lengths)))
    for number, batch in enumerate(batches):
        assert lengths[batch].sum() <= budget or len(batch[lengths[batch] > 0]) == 1
        assert max_cells is None or len(batch) <= max_cells
        assert (np.diff(lengths[batch]) <= 0).all()  # so cells of equal length are neighbours
        for length in np.unique(lengths[batch]):
            assert (np.diff(batch[lengths[batch] == length]) > 0).all()
        later = np.concatenate([*batches[number + 1 :], []]).astype(int)
        if len(later) and len(batch) != max_cells:  # no cell that follows would have fitted
            assert lengths[batch].sum() + lengths[later].min() > budget
    again = fill_batches(lengths.copy(), budget, max_cells)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


@pytest.mark.parametrize("budget", [8192, 32768])
def test_batches_of_a_window_are_nearly_full(budget):
    lengths = realistic(4096, 600)
    filled = [lengths[batch].sum() / budget for batch in fill_batches(lengths, budget)]
    assert np.mean(filled) >= 0.97
    assert min(filled[:-1]) >= 0.9
    for name, wrong in (("budget", (0,)), ("max_cells", (200, 0))):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            fill_batches(lengths, *wrong)


@settings(max_examples=200, deadline=None)
@given(lengths_of_cells.filter(len), st.data())
def test_dealt_batches_hold_every_cell_once_and_differ_by_one_cell_at_most(lengths, data):
    n = data.draw(st.integers(1, len(lengths)))
    batches = deal_batches(lengths, n)
    assert len(batches) == n
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    sizes, tokens = [len(batch) for batch in batches], [int(lengths[batch].sum()) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    assert max(tokens) - min(tokens) <= lengths.max()
    assert max(tokens) <= lengths.sum() / n + lengths.max() * (n - 1) / n
    for batch in batches:
        assert (np.diff(batch) > 0).all()


def test_dealt_batches_are_alike():
    lengths = realistic(4096, 900)
    tokens = np.array([lengths[batch].sum() for batch in deal_batches(lengths, 110)])
    assert tokens.max() - tokens.min() <= 0.02 * tokens.mean()


@pytest.fixture(scope="module")
def data():
    """Cells of three batches, two of them empty."""
    adata = sd.datasets.toy(60, 60, n_batches=3, rng=1)
    matrix = adata.X.toarray()
    matrix[[4, 9]] = 0
    adata.X = sp.csr_matrix(matrix)
    return adata


@pytest.fixture(scope="module")
def opened(data):
    human = Vocabulary.human()
    tokens = human.match(list(data.var_names[:55])).tokens  # five genes stay unknown
    return open_cells(data, human.subset(np.sort(tokens[tokens >= 0])), max_length=40, empty="nan")


@pytest.mark.parametrize("all_genes", [False, True])
def test_cells_are_ordered_by_batch_and_empty_ones_left_out(opened, data, all_genes, recwarn):
    batch = data.obs["batch"].cat.codes.to_numpy()
    cells, rows = read_cells(opened, batch, all_genes=all_genes, trains=not all_genes)
    assert sorted(rows) == [i for i in range(60) if i not in (4, 9)]
    assert (np.diff(cells.batch) >= 0).all()
    np.testing.assert_array_equal(cells.batch, batch[rows])
    assert cells.n_batches == 3
    assert any("2 of 60 cells are left out" in str(one.message) for one in recwarn) != all_genes
    every = replace(opened, max_length=60 if all_genes else 40).read(0, 60)
    for actual, expected in zip((cells.indptr, cells.tokens, cells.values), take_cells(every, rows), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert (np.diff(cells.indptr).max() > 40) == all_genes


@pytest.mark.parametrize("block_rows", [7, 60])
def test_of_many_cells_some_are_drawn_and_no_other_is_held(opened, data, block_rows):
    batch, source = data.obs["batch"].cat.codes.to_numpy(), replace(opened, block_rows=block_rows)
    all_cells, all_rows = read_cells(opened, batch, trains=False)
    cells, rows = read_cells(source, batch, trains=False, max_cells=20, seed=3)
    drawn = np.sort(np.random.default_rng([3, 1]).choice(58, 20, replace=False))
    np.testing.assert_array_equal(rows, all_rows[drawn])
    expected = all_cells.subset(drawn)
    for name in ("indptr", "tokens", "values", "batch"):
        np.testing.assert_array_equal(getattr(cells, name), getattr(expected, name))
    again, of_again = read_cells(source, batch, trains=False, max_cells=58)
    np.testing.assert_array_equal(of_again, all_rows)
    np.testing.assert_array_equal(again.values, all_cells.values)


@pytest.mark.parametrize("all_genes", [False, True])
def test_columns_of_one_gene_are_added(opened, data, all_genes):
    renamed, names = data.copy(), list(data.var_names)
    names[3:6] = opened.vocabulary.ensembl_ids[opened.tokens[:3] - N_SPECIAL]
    renamed.var_names = names
    source = open_cells(renamed, opened.vocabulary, max_length=40, empty="nan")
    cells, rows = read_cells(source, data.obs["batch"].cat.codes.to_numpy(), all_genes=all_genes, trains=False)
    all_cells = replace(source, max_length=60 if all_genes else 40).read(0, 60)
    for actual, expected in zip((cells.indptr, cells.tokens, cells.values), take_cells(all_cells, rows), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert cells.indptr[-1] < source.lengths.sum()


def test_cells_are_held_once():
    data = sd.datasets.toy(4000, 200, rng=1)
    source = open_cells(data, block_rows=100)
    tracemalloc.start()
    cells, _ = read_cells(source, np.arange(4000) % 3, trains=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * (cells.tokens.nbytes + cells.values.nbytes)


def test_a_balanced_sample_takes_equally_many_cells_of_each_group():
    group = np.random.default_rng(0).permutation(np.repeat([3, 1, 7], [50, 4, 20]))
    counts = np.zeros(len(group))
    for seed in range(200):
        rows = balanced_sample(group, 24, np.random.default_rng(seed))
        assert len(set(rows)) == 24
        assert (np.diff(rows) > 0).all()
        assert np.bincount(group[rows])[[3, 1, 7]].tolist() == [10, 4, 10]
        counts[rows] += 1
    for number, share in ((3, 0.2), (1, 1), (7, 0.5)):
        np.testing.assert_allclose(counts[group == number] / 200, share, atol=0.15)
    np.testing.assert_array_equal(balanced_sample(group, 74, np.random.default_rng(0)), np.arange(74))
