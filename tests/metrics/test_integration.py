from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from scdiva.metrics import avg_batch, avg_bio, shuffle_control


@pytest.fixture(scope="module")
def blobs():
    labels = np.repeat(["a", "b", "c", "d"], 40)
    centre = 15.0 * np.eye(4)[np.repeat(range(4), 40)]
    return centre + np.random.default_rng(0).normal(size=(160, 4)), labels


@pytest.fixture(scope="module")
def cells():
    """(after, before, batch, label) of 150 cells: three types, three batches, far apart before and a little after."""
    rng = np.random.default_rng(0)
    labels, batch = np.repeat(["a", "b", "c"], 50), rng.choice(["x", "y", "z"], 150, p=[0.5, 0.3, 0.2])
    shift = rng.normal(size=(3, 5))[np.unique(batch, return_inverse=True)[1]]
    z = rng.normal(size=(150, 5)) + 4.0 * np.eye(3, 5)[np.repeat(range(3), 50)]
    return (z + 0.4 * shift).astype(np.float32), (z + 3 * shift).astype(np.float32), batch, labels


def distances(z):
    return np.sqrt(((z[:, None] - z[None]) ** 2).sum(axis=2))


def silhouette(z, groups):
    """Mean silhouette width, from loops over pairs."""
    distance, widths = distances(z), []
    for i in range(len(z)):
        same_group = groups == groups[i]
        a = distance[i, same_group].sum() / (same_group.sum() - 1)
        b = min(distance[i, groups == group].mean() for group in np.unique(groups) if group != groups[i])
        widths.append((b - a) / max(a, b))
    return np.mean(widths)


# biology


@pytest.fixture
def igraph():
    return pytest.importorskip("igraph", reason="Leiden clusters need igraph (extra leiden)")


def test_separated_types_are_found(igraph, blobs):
    scores = avg_bio(*blobs)
    assert (scores["nmi"], scores["ari"]) == (pytest.approx(1), pytest.approx(1))
    shuffled = avg_bio(blobs[0], np.random.default_rng(0).permutation(blobs[1]))
    assert shuffled["nmi"] < 0.2


def test_is_repeatable_and_leaves_the_users_generator_alone(igraph, blobs):
    z = np.random.default_rng(4).normal(size=(160, 4))
    random.seed(3)
    expected = random.random()
    random.seed(3)
    first = avg_bio(z, blobs[1])
    assert random.random() == expected
    assert avg_bio(z, blobs[1]) == first


@pytest.mark.parametrize("definition", ["paper", "scgpt"])
def test_average_is_the_mean_of_its_parts(igraph, blobs, definition):
    z, labels = blobs[0] / 10, blobs[1]
    score, width = avg_bio(z, labels, definition=definition), silhouette(z, labels)
    assert score["asw"] == pytest.approx(width if definition == "paper" else (width + 1) / 2, abs=1e-6)
    assert score["avg_bio"] == pytest.approx((score["nmi"] + score["ari"] + score["asw"]) / 3)


def test_cells_without_a_label_are_left_out(igraph, blobs):
    z, labels = blobs[0] / 10, blobs[1].copy()
    labels[::7] = ""
    assert avg_bio(z, labels) == avg_bio(z[labels != ""], labels[labels != ""])


def test_without_igraph_the_extra_is_named(blobs, monkeypatch):
    monkeypatch.setitem(sys.modules, "igraph", None)
    with pytest.raises(ImportError, match=r"scdiva\[leiden\]"):
        avg_bio(*blobs)


# batches


def test_the_papers_definition(cells):
    """1 - mean silhouette of the batches over all cells, with its sign."""
    z, _, batch, _ = cells
    expected = pytest.approx(1 - silhouette(z, batch))
    assert avg_batch(z, batch, definition="paper") == {"avg_batch": expected, "asw_batch": expected}


