"""The plain tokenizers rank as they say, the cells are what the page says, and the script runs."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp


@pytest.fixture
def serialisation(script):
    return script("serialisation")


def test_detection_rate_inverts_the_entropy_of_found_or_not(serialisation):
    p = np.array([0.01, 0.09, 0.5])
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    np.testing.assert_allclose(serialisation.detection_rate(entropy), p, rtol=1e-2)


def test_the_three_ways_of_geneformer_agree(serialisation):
    rng = np.random.default_rng(1)
    counts = sp.csr_matrix(rng.poisson(0.5, (20, 60)).astype(np.float32))
    medians, token_of = 1 + rng.random(60), rng.permutation(60).astype(np.int32)
    ways = [serialisation.geneformer, serialisation.geneformer_sparse, serialisation.geneformer_slices]
    dense, *others = (way(counts, medians, token_of) for way in ways)
    normed = counts.toarray() / counts.toarray().sum(1, keepdims=True) / medians
    for i, tokens in enumerate(dense):
        np.testing.assert_array_equal(tokens, token_of[np.argsort(-normed[i])[: len(tokens)]])
        assert len(tokens) == counts[i].nnz
        for other in others:
            np.testing.assert_array_equal(other[i], tokens)


def test_bins_of_quantiles_rise_with_the_value(serialisation):
    cells = sp.csr_matrix(np.float32([[0, 3, 1, 2, 2, 9, 0, 4]]))
    (bins,) = serialisation.scgpt(cells)
    assert np.all(np.diff(bins[np.argsort(cells.data, kind="stable")][[0, 1, 3, 4, 5]]) > 0)
    assert 1 <= bins.min() <= bins.max() <= serialisation.BINS


def test_ties_are_counted_within_cells(serialisation):
    ranked = np.array([0, 3, 5]), np.array([3, 4, 5, 3, 4]), np.float32([2, 2, 1, 1, 1])
    assert serialisation.ties(ranked, np.ones(6, np.float32)) == 1.0
