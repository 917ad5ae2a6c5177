from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from scdiva.metrics import average_bio, leiden_agreement, silhouette_label

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


def test_average_is_the_mean_of_its_parts(blobs):
    for definition in ("paper", "scgpt"):
        score = average_bio(*blobs, definition=definition)
        assert score["average_bio"] == pytest.approx((score["nmi"] + score["ari"] + score["asw"]) / 3)
    assert average_bio(*blobs, definition="paper")["asw"] < average_bio(*blobs)["asw"]
    with pytest.raises(ValueError, match="'paper' or 'scgpt'"):
        average_bio(*blobs, definition="scib")


def test_without_igraph_the_extra_is_named(blobs, monkeypatch):
    monkeypatch.setitem(sys.modules, "igraph", None)
    with pytest.raises(ImportError, match=r"scdiva\[bench\]"):
        leiden_agreement(*blobs)
