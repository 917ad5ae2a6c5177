"""The hash by which these tests detect a changed AnnData object depends on every part of it."""

from __future__ import annotations

import numpy as np
import pytest

CHANGES = {
    "X": lambda a: a.X.data.__setitem__(0, a.X.data[0] + 1),
    "dtype": lambda a: setattr(a, "X", a.X.astype(np.float64)),
    "layers": lambda a: a.layers["counts"].data.__setitem__(0, -1),
    "obs": lambda a: setattr(a, "obs", a.obs.assign(batch=a.obs["batch"].cat.add_categories("more"))),
    "names": lambda a: setattr(a, "obs_names", [f"n{i}" for i in range(a.n_obs)]),
    "uns": lambda a: a.uns["truth"]["program"].__setitem__((0, 0), 9.0),
    "obsm": lambda a: a.obsm["X_own"].__setitem__((0, 0), 9.0),
    "obsp": lambda a: a.obsp.__setitem__("new", np.eye(a.n_obs)),
    "raw": lambda a: a.raw.X.data.__setitem__(0, -1),
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_change_is_seen(drawn, hashed, part):
    adata = drawn.copy()
    assert hashed(adata) == hashed(drawn)
    CHANGES[part](adata)
    assert hashed(adata) != hashed(drawn)
