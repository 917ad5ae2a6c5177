from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.spatial.distance import pdist

from scdiva.pl._network_layout import pack, place_genes


def graph(n: int, n_modules: int, seed: int = 0) -> tuple[sp.csr_matrix, np.ndarray]:
    """Symmetric weights, dense within modules and sparse between."""
    rng = np.random.default_rng(seed)
    modules = rng.integers(n_modules, size=n)
    share = np.where(modules[:, None] == modules, 0.15, 0.005)
    upper = np.triu(rng.random((n, n)) < share, 1) * rng.uniform(0.2, 1, (n, n))
    return sp.csr_matrix(upper + upper.T), modules


@pytest.mark.parametrize(("n", "n_modules"), [(1, 1), (2, 1), (2, 2), (30, 3), (150, 6), (150, 1)])
def test_genes_are_apart_and_modules_do_not_mix(n, n_modules):
    weights, modules = graph(n, n_modules)
    places = place_genes(weights, modules)
    assert np.isfinite(places).all()
    assert n == 1 or pdist(places).min() > 0.6
    for a in range(n_modules):
        for b in range(a):
            mine, yours = places[modules == a], places[modules == b]
            if len(mine) and len(yours):
                gap = np.linalg.norm(mine[:, None] - yours, axis=2).min()
                assert gap > 1.5


def test_places_are_the_same_every_time():
    weights, modules = graph(150, 1)
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    first = place_genes(weights, modules)
    np.testing.assert_array_equal(first, place_genes(weights, modules))
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # noqa: NPY002


def test_edges_are_shorter_than_pairs_without():
    weights, modules = graph(60, 1)
    places = place_genes(weights, modules)
    length = np.linalg.norm(places[:, None] - places, axis=2)
    joined = weights.toarray() > 0
    assert length[joined].mean() < 0.7 * length[~joined].mean()


@pytest.mark.parametrize("n", [1, 2, 3, 25])
def test_discs_touch_and_never_overlap(n):
    rng = np.random.default_rng(n)
    radii = rng.uniform(0.5, 3, n)
    pull = np.triu(rng.random((n, n)) < 0.1, 1).astype(float)
    centres = pack(radii, pull + pull.T)
    gaps = np.linalg.norm(centres[:, None] - centres, axis=2) - radii[:, None] - radii
    np.fill_diagonal(gaps, np.inf)
    assert n == 1 or gaps.min() > -1e-6
    assert n == 1 or np.allclose(gaps.min(axis=1), 0, atol=1e-6)


def test_what_attracts_is_near():
    radii = np.ones(12)
    pull = np.zeros((12, 12))

    def apart() -> float:
        centres = pack(radii, pull)
        return float(np.linalg.norm(centres[8] - centres[11]))

    before = apart()
    pull[8, 11] = pull[11, 8] = 1.0
    assert apart() < before - 1
