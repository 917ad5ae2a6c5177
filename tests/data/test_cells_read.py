"""Cells read as if their data had no other genes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scdiva.data.cells import open_cells, restricted


def read(source):
    return list(source.windows(1000))


def assert_same(one, other):
    """Bit for bit: rows, tokens and values of all cells, and what is known of the genes."""
    assert len(one) == len(other)
    for (rows, ragged), (other_rows, other_ragged) in zip(one, other, strict=True):
        np.testing.assert_array_equal(rows, other_rows)
        for part, other_part in zip(ragged, other_ragged, strict=True):
            np.testing.assert_array_equal(part, other_part)


def columns_of(cells, source, tokens):
    return cells[:, np.isin(source.tokens, tokens)].copy()


@pytest.mark.filterwarnings("ignore:only")
@pytest.mark.parametrize("lognorm", [False, True])
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), n=st.integers(20, 78))
def test_it_is_the_data_without_the_other_columns(cells, vocabulary, lognorm, seed, n):
    data = cells.copy()
    if lognorm:
        counts = data.X.toarray()
        data.X = sp.csr_matrix(np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True)).astype(np.float32))
    source = open_cells(data, vocabulary, empty="nan", block_rows=16)
    tokens = np.random.default_rng(seed).choice(source.measured_tokens, n, replace=False)
    part = restricted(source, tokens)
    expected = open_cells(
        columns_of(data, source, tokens), vocabulary, empty="nan", input="lognorm" if lognorm else "counts"
    )
    assert_same(read(part), read(expected))
    np.testing.assert_array_equal(part.lengths, expected.lengths)
    np.testing.assert_array_equal(part.measured_tokens, np.sort(tokens))
    np.testing.assert_array_equal(part.measured_tokens, expected.measured_tokens)
    assert (part.n_obs, part.kind) == (source.n_obs, source.kind)


def test_unknown_columns_have_no_part_even_if_all_others_are_kept(cells, vocabulary):
    source = open_cells(cells, vocabulary)
    part = restricted(source, source.measured_tokens)
    known = cells[:, ~cells.var_names.isin(["NOGENE1", "NOGENE2"])].copy()
    assert_same(read(part), read(open_cells(known, vocabulary)))
    assert not np.array_equal(read(part)[0][1][2], read(source)[0][1][2])
    whole = open_cells(known, vocabulary)
    assert restricted(whole, whole.measured_tokens) is whole
    assert restricted(whole, np.arange(10_000)) is whole


def test_the_given_source_reads_on_as_it_was(cells, vocabulary):
    source = open_cells(cells, vocabulary)
    before, lengths = read(source), source.lengths.copy()
    restricted(source, source.measured_tokens[:30])
    assert_same(read(source), before)
    np.testing.assert_array_equal(source.lengths, lengths)
    assert source.columns is None


def test_cells_that_have_none_of_the_genes_are_empty(cells, vocabulary):
    data, matrix = cells.copy(), cells.X.toarray()
    source = open_cells(data, vocabulary)
    kept = np.flatnonzero(source.tokens >= 0)[:20]
    matrix[np.ix_([3, 40], kept)] = 0
    data.X = sp.csr_matrix(matrix)
    part = restricted(open_cells(data, vocabulary, empty="nan"), source.tokens[kept])
    counts = matrix[:, kept]
    np.testing.assert_array_equal(part.lengths, (counts > 0).sum(axis=1))
    rows = np.concatenate([rows for rows, _ in part.windows(7)])
    np.testing.assert_array_equal(rows, np.flatnonzero(counts.sum(axis=1)))
    assert not {3, 40} & set(rows)
    nothing = restricted(source, np.zeros(0, dtype=int))
    assert read(nothing) == []
    assert not nothing.lengths.any()


def test_two_columns_of_one_gene_are_both_kept(cells, vocabulary):
    data = cells.copy()
    source = open_cells(data, vocabulary)
    first, second = np.flatnonzero(source.tokens >= 0)[:2]
    names = data.var_names.to_numpy().copy()
    names[second] = names[first]
    data.var = pd.DataFrame({"symbol": names}, index=data.var_names)
    source = open_cells(data, vocabulary, gene_ids="symbol")
    tokens = source.tokens[source.tokens >= 0][:15]
    part = restricted(source, tokens)
    assert (part.tokens == source.tokens[first]).sum() == 2
    np.testing.assert_array_equal(part.tokens, source.tokens[np.isin(source.tokens, tokens)])
    expected = open_cells(columns_of(data, source, tokens), vocabulary, gene_ids="symbol", empty="nan")
    assert_same(read(part), read(expected))
