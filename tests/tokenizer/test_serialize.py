from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva.tokenizer.serialize import ENTROPY_FLOOR, EPSILON, score_denominator, serialize, to_token_space


def slow_normalise(counts: np.ndarray, tokens: np.ndarray, n_tokens: int) -> np.ndarray:
    """v = log(1 + 1e4 c / C), one cell and gene after the other, in exact sums."""
    v = np.zeros((len(counts), n_tokens))
    for i, cell in enumerate(counts):
        total = math.fsum(cell)
        for token in set(tokens.tolist()) - {-1}:
            of_gene = math.fsum(cell[tokens == token])
            if of_gene > 0:
                v[i, token] = math.log1p(of_gene / total * 1e4)
    return v.astype(np.float32)


def numpy_normalise(counts: np.ndarray, block: sp.csr_matrix, tokens: np.ndarray, n_tokens: int) -> sp.csr_matrix:
    """What `to_token_space` returns to the bit, in fixed point, by numpy alone."""
    n_cells, indptr = block.shape[0], block.indptr.astype(np.int64)
    counts = counts.astype(np.float64)
    row = np.repeat(np.arange(n_cells), np.diff(indptr))
    largest, total = np.zeros(n_cells), np.zeros(n_cells, dtype=np.int64)
    np.maximum.at(largest, row, counts)
    fixed = np.rint(np.ldexp(counts, (40 - np.frexp(largest)[1])[row])).astype(np.int64)
    np.add.at(total, row, fixed)
    token = tokens[block.indices]
    in_vocabulary = token >= 0
    cells = sp.coo_matrix(
        (fixed[in_vocabulary], (row[in_vocabulary], token[in_vocabulary])), shape=(n_cells, n_tokens)
    ).tocsr()
    cells.sum_duplicates()
    cells.eliminate_zeros()
    row = np.repeat(np.arange(n_cells), np.diff(cells.indptr))
    share = cells.data.astype(np.float64) / total[row].astype(np.float64)
    values = np.log1p(share * 1e4).astype(np.float32)
    return sp.csr_matrix((values, cells.indices, cells.indptr), shape=cells.shape)


def slow_serialize(v: np.ndarray, denominator: np.ndarray, max_length: int):
    """A stable lexicographic sort of each row: descending float32 score, then ascending token."""
    indptr, tokens, values = [0], [], []
    for cell in v:
        token = np.flatnonzero(cell > 0)
        score = (cell[token] / denominator[token]).astype(np.float32)
        order = np.lexsort((token, -score))[:max_length]
        tokens.extend(token[order])
        values.extend(cell[token[order]])
        indptr.append(len(tokens))
    return np.array(indptr), np.array(tokens, dtype=np.int32), np.array(values, dtype=np.float32)


