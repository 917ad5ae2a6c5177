"""What a column of labels, batches or groups can't be: texts that stand for a missing value, or numbers that vary."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kind = Literal["label", "batch", "group", "perturbation"]

MISSING = frozenset(
    ("", "nan", "NaN", "NAN", "-nan", "-NaN", "None", "NA", "N/A", "n/a", "#N/A", "#NA", "<NA>", "NaT", "null", "NULL")
)
"""Texts that `astype(str)`, an export or an empty field make of a missing value."""
UNKNOWN = frozenset(
    ("unknown", "unassigned", "unlabelled", "unlabeled", "unannotated", "unclassified", "undefined", "undetermined",
     "not available", "not assigned", "none", "na", "-", "--", "?", ".")
)  # fmt: skip
"""Words, in small letters, that as the label of a cell say that it has none; they may be meant as a group."""
_FEW = 20
"""Up to so many different values are groups, however few cells there are."""


def is_missing(texts: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Mark texts that stand for a missing value, or are blank."""
    return _marked(texts, lambda name: name.strip() in MISSING)


def is_unknown(texts: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Mark words that say of a cell that its label is not known."""
    return _marked(texts, lambda name: name.strip().lower() in UNKNOWN)


def _marked(texts: NDArray[np.str_], rule: Callable[[str], bool]) -> NDArray[np.bool_]:
    names, code = np.unique(texts, return_inverse=True)
    found: NDArray[np.bool_] = np.array([rule(str(name)) for name in names], dtype=np.bool_)
    return found[code.reshape(texts.shape)]


def check_labels(
    values: pd.Series, where: str, kind: Kind, *, meant: Collection[str] = (), stacklevel: int = 3
) -> None:
    """Refuse a column whose values are no labels, batches or groups.

    Parameters
    ----------
    values
        Those of cells that have one; the index names the cells.
    where
        What the column is called in messages, such as `"adata.obs['cell_type']"`.
    kind
        What it is to be. Words such as "unknown" are refused as a label that is learned, and warned about else. Of a
        perturbation each cell may have its own.
    meant
        Texts that are what they say, such as the name that the user gave of control cells.
    stacklevel
        Of the warning.

    Raises
    ------
    ValueError
        If a text stands for a missing value (`"nan"`, `"None"`, an empty one), if the values are continuous numbers, or
        if more than half of the cells have a value of their own.

    Warns
    -----
    UserWarning
        If a word such as "unknown" counts as a batch, group or perturbation.
    """
    refuse_continuous(values, where, kind)
    texts = values.astype(str).to_numpy(dtype=object).astype(str)
    unclear = ~np.isin(texts, list(meant))
    missing, unknown = is_missing(texts) & unclear, is_unknown(texts) & unclear
    frame = where.partition(".obs[")[0]
    if (wrong := missing | unknown if kind == "label" else missing).any():
        names = np.unique(texts[wrong]).tolist()
        listed = f"[{', '.join(map(repr, names))}]"
        if kind == "label":
            one = "" if len(names) == 1 else f"{where} = {where}.astype(object).replace({listed}, 'unknown'), and "
            mend = f"If they have no label, {one}unlabeled_category={names[0] if len(names) == 1 else 'unknown'!r}"
        else:
            mend = f"Name their {kind}"
        out = f": {frame} = {frame}[~{where}.isin({listed})].copy()" if frame != where else ""
        raise ValueError(
            f"{where} is {_counted(values, texts, wrong)}. That names no {'type' if kind == 'label' else kind}. "
            f"{mend}; or leave these cells out{out}."
        )
    if unknown.any():
        warnings.warn(
            f"{where} is {_counted(values, texts, unknown)}: counted as a {kind} like any other. If it says that the "
            f"{kind} is not known, leave these cells out.",
            UserWarning,
            stacklevel=stacklevel,
        )


def _counted(values: pd.Series, texts: NDArray[np.str_], which: NDArray[np.bool_]) -> str:
    """Say which texts these are, of how many cells, and the first."""
    names = " or ".join(map(repr, np.unique(texts[which]).tolist()))
    return f"{names} for {which.sum()} of {len(texts)} cells, the first is {str(values.index[which.argmax()])!r}"


def refuse_continuous(values: pd.Series, where: str, kind: Kind) -> None:
    """Refuse numbers that vary continuously, and columns in which hardly two cells share a value.

    Parameters
    ----------
    values, where, kind
        As for :func:`check_labels`.

    Raises
    ------
    ValueError
        If the column is of these.
    """
    n, n_values = len(values), values.nunique()
    numbers = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
    fractions = pd.api.types.is_float_dtype(values) and bool((values.to_numpy(dtype=np.float64) % 1 != 0).any())
    if fractions:
        continuous = n_values > max(2, min(_FEW, n / 2))
    else:  # counts of a cell, such as its genes
        continuous = numbers and n_values > 10 * _FEW and n_values > n / 20
    alone = kind != "perturbation" and n_values >= _FEW and n_values > n / 2
    if not continuous and not alone:
        return
    seen = ", ".join(repr(getattr(value, "item", lambda v=value: v)()) for value in values.unique()[:3])
    what = "continuous numbers" if continuous else f"nearly as many {_PLURAL[kind]} as cells"
    raise ValueError(
        f"{where} holds {what}: {n_values} different values (dtype {values.dtype}, such as {seen}) in {n} cells. Name "
        f"a column in which cells share a {kind}"
        + (f", or cut the numbers into groups: pandas.cut({where}, 5)." if numbers else ".")
    )


_PLURAL = {"label": "labels", "batch": "batches", "group": "groups", "perturbation": "perturbations"}
