"""Columns of labels, batches and groups: what they can't be, and their values as numbers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from scdiva._checks import no_column, refuse_absent, warn

if TYPE_CHECKING:
    from anndata import AnnData
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
_PLURAL = {"label": "labels", "batch": "batches", "group": "groups", "perturbation": "perturbations"}
_FEW = 20
"""Up to so many different values are groups, however few cells there are."""


@contextlib.contextmanager
def many_labels_accepted() -> Iterator[None]:
    """Suppress scikit-learn's warning that many labels for few cells look like a regression target.

    Columns that are no labels are refused before (:func:`refuse_continuous`).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
        yield


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


def check_labels(values: pd.Series, where: str, kind: Kind, *, meant: Collection[str] = ()) -> None:
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
        warn(
            f"{where} is {_counted(values, texts, unknown)}: counted as a {kind} like any other. If it says that the "
            f"{kind} is not known, leave these cells out."
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


def labels_column(adata: AnnData, key: str, where: str) -> pd.Series:
    """Return a column of labels, with bytes decoded; arguments as for :func:`read_labels`."""
    if key not in adata.obs:
        raise no_column(f"{where}.obs", key, adata.obs.columns)
    column = adata.obs[key]
    categorical = isinstance(column.dtype, pd.CategoricalDtype)
    values = column.cat.categories if categorical else column
    if values.dtype != object or not any(isinstance(value, bytes) for value in values):
        return column
    try:
        text = {value: value.decode() for value in set(values) if isinstance(value, bytes)}
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}.obs[{key!r}] holds bytes that are not UTF-8 text (first: {error.object!r:.40}). Decode them: "
            f"{where}.obs[{key!r}] = {where}.obs[{key!r}].astype(object).str.decode('latin-1')."
        ) from None
    return column.astype(object).map(lambda value: text.get(value, value))


def read_labels(
    adata: AnnData, key: str, *, where: str = "adata", kind: Kind = "group", meant: Collection[str] = ()
) -> NDArray[np.str_]:
    """Read a column of labels as text.

    Parameters
    ----------
    adata
        The cells.
    key
        A column of `adata.obs`.
    where
        What the cells are called in messages.
    kind, meant
        As for :func:`check_labels`.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If a label is missing, there is no cell, or the column holds no labels.
    """
    column = labels_column(adata, key, where)
    if not adata.n_obs:
        raise ValueError(f"{where} is empty: 0 cells × {adata.n_vars} genes.")
    refuse_missing(adata, key, where, f"name their {kind}")
    check_labels(column, f"{where}.obs[{key!r}]", kind, meant=meant)
    found: NDArray[np.str_] = column.astype(str).to_numpy().astype(str)
    return found


def refuse_missing(adata: AnnData, key: str, where: str, mend: str) -> None:
    """Raise ValueError if cells have no value in a column; `mend` ends the sentence."""
    missing = adata.obs[key].isna().to_numpy()
    if missing.any():
        raise ValueError(
            f"{where}.obs[{key!r}] is missing for {missing.sum()} of {adata.n_obs} cells, the first is "
            f"{adata.obs_names[missing.argmax()]!r}: leave them out, {where} = "
            f"{where}[{where}.obs[{key!r}].notna()].copy(), or {mend}."
        )


def batch_numbers(adata: AnnData, batch_key: str | None, *, where: str = "adata") -> np.ndarray:
    """Return the number of each cell's batch, int64 from 0; 0 for all cells if `batch_key` is None.

    Arguments and errors as for :func:`read_labels`.
    """
    if batch_key is None:
        return np.zeros(adata.n_obs, dtype=np.int64)
    labels = read_labels(adata, batch_key, where=where, kind="batch")
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


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
        If there is no label, or only one, or the column holds no labels (:func:`check_labels`).

    Warns
    -----
    UserWarning
        If no cell has the `unlabeled_category`.
    """
    column = labels_column(adata, labels_key, where)
    known = column.notna().to_numpy(copy=True)
    if unlabeled_category is not None:
        without = (column.astype(str) == str(unlabeled_category)).to_numpy() & known
        known = known & ~without  # not in place: pandas 3 gives arrays that can't be written to
    check_labels(column[known], f"{where}.obs[{labels_key!r}]", "label")
    if unlabeled_category is not None and not without.any():
        names = sorted(map(str, column[known].unique()))
        warn(
            f"no cell has the unlabeled_category {str(unlabeled_category)!r}: {where}.obs[{labels_key!r}] holds "
            f"{', '.join(map(repr, names[:20]))}{', ...' if len(names) > 20 else ''}, and all of these count as "
            "types."
        )
    numbers = np.full(adata.n_obs, -1, dtype=np.int64)
    labels, numbers[known] = _as_categories(column[known])
    types = labels.categories
    if len(types) < 2:
        raise ValueError(
            f"{where}.obs[{labels_key!r}] labels {known.sum()} cells with {len(types)} type(s); two or more are needed."
        )
    return numbers, labels


def _as_categories(column: pd.Series) -> tuple[pd.CategoricalDtype, np.ndarray]:
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


def listed(given: Sequence[str] | str) -> list[str]:
    """Give one name, or several, as a list."""
    return [given] if isinstance(given, str) else [str(name) for name in given]


def refuse_twice(given: Sequence[object], argument: str) -> None:
    """Refuse what is asked for twice."""
    if len(set(given)) < len(given):
        raise ValueError(f"{argument} holds {max(given, key=given.count)!r} more than once.")


def wanted_groups(groups: Sequence[str] | str | None, present: Sequence[str], lack: str) -> list[str]:
    """Name the groups that are asked for, all if None; refuse those that are not there.

    Raises
    ------
    ValueError
        If there is none, one is named twice, or some are not present; `lack` is what the message then states of them.
    """
    wanted = list(present) if groups is None else listed(groups)
    if not wanted:
        raise ValueError("groups names no group; leave it out to take all.")
    refuse_twice(wanted, "groups")
    refuse_absent(wanted, present, f"groups {lack}", f"; there are {', '.join(map(repr, present[:10]))}", ValueError)
    return wanted