def csr_parts(cells: sp.csr_matrix):
    return cells.indptr, cells.indices, cells.data


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@st.composite
def problems(draw):
    """Counts with ties, empty cells, unknown and shared genes."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    n_obs, n_vars, n_tokens = draw(st.integers(1, 6)), draw(st.integers(1, 40)), draw(st.integers(6, 40))
    counts = rng.poisson(draw(st.sampled_from([0.1, 1.0, 30.0])), (n_obs, n_vars)).astype(np.float32)
    if draw(st.booleans()):  # recovered or corrected counts
        counts *= rng.uniform(0.5, 2.0, counts.shape).astype(np.float32)
    tokens = rng.integers(2, n_tokens, n_vars)
    tokens[tokens == 2] = -1
    entropy = np.round(rng.uniform(0, 2, n_tokens), 1).astype(np.float32)
    return counts, tokens.astype(np.int32), entropy, draw(st.integers(1, 50)), rng.permutation(n_vars)


@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_equals_the_slow_way_and_ignores_column_order(problem):
    counts, tokens, entropy, max_length, order = problem
    denominator = score_denominator(entropy)
    cells = to_token_space(sp.csr_matrix(counts), tokens, len(entropy))
    assert cells.dtype == np.float32
    assert (cells.data > 0).all()
    np.testing.assert_allclose(cells.toarray(), slow_normalise(counts, tokens, len(entropy)), rtol=2e-7)
    got = serialize(cells, denominator, max_length)
    assert [part.dtype for part in got] == [np.int64, np.int32, np.float32]
    assert_same(got, slow_serialize(cells.toarray(), denominator, max_length))

    shuffled = to_token_space(sp.csr_matrix(counts[:, order]), tokens[order], len(entropy))
    for name in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(shuffled, name), getattr(cells, name))
    assert_same(serialize(shuffled, denominator, max_length), got)


def test_empty_cells_and_cells_of_unknown_genes_have_no_tokens():
    counts = np.float32([[0, 0], [0, 4], [2, 0]])
    indptr, tokens, values = serialize(
        to_token_space(sp.csr_matrix(counts), np.int32([3, -1]), 4), np.ones(4, np.float32)
    )
    np.testing.assert_array_equal(indptr, [0, 0, 0, 1])
    np.testing.assert_array_equal(tokens, [3])
    np.testing.assert_array_equal(values, [np.float32(math.log1p(1e4))])


def test_division_ranks_near_ties_that_a_reciprocal_would_swap():
    # 3/3 == 1/1, but 3 * float32(1/3) differs from 1 or ties by luck only; look for a pair where the product errs.
    rng = np.random.default_rng(5)
    v = rng.uniform(0.1, 9, 20000).astype(np.float32)
    denominator = np.concatenate([np.ones(3), rng.uniform(0.1, 3, 20000)]).astype(np.float32)
    cells = sp.csr_matrix((v, np.arange(3, 20003, dtype=np.int32), np.array([0, 20000])), shape=(1, 20003))
    _, ranked, _ = serialize(cells, denominator, 20000)
    score = np.zeros(20003, np.float32)
    score[3:] = v / denominator[3:]
    np.testing.assert_array_equal(ranked, np.lexsort((np.arange(20003), -score))[:20000])
    product = np.zeros(20003, np.float32)
    product[3:] = v * (np.float32(1) / denominator[3:])
    assert not np.array_equal(ranked, np.lexsort((np.arange(20003), -product))[:20000])


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ([1, 0, 3], [3, 4, 5]),
        ([1, -2, 3], [3, 4, 5]),
        ([1, np.nan, 3], [3, 4, 5]),
        ([1, np.inf, 3], [3, 4, 5]),
        ([1, 2, 3], [5, 4, 3]),
        ([1, 2, 3], [3, 4, 4]),
        ([1, 2, 3], [3, 4, 7]),
        ([1, 2, 3], [-1, 4, 5]),
    ],
)
def test_what_to_token_space_never_returns_is_refused(values, tokens):
    cells = sp.csr_matrix((np.float32(values), np.int32(tokens), np.array([0, 3])), shape=(1, 7))
    with pytest.raises(ValueError, match=r"damaged: tokens .*0 \.\.\. 6"):
        serialize(cells, np.ones(7, np.float32))


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.lists(st.integers(1, 0x7F7FFFFF), max_size=60), min_size=1, max_size=4))
def test_any_positive_float_finds_its_place(rows):
    """Subnormal ones too, and such that differ in one bit."""
    n = max(map(len, rows)) + 3
    v = np.zeros((len(rows), n), np.float32)
    for row, bits in zip(v, rows, strict=True):
        row[3 : 3 + len(bits)] = np.array(bits, np.uint32).view(np.float32)
        row[3 : 3 + len(bits) : 3] = row[3] if bits else 0  # ties
    ones = np.ones(n, np.float32)
    assert_same(serialize(sp.csr_matrix(v), ones, 50), slow_serialize(v, ones, 50))


@settings(max_examples=60, deadline=None)
@given(
    problem=problems(), scale=st.sampled_from([1.0, 1e-30, 1e-300, 1e30]), kind=st.sampled_from(["counts", "lognorm"])
)
def test_any_counts_are_normalised_to_the_bits_of_numpy(problem, scale, kind):
    counts, tokens, entropy, *_ = problem
    block = sp.csr_matrix(counts.astype(np.float64) * (scale if kind == "counts" else 0.1))
    if scale == 1.0:
        block = block.astype(np.float32)
    block.data[::5] = 0  # stored zeros
    cells = to_token_space(block, tokens, len(entropy), kind)
    on_counts = block.data if kind == "counts" else np.expm1(block.data.astype(np.float64))
    assert_same(csr_parts(cells), csr_parts(numpy_normalise(on_counts, block, tokens, len(entropy))))
    assert (cells.data > 0).all()
    assert sp.csr_matrix(csr_parts(cells)[::-1], shape=cells.shape).has_canonical_format


def test_damaged_blocks_are_refused():
    cells = sp.csr_matrix((np.float32([1, 2]), np.int32([3, 5]), np.array([0, 2])), shape=(1, 7))
    for token in (7, -1):
        bad = cells.copy()
        bad.indices[:] = sorted([3, token])
        with pytest.raises(ValueError, match="it is damaged"):
            to_token_space(bad, np.arange(3, 10, dtype=np.int32), 10)


def test_denominator_is_the_floored_entropy():
    entropy = np.float32([0, 0.05, ENTROPY_FLOOR, 0.5, 2])
    got = score_denominator(entropy)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [0.3 + 1e-6, 0.3 + 1e-6, 0.3 + 1e-6, 0.5 + 1e-6, 2 + 1e-6], rtol=1e-6)
    np.testing.assert_allclose(score_denominator(entropy, floor=0)[0], EPSILON)  # the paper to the letter


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda block, _: to_token_space(block, np.int32([3, 4, 5]), 9), "3 tokens for 2 columns"),
        (lambda block, _: to_token_space(block, np.int32([3, 9]), 9), r"must lie in 3 \.\.\. 8, got 3 to 9"),
        (lambda block, _: to_token_space(block, np.int32([1, 4]), 9), r"must lie in 3 \.\.\. 8, got 1 to 4"),
        (lambda block, _: to_token_space(block, np.int32([3, 4]), 9, "scaled"), "kind must be"),
        (lambda _, cells: serialize(cells, np.ones(9, np.float32), 0), r"max_length .*got 0"),
        (lambda _, cells: serialize(cells, np.ones(9, np.float32), 2.5), "max_length must be a whole number"),
        (lambda _, cells: serialize(cells, np.ones(8, np.float32)), "the cells have 9 tokens"),
        (lambda _, cells: serialize(cells, np.ones(9)), "must be float32"),
        (lambda _, cells: serialize(cells.astype(np.float64), np.ones(9, np.float32)), "cells must be float32"),
        (lambda *_: score_denominator(np.float32([0, np.nan, 1])), r"1 of 3 entropies .*token 1"),
        (lambda *_: score_denominator(np.float32([0, 1]), floor=0, eps=0), "not finite"),
        (lambda *_: score_denominator(np.float32([0, 1]), floor=np.inf), "both must be finite"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    block = sp.csr_matrix(np.ones((1, 2), np.float32))
    with pytest.raises(ValueError, match=message):
        call(block, to_token_space(block, np.int32([3, 4]), 9))
