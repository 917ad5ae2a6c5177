"""The hash by which the fault table tells whether adata was changed sees a change of any part."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp


def _of_raw(adata):
    adata.raw.X.data[0] += 1


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.X.data.__setitem__(0, a.X.data[0] + 1),
        lambda a: setattr(a, "X", a.X.astype(np.float64)),
        lambda a: setattr(a, "X", sp.csc_matrix(a.X)),
        lambda a: a.layers["counts"].data.__setitem__(0, -1),
        lambda a: a.layers.pop("counts"),
        lambda a: a.obs.__setitem__("new", 1),
        lambda a: a.obs.__setitem__("batch", a.obs["batch"].cat.add_categories("more")),
        lambda a: a.obs.__setitem__("batch", a.obs["batch"].astype(str)),
        lambda a: setattr(a, "obs_names", [f"n{i}" for i in range(a.n_obs)]),
        lambda a: a.var.__setitem__("new", 1.0),
        lambda a: a.uns["truth"]["program"].__setitem__((0, 0), 9.0),
        lambda a: a.uns.__setitem__("scdiva", {}),
        lambda a: a.obsm["X_own"].__setitem__((0, 0), 9.0),
        lambda a: a.obsm.__setitem__("X_new", pd.DataFrame({"a": range(a.n_obs)}, index=a.obs_names)),
        lambda a: a.varm.__setitem__("new", np.zeros((a.n_vars, 1))),
        lambda a: a.obsp.__setitem__("new", sp.eye(a.n_obs, format="csr")),
        lambda a: a.varp.__setitem__("new", sp.eye(a.n_vars, format="csr")),
        _of_raw,
    ],
)
def test_a_change_is_seen(drawn, hashed, change):
    adata = drawn.copy()
    assert hashed(adata) == hashed(drawn)
    change(adata)
    assert hashed(adata) != hashed(drawn)
