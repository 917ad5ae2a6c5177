"""Validation of the input of scores."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scdiva._labels import check_labels, is_missing, is_unknown, refuse_continuous


def as_texts(labels: ArrayLike) -> NDArray[np.str_]:
    """Labels as text; bytes, which some HDF5 readers return, are decoded."""
    values = np.asarray(labels)
    if values.dtype.kind == "S" or (values.dtype == object and any(isinstance(one, bytes) for one in values.flat)):
        texts = [one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in values.flat]
        values = np.array(texts, dtype=np.str_).reshape(values.shape)
    return values.astype(np.str_)


def labelled(labels: ArrayLike) -> np.ndarray:
    """Mark the cells whose label names a cell type.

    Parameters
    ----------
    labels
        Label of each cell, shape `(n_cells,)`; missing ones may be NaN, None or texts such as `"nan"` and `"unknown"`.

    Returns
    -------
    Boolean array of shape `(n_cells,)`.
    """
    texts = as_texts(labels)
    return ~(is_missing(texts) | is_unknown(texts))


def refuse_where(bad: NDArray[np.bool_], what: str, mend: str = "Leave them out before scoring.") -> None:
    """Raise ValueError if any value is bad, with the number of bad values, the first and the remedy."""
    if bad.any():
        first = ", ".join(str(int(i)) for i in np.argwhere(bad)[0])
        raise ValueError(f"{bad.sum()} of {bad.size} {what} (the first is number {first}). {mend}")


def finite_arrays(
    shape: str, values_by_name: dict[str, ArrayLike], *, empty: bool = False
) -> dict[str, NDArray[np.float64]]:
    """Arrays as float64; raise an error if their shapes differ or do not fit `shape`, or if values are not finite."""
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in values_by_name.items()}
    shapes = {name: values.shape for name, values in arrays.items()}
    n_dim = len(shape.strip("(,)").split(","))
    fits = all(values.ndim == n_dim and (empty or values.size) for values in arrays.values())
    if len(set(shapes.values())) > 1 or not fits:
        raise ValueError(f"all must have the same shape {shape}, got {shapes}.")
    for name, values in arrays.items():
        refuse_where(~np.isfinite(values), f"values of {name} are not finite", "Leave out what is not defined.")
    return arrays


def check_coordinates(embedding: ArrayLike, scored: NDArray[np.bool_] | None = None) -> NDArray[np.floating]:
    """Coordinates as an array; raise an error unless it has two axes, and finite and varying values in scored cells."""
    coordinates = np.asarray(embedding)
    if coordinates.ndim != 2:
        raise ValueError(f"embedding has shape {coordinates.shape}; it must be (n_cells, n_dims).")
    scored = np.ones(len(coordinates), dtype=bool) if scored is None else scored
    refuse_where(scored & ~np.isfinite(coordinates).all(axis=1), "cells have coordinates that are not finite")
    if len(coordinates) > 1 and not np.ptp(coordinates[scored], axis=0).any():
        # neighbours would follow the order of the cells, which are often sorted by type
        raise ValueError("All cells are at one point of the embedding: there is nothing to score.")
    return coordinates


def scored_cells(embedding: ArrayLike, labels: ArrayLike) -> tuple[NDArray[np.floating], NDArray[np.str_]]:
    """Coordinates and labels of the labelled cells; raise an error if coordinates are not finite."""
    names, keep = as_texts(labels), labelled(labels)
    if len(np.asarray(embedding)) != len(names):
        raise ValueError(f"embedding has shape {np.shape(embedding)}, but there are {len(names)} labels.")
    refuse_unlabelled(labels, keep)
    return check_coordinates(embedding, keep)[keep], names[keep]


def refuse_unlabelled(labels: ArrayLike, keep: NDArray[np.bool_]) -> None:
    """Raise an error for labels without any cell type, and for continuous numbers."""
    if not keep.any():
        raise ValueError(f"None of {len(keep)} cells has a label: there is nothing to score.")
    refuse_continuous(pd.Series(np.asarray(labels)[keep]), "labels", "label")


def batch_codes(batch: ArrayLike, n_cells: int) -> NDArray[np.intp]:
    """Batch numbers from 0; raise an error for missing batches, fewer than two, or another number of cells."""
    values = np.asarray(batch, dtype=object)  # as text, NaN in a list would become a batch "nan"
    if values.shape != (n_cells,):
        raise ValueError(f"batch has shape {values.shape}, but there are {n_cells} cells.")
    refuse_where(np.asarray(pd.isna(values)), "cells have no batch", "Leave them out, or name their batch.")
    check_labels(pd.Series(np.asarray(batch)), "batch", "batch")
    names, codes = np.unique(values.astype(str), return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"All {n_cells} cells are of the batch {str(names[0])!r}; a score of mixing needs two.")
    if len(names) == n_cells > 2:
        raise ValueError(f"Each of the {n_cells} cells is a batch of its own: pass the samples or runs as batch.")
    return codes


def truth_values(values: ArrayLike, what: str) -> NDArray[np.bool_]:
    """Truth values as booleans; raise an error for values other than 0 and 1."""
    values = np.asarray(values)
    invalid = np.zeros(values.shape, dtype=bool) if values.dtype == np.bool_ else ~np.isin(values, (0, 1))
    if invalid.any():
        raise ValueError(f"{what} must hold truth values, not {values.dtype} such as {values[invalid][0]!r}.")
    return values.astype(np.bool_)
