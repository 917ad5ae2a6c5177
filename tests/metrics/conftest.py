from __future__ import annotations

import pytest

from scdiva.metrics import nearest_neighbors


@pytest.fixture
def scib(monkeypatch):
    """scib-metrics, whose search for neighbours among diffusion components is exact and at once.

    Within labels its kBET asks pynndescent, which numba first compiles for half a minute or more; its neighbours are
    approximate besides, so that two runs on a few dozen cells differ.
    """
    found = pytest.importorskip("scib_metrics", reason="needs scib-metrics (extra metrics)")

    def exact(x, n_neighbors):
        return found.nearest_neighbors.NeighborsResults(**nearest_neighbors(x, n_neighbors)._asdict())

    monkeypatch.setattr(found.nearest_neighbors, "pynndescent", exact)
    return found
