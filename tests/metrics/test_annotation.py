from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scdiva.metrics import avg_batch, calibration, classification, knn_cross_validation
from scdiva.metrics.annotation import labelled

NAMES = st.sampled_from(["a", "b", "c", "unknown"])


def blobs(n=60, gap=20.0, rng=0):
    labels = np.repeat(["a", "b", "c"], n // 3)
    centre = gap * np.array([[0, 0], [1, 0], [0, 1]])[np.repeat([0, 1, 2], n // 3)]
    return centre + np.random.default_rng(rng).normal(size=(n, 2)), labels


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
    with pytest.raises(ValueError, match=r"1 of 60 cells .* number 7"):
        knn_cross_validation(bad, labels)
    with pytest.raises(ValueError, match="smaller n_folds"):
        knn_cross_validation(z, np.where(np.arange(60) < 57, "a", "b"))


@pytest.mark.parametrize("dtype", ["string", "string[pyarrow]", "category", "object"])
def test_missing_labels_of_any_type_are_left_out(dtype):
    labels = pd.Series(["a", None, "b", pd.NA]).astype(dtype if dtype != "category" else "string").astype(dtype)
    assert labelled(labels).tolist() == [True, False, True, False]
    assert labelled(pd.to_datetime(["2020-01-01", None])).tolist() == [True, False]


def test_scores_are_those_worked_out_by_hand():
    """T: 2 of 3 found, 1 wrongly named so: F1 = 2 * 2 / (3 + 3); B: 1 of 2, F1 = 2 * 1 / (2 + 1); NK: none."""
    labels = ["T", "T", "T", "B", "B", "NK", np.nan]
    predicted = ["T", "T", "unknown", "B", "T", np.nan, "T"]
    score = classification(labels, predicted)
    assert score["n_cells"] == 6
    assert score["accuracy"] == pytest.approx(3 / 6)
    assert score["f1"] == pytest.approx({"B": 2 / 3, "NK": 0.0, "T": 2 / 3})
    assert score["macro_f1"] == pytest.approx(4 / 9)


@given(st.lists(st.tuples(st.sampled_from("abc"), NAMES), min_size=1, max_size=40), st.randoms())
def test_scores_of_any_prediction_are_counts_of_hits(cells, shuffler):
    labels, predicted = map(np.array, zip(*cells, strict=True))
    score = classification(labels, predicted)
    by_hand = {
        t: 2 * ((labels == t) & (predicted == t)).sum() / ((labels == t).sum() + (predicted == t).sum()) for t in labels
    }
    assert score["f1"] == pytest.approx(by_hand)
    assert score["macro_f1"] == pytest.approx(np.mean(list(by_hand.values())))
    shuffler.shuffle(cells)
    again = classification(*map(pd.Categorical, zip(*cells, strict=True)))  # neither order nor kind of column counts
    assert again.pop("f1") == pytest.approx(score.pop("f1"))
    assert again == pytest.approx(score)
    assert classification(labels, labels)["macro_f1"] == 1.0


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60), st.integers(1, 20))
def test_calibration_follows_its_definition_for_any_cells(cells, n_bins):
    p, right = (np.array(column, dtype=float) for column in zip(*cells, strict=True))
    result = calibration(p, right, n_bins=n_bins)
    expected, n_filled = 0.0, 0
    for m in range(n_bins):
        inside = (p * n_bins > m) & (p * n_bins <= m + 1) | ((p == 0) & (m == 0))
        assert result["n_cells"][m] == inside.sum()
        if inside.any():
            expected += inside.sum() / len(p) * abs(right[inside].mean() - p[inside].mean())
            n_filled += 1
    assert result["ece"] == pytest.approx(expected, abs=1e-12)
    assert np.isfinite(result["accuracy"]).sum() == np.isfinite(result["confidence"]).sum() == n_filled


@pytest.mark.parametrize("score", [knn_cross_validation, lambda z, labels: avg_batch(z, ["a", "b"] * 30, labels)])
def test_cells_of_which_none_has_a_label_are_refused(score):
    with pytest.raises(ValueError, match="None of 60 cells has a label"):
        score(blobs()[0], [None] * 60)


@pytest.mark.parametrize(
    ("call", "arguments", "match"),
    [
        (classification, (["a", "b"], ["a"]), r"shape \(2,\), but predicted has \(1,\)"),
        (classification, ([], []), "None of 0 cells"),
        (calibration, ([0.5, np.nan], [1, 0]), r"1 of 2 confidences .* number 1"),
        (calibration, ([0.5, 1.2], [1, 0]), r"1 of 2 confidences .* number 1"),
        (calibration, ([0.5], [0.5]), "correct must hold truth values"),
        (calibration, ([0.5], [1, 0]), r"shape \(1,\) and correct has \(2,\)"),
        (calibration, ([], []), "must be"),
    ],
)
def test_predictions_that_cannot_be_scored_are_refused(call, arguments, match):
    with pytest.raises(ValueError, match=match):
        call(*arguments)


def test_labels_of_bytes_are_the_text_that_they_encode():
    names = ["T", "T", "B", "unknown"]
    scores = classification(np.array([name.encode() for name in names], dtype=object), ["T", "B", "B", "B"])
    assert scores["accuracy"] == pytest.approx(2 / 3)


def test_cells_of_which_it_is_not_known_whether_they_are_right_are_left_out():
    p, right = np.array([0.9, 0.8, 0.7, 0.6]), [True, True, False, True]
    expected = calibration(p[:3], right[:3])["ece"]
    for missing in (None, np.nan, pd.NA):
        result = calibration(p, pd.Series([*right[:3], missing], dtype=object))
        assert (result["ece"], result["n_cells"].sum()) == (expected, 3)
    assert calibration(p, pd.array([True, True, False, pd.NA], dtype="boolean"))["ece"] == expected
    with pytest.raises(ValueError, match="missing for all 2 cells"):
        calibration([0.5, 0.5], [None, None])


def test_many_labels_of_few_cells_raise_no_warning():
    labels = [f"type {i % 10}" for i in range(18)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert classification(labels, labels)["accuracy"] == 1
