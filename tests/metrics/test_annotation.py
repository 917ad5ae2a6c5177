from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scdiva.metrics import knn_cross_validation
from scdiva.metrics.annotation import labelled


def blobs(n=60, gap=20.0, rng=0):
    labels = np.repeat(["a", "b", "c"], n // 3)
    centre = gap * np.array([[0, 0], [1, 0], [0, 1]])[np.repeat([0, 1, 2], n // 3)]
    return centre + np.random.default_rng(rng).normal(size=(n, 2)), labels


def test_separated_types_are_read_off_and_shuffled_ones_are_not():
    z, labels = blobs()
    assert knn_cross_validation(z, labels) == {"accuracy": 1.0, "macro_f1": 1.0, "n_cells": 60}
    shuffled = np.random.default_rng(1).permutation(labels)
    assert knn_cross_validation(z, shuffled)["accuracy"] < 0.6


def test_equals_a_vote_written_out():
    """Accuracy and macro-F1 from plain loops over sklearn's folds."""
    from sklearn.model_selection import StratifiedKFold

    rng = np.random.default_rng(3)
    z, labels = rng.normal(size=(80, 4)), rng.choice(["x", "y"], 80, p=[0.7, 0.3])
    z[labels == "y"] += 0.8
    predicted = labels.copy()
    for train, test in StratifiedKFold(5, shuffle=True, random_state=0).split(z, labels):
        for i in test:
            near = train[np.argsort(((z[train] - z[i]) ** 2).sum(axis=1))[:7]]
            names, votes = np.unique(labels[near], return_counts=True)
            predicted[i] = names[votes.argmax()]
    f1 = []
    for name in ("x", "y"):
        hit = ((predicted == name) & (labels == name)).sum()
        f1.append(2 * hit / ((predicted == name).sum() + (labels == name).sum()))
    score = knn_cross_validation(z, labels, n_neighbors=7)
    assert score["accuracy"] == pytest.approx((predicted == labels).mean())
    assert score["macro_f1"] == pytest.approx(np.mean(f1))


def test_unlabelled_and_rare_cells_are_left_out():
    z, labels = blobs()
    labels = labels.astype(object)
    labels[:5] = [None, np.nan, "unknown", "", "unlabelled"]
    labels[5:8] = "rare"
    z[0] = np.nan  # unlabelled: may be anything
    assert labelled(labels).sum() == 55
    assert knn_cross_validation(z, labels)["n_cells"] == 52


def test_what_cannot_be_scored_is_refused():
    z, labels = blobs()
    with pytest.raises(ValueError, match="60 labels"):
        knn_cross_validation(z[:-1], labels)
    bad = z.copy()
    bad[7] = np.inf
    with pytest.raises(ValueError, match=r"1 labelled cells .* number 7"):
        knn_cross_validation(bad, labels)
    with pytest.raises(ValueError, match="smaller n_folds"):
        knn_cross_validation(z, np.where(np.arange(60) < 57, "a", "b"))


@pytest.mark.parametrize("dtype", ["string", "string[pyarrow]", "category", "object"])
def test_missing_labels_of_any_type_are_left_out(dtype):
    labels = pd.Series(["a", None, "b", pd.NA]).astype(dtype if dtype != "category" else "string").astype(dtype)
    assert labelled(labels).tolist() == [True, False, True, False]
    assert labelled(pd.to_datetime(["2020-01-01", None])).tolist() == [True, False]
