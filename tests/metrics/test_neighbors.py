from __future__ import annotations

import sys

import numpy as np
import pytest
from scipy.stats import chi2

from scdiva.metrics import Neighbors, clisi, graph_connectivity, ilisi, kbet, leiden_agreement, nearest_neighbors
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
    with pytest.raises(ValueError, match=r"2 of 30 cells .* number 4"):
        nearest_neighbors(z, 3)
    with pytest.raises(ValueError, match=r"2 of 30 cells .* number 4"):
        leiden_agreement(z, ["a", "b"] * 15)


@pytest.fixture(scope="module")
def cells():
    """Three types in two dimensions; two batches of unequal size, a little apart."""
    rng = np.random.default_rng(0)
    labels = np.repeat(["a", "b", "c"], 40)
    batch = rng.choice(["x", "y"], 120, p=[0.6, 0.4])
    z = rng.normal(size=(120, 2)) + 3.0 * np.eye(3, 2)[np.repeat(range(3), 40)]
    z[batch == "y"] += 0.7
    return z, batch, labels


def sorted_by_distance(z):
    distance = np.sqrt(((z[:, None] - z[None]) ** 2).sum(axis=2))
    return np.argsort(distance, axis=1), np.sort(distance, axis=1)


def lisi_by_definition(z, groups, k):
    """Per cell: weights exp(-beta d) on k - 1 others, of entropy log(k // 3), then 1 / sum of the groups' squared."""
    indices, distances = sorted_by_distance(z)
    found = []
    for near, d in zip(indices[:, 1:k], distances[:, 1:k], strict=True):
        low, high = 0.0, 1e6
        for _ in range(200):
            beta = (low + high) / 2
            p = np.exp(-beta * (d - d.min()))
            p /= p.sum()
            entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
            low, high = (beta, high) if entropy > np.log(k // 3) else (low, beta)
        found.append(1 / sum(p[groups[near] == name].sum() ** 2 for name in np.unique(groups)))
    return np.array(found)


@pytest.mark.parametrize("k", [30, 90])
def test_lisi_is_its_definition(scib, cells, k):
    z, batch, labels = cells
    by_batch, by_label = lisi_by_definition(z, batch, k), lisi_by_definition(z, labels, k)
    assert ilisi(z, batch, n_neighbors=k) == pytest.approx(np.median(by_batch) - 1, abs=1e-3)
    assert clisi(z, labels, n_neighbors=k) == pytest.approx((3 - np.median(by_label)) / 2, abs=1e-3)
    shared = nearest_neighbors(z)
    assert ilisi(shared, batch, n_neighbors=k) == pytest.approx(ilisi(z, batch, n_neighbors=k))
    assert clisi(shared, labels, n_neighbors=k) == pytest.approx(clisi(z, labels, n_neighbors=k))


def test_mixed_batches_score_high_and_separate_ones_low(scib, cells):
    z, batch, labels = cells
    apart = z + 100.0 * (batch == "y")[:, None]
    for score in (ilisi, kbet):
        assert score(apart, batch, n_neighbors=30) < 0.01
        assert score(z, batch, n_neighbors=30) < score(z, np.random.default_rng(0).permutation(batch), n_neighbors=30)
    shuffled = np.random.default_rng(0).permutation(labels)
    assert clisi(z, labels, n_neighbors=30) > clisi(z, shuffled, n_neighbors=30) + 0.3


def test_kbet_is_a_chi_square_test_of_each_cells_neighbours(scib, cells):
    z, batch, _ = cells
    near = sorted_by_distance(z)[0][:, :25]
    share = np.array([(batch == name).mean() for name in ("x", "y")])
    accepted = []
    for row in near:
        seen = np.array([(batch[row] == name).sum() for name in ("x", "y")])
        accepted.append(chi2.sf(((seen - 25 * share) ** 2 / (25 * share)).sum(), df=1) >= 0.05)
    assert 0.05 < np.mean(accepted) < 0.95
    assert kbet(z, batch, n_neighbors=25) == pytest.approx(np.mean(accepted), abs=0.01)


def test_kbet_within_labels(scib):
    """Types that only some batches hold are no fault of mixing: within labels all is mixed, over all cells nothing."""
    rng = np.random.default_rng(1)
    labels, batch = np.repeat(["a", "b"], 100), rng.choice(["x", "y"], 200)
    batch[:80], batch[120:] = "x", "y"
    batch[:100], batch[100:] = rng.permutation(batch[:100]), rng.permutation(batch[100:])
    z = rng.normal(size=(200, 4)) + 30.0 * (labels == "b")[:, None]
    assert kbet(z, batch) < 0.1
    assert kbet(z, batch, labels) > 0.7
    with pytest.raises(ValueError, match="coarser labels"):
        kbet(z, batch, np.where(batch == "x", "a", "b"))


@pytest.mark.parametrize("definition", ["scgpt", "scib"])
def test_connectivity_by_walking_the_graph(request, cells, definition):
    """Two cells are connected if a walk along neighbours of the label leads from one to the other (scib: both ways)."""
    if definition == "scib":
        request.getfixturevalue("scib")
    z, _, labels = cells
    z, labels = np.vstack([z, [[50.0, 50.0]]]), np.append(labels, "")  # a cell of no label joins nothing
    near = sorted_by_distance(z[:120])[0][:, :4]
    edges = np.zeros((120, 120), bool)
    edges[np.arange(120)[:, None], near] = True
    if definition == "scgpt":
        edges |= edges.T
    shares = []
    for name in "abc":
        reach = edges[np.ix_(labels[:120] == name, labels[:120] == name)]
        for _ in range(7):
            reach = reach @ reach
        shares.append((reach & reach.T).sum(axis=1).max() / 40)
    assert np.mean(shares) < 1
    assert graph_connectivity(z, labels, n_neighbors=4, definition=definition) == pytest.approx(np.mean(shares))
    shared = nearest_neighbors(z[:120], 20)
    assert graph_connectivity(shared, labels[:120], n_neighbors=4, definition=definition) == pytest.approx(
        np.mean(shares)
    )


def test_scgpts_connectivity_is_that_of_scanpys_graph(cells):
    """As the scib package does it: connected parts of scanpy's connectivities within each label."""
    import anndata as ad
    import scanpy as sc
    from scipy.sparse.csgraph import connected_components

    z, _, labels = cells
    adata = ad.AnnData(np.zeros((120, 1), np.float32), obsm={"X": z.astype(np.float32)})
    sc.pp.neighbors(adata, n_neighbors=4, use_rep="X", transformer="sklearn")
    shares = []
    for name in "abc":
        own = labels == name
        _, parts = connected_components(adata.obsp["connectivities"][own][:, own], connection="strong")
        shares.append(np.bincount(parts).max() / own.sum())
    assert graph_connectivity(z, labels, n_neighbors=4, definition="scgpt") == pytest.approx(np.mean(shares))


def test_bad_input_of_scores_is_refused(cells):
    z, _, labels = cells
    with pytest.raises(ValueError, match="'scgpt' or 'scib'"):
        graph_connectivity(z, labels, definition="paper")
    unlabelled = np.where(np.arange(120) % 50 == 3, "", labels)
    with pytest.raises(ValueError, match=r"3 of 120 cells have no label \(the first is number 3\)"):
        graph_connectivity(nearest_neighbors(z, 20), unlabelled, definition="scgpt")
    with pytest.raises(ValueError, match=r"labels has shape \(119,\), but there are 120 cells"):
        graph_connectivity(nearest_neighbors(z, 20), labels[1:], definition="scgpt")


def test_neighbours_with_labels_missing_or_all_alike_are_refused(scib, cells):
    z, batch, labels = cells
    with pytest.raises(ValueError, match="at least two labels"):
        clisi(z, np.full(120, "a"))
    with pytest.raises(ValueError, match="1 of 120 cells have no label"):
        kbet(z, batch, np.where(np.arange(120) == 0, "", labels))
    with pytest.raises(ValueError, match=r"90 neighbours .* among 80 cells"):
        ilisi(z[:80], batch[:80])


def test_without_scib_metrics_the_extra_is_named(cells, monkeypatch):
    z, batch, labels = cells
    monkeypatch.setitem(sys.modules, "scib_metrics", None)
    for call in (lambda: ilisi(z, batch), lambda: clisi(z, labels), lambda: kbet(z, batch)):
        with pytest.raises(ImportError, match=r"pip install 'scdiva\[metrics\]'"):
            call()
