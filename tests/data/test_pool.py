"""The cells of a pool are those of its sources that are wanted, in blocks of neighbours of one study."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva.data import sampler as module
from scdiva.data.sampler import LEFT_OUT, CellPool

COLUMNS = ("_source", "_first", "_span", "sizes", "tokens", "starts")


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=3),
    block_rows=st.integers(1, 9),
    chunk=st.integers(1, 40),
    seed=st.integers(0, 999),
)
def test_blocks_are_of_one_study_and_looked_at_in_any_portions(sizes, block_rows, chunk, seed):
    rng = np.random.default_rng(seed)
    studies = [np.repeat(np.arange(len(some), dtype=np.int16), some) for some in sizes]
    numbers = [
        np.where(rng.random(len(some)) < 0.3, LEFT_OUT, 10 * i + np.arange(len(some))) for i, some in enumerate(sizes)
    ]
    sources = [SimpleNamespace(lengths=rng.integers(0, 9, len(study)).astype(np.uint16)) for study in studies]
    pool = CellPool(sources, studies, 2, 5, block_rows, numbers)
    expected = [
        (i, row, int(numbers[i][studies[i][row]]), min(int(source.lengths[row]), 5) + 1)
        for i, source in enumerate(sources)
        for row in range(len(studies[i]))
        if source.lengths[row] >= 2 and numbers[i][studies[i][row]] != LEFT_OUT
    ]
    assert pool.n_cells == len(expected) == int(pool.sizes.sum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        other = CellPool(sources, studies, 2, 5, block_rows, numbers)
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(pool, column), getattr(other, column))
    if not expected:
        return
    cells = rng.permutation(len(expected))
    source, row, study = pool.rows_of(cells)
    found = list(zip(*(one.tolist() for one in (source, row, study, pool.n_tokens(cells))), strict=True))
    assert found == [expected[cell] for cell in cells]
    assert pool.longest == max(tokens for *_, tokens in expected)
    for start, n, tokens in zip(pool.starts, pool.sizes, pool.tokens, strict=True):
        block = expected[start : start + n]
        assert len({(i, study) for i, _, study, _ in block}) == 1
        assert sum(n_tokens for *_, n_tokens in block) == tokens
        assert n <= block_rows
