"""How well cell-type labels can be read off an embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ._input import check_coordinates

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

MISSING_LABELS = ("nan", "None", "NaN", "<NA>", "NaT", "", "unknown", "Unknown", "unlabelled", "unlabeled")
"""Label texts that name no cell type, so that no score is taken over them."""


def labelled(labels: ArrayLike) -> np.ndarray:
    """Mark the cells whose label names a cell type.

    Parameters
    ----------
    labels
        Label of each cell, shape `(n_cells,)`; missing ones may be NaN, None or one of `MISSING_LABELS`.

    Returns
    -------
    Boolean array of shape `(n_cells,)`.
    """
    return ~np.isin(np.asarray(labels).astype(str), MISSING_LABELS)


def knn_cross_validation(
    embedding: ArrayLike, labels: ArrayLike, *, n_neighbors: int = 15, n_folds: int = 5, rng: int = 0
) -> dict[str, float]:
    """Accuracy and macro-F1 of a k-nearest-neighbour vote, by stratified cross-validation.

    Neighbours are Euclidean in the embedding as it stands. Cells without a label and cells of types with fewer than
    `n_folds` cells are left out, since neither can be both a training and a test cell in every fold.

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
        If fewer than two labels have `n_folds` cells, or the embedding holds a value that is not finite in a
        labelled cell.
    """
    from sklearn.metrics import accuracy_score, f1_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.neighbors import KNeighborsClassifier

    embedding, labels = _scored(embedding, labels)
    names, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    enough = counts[codes] >= n_folds
    if (counts >= n_folds).sum() < 2:
        raise ValueError(
            f"{n_folds}-fold cross-validation needs two labels with at least {n_folds} cells each; of the "
            f"{len(names)} labels, {(counts >= n_folds).sum()} have them. Pass a smaller n_folds or coarser labels."
        )
    embedding, labels = embedding[enough], labels[enough]
    folds = StratifiedKFold(n_folds, shuffle=True, random_state=rng)
    predicted = cross_val_predict(KNeighborsClassifier(n_neighbors), embedding, labels, cv=folds)
    return {
        "accuracy": float(accuracy_score(labels, predicted)),
        "macro_f1": float(f1_score(labels, predicted, average="macro")),
        "n_cells": len(labels),
    }


def _scored(embedding: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Drop the cells without a label; refuse coordinates that are not finite."""
    names, keep = np.asarray(labels).astype(str), labelled(labels)
    if len(np.asarray(embedding)) != len(names):
        raise ValueError(f"embedding has shape {np.shape(embedding)}, but there are {len(names)} labels.")
    return check_coordinates(embedding, keep)[keep], names[keep]


def all_labelled(labels: ArrayLike, n_cells: int) -> NDArray[np.str_]:
    """Give the labels as text; refuse missing ones, since neighbours cannot be left out any more."""
    names = np.asarray(labels).astype(str)
    if names.shape != (n_cells,):
        raise ValueError(f"labels has shape {names.shape}, but there are {n_cells} cells.")
    missing = ~labelled(labels)
    if missing.any():
        raise ValueError(
            f"{missing.sum()} of {n_cells} cells have no label (the first is number {int(missing.argmax())}). Leave "
            "them out before you call nearest_neighbors."
        )
    return names
