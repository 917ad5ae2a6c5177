"""integration.py: scores are what they are said to be, hidden labels stay hidden."""

from __future__ import annotations

import numpy as np
import pytest

import scdiva as sd


def test_lisi_is_its_definition(script):
    scores, rng = script("_integration_scores"), np.random.default_rng(0)
    batches = np.array(["x", "y", "z"])[np.arange(300) % 3]
    embedding = rng.normal(size=(300, 4)) + np.where(batches == "x", 1.0, 0)[:, None] * [0, 1, 0, 0]
    found, even = scores.lisi(embedding, batches), scores.lisi(embedding, batches, None)
    for cell in (0, 7, 299):
        distance = np.linalg.norm(embedding - embedding[cell], axis=1)
        nearest = np.argsort(distance)[:90]
        assert even[cell] == pytest.approx(1 / sum(np.mean(batches[nearest] == name) ** 2 for name in "xyz"))
        others = nearest[1:]
        # beta by bisection on its own scale, not on that of the function
        low, high = 1e-6, 1e6
        for _ in range(200):
            beta = (low * high) ** 0.5
            weight = np.exp(-beta * (distance[others] - distance[others].min()))
            weight /= weight.sum()
            perplexity = np.exp(-(weight * np.log(np.maximum(weight, 1e-300))).sum())
            low, high = (beta, high) if perplexity > 30 * 89 / 90 else (low, beta)
        shares = [weight[batches[others] == name].sum() for name in "xyz"]
        assert found[cell] == pytest.approx(1 / np.sum(np.square(shares)), rel=0.01)


def test_what_is_hidden_is_not_told(script):
    arms, adata = script("_integration_arms"), sd.datasets.toy(120, 160, n_types=3)
    adata.obs["cell_type"] = adata.obs["cell_type"].astype(str)
    adata.obs.loc[adata.obs_names[:10], "cell_type"] = "nan"
    half, other = (arms.hidden_half(adata.obs["cell_type"].to_numpy(), seed) for seed in (1, 0))
    assert not np.array_equal(half, other)
    assert (len(half), half.min() >= 10) == (55, True)
    told, later = arms.parted(adata.copy(), {"part": "labelled", "seed": 1})
    assert later is None
    np.testing.assert_array_equal(
        np.flatnonzero(told.obs["known_type"] == "unlabelled"), np.union1d(half, np.arange(10))
    )
    batch = str(adata.obs["batch"].iloc[0])
    told, later = arms.parted(adata.copy(), {"part": "query", "seed": 0, "left_out": batch})
    assert set(later.obs["batch"].astype(str)) == {batch}
    assert batch not in set(told.obs["batch"].astype(str))
    assert (later.obs["known_type"] == "unlabelled").all()
