from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva.tokenizer.serialize import ENTROPY_FLOOR, EPSILON, score_denominator, serialize, to_token_space

N_TOKENS = 41_821
"""Tokens of the human vocabulary, specials with them."""


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
    known = token >= 0
    cells = sp.coo_matrix((fixed[known], (row[known], token[known])), shape=(n_cells, n_tokens)).tocsr()
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


def test_totals_do_not_depend_on_order_where_float_sums_do():
    rng = np.random.default_rng(1)
    counts = (10 ** rng.uniform(-2, 4, (1, 3000))).astype(np.float32)
    tokens = np.arange(3, 3003, dtype=np.int32)
    cells = to_token_space(sp.csr_matrix(counts), tokens, 3003)
    np.testing.assert_allclose(cells.data, np.log1p(counts[0] / math.fsum(counts[0]) * 1e4), rtol=3e-7, atol=1e-9)
    float_sums = set()
    for _ in range(20):
        order = rng.permutation(3000)
        float_sums.add(float(counts[0, order].sum()))
        again = to_token_space(sp.csr_matrix(counts[:, order]), tokens[order], 3003)
        np.testing.assert_array_equal(again.data, cells.data)
    assert len(float_sums) > 1  # the danger is real in this example


def test_unknown_genes_count_in_the_total():
    cells = to_token_space(sp.csr_matrix(np.float32([[1, 3]])), np.int32([3, -1]), 4)
    assert cells[0, 3] == np.float32(math.log1p(2500))


def test_lognormalised_input_gives_what_its_counts_give():
    rng = np.random.default_rng(3)
    counts = rng.poisson(1.0, (20, 50)).astype(np.float32)
    tokens = np.arange(3, 53, dtype=np.int32)
    from_counts = to_token_space(sp.csr_matrix(counts), tokens, 53)
    for target in (1e4, 1e6, 50.0):
        logs = np.log1p(counts / counts.sum(1, keepdims=True) * target).astype(np.float32)
        from_logs = to_token_space(sp.csr_matrix(logs), tokens, 53, "lognorm")
        np.testing.assert_array_equal(from_logs.indices, from_counts.indices)
        np.testing.assert_allclose(from_logs.data, from_counts.data, rtol=5e-6)


def test_empty_cells_and_cells_of_unknown_genes_have_no_tokens():
    counts = np.float32([[0, 0], [0, 4], [2, 0]])
    indptr, tokens, values = serialize(
        to_token_space(sp.csr_matrix(counts), np.int32([3, -1]), 4), np.ones(4, np.float32)
    )
    np.testing.assert_array_equal(indptr, [0, 0, 0, 1])
    np.testing.assert_array_equal(tokens, [3])
    np.testing.assert_array_equal(values, [np.float32(math.log1p(1e4))])


def test_no_cells_and_no_counts():
    for n_cells in (0, 3):
        indptr, tokens, values = serialize(
            to_token_space(sp.csr_matrix((n_cells, 2), dtype=np.float32), np.int32([3, 4]), 5), np.ones(5, np.float32)
        )
        np.testing.assert_array_equal(indptr, np.zeros(n_cells + 1))
        assert len(tokens) == len(values) == 0


def test_ties_break_by_token_never_by_column():
    counts = sp.csr_matrix(np.ones((1, 30), np.float32))
    tokens = np.random.default_rng(4).permutation(np.arange(3, 33)).astype(np.int32)
    _, ranked, _ = serialize(to_token_space(counts, tokens, 33), np.ones(33, np.float32), 10)
    np.testing.assert_array_equal(ranked, np.arange(3, 13))


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


def cells_of_all_genes() -> tuple[sp.csr_matrix, np.ndarray]:
    """Rows of every gene, of one, of none, and of some; a few values, so that many scores are equal."""
    rng = np.random.default_rng(6)
    lengths = [N_TOKENS - 3, 0, 1, 900, 0, 3000, 1, 70_000 % N_TOKENS]
    tokens = [np.sort(rng.permutation(np.arange(3, N_TOKENS))[:n]) for n in lengths]
    indices = np.concatenate(tokens).astype(np.int32)
    data = rng.choice(np.log1p(np.arange(1, 7)), len(indices)).astype(np.float32)
    cells = sp.csr_matrix((data, indices, np.cumsum([0, *lengths])), shape=(len(lengths), N_TOKENS))
    return cells, rng.choice(np.float32([0.3, 0.7, 1.1]), N_TOKENS)


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


def test_integer_counts_and_wide_indices_are_taken():
    rng = np.random.default_rng(7)
    counts, tokens = rng.poisson(1.0, (5, 30)), rng.permutation(np.arange(3, 33))
    expected = to_token_space(sp.csr_matrix(counts.astype(np.float32)), tokens.astype(np.int32), 33)
    block = sp.csr_matrix(counts)
    block.indices, block.indptr = block.indices.astype(np.int64), block.indptr.astype(np.int64)
    assert_same(csr_parts(to_token_space(block, tokens, 33)), csr_parts(expected))


def test_arrays_that_must_not_be_written_to_are_read():
    cells, denominator = cells_of_all_genes()
    expected = serialize(cells, denominator)
    for array in (cells.data, cells.indices, cells.indptr, denominator):
        array.flags.writeable = False
    assert_same(serialize(cells, denominator), expected)


def test_damaged_blocks_are_refused():
    cells = sp.csr_matrix((np.float32([1, 2]), np.int32([3, 5]), np.array([0, 2])), shape=(1, 7))
    with pytest.raises(ValueError, match=r"cells must be float32 .* got float64"):
        serialize(cells.astype(np.float64), np.ones(7, np.float32))
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


def test_floor_is_the_entropy_of_a_gene_in_nine_percent_of_cells():
    assert abs(-(0.09 * math.log(0.09) + 0.91 * math.log(0.91)) - ENTROPY_FLOOR) < 0.005


def test_wrong_arguments_are_refused():
    block = sp.csr_matrix(np.ones((1, 2), np.float32))
    with pytest.raises(ValueError, match="3 tokens for 2 columns"):
        to_token_space(block, np.int32([3, 4, 5]), 9)
    with pytest.raises(ValueError, match=r"must lie in 3 \.\.\. 8, got 3 to 9"):
        to_token_space(block, np.int32([3, 9]), 9)
    with pytest.raises(ValueError, match=r"must lie in 3 \.\.\. 8, got 1 to 4"):
        to_token_space(block, np.int32([1, 4]), 9)
    with pytest.raises(ValueError, match="kind must be"):
        to_token_space(block, np.int32([3, 4]), 9, "scaled")
    cells = to_token_space(block, np.int32([3, 4]), 9)
    with pytest.raises(ValueError, match=r"max_length .*got 0"):
        serialize(cells, np.ones(9, np.float32), 0)
    with pytest.raises(ValueError, match="max_length must be a whole number"):
        serialize(cells, np.ones(9, np.float32), 2.5)
    with pytest.raises(ValueError, match="the cells have 9 tokens"):
        serialize(cells, np.ones(8, np.float32))
    with pytest.raises(ValueError, match="must be float32"):
        serialize(cells, np.ones(9))
    with pytest.raises(ValueError, match=r"1 of 3 entropies .*token 1"):
        score_denominator(np.float32([0, np.nan, 1]))
    with pytest.raises(ValueError, match="divided by zero"):
        score_denominator(np.float32([0, 1]), floor=0, eps=0)
    with pytest.raises(ValueError, match="both must be finite"):
        score_denominator(np.float32([0, 1]), floor=np.inf)
