"""What every score checks before it is taken."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scdiva._labels import check_labels, is_missing, is_unknown, refuse_continuous


def as_texts(labels: ArrayLike) -> NDArray[np.str_]:
    """Give labels as text; bytes, as readers of HDF5 may leave them, as the text that they encode."""
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
    """Refuse values, one or more of which are bad: say how many, which is the first, and how to fix it."""
    if bad.any():
        first = ", ".join(str(int(i)) for i in np.argwhere(bad)[0])
        raise ValueError(f"{bad.sum()} of {bad.size} {what} (the first is number {first}). {mend}")


def finite_arrays(shape: str, given: dict[str, ArrayLike], *, empty: bool = False) -> dict[str, NDArray[np.float64]]:
    """Give arrays as float64; refuse others than of one shape with so many axes, and values that are not finite."""
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in given.items()}
    shapes = {name: values.shape for name, values in arrays.items()}
    n_dim = len(shape.strip("(,)").split(","))
    fits = all(values.ndim == n_dim and (empty or values.size) for values in arrays.values())
    if len(set(shapes.values())) > 1 or not fits:
        raise ValueError(f"all must have the same shape {shape}, got {shapes}.")
    for name, values in arrays.items():
        refuse_where(~np.isfinite(values), f"values of {name} are not finite", "Leave out what is not defined.")
    return arrays


def check_coordinates(embedding: ArrayLike, scored: NDArray[np.bool_] | None = None) -> NDArray[np.floating]:
    """Give the coordinates as an array; refuse another number of axes and values that are not finite where scored."""
    coordinates = np.asarray(embedding)
    if coordinates.ndim != 2:
        raise ValueError(f"embedding has shape {coordinates.shape}; it must be (n_cells, n_dims).")
    scored = np.ones(len(coordinates), dtype=bool) if scored is None else scored
    refuse_where(scored & ~np.isfinite(coordinates).all(axis=1), "cells have coordinates that are not finite")
    if len(coordinates) > 1 and not np.ptp(coordinates[scored], axis=0).any():
        # Neighbours would follow the order of the cells, in which types often stand, and score well.
        raise ValueError("All cells are at one point of the embedding: there is nothing to score.")
    return coordinates


def scored_cells(embedding: ArrayLike, labels: ArrayLike) -> tuple[NDArray[np.floating], NDArray[np.str_]]:
    """Drop the cells without a label; refuse coordinates that are not finite."""
    names, keep = as_texts(labels), labelled(labels)
    if len(np.asarray(embedding)) != len(names):
        raise ValueError(f"embedding has shape {np.shape(embedding)}, but there are {len(names)} labels.")
    refuse_unlabelled(labels, keep)
    return check_coordinates(embedding, keep)[keep], names[keep]


def refuse_unlabelled(labels: ArrayLike, keep: NDArray[np.bool_]) -> None:
    """Refuse labels of which none is a cell type, or which are continuous numbers."""
    if not keep.any():
        raise ValueError(f"None of {len(keep)} cells has a label: there is nothing to score.")
    refuse_continuous(pd.Series(np.asarray(labels)[keep]), "labels", "label")


def batch_codes(batch: ArrayLike, n_cells: int) -> NDArray[np.intp]:
    """Give batches numbers from 0; refuse missing ones, fewer than two, and another number of cells."""
    given = np.asarray(batch, dtype=object)  # as text, a list's NaN would become a batch called "nan"
    if given.shape != (n_cells,):
        raise ValueError(f"batch has shape {given.shape}, but there are {n_cells} cells.")
    refuse_where(np.asarray(pd.isna(given)), "cells have no batch", "Leave them out, or name their batch.")
    check_labels(pd.Series(np.asarray(batch)), "batch", "batch")
    names, codes = np.unique(given.astype(str), return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"All {n_cells} cells are of the batch {str(names[0])!r}; how batches mix needs two.")
    if len(names) == n_cells > 2:
        raise ValueError(f"Each of the {n_cells} cells is a batch of its own: pass the samples or runs as batch.")
    return codes


def truth_values(given: ArrayLike, what: str) -> NDArray[np.bool_]:
    """Give truth values as such; refuse other numbers than 0 and 1."""
    values = np.asarray(given)
    other = np.zeros(values.shape, dtype=bool) if values.dtype == np.bool_ else ~np.isin(values, (0, 1))
    if other.any():
        raise ValueError(f"{what} must hold truth values, not {values.dtype} such as {values[other][0]!r}.")
    return values.astype(np.bool_)
