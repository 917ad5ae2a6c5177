"""Modules and hubs: of cliques made by hand, and of toy cells whose modules are known."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.metrics import adjusted_rand_score

import scdiva as sd
from scdiva.networks.network import strongest

from .conftest import about


@pytest.fixture
def cliques():
    """Twenty genes: cliques of six, eight and four, with weak edges between them, one with negative edges, one alone.

    Rows 0 to 9 are sources.
    """
    rng = np.random.default_rng(0)
    kind = rng.permutation(np.repeat([0, 1, 2, 3, 4], [6, 8, 4, 1, 1]))
    weights = np.where(kind[:, None] == kind, rng.uniform(0.5, 1, (20, 20)), rng.uniform(0, 0.05, (20, 20)))
    weights[kind == 3] = -rng.uniform(0, 1, 20)
    weights[:, kind == 3] = -1.0
    weights[kind == 4] = weights[:, kind == 4] = 0
    np.fill_diagonal(weights, 0)
    adata = ad.AnnData(np.ones((3, 20), np.float32), var=pd.DataFrame(index=[f"G{i}" for i in range(20)]))
    for key, factor in (("net", 1.0), ("by_a_b", 1.0), ("by_c", -1.0)):
        adata.varp[key] = sp.csr_matrix((factor * weights).astype(np.float32))
    names = adata.var_names
    adata.uns["scdiva"] = {
        "net": about(names, ["net"], method="correlation", signed=True),
        "by": about(names, ["by_a_b", "by_c"], ["a/b", "c"], "correlation", signed=True),
    }
    return adata, kind, weights


@pytest.fixture
def toy():
    return sd.datasets.toy(300, 200, rng=0)


def slow_strongest(weights, n):
    """Edge by edge: the larger of both directions, kept if it is among the n largest of either end."""
    size = len(weights)
    symmetric = np.maximum(np.maximum(weights, weights.T), 0)
    chosen = {
        i: sorted((j for j in range(size) if symmetric[i, j] > 0), key=lambda j: (-symmetric[i, j], j))[:n]
        for i in range(size)
    }
    return np.array(
        [[symmetric[i, j] if j in chosen[i] or i in chosen[j] else 0 for j in range(size)] for i in range(size)]
    )


@pytest.mark.parametrize("n", [1, 3, 15])
def test_the_strongest_edges_of_each_gene(n):
    rng = np.random.default_rng(n)
    weights = np.round(rng.normal(size=(25, 25)), 1) * (rng.random((25, 25)) < 0.5)  # some tie
    np.fill_diagonal(weights, 0)
    np.testing.assert_array_equal(strongest(sp.csr_matrix(weights), n).toarray(), slow_strongest(weights, n))


def test_cliques_are_modules_the_largest_first(cliques, tmp_path):
    adata, kind, weights = cliques
    before = adata.uns["scdiva"]["net"]
    assert sd.tl.grn_modules(adata, key="net", n_neighbors=5) is None
    module = adata.var["scdiva_grn_module"]
    assert list(module.cat.categories) == ["0", "1", "2"]
    for number, of in (("0", 1), ("1", 0), ("2", 2)):
        assert set(np.flatnonzero(module == number)) == set(np.flatnonzero(kind == of))
    assert module.isna().to_numpy().tolist() == (kind > 2).tolist()
    hub = adata.var["scdiva_grn_module_hub"]
    assert hub.dtype == np.float32
    left = np.linalg.svd(np.abs(weights))[0][:, 0]
    np.testing.assert_allclose(hub, np.abs(left) / np.abs(left).max(), atol=1e-5)
    assert adata.uns["scdiva"]["net"] is before
    about = adata.uns["scdiva"]["scdiva_grn_module"]
    assert (about["key"], about["group"], about["n_neighbors"], about["resolution"]) == ("net", "", 5, 1.0)
    adata.write_h5ad(tmp_path / "a.h5ad")
    back = ad.read_h5ad(tmp_path / "a.h5ad")
    pd.testing.assert_frame_equal(back.var, adata.var)


def test_of_a_group_and_of_part_of_the_sources(cliques):
    adata, _, weights = cliques
    sources = np.arange(20) < 10
    for key in adata.varp:
        adata.varp[key] = sp.csr_matrix(adata.varp[key].multiply(sources[:, None]))
    adata.uns["scdiva"]["by"]["sources"] = np.asarray(adata.var_names)[sources]
    copy = sd.tl.grn_modules(adata, key="by", group="a/b", key_added="mine", copy=True)
    assert "mine" not in adata.var
    assert copy.uns["scdiva"]["mine"]["group"] == "a/b"
    hub = copy.var["mine_hub"]
    assert hub.isna().to_numpy().tolist() == (~sources).tolist()
    left = np.abs(np.linalg.svd(weights[sources])[0][:, 0])
    np.testing.assert_allclose(hub[sources], left / left.max(), atol=1e-5)
    assert copy.var["mine"].notna().sum() > 10  # targets are in modules too


@pytest.mark.parametrize("method", ["correlation", "embedding"])
def test_the_modules_of_toy_cells_are_found_and_dense(toy, method):
    """By the bundled model's gene vectors and cell states, as by correlation."""
    sd.tl.grn(toy, method, n_targets=None)
    sd.tl.grn_modules(toy)
    truth = toy.uns["truth"]["module"]
    assigned = (truth >= 0) & toy.var["scdiva_grn_module"].notna().to_numpy()
    assert assigned.sum() > 55
    assert adjusted_rand_score(truth[assigned], toy.var["scdiva_grn_module"][assigned].astype(str)) > 0.8
    weights = toy.varp["scdiva_grn"].toarray()
    for number in range(4):
        members = truth == number
        assert weights[np.ix_(members, members)].mean() > 2 * abs(weights[np.ix_(members, ~members)]).mean()
    hub = toy.var["scdiva_grn_module_hub"]
    assert hub[assigned].mean() > hub[truth < 0].mean()


def test_resolution_neighbors_and_seed(toy):
    sd.tl.grn(toy, "correlation", n_targets=None)
    n = []
    for resolution in (0.2, 1.0, 5.0):
        sd.tl.grn_modules(toy, resolution=resolution)
        n.append(toy.var["scdiva_grn_module"].nunique())
    assert n[0] < n[1] < n[2]
    sd.tl.grn_modules(toy, resolution=5.0, rng=3, key_added="again")
    first = toy.var["again"].copy()
    with sd.settings.override(seed=3):
        sd.tl.grn_modules(toy, resolution=5.0, key_added="again")
    pd.testing.assert_series_equal(toy.var["again"], first)
    sizes = first.value_counts()
    assert sizes.sort_index(key=lambda i: i.astype(int)).is_monotonic_decreasing
    assert toy.uns["scdiva"]["again"]["seed"] == "3"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_neighbors": 0}, "n_neighbors must be at least 1, got 0"),
        ({"resolution": 0}, "resolution .*got 0"),
        ({"resolution": float("nan")}, "resolution .*got nan"),
        ({"key": "negative"}, "no edge of positive weight"),
    ],
)
def test_what_makes_no_modules_is_refused(cliques, hashed, options, message):
    adata, _, weights = cliques
    adata.X = sp.csr_matrix(adata.X)
    adata.uns["scdiva"]["negative"] = adata.uns["scdiva"]["net"] | {"keys": np.array(["negative"])}
    adata.varp["negative"] = sp.csr_matrix(-np.abs(weights).astype(np.float32))
    before = hashed(adata)
    with pytest.raises(ValueError, match=message):
        sd.tl.grn_modules(adata, **{"key": "net"} | options)
    assert hashed(adata) == before
