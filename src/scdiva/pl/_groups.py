"""Groups of cells from columns of obs, their colours, and gene names."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData
from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgb
from numpy.typing import NDArray

from scdiva._checks import check_choices, no_column, no_entry, refuse_absent, warn
from scdiva._constants import REJECTED
from scdiva._labels import is_missing, refuse_continuous

MAX_GROUPS = 100
"""Maximum number of groups in a figure."""
MISSING = (0.83, 0.83, 0.83, 1.0)
"""Colour of cells without a value."""
UNKNOWN = (0.6, 0.6, 0.6)
"""Colour of cells that `tl.annotate` rejects."""
_HUES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
"""Colours for colour-blind readers (Okabe & Ito, Color Universal Design, 2008)."""


def column_of(adata: AnnData, key: str) -> pd.Series:
    """Column of obs; an error if several have the name."""
    values = adata.obs[key]
    if isinstance(values, pd.DataFrame):
        raise ValueError(f"{values.shape[1]} columns of adata.obs are called {key!r}: rename them, or drop one")
    return values


def is_number(values: pd.Series) -> bool:
    """Whether a column is numeric; booleans are not."""
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def as_groups(values: pd.Series, key: str) -> pd.Series:
    """Convert a column to categories, with numbers in order and texts such as "nan" as missing values.

    Unused categories are kept, so that the others keep their colours.
    """
    if not isinstance(values.dtype, pd.CategoricalDtype):
        texts = values if is_number(values) else values.astype(object).where(values.isna(), values.astype(str))
        values = texts.astype("category")
    names = values.cat.categories
    missing = names[is_missing(np.array([str(name) for name in names], dtype=str))]
    is_text = values.isin(list(missing)).to_numpy()
    if is_text.any():
        warn(
            f"adata.obs[{key!r}] is {' or '.join(repr(str(name)) for name in missing)} for {is_text.sum()} of "
            f"{len(values)} cells, the first is {str(values.index[is_text.argmax()])!r}: they are drawn as cells "
            "without a value."
        )
        values = values.where(~is_text)
    return values


def groups_of(adata: AnnData, key: str, made_by: str | None = None) -> pd.Series:
    """Column of obs as categories, 1 to `MAX_GROUPS`; `made_by` is the call that writes it, for the error."""
    if key not in adata.obs:
        if made_by is not None:
            raise no_entry("adata.obs", key, adata.obs.columns, made_by)
        raise no_column("adata.obs", key, adata.obs.columns)
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
    """Column of predicted cell types as categories; an error with the call that writes it."""
    return groups_of(adata, key, made_by=f"scdiva.tl.annotate(adata, ..., key_added={key!r})")


def palette(adata: AnnData, names: Mapping[str, Sequence[Hashable]], user_palette: Any = None) -> dict[Hashable, Any]:
    """Return a colour for each category: from `user_palette`, from ``uns``, or else a default palette.

    Parameters
    ----------
    adata
        Cells, maybe with colours in ``uns[column + "_colors"]``.
    names
        Categories of each column. A category of several columns has the colour of the first.
    user_palette
        `palette` of scanpy: the name of a colour map, colours, a cycler, or a mapping from categories to colours.
    """
    every = list(dict.fromkeys(name for each in names.values() for name in each))
    colours: dict[Hashable, Any] = {}
    if isinstance(user_palette, Mapping):
        refuse_absent([str(name) for name in every], list(map(str, user_palette)), "groups have no colour in palette")
        by_name = {str(name): colour for name, colour in user_palette.items()}
        return {name: to_rgb(by_name[str(name)]) for name in every}
    if isinstance(user_palette, str):
        check_choices(palette=(user_palette, list(colormaps)))
        return dict(zip(every, map(to_rgb, colormaps[user_palette](np.linspace(0, 1, len(every)))), strict=True))
    if user_palette is not None:
        one_by_one = user_palette.by_key()["color"] if hasattr(user_palette, "by_key") else user_palette
        return dict(zip(every, itertools.cycle(map(to_rgb, one_by_one)), strict=False))
    for key, each in names.items():
        colours = dict(zip(each, _stored_colours(adata, f"{key}_colors"), strict=False)) | colours
    distinct = distinct_colours(len(every))
    unused = itertools.cycle([colour for colour in distinct if colour not in colours.values()] or distinct)
    return {name: colours.get(name) or (UNKNOWN if name == REJECTED else next(unused)) for name in every}


def keep_colours(
    adata: AnnData, names: Mapping[str, Sequence[Hashable]], colours: Mapping[Hashable, Any], user_palette: Any = None
) -> None:
    """Write the colours of categories to ``uns[column + "_colors"]``, as scanpy does; views are not changed.

    Existing colours are replaced only by a `user_palette`.
    """
    for key, each in names.items():
        if not adata.is_view and (user_palette is not None or f"{key}_colors" not in adata.uns):
            adata.uns[f"{key}_colors"] = [to_hex(colours[name]) for name in each]


def _stored_colours(adata: AnnData, key: str) -> list[tuple[float, float, float]]:
    """Colours in uns; a warning and none if matplotlib does not know one of them."""
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
    """Up to 102 distinct colours: up to 21 for colour-blind readers (seven hues, darker, paler), else scanpy's."""
    if n > 3 * len(_HUES):
        from scanpy.plotting.palettes import godsnot_102

        return [to_rgb(colour) for colour in godsnot_102[:n]]
    hues = np.array([to_rgb(hue) for hue in _HUES])
    return [(float(r), float(g), float(b)) for r, g, b in np.concatenate([hues, 0.55 * hues, 0.5 + 0.5 * hues])[:n]]


def gene_names(var: pd.DataFrame, gene_symbols: str | None, called: str = "adata.var") -> NDArray[np.object_]:
    """Gene names from the column `gene_symbols`, or from the index where it is missing."""
    if gene_symbols is None:
        return np.asarray(var.index, dtype=object)
    if gene_symbols not in var:
        raise no_column(called, gene_symbols, var.columns)
    names = var[gene_symbols]
    return np.asarray(np.where(names.isna(), var.index, names.astype(str)), dtype=object)
