"""Screens, and models fitted on them."""

from __future__ import annotations

import numpy as np
import pytest

import scdiva as sd


@pytest.fixture(scope="session")
def data(perturbed_cells):
    """A screen of seven conditions; never written to."""
    return perturbed_cells(("control", "0", "1", "2", "3", "0+1", "1+2", "drug"))


@pytest.fixture(scope="session")
def fitted(data, one):
    return sd.tl.fit_perturbation(data, "perturbation", model=one, rng=0)


@pytest.fixture(scope="session")
def of_groups(perturbed_cells):
    """A screen of three lines and two doses; never written to."""
    return perturbed_cells(("control", "0", "1", "0+1"), ("b", "a", "c"), n=6, doses=(1.0, 10.0))


@pytest.fixture(scope="session")
def fitted_groups(of_groups, one):
    return sd.tl.fit_perturbation(of_groups, "perturbation", model=one, groupby="line", dose_key="dose", rng=0)


def predict(data, model, predict=None, **arguments):
    """Predict with a fitted model from a copy of the cells."""
    return sd.tl.predict_perturbation(data.copy(), model=model, predict=predict, **{"rng": 0} | arguments)


def alike(first, second):
    """Assert that two predictions of the same conditions have the same bits."""
    np.testing.assert_array_equal(first.X, second.X)
    assert first.varm.keys() == second.varm.keys()
    for key in first.varm:
        np.testing.assert_array_equal(first.varm[key], second.varm[key])
