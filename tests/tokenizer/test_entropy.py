from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva.tokenizer.entropy import N_BINS, EntropyHistogram


def random_values(seed: int, n_cells: int = 40, n_tokens: int = 9) -> np.ndarray:
    rng = np.random.default_rng(seed)
    v = np.where(rng.random((n_cells, n_tokens)) < 0.4, rng.uniform(0, 9.2, (n_cells, n_tokens)), 0)
    v = np.where(rng.random(v.shape) < 0.2, np.ceil(v * 2) / 2, v).astype(np.float32)  # some right on an edge
    v[:, :3] = 0
    return v


MEASURED = np.arange(3, 9)


def histogram_of(v: np.ndarray, measured: np.ndarray = MEASURED) -> EntropyHistogram:
    histogram = EntropyHistogram.empty(v.shape[1])
    histogram.update(sp.csr_matrix(v), measured)
    return histogram


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 40), max_size=6), st.randoms())
def test_any_division_and_order_gives_equal_histograms(seed, cuts, random):
    v = random_values(seed)
    edges = sorted({0, 40, *cuts})
    parts = [histogram_of(v[a:b]) for a, b in itertools.pairwise(edges)]
    random.shuffle(parts)
    expected = histogram_of(v)
    total = EntropyHistogram.empty(9)
    for part in parts:
        total = total + part
    assert total == expected
    assert total.n_cells == 40
    np.testing.assert_array_equal(total.entropy(), expected.entropy())
    streamed = EntropyHistogram.empty(9)
    for a, b in itertools.pairwise(edges):
        streamed.update(sp.csr_matrix(v[a:b]), MEASURED)
    assert streamed == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 60), max_size=3))
def test_every_value_is_counted_in_its_bin(seed, cuts):
    v = random_values(seed, 60, 12)
    measured = np.random.default_rng(seed).permutation(np.arange(-1, 12))
    histogram, slow = EntropyHistogram.empty(12), np.zeros((12, N_BINS), np.int64)
    for a, b in itertools.pairwise(sorted({0, 60, *cuts})):
        histogram.update(sp.csr_matrix(v[a:b]), measured)
    for token in range(12):
        np.add.at(slow[token], np.ceil(v[:, token] / np.float32(0.5)).astype(int), 1)
    np.testing.assert_array_equal(histogram.counts, slow)
    assert histogram.counts.sum() == 60 * 12


def test_zeros_count_only_where_the_gene_was_measured():
    v = random_values(3)
    v[:, 5] = 0
    first, second = (
        histogram_of(v),
        histogram_of(np.delete(v, 5, 1) @ np.zeros((8, 9), np.float32), np.array([3, -1, 4])),
    )
    total = first + second
    np.testing.assert_array_equal(total.counts.sum(1), [0, 0, 0, 80, 80, 40, 40, 40, 40])
    assert total.counts[5, 0] == 40
    assert total.entropy()[5] == 0
    np.testing.assert_array_equal(total.entropy()[6:], first.entropy()[6:])


def test_a_block_that_is_refused_leaves_no_count():
    histogram = histogram_of(random_values(5))
    before = histogram.counts.copy()
    good = sp.csr_matrix(random_values(6))
    for part, wrong in (("indices", (9, -1)), ("data", (-1.0, 0.0, 11.0, np.nan, np.inf))):
        for value in wrong:
            bad = good.copy()
            getattr(bad, part)[-1] = value
            with pytest.raises(ValueError, match="0 to 10, or tokens"):
                histogram.update(bad, MEASURED)
    for cells, measured, message in (
        (good, MEASURED[:-1], "0 to 10, or tokens"),
        (good.astype(np.float64), MEASURED, "must be float32"),
        (good[:, :8], MEASURED, "cells have 8 tokens, the histogram 9"),
    ):
        with pytest.raises(ValueError, match=message):
            histogram.update(cells, measured)
    np.testing.assert_array_equal(histogram.counts, before)
    assert histogram.n_cells == 40
    for incompatible in (EntropyHistogram.empty(8), EntropyHistogram.empty(9, "b")):
        with pytest.raises(ValueError, match="different vocabularies"):
            EntropyHistogram.empty(9, "a") + incompatible


def test_a_saved_histogram_comes_back(tmp_path):
    histogram = histogram_of(random_values(6))
    histogram.fingerprint = "abc"
    np.savez(tmp_path / "h.npz", **vars(histogram))
    back = EntropyHistogram(**np.load(tmp_path / "h.npz"))
    assert back == histogram
    assert back.fingerprint == "abc"
    assert (back + histogram).n_cells == 80


@pytest.mark.parametrize(
    "counts",
    [
        np.zeros((4, 3), np.int64),
        np.zeros((3, N_BINS), np.int64),
        np.zeros((2, N_BINS), np.int64),
        np.zeros((4, N_BINS), np.int32),
        np.full((4, N_BINS), -1),
        np.zeros(4, np.int64),
    ],
)
def test_counts_of_no_histogram_are_refused(counts):
    with pytest.raises(ValueError, match="counts must be int64"):
        EntropyHistogram(counts, 4)