def batch_silhouette(z, batch, labels):
    """1 - |s| of the batches within each label, averaged over the label, then over labels; from loops over pairs."""
    distance, per_label = distances(z), []
    for name in np.unique(labels):
        members = np.flatnonzero(labels == name)
        if len(np.unique(batch[members])) == 1:
            continue
        widths = []
        for i in members:
            same = members[(batch[members] == batch[i]) & (members != i)]
            other_batches = [
                members[batch[members] == batch_id] for batch_id in np.unique(batch[members]) if batch_id != batch[i]
            ]
            a, b = (
                distance[i, same].mean() if len(same) else 0.0,
                min(distance[i, rows].mean() for rows in other_batches),
            )
            widths.append(1 - abs(b - a) / max(a, b) if len(same) else 1.0)
        per_label.append(np.mean(widths))
    return np.mean(per_label)


def connectivity(z, labels):
    """Walk along neighbours within each label, both ways: the largest share of a label that reaches itself."""
    near = np.argsort(distances(z), axis=1)[:, :15]
    edges = np.zeros((len(z), len(z)), bool)
    edges[np.arange(len(z))[:, None], near] = True
    edges |= edges.T
    shares = []
    for name in np.unique(labels):
        reach = edges[np.ix_(labels == name, labels == name)]
        for _ in range(7):
            reach = reach @ reach
        shares.append(reach.sum(axis=1).max() / len(reach))
    return np.mean(shares)


def test_scgpts_definition(cells):
    z, _, batch, labels = cells
    batch = np.where(labels == "c", "x", batch)  # one label of one batch, which says nothing
    far = np.where(np.arange(150)[:, None] % 5 == 0, z + 30 * (np.arange(150)[:, None] % 10 == 0), z)
    for points in (z, far):
        asw, connected = batch_silhouette(points, batch, labels), connectivity(points, labels)
        assert avg_batch(points, batch, labels) == {
            "avg_batch": pytest.approx((asw + connected) / 2),
            "asw_batch": pytest.approx(asw),
            "graph_connectivity": pytest.approx(connected),
        }
    assert connected < 1
    partial_labels = np.where(np.arange(150) % 7 == 0, "unknown", labels)
    labelled = partial_labels != "unknown"
    assert avg_batch(z, batch, partial_labels) == avg_batch(z[labelled], batch[labelled], labels[labelled])


def test_a_shuffle_scores_what_mixed_batches_score(cells):
    """Batches far apart score below their shuffle; batches given at random score as their shuffle does."""
    after, before, batch, labels = cells
    for definition in ("paper", "scgpt"):
        control = shuffle_control(before, batch, labels, definition=definition)
        assert avg_batch(before, batch, labels, definition=definition)["avg_batch"] < control["avg_batch"] - 0.1
        drawn = np.random.default_rng(5).permutation(batch)
        mixed = avg_batch(after, drawn, labels, definition=definition)["avg_batch"]
        shuffled = shuffle_control(after, drawn, labels, definition=definition)["avg_batch"]
        assert mixed == pytest.approx(shuffled, abs=0.03)
    assert shuffle_control(before, batch, labels, rng=1) == shuffle_control(before, batch, labels, rng=1)
    assert shuffle_control(before, batch, labels, rng=1) != shuffle_control(before, batch, labels, rng=2)


def test_bad_input_is_refused(cells):
    after, _, batch, labels = cells
    with pytest.raises(ValueError, match=r"definition must be one of 'paper', 'scgpt'; got 'scib'"):
        avg_batch(after, batch, labels, definition="scib")
    with pytest.raises(ValueError, match="pass labels"):
        avg_batch(after, batch)
    with pytest.raises(ValueError, match="confounded"):
        avg_batch(after, labels, labels)
    for missing in (None, np.nan):
        with pytest.raises(ValueError, match=r"2 of 150 .*batch .*number 1\)"):
            avg_batch(after, ["x", missing, "y", missing] + ["x", "y"] * 73, labels)
    with pytest.raises(ValueError, match="All 150 cells are of the batch 'x'"):
        avg_batch(after, ["x"] * 150, definition="paper")
    with pytest.raises(ValueError, match=r"shape \(149,\), but there are 150 cells"):
        avg_batch(after, batch[1:], labels)
    with pytest.raises(ValueError, match=r"14 neighbours .* only 10 cells"):
        avg_batch(after[::15], np.tile(["x", "y"], 5), labels[::15])
    with pytest.raises(ValueError, match="All cells are at one point"):
        avg_batch(np.zeros((150, 2)), batch, labels)
