"""What is tried beside the cell state: what each arm is made of."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.decomposition import PCA

import scdiva as sd


@pytest.fixture
def arms(script):
    model, cells = sd.models.load_model(), sd.datasets.toy(60, 300)
    return lambda seed: dict(script("state_arms").arms_of(cells, model, seed)), cells, model


def test_components_are_those_of_a_pca(script):
    x = np.random.default_rng(0).normal(size=(30, 8)) * np.arange(1, 9)
    found, expected = script("state_arms").components(x, 3), PCA(3, svd_solver="full").fit_transform(x)
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-10)


@pytest.mark.filterwarnings("ignore")
def test_only_what_reads_the_context_depends_on_it(arms):
    make, cells, model = arms
    one, other = make(0), make(1)
    state = sd.tl.embed(cells, model, copy=True).obsm["X_scdiva"]
    np.testing.assert_allclose(one["state"], state / np.linalg.norm(state, axis=1, keepdims=True), atol=1e-5)
    reads = {"predicted, context", "state and predicted, context"}
    assert {name for name in one if not np.allclose(one[name], other[name])} - {"adapted"} == reads
    assert all(len(embedding) == cells.n_obs and np.isfinite(embedding).all() for embedding in one.values())


def test_a_lead_is_a_mean_over_studies(script):
    rows = [
        {"set": name, "arm": arm, "accuracy": base + lead, "average_bio": base - lead}
        for name, base in (("a", 0.5), ("b", 0.7))
        for arm, lead in (
            ("state", 0), ("state, centred", 0), ("state and predicted", 0.1), ("adapted", 0.2),
            ("state and predicted, context", 0.05),
        )
    ]  # fmt: skip
    found = {row["what"]: row["value"] for row in script("state_arms").goals(rows)}
    assert found["state and predicted, context: mean accuracy above the state"] == pytest.approx(0.05)
    assert found["adapted: mean average_bio above the state"] == pytest.approx(-0.2)
    assert script("state_arms").goals(rows[:5]) == []  # of one study there is no interval
