"""Cells in memory: parts of them, held out or taken."""

from __future__ import annotations

import numpy as np

from scdiva._constants import N_SPECIAL
from scdiva.train import adaptation as A


def make_cells(n: int = 240, n_batches: int = 2) -> A.AdaptationCells:
    """Cells of two types among the last 25 genes; the second batch has twice the values."""
    draw = np.random.default_rng(0)
    batch = np.sort(np.arange(n) % n_batches)
    tokens, values, lengths = [], [], []
    for i in range(n):
        length = int(draw.integers(3, 9))
        genes = draw.permutation(12)[:length] + (0 if i % 4 < 2 else 13)
        tokens.append(genes + 5 + N_SPECIAL)
        values.append(draw.uniform(0.5, 2, length) * (1 + batch[i]))
        lengths.append(length)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    measured = np.arange(5, 30) + N_SPECIAL
    return A.AdaptationCells(
        indptr, np.concatenate(tokens), np.concatenate(values).astype(np.float32), batch, measured, n_batches
    )


def test_split_and_subset():
    cells = make_cells()
    split = cells.split(0.1, 3)
    assert (len(split.training), len(split.held_out)) == (216, 24)
    assert np.array_equal(np.sort(np.concatenate(split)), np.arange(240))
    assert np.array_equal(cells.split(0.1, 3).held_out, split.held_out)
    assert not np.array_equal(cells.split(0.1, 4).held_out, split.held_out)
    assert [len(part) for part in make_cells(2).split(0.01, 0)] == [1, 1]
    assert [len(part) for part in make_cells(2).split(0.99, 0)] == [1, 1]
    some, whole = cells.subset(split.held_out), cells.take(split.held_out)
    assert np.array_equal(some.batch, whole.study)
    assert np.array_equal(some.tokens, whole.tokens)
    assert np.array_equal(some.values, whole.values)
    assert np.array_equal(some.indptr, whole.cu_seqlens)
