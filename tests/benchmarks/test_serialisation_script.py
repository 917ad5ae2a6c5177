"""The plain tokenizers rank as they say, the cells are what the page says, and the script runs."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import scipy.sparse as sp
import torch


@pytest.fixture
def serialisation(script):
    return script("serialisation")


def test_synthetic_cells_have_the_stated_lengths_and_ties(serialisation):
    entropy = np.random.default_rng(0).uniform(0, 2, 20_000)
    counts = serialisation.synthetic(300, entropy, np.arange(3, 20_000))
    lengths = np.diff(counts.indptr)
    assert abs(np.median(lengths) / serialisation.MEDIAN - 1) < 0.1
    assert abs(np.log(lengths).std() / serialisation.SPREAD - 1) < 0.2
    assert counts.has_canonical_format
    np.testing.assert_array_equal(counts.data, np.rint(counts.data))
    assert (counts.data == 1).mean() > 0.3
    found = np.bincount(counts.indices, minlength=counts.shape[1])
    assert found[entropy[3:] > 0.6].mean() > 3 * found[entropy[3:] < 0.3].mean()


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


def test_the_script_runs_on_few_cells(serialisation, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["_record"], "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["benchmarks/serialisation.py"])
    threads = torch.get_num_threads()
    serialisation.main(["--cells", "100", "--repeats", "1"])
    torch.set_num_threads(threads)
    found = json.loads((tmp_path / "serialisation.json").read_text())
    assert sum("met" in row for row in found["rows"]) == 5
    assert 500 < found["median_length"] < 1300
    assert found["ties_per_cell"] > 10
    assert "times as fast as the lexsort loop" in capsys.readouterr().out
