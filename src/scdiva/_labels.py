"""Columns of labels, batches and groups: validation, and conversion to numbers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator, Sequence
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
"""Texts that stand for a missing value after `astype(str)`, an export, or in an empty field."""
UNKNOWN = frozenset(
    ("unknown", "unassigned", "unlabelled", "unlabeled", "unannotated", "unclassified", "undefined", "undetermined",
     "not available", "not assigned", "none", "na", "-", "--", "?", ".")
)  # fmt: skip
"""Lower-case words for an unknown label, which may be intended as a group."""
_FEW = 20
"""Number of different values below which a column is not checked for nearly as many values as cells; also part of the
limits for numbers."""


@contextlib.contextmanager
def many_labels_accepted() -> Iterator[None]:
    """Suppress scikit-learn's warning that many labels for few cells look like a regression target.

    Columns of continuous values raised an error before (:func:`refuse_continuous`).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
        yield


def is_missing(texts: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Mark blank texts and texts that stand for a missing value."""
    return np.isin(np.char.strip(texts), list(MISSING))


def is_unknown(texts: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Mark words for an unknown label."""
    return np.isin(np.char.lower(np.char.strip(texts)), list(UNKNOWN))


def check_labels(values: pd.Series, where: str, kind: Kind, *, meant: Collection[str] = ()) -> None:
    """Raise an error for a column whose values are not labels, batches or groups.

    Parameters
    ----------
    values
        Values of the cells that have one, with cell names as index.
    where
        Name of the column in messages, such as `"adata.obs['cell_type']"`.
    kind
        Use of the column. Words such as "unknown" raise an error for labels, because they would be learned as a label,
        and a warning for other uses. For perturbations, each cell may have a different value.
    meant
        Texts that are accepted, such as the user's name for control cells.

    Raises
    ------
    ValueError
        If a value is a placeholder for a missing value (`"nan"`, `"None"`, an empty string) or, for labels, for an
        unknown one; if the values are continuous numbers; or if there are at least 20 different values and more than
        half as many as cells (not for perturbations).

    Warns
    -----
    UserWarning
        If a word such as "unknown" is a batch, group or perturbation.
    """
    refuse_continuous(values, where, kind)
    texts = values.astype(str).to_numpy(dtype=object).astype(str)
    accepted = np.isin(texts, list(meant))
    missing, unknown = is_missing(texts) & ~accepted, is_unknown(texts) & ~accepted
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
            f"{where} is {_counted(values, texts, wrong)}. That is not a {'type' if kind == 'label' else kind}. "
            f"{mend}; or leave these cells out{out}."
        )
    if unknown.any():
        warn(
            f"{where} is {_counted(values, texts, unknown)}, which is treated as a {kind}. If it means that the {kind} "
            "is unknown, leave these cells out."
        )


def _counted(values: pd.Series, texts: NDArray[np.str_], which: NDArray[np.bool_]) -> str:
    """Texts, number of cells and first cell of a selection, for messages."""
    names = " or ".join(map(repr, np.unique(texts[which]).tolist()))
    return f"{names} for {which.sum()} of {len(texts)} cells, the first is {str(values.index[which.argmax()])!r}"


def refuse_continuous(values: pd.Series, where: str, kind: Kind) -> None:
    """Raise an error if a column contains continuous numbers or nearly as many different values as cells.

    Parameters
    ----------
    values, where, kind
        As for :func:`check_labels`.

    Raises
    ------
    ValueError
        If the column contains such values, see :func:`check_labels`.
    """
    n, n_values = len(values), values.nunique()
    numbers = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
    fractions = pd.api.types.is_float_dtype(values) and bool((values.to_numpy(dtype=np.float64) % 1 != 0).any())
    if fractions:
        continuous = n_values > max(2, min(_FEW, n / 2))
    else:  # counts, such as the number of genes of a cell
        continuous = numbers and n_values > 10 * _FEW and n_values > n / 20
    alone = kind != "perturbation" and n_values >= _FEW and n_values > n / 2
    if not continuous and not alone:
        return
    examples = ", ".join(repr(getattr(value, "item", lambda v=value: v)()) for value in values.unique()[:3])
    plural = "batches" if kind == "batch" else f"{kind}s"
    what = "continuous numbers" if continuous else f"nearly as many {plural} as cells"
    raise ValueError(
        f"{where} holds {what}: {n_values} different values (dtype {values.dtype}, such as {examples}) in {n} cells. "
        f"Name a column in which cells share a {kind}"
        + (f", or cut the numbers into groups: pandas.cut({where}, 5)." if numbers else ".")
    )


