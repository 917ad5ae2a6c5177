from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from scdiva.metrics import avg_bio, isolated_labels, leiden_agreement, nearest_neighbors, silhouette_label

igraph = pytest.importorskip("igraph", reason="Leiden clusters need igraph (extra bench)")


@pytest.fixture(scope="module")
def blobs():
    labels = np.repeat(["a", "b", "c", "d"], 40)
    centre = 15.0 * np.eye(4)[np.repeat(range(4), 40)]
    return centre + np.random.default_rng(0).normal(size=(160, 4)), labels


def test_separated_types_are_found(blobs):
    found = leiden_agreement(*blobs)
    assert found["nmi"] == pytest.approx(1)
    assert found["ari"] == pytest.approx(1)
    shuffled = leiden_agreement(blobs[0], np.random.default_rng(0).permutation(blobs[1]))
    assert shuffled["nmi"] < 0.2


def test_is_repeatable_and_leaves_the_users_generator_alone(blobs):
    z = np.random.default_rng(4).normal(size=(160, 4))
    random.seed(3)
    expected = random.random()
    random.seed(3)
    first = leiden_agreement(z, blobs[1])
    assert random.random() == expected
    assert leiden_agreement(z, blobs[1]) == first


def test_silhouette_is_its_definition(blobs):
    z, labels = blobs[0] / 10, blobs[1]
    d = np.sqrt(((z[:, None] - z[None]) ** 2).sum(axis=2))
    width = []
    for i in range(160):
        own = labels == labels[i]
        a = d[i, own].sum() / (own.sum() - 1)
        b = min(d[i, labels == other].mean() for other in "abcd" if other != labels[i])
        width.append((b - a) / max(a, b))
    assert silhouette_label(z, labels, rescale=False) == pytest.approx(np.mean(width), abs=1e-6)
    assert silhouette_label(z, labels) == pytest.approx((np.mean(width) + 1) / 2, abs=1e-6)


def test_neighbours_at_hand_give_the_same_clusters(blobs):
    z = np.random.default_rng(4).normal(size=(160, 4))
    assert leiden_agreement(nearest_neighbors(z, 40), blobs[1]) == leiden_agreement(z, blobs[1])
    with pytest.raises(ValueError, match=r"16 neighbours .* 10 are given"):
        leiden_agreement(nearest_neighbors(z, 10), blobs[1])


@pytest.mark.parametrize("definition", ["paper", "scgpt"])
def test_average_is_the_mean_of_its_parts(blobs, definition):
    z, labels = blobs[0] / 10, blobs[1]
    score = avg_bio(z, labels, definition=definition)
    found = leiden_agreement(z, labels)
    asw = silhouette_label(z, labels, rescale=definition == "scgpt")
    assert score == {
        "avg_bio": pytest.approx((found["nmi"] + found["ari"] + asw) / 3),
        "nmi": found["nmi"],
        "ari": found["ari"],
        "asw": asw,
    }


def test_bad_definitions_are_refused(blobs):
    with pytest.raises(ValueError, match="'paper', 'scgpt' or 'scib'"):
        avg_bio(*blobs, definition="scIB")
    with pytest.raises(ValueError, match="pass batch"):
        avg_bio(*blobs, definition="scib")


def test_isolated_labels_are_those_that_the_fewest_batches_hold():
    """Type c is in one batch: its mean rescaled silhouette, from loops over all pairs."""
    rng = np.random.default_rng(2)
    labels, batch = np.repeat(["a", "b", "c", ""], 20), np.tile(["x", "y"], 40)
    batch[40:60] = "x"
    z = rng.normal(size=(80, 3)) + 1.5 * np.eye(4, 3)[np.repeat(range(4), 20)]
    distance = np.sqrt(((z[:, None] - z[None]) ** 2).sum(axis=2))
    widths = []
    for i in range(40, 60):
        own = distance[i, 40:60].sum() / 19
        other = min(distance[i, :20].mean(), distance[i, 20:40].mean())
        widths.append(((other - own) / max(own, other) + 1) / 2)
    assert isolated_labels(z, labels, batch) == pytest.approx(np.mean(widths))
    batch[40] = "y"  # now all three are in two batches
    known = labels != ""
    assert isolated_labels(z, labels, batch) == pytest.approx(
        np.mean([_mean_width(z[known], labels[known], name) for name in "abc"])
    )


def _mean_width(z, labels, name):
    from sklearn.metrics import silhouette_samples

    return (silhouette_samples(z, labels)[labels == name].mean() + 1) / 2


def test_without_igraph_the_extra_is_named(blobs, monkeypatch):
    monkeypatch.setitem(sys.modules, "igraph", None)
    with pytest.raises(ImportError, match=r"scdiva\[metrics\]"):
        leiden_agreement(*blobs)
