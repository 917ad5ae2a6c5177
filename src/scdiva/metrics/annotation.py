"""Scores of cell types in an embedding, and of the accuracy and calibration of an annotation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from scdiva._checks import check_arguments, check_least
from scdiva._labels import many_labels_accepted

from ._input import as_texts, labelled, refuse_unlabelled, refuse_where, scored_cells, truth_values


@check_arguments
def knn_cross_validation(
    embedding: ArrayLike, labels: ArrayLike, *, n_neighbors: int = 15, n_folds: int = 5, rng: int = 0
) -> dict[str, float]:
    """Accuracy and macro-F1 of a k-nearest-neighbour vote, by stratified cross-validation.

    Neighbours are Euclidean in the embedding. Cells without a label and cells of types with fewer than `n_folds` cells
    are ignored.

    Parameters
    ----------
    embedding
        Coordinates of each cell, shape `(n_cells, n_dims)`.
    labels
        Label of each cell, shape `(n_cells,)`.
    n_neighbors
        Neighbours that vote.
    n_folds
        Folds of the cross-validation.
    rng
        Seed of the shuffle that makes the folds.

    Returns
    -------
    `accuracy` and `macro_f1` (both 0 to 1), and `n_cells`, the number of cells scored.

    Raises
    ------
    ValueError
        If fewer than two labels have `n_folds` cells, or the embedding of a labelled cell is not finite.

    Examples
    --------
    >>> import numpy as np
    >>> import scdiva as sd
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["T", "B"], 60)
    >>> batch = np.tile(["one", "two"], 60)
    >>> z = rng.normal(size=(120, 5)) + 6 * (labels == "T")[:, None]
    >>> sd.metrics.knn_cross_validation(z, labels)["accuracy"]
    1.0
    """
    from sklearn.metrics import accuracy_score, f1_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.neighbors import KNeighborsClassifier

    embedding, labels = scored_cells(embedding, labels)
    names, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    enough = counts[codes] >= n_folds
    if (counts >= n_folds).sum() < 2:
        raise ValueError(
            f"{n_folds}-fold cross-validation needs two labels with at least {n_folds} cells each; of the "
            f"{len(names)} labels, {(counts >= n_folds).sum()} have them. Pass a smaller n_folds or coarser labels."
        )
    embedding, labels = embedding[enough], labels[enough]
    folds = StratifiedKFold(n_folds, shuffle=True, random_state=rng)
    with many_labels_accepted():
        predicted = cross_val_predict(KNeighborsClassifier(n_neighbors), embedding, labels, cv=folds)
        return {
            "accuracy": float(accuracy_score(labels, predicted)),
            "macro_f1": float(f1_score(labels, predicted, average="macro")),
            "n_cells": len(labels),
        }


def classification(labels: ArrayLike, predicted: ArrayLike) -> dict[str, Any]:
    """Accuracy, F1 by type and macro-F1 of predicted cell types.

    Cells without a label are ignored. A prediction that is missing or not a type of `labels` ("unknown", a parent type,
    a type that only the reference has) is a false negative of the true type; only types of `labels` enter the mean.

    Parameters
    ----------
    labels
        True label of each cell, shape `(n_cells,)`; missing ones may be NaN, None or texts such as
        ``"nan"`` and ``"unknown"``.
    predicted
        Predicted label of each cell, shape `(n_cells,)`.

    Returns
    -------
    `accuracy`; `macro_f1`, the unweighted mean of F1 over the types in `labels`; `f1`, a dict of F1 by type in
    alphabetical order; and `n_cells`, the number of cells scored. All scores are 0 to 1.

    Raises
    ------
    ValueError
        If the two differ in length, or no cell has a label.

    Examples
    --------
    >>> import scdiva as sd
    >>> scores = sd.metrics.classification(["T", "T", "B", "B"], ["T", "T", "B", "T"])
    >>> scores["accuracy"], round(scores["macro_f1"], 2)
    (0.75, 0.73)
    """
    from sklearn.metrics import accuracy_score, f1_score

    scored = labelled(labels)
    if np.shape(predicted) != scored.shape or scored.ndim != 1:
        raise ValueError(f"labels has shape {scored.shape}, but predicted has {np.shape(predicted)}; both (n_cells,).")
    refuse_unlabelled(labels, scored)
    truth = as_texts(labels)[scored]
    prediction = as_texts(predicted)[scored]
    types = np.unique(truth)
    with many_labels_accepted():
        f1 = f1_score(truth, prediction, labels=types, average=None, zero_division=0.0)
        accuracy = accuracy_score(truth, prediction)
    return {
        "accuracy": float(accuracy),
        "macro_f1": float(np.mean(f1)),
        "f1": dict(zip(types.tolist(), f1.tolist(), strict=True)),
        "n_cells": len(truth),
    }


@check_arguments
def calibration(confidence: ArrayLike, correct: ArrayLike, *, n_bins: int = 15) -> dict[str, Any]:
    r"""Expected calibration error, and the columns of a reliability diagram.

    Bin :math:`m` of :math:`M` contains the cells with a confidence in :math:`((m - 1) / M, m / M]`, and the first bin
    also those with confidence 0. The error is the difference between accuracy and mean confidence of a bin, weighted by
    its cells [1]_:
    :math:`\sum_m \frac{n_m}{n} |\mathrm{acc}_m - \mathrm{conf}_m|`.

    Parameters
    ----------
    confidence
        Predicted probability of the predicted label of each cell, 0 to 1, shape `(n_cells,)`.
    correct
        Whether the prediction is correct, shape `(n_cells,)`. Cells for which it is missing (None, NaN or `pandas.NA`,
        as in a comparison with a missing label) are ignored.
    n_bins
        Bins of equal width.

    Returns
    -------
    `ece` (0 to 1), and arrays of length `n_bins`: `confidence` and `accuracy`, the means of each bin (NaN where it is
    empty), and `n_cells` (int64).

    Raises
    ------
    ValueError
        If there are no cells, or `correct` is missing for all; the two differ in length, a confidence is NaN or outside
        0 to 1, `correct` holds values other than truth values, or `n_bins` is below 1.

    References
    ----------
    .. [1] Guo, Pleiss, Sun & Weinberger, On calibration of modern neural networks, ICML 2017.

    Examples
    --------
    >>> import scdiva as sd
    >>> round(sd.metrics.calibration([0.9, 0.9, 0.6, 0.6], [True, True, True, False])["ece"], 2)
    0.1
    """
    p = np.asarray(confidence, dtype=np.float64)
    if p.shape != np.shape(correct) or p.ndim != 1 or not p.size:
        raise ValueError(f"scores have shape {p.shape} and correct has {np.shape(correct)}; both must be (n_cells,).")
    scored = ~np.asarray(pd.isna(correct))
    if not scored.any():
        raise ValueError(f"correct is missing for all {p.size} cells: there is nothing to score.")
    p, right = p[scored], truth_values(np.asarray(correct)[scored], "correct")
    check_least(n_bins=(n_bins, 1))
    remedy = "Leave out the cells that have none; turn scores into probabilities first."
    refuse_where(~((p >= 0) & (p <= 1)), "confidences are not from 0 to 1", remedy)
    bins = np.clip(np.ceil(p * n_bins).astype(int) - 1, 0, n_bins - 1)
    n_cells = np.bincount(bins, minlength=n_bins)
    with np.errstate(invalid="ignore"):  # empty bins are NaN
        mean = np.bincount(bins, weights=p, minlength=n_bins) / n_cells
        accuracy = np.bincount(bins, weights=right, minlength=n_bins) / n_cells
    error = float(np.nansum(n_cells * np.abs(accuracy - mean)) / len(p))
    return {"ece": error, "confidence": mean, "accuracy": accuracy, "n_cells": n_cells}
