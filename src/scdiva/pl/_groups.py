"""Columns of obs as groups of cells."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scdiva._labels import is_missing, refuse_continuous
from scdiva._nearest import or_nearest

if TYPE_CHECKING:
    from anndata import AnnData

MAX_GROUPS = 100
"""More than this are no groups that a picture could tell apart, but numbers or names of cells."""


def as_groups(values: pd.Series) -> pd.Series:
    """Make text and booleans into categories, and keep missing values missing."""
    return values.astype(object).where(values.isna(), values.astype(str)).astype("category")


def groups_of(adata: AnnData, key: str) -> pd.Series:
    """Give a column of obs as categories, numbers in their order."""
    if key not in adata.obs:
        columns = ", ".join(map(str, adata.obs.columns)) or "none"
        raise KeyError(f"{key!r} is no column of adata.obs{or_nearest(key, adata.obs.columns)}, which has {columns}")
    values = adata.obs[key]
    numbers = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
    if not isinstance(values.dtype, pd.CategoricalDtype):
        values = values.astype("category") if numbers else as_groups(values)
    values = without_missing_texts(values, key)
    n = values.nunique()
    if not 1 <= n <= MAX_GROUPS:
        raise ValueError(
            f"adata.obs[{key!r}] has {n:,} different values in {len(values):,} cells: name a column that puts them in "
            f"1 to {MAX_GROUPS} groups"
        )
    if numbers:
        refuse_continuous(adata.obs[key].dropna(), f"adata.obs[{key!r}]", "group")
    return values


def without_missing_texts(values: pd.Series, key: str) -> pd.Series:
    """Take "nan" and the like for what they stand for; the categories stay, so that colours do."""
    names = values.cat.categories
    missing = is_missing(np.array([str(name) for name in names], dtype=str))
    which = values.isin(list(names[missing])).to_numpy()
    if not which.any():
        return values
    warnings.warn(
        f"adata.obs[{key!r}] is {' or '.join(repr(str(name)) for name in names[missing])} for {which.sum()} of "
        f"{len(values)} cells, the first is {str(values.index[which.argmax()])!r}: they are drawn as cells without a "
        "value.",
        UserWarning,
        stacklevel=4,
    )
    return values.where(~which)


def predicted_groups(adata: AnnData, key: str) -> pd.Series:
    """Give the column of predicted types as categories; say how it comes about if it is not there."""
    if key not in adata.obs:
        raise KeyError(
            f"adata.obs has no {key!r}{or_nearest(key, adata.obs.columns)}: call scdiva.tl.annotate(adata, ..., "
            f"key_added={key!r}) first"
        )
    return groups_of(adata, key)
