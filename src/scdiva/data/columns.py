"""Columns of batches and labels, as numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scdiva._labels import check_labels
from scdiva._nearest import no_column
from scdiva._warn import warn

if TYPE_CHECKING:
    from anndata import AnnData


def batch_numbers(adata: AnnData, batch_key: str | None, *, where: str = "adata") -> np.ndarray:
    """Return the number of each cell's batch, int64 from 0; 0 for all without a key.

    Parameters
    ----------
    adata
        The cells.
    batch_key
        A column of `adata.obs`.
    where
        What the cells are called in messages.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If the batch of a cell is missing, or the column holds no batches (:func:`scdiva._labels.check_labels`).
    """
    if batch_key is None:
        return np.zeros(adata.n_obs, dtype=np.int64)
    if batch_key not in adata.obs:
        raise no_column(f"{where}.obs", batch_key, adata.obs.columns)
    missing = adata.obs[batch_key].isna().to_numpy()
    if missing.any():
        raise ValueError(
            f"{where}.obs[{batch_key!r}] is missing for {missing.sum()} of {adata.n_obs} cells, the first is "
            f"{adata.obs_names[missing.argmax()]!r}: name their batch, or leave them out with "
            f"{where}[{where}.obs[{batch_key!r}].notna()].copy()."
        )
    check_labels(adata.obs[batch_key], f"{where}.obs[{batch_key!r}]", "batch", stacklevel=4)
    return np.unique(adata.obs[batch_key].astype(str).to_numpy(), return_inverse=True)[1].astype(np.int64)


def label_numbers(
    adata: AnnData, labels_key: str, unlabeled_category: str | None = None, *, where: str = "adata"
) -> tuple[np.ndarray, pd.CategoricalDtype]:
    """Return the number of each cell's label, int64 from 0, -1 for none; and the labels, in the type that they have.

    Parameters
    ----------
    adata
        The cells.
    labels_key
        A column of `adata.obs`; a missing value means no label.
    unlabeled_category
        Another value that means so.
    where
        What the cells are called in messages.

    Returns
    -------
    The numbers, and the labels as categories: numbers in their order, truth values and ordered categories too, text in
    that of the alphabet.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If there is no label, or only one, or the column holds no labels (:func:`scdiva._labels.check_labels`).

    Warns
    -----
    UserWarning
        If no cell has the `unlabeled_category`.
    """
    if labels_key not in adata.obs:
        raise no_column(f"{where}.obs", labels_key, adata.obs.columns)
    column = adata.obs[labels_key]
    known = column.notna().to_numpy(copy=True)
    if unlabeled_category is not None:
        without = (column.astype(str) == str(unlabeled_category)).to_numpy() & known
        if not without.any():
            names = sorted(map(str, column[known].unique()))
            warn(
                f"no cell has the unlabeled_category {str(unlabeled_category)!r}: {where}.obs[{labels_key!r}] holds "
                f"{', '.join(map(repr, names[:20]))}{', ...' if len(names) > 20 else ''}, and all of these count as "
                "types.",
            )
        known = known & ~without  # not in place: pandas 3 gives arrays that can't be written to
    check_labels(column[known], f"{where}.obs[{labels_key!r}]", "label")
    numbers = np.full(adata.n_obs, -1, dtype=np.int64)
    labels, numbers[known] = _labels(column[known])
    types = labels.categories
    if len(types) < 2:
        raise ValueError(
            f"{where}.obs[{labels_key!r}] labels {known.sum()} cells with {len(types)} type(s); two or more are needed."
        )
    return numbers, labels


def _labels(column: pd.Series) -> tuple[pd.CategoricalDtype, np.ndarray]:
    """Give the labels that occur, and the number of each cell's; what is neither number nor truth value is text."""
    categorical = isinstance(column.dtype, pd.CategoricalDtype)
    ordered = categorical and bool(column.cat.ordered)
    found = column.cat.remove_unused_categories().cat.categories if categorical else pd.Series(column.unique())
    dtype = getattr(found.dtype, "numpy_dtype", found.dtype)  # that of Int64 is int64
    if dtype == np.dtype(object):
        dtype = pd.Series(np.asarray(found)).infer_objects().dtype
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biuf":
        dtype, column, found = np.dtype(object), column.astype(str), found.astype(str)
    values = np.asarray(found, dtype=dtype)
    values = np.array(list(dict.fromkeys(values.tolist())), dtype=dtype) if ordered else np.unique(values)
    labels = pd.CategoricalDtype(pd.Index(values, dtype=dtype), ordered)
    return labels, labels.categories.get_indexer(np.asarray(column, dtype=dtype)).astype(np.int64)