def labels_column(adata: AnnData, key: str, where: str) -> pd.Series:
    """Column of labels, with bytes decoded; parameters as for :func:`read_labels`."""
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
        Name of the cells in messages.
    kind, meant
        As for :func:`check_labels`.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If a label is missing, there are no cells, or the column is not valid for :func:`check_labels`.
    """
    column = labels_column(adata, key, where)
    if not adata.n_obs:
        raise ValueError(f"{where} is empty: 0 cells × {adata.n_vars} genes.")
    refuse_missing(adata, key, where, f"name their {kind}")
    check_labels(column, f"{where}.obs[{key!r}]", kind, meant=meant)
    labels: NDArray[np.str_] = column.astype(str).to_numpy().astype(str)
    return labels


def refuse_missing(adata: AnnData, key: str, where: str, mend: str) -> None:
    """Raise ValueError if cells have no value in a column; the remedy `mend` ends the message."""
    missing = adata.obs[key].isna().to_numpy()
    if missing.any():
        raise ValueError(
            f"{where}.obs[{key!r}] is missing for {missing.sum()} of {adata.n_obs} cells, the first is "
            f"{adata.obs_names[missing.argmax()]!r}: leave them out, {where} = "
            f"{where}[{where}.obs[{key!r}].notna()].copy(), or {mend}."
        )


def batch_numbers(adata: AnnData, batch_key: str | None, *, where: str = "adata") -> np.ndarray:
    """Batch number of each cell, int64 from 0; 0 for all cells if `batch_key` is None.

    Parameters and errors as for :func:`read_labels`.
    """
    if batch_key is None:
        return np.zeros(adata.n_obs, dtype=np.int64)
    labels = read_labels(adata, batch_key, where=where, kind="batch")
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def label_numbers(
    adata: AnnData, labels_key: str, unlabeled_category: str | None = None, *, where: str = "adata"
) -> tuple[np.ndarray, pd.CategoricalDtype]:
    """Label number of each cell, int64 from 0, -1 for none, and the labels in their original type.

    Parameters
    ----------
    adata
        The cells.
    labels_key
        A column of `adata.obs`; a missing value means no label.
    unlabeled_category
        Another value that means no label.
    where
        Name of the cells in messages.

    Returns
    -------
    The numbers, and the labels as categories: numbers, truth values and ordered categories in their order, text in
    alphabetical order.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If there are fewer than two labels, or the column is not valid for :func:`check_labels`.

    Warns
    -----
    UserWarning
        If no cell has the `unlabeled_category`.
    """
    column = labels_column(adata, labels_key, where)
    labelled = column.notna().to_numpy()
    if unlabeled_category is not None:
        without = (column.astype(str) == str(unlabeled_category)).to_numpy() & labelled
        labelled = labelled & ~without
    check_labels(column[labelled], f"{where}.obs[{labels_key!r}]", "label")
    if unlabeled_category is not None and not without.any():
        names = sorted(map(str, column[labelled].unique()))
        warn(
            f"no cell has the unlabeled_category {str(unlabeled_category)!r}: {where}.obs[{labels_key!r}] holds "
            f"{', '.join(map(repr, names[:20]))}{', ...' if len(names) > 20 else ''}, which are all treated as "
            "types."
        )
    numbers = np.full(adata.n_obs, -1, dtype=np.int64)
    labels, numbers[labelled] = _as_categories(column[labelled])
    types = labels.categories
    if len(types) < 2:
        raise ValueError(
            f"{where}.obs[{labels_key!r}] labels {labelled.sum()} cells with {len(types)} type(s); two or more are "
            "needed."
        )
    return numbers, labels


def _as_categories(column: pd.Series) -> tuple[pd.CategoricalDtype, np.ndarray]:
    """Labels that occur, and the number of each cell's; values other than numbers and truth values become text."""
    categorical = isinstance(column.dtype, pd.CategoricalDtype)
    ordered = categorical and bool(column.cat.ordered)
    unique = column.cat.remove_unused_categories().cat.categories if categorical else pd.Series(column.unique())
    dtype = getattr(unique.dtype, "numpy_dtype", unique.dtype)  # int64 for Int64
    if dtype == np.dtype(object):
        dtype = pd.Series(np.asarray(unique)).infer_objects().dtype
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biuf":
        dtype, column, unique = np.dtype(object), column.astype(str), unique.astype(str)
    values = np.asarray(unique, dtype=dtype)
    values = np.array(list(dict.fromkeys(values.tolist())), dtype=dtype) if ordered else np.unique(values)
    labels = pd.CategoricalDtype(pd.Index(values, dtype=dtype), ordered)
    return labels, labels.categories.get_indexer(np.asarray(column, dtype=dtype)).astype(np.int64)


def listed(names: Sequence[str] | str) -> list[str]:
    """One or several names as a list."""
    return [names] if isinstance(names, str) else list(map(str, names))


def refuse_twice(values: Sequence[object], argument: str) -> None:
    """Raise an error for repeated values."""
    if len(set(values)) < len(values):
        raise ValueError(f"{argument} holds {max(values, key=values.count)!r} more than once.")


def wanted_groups(groups: Sequence[str] | str | None, present: Sequence[str], lack: str) -> list[str]:
    """Requested groups, or all if None; raise an error for groups that do not exist.

    Raises
    ------
    ValueError
        If there is none, one is repeated, or some are not present; `lack` is the predicate of the message.
    """
    requested = list(present) if groups is None else listed(groups)
    if not requested:
        raise ValueError("groups is empty; omit it to use all groups.")
    refuse_twice(requested, "groups")
    refuse_absent(requested, present, f"groups {lack}", f"; there are {', '.join(map(repr, present[:10]))}", ValueError)
    return requested
