from __future__ import annotations

import numpy as np
import pytest

from scdiva.metrics import Neighbors, leiden_agreement, nearest_neighbors
from scdiva.metrics.neighbors import neighbors_of


@pytest.mark.parametrize("n_dims", [3, 40])
def test_are_those_of_a_full_sort(n_dims):
    z = np.random.default_rng(0).normal(size=(70, n_dims))
    distance = np.sqrt(((z[:, None] - z[None]) ** 2).sum(axis=2))
    found = nearest_neighbors(z, 12)
    assert np.array_equal(found.indices, np.argsort(distance, axis=1)[:, :12])
    assert np.allclose(found.distances, np.sort(distance, axis=1)[:, :12])


def test_the_cell_itself_comes_first_among_equals():
    z = np.repeat([[0.0, 0.0], [5.0, 5.0]], 6, axis=0)
    found = nearest_neighbors(z, 4)
    assert found.indices[:, 0].tolist() == list(range(12))
    assert (np.diff(np.sort(found.indices, axis=1), axis=1) > 0).all()
    assert (found.distances == 0).all()
    with pytest.raises(ValueError, match="All cells are at one point"):
        nearest_neighbors(z[:6], 4)


def test_what_is_at_hand_is_used_and_cut():
    found = nearest_neighbors(np.random.default_rng(0).normal(size=(30, 2)), 9)
    fewer = neighbors_of(found, 4)
    assert isinstance(fewer, Neighbors)
    assert np.array_equal(fewer.indices, found.indices[:, :4])
    assert np.array_equal(fewer.distances, found.distances[:, :4])
    with pytest.raises(ValueError, match=r"10 neighbours .* 9 are given: call nearest_neighbors\(embedding, 10\)"):
        neighbors_of(found, 10)


def test_bad_input_is_refused():
    z = np.random.default_rng(0).normal(size=(30, 2))
    for n in (1, 31):
        with pytest.raises(ValueError, match=f"{n} neighbours .* among 30 cells"):
            nearest_neighbors(z, n)
    with pytest.raises(ValueError, match=r"shape \(30,\)"):
        nearest_neighbors(z[:, 0], 3)
    z[[4, 7]] = np.nan
    with pytest.raises(ValueError, match=r"2 cells .* number 4"):
        nearest_neighbors(z, 3)
    with pytest.raises(ValueError, match=r"2 labelled cells .* number 4"):
        leiden_agreement(z, ["a", "b"] * 15)
