"""Columns of obs as groups of cells, their colours, and names of genes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from scdiva._checks import no_column, no_entry, warn
from scdiva._labels import is_missing, refuse_continuous

MAX_GROUPS = 100
"""More than this are no groups that a picture could tell apart, but numbers or names of cells."""
MISSING = (0.83, 0.83, 0.83, 1.0)
"""Colour of cells without a value."""
_HUES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
"""Colours that colour-blind readers tell apart (Okabe & Ito, Color Universal Design, 2008)."""


def column_of(adata: AnnData, key: str) -> pd.Series:
    """Give a column of obs; refuse a name that several have."""
    values = adata.obs[key]
    if isinstance(values, pd.DataFrame):
        raise ValueError(f"{values.shape[1]} columns of adata.obs are called {key!r}: rename them, or drop one")
    return values


def is_number(values: pd.Series) -> bool:
    """Whether a column holds numbers, which truth values are not."""
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def as_groups(values: pd.Series, key: str) -> pd.Series:
    """Make categories of a column, numbers in their order, "nan" and the like missing.

    The categories stay where no cell has them any more, so that the others keep their colours.
    """
    if not isinstance(values.dtype, pd.CategoricalDtype):
        texts = values if is_number(values) else values.astype(object).where(values.isna(), values.astype(str))
        values = texts.astype("category")
    names = values.cat.categories
    missing = names[is_missing(np.array([str(name) for name in names], dtype=str))]
    which = values.isin(list(missing)).to_numpy()
    if which.any():
        warn(
            f"adata.obs[{key!r}] is {' or '.join(repr(str(name)) for name in missing)} for {which.sum()} of "
            f"{len(values)} cells, the first is {str(values.index[which.argmax()])!r}: they are drawn as cells without "
            "a value."
        )
        values = values.where(~which)
    return values


def groups_of(adata: AnnData, key: str, made_by: str | None = None) -> pd.Series:
    """Give a column of obs as categories, numbers in their order; `made_by` is the call that writes it."""
    if key not in adata.obs:
        asked = "adata.obs", key, adata.obs.columns
        raise no_column(*asked) if made_by is None else no_entry(*asked, made_by)
    values = as_groups(column_of(adata, key), key)
    n = values.nunique()
    if not 1 <= n <= MAX_GROUPS:
        raise ValueError(
            f"adata.obs[{key!r}] has {n:,} different values in {len(values):,} cells: name a column that puts them in "
            f"1 to {MAX_GROUPS} groups"
        )
    if is_number(adata.obs[key]):
        refuse_continuous(adata.obs[key].dropna(), f"adata.obs[{key!r}]", "group")
    return values


def predicted_groups(adata: AnnData, key: str) -> pd.Series:
    """Give the column of predicted types as categories; say how it comes about if it is not there."""
    return groups_of(adata, key, made_by=f"scdiva.tl.annotate(adata, ..., key_added={key!r})")


def palette(adata: AnnData, key: str, names: Sequence[Hashable]) -> dict[Hashable, Any]:
    """Give a colour to each category: the user's in ``uns``, where scanpy puts them, then well-separated ones."""
    given = _stored_colours(adata, f"{key}_colors")
    others = [colour for colour in distinct_colours(len(names)) if colour not in given]
    return dict(zip(names, itertools.cycle([*given, *others]), strict=False))


def _stored_colours(adata: AnnData, key: str) -> list[tuple[float, float, float]]:
    """Give the colours in uns; none, with a warning, if matplotlib does not know one of them."""
    stored: Any = adata.uns.get(key, ())
    each: Any = [stored] if isinstance(stored, str | Mapping) or not np.iterable(stored) else stored
    colours = []
    for colour in each:
        try:
            colours.append(to_rgb(colour))
        except (ValueError, TypeError):
            warn(
                f"adata.uns[{key!r}] is ignored: matplotlib does not know the colour {colour!r:.40}. Store one colour "
                f"per category, such as adata.uns[{key!r}] = ['#0072B2', '#E69F00'], or delete the entry."
            )
            return []
    return colours


def distinct_colours(n: int) -> list[tuple[float, float, float]]:
    """Give up to 102 colours: up to 21 for colour-blind readers too, seven hues, then darker, paler; else scanpy's."""
    if n > 3 * len(_HUES):
        from scanpy.plotting.palettes import godsnot_102

        return [to_rgb(colour) for colour in godsnot_102[:n]]
    hues = np.array([to_rgb(hue) for hue in _HUES])
    return [(float(r), float(g), float(b)) for r, g, b in np.concatenate([hues, 0.55 * hues, 0.5 + 0.5 * hues])[:n]]


def gene_names(var: pd.DataFrame, gene_symbols: str | None, called: str = "adata.var") -> NDArray[np.object_]:
    """Give the names of genes as they are written, those of the index where the column has none."""
    if gene_symbols is None:
        return np.asarray(var.index, dtype=object)
    if gene_symbols not in var:
        raise no_column(called, gene_symbols, var.columns)
    names = var[gene_symbols]
    return np.asarray(np.where(names.isna(), var.index, names.astype(str)), dtype=object)
