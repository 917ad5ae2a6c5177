"""The hash by which these tests detect a changed AnnData object depends on every part of it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp


def _of_raw(adata):
    adata.raw.X.data[0] += 1


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.X.data.__setitem__(0, a.X.data[0] + 1),
        lambda a: setattr(a, "X", a.X.astype(np.float64)),
        lambda a: a.layers["counts"].data.__setitem__(0, -1),
        lambda a: a.obs.__setitem__("batch", a.obs["batch"].cat.add_categories("more")),
        lambda a: setattr(a, "obs_names", [f"n{i}" for i in range(a.n_obs)]),
        lambda a: a.uns["truth"]["program"].__setitem__((0, 0), 9.0),
        lambda a: a.obsm["X_own"].__setitem__((0, 0), 9.0),
        lambda a: a.obsp.__setitem__("new", sp.eye(a.n_obs, format="csr")),
        _of_raw,
    ],
)
def test_a_change_is_seen(drawn, hashed, change):
    adata = drawn.copy()
    assert hashed(adata) == hashed(drawn)
    change(adata)
    assert hashed(adata) != hashed(drawn)
