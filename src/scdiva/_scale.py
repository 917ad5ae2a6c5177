"""Scale of expression values: counts, counts scaled per cell, or log1p of these; and rank codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

MAX_LOGNORM = 15.0
"""Largest value taken as a logarithm: log(1 + 1e6), the whole of a cell in one gene at a million counts, is 13.8."""
_FITS = 0.9
_MAY_FIT = 0.8
"""Shares of values that are multiples of one count: a scale fits above the first, and may fit above the second."""
_TOLERANCE = 0.05
_MIN_VALUES = 100
_MIN_CELLS = 10


def find_scale(values: np.ndarray, indptr: np.ndarray) -> Literal["log1p", "linear", "neither"] | None:
    """Distinguish log-normalised expression from counts that were scaled per cell.

    On the right scale, the values of a cell are multiples of its smallest value, which is one count, or all cells have
    the same total. Multiples remain if genes are selected after normalisation; equal totals remain in corrected counts
    and TPM.

    Parameters
    ----------
    values
        float64, the values above zero of some cells, cell after cell.
    indptr
        Cell i holds ``values[indptr[i]:indptr[i + 1]]``; no cell is empty.

    Returns
    -------
    ``"log1p"`` or ``"linear"``; ``"neither"`` if there are enough values and neither scale fits, as for logarithms to
    another base, square roots and scaled values; None if there are too few values or the scale is unclear.
    """
    if not len(values):
        return None
    counts = np.expm1(values) if values.max() <= MAX_LOGNORM else None
    of_logs = np.inf if counts is None else _spread_of_totals(counts, indptr)
    if _spread_of_totals(values, indptr) < min(1e-3, of_logs / 10):
        return "linear"
    if of_logs < 1e-3:
        return "log1p"
    logs, n_logs = (0.0, 0) if counts is None else _multiples(counts, indptr)
    linear, n_linear = _multiples(values, indptr)
    logs, linear = (logs if n_logs >= _MIN_VALUES else 0.0), (linear if n_linear >= _MIN_VALUES else 0.0)
    if max(logs, linear) > _MAY_FIT:
        return None if max(logs, linear) <= _FITS else "log1p" if logs >= linear else "linear"
    return "neither" if max(n_logs, n_linear) >= _MIN_VALUES and logs < 0.5 else None


def are_ranks(cells: Sequence[np.ndarray]) -> bool:
    """Whether the values of every cell are ranks within the cell, from 1 to n or as fractions of n.

    Parameters
    ----------
    cells
        The values above zero of each of some cells. At least ten cells with two different values are required.

    Returns
    -------
    True for ranks with any method for ties (minimum, maximum, mean); dense ranks must reach 20 in the median cell,
    because a cell of counts rarely has every integer up to its maximum.
    """
    cells = [cell for cell in cells if (cell != cell[0]).any()]
    if len(cells) < _MIN_CELLS:
        return False
    kinds = np.ones(4, dtype=bool)
    largest = []
    for cell in cells:
        found, n = np.unique(cell, return_counts=True)
        if found[-1] <= 1:  # fractions
            found = found * len(cell)
        last = np.cumsum(n)
        first, order = last - n + 1, np.arange(1, len(found) + 1)
        kinds &= [np.allclose(found, rank, rtol=1e-4) for rank in (first, last, (first + last) / 2, order)]
        largest.append(found[-1])
        if not kinds.any():
            return False
    return bool(kinds[:3].any() or np.median(largest) >= 20)


def one_count(values: np.ndarray, indptr: np.ndarray) -> np.ndarray | None:
    """Value of one count in each cell of log-normalised expression, before the logarithm.

    Parameters
    ----------
    values, indptr
        As for :func:`find_scale`; log-normalised expression.

    Returns
    -------
    float64 `(n_cells,)`, each cell's smallest value; None if the other values are not multiples of it, as in TPM.
    """
    undone = np.expm1(values.astype(np.float64))
    share, n = _multiples(undone, indptr)
    return None if n >= _MIN_VALUES and share < _MAY_FIT else np.minimum.reduceat(undone, indptr[:-1])


def _multiples(undone: np.ndarray, indptr: np.ndarray) -> tuple[float, int]:
    """Share of values, 1.5 to 50 times their cell's smallest one, that are multiples of it; and their number."""
    ratio = undone / np.repeat(np.minimum.reduceat(undone, indptr[:-1]), np.diff(indptr))
    ratio = ratio[(ratio > 1.5) & (ratio < 50)]
    near = np.abs(ratio - np.rint(ratio)) < _TOLERANCE
    return (float(near.mean()), len(ratio)) if len(ratio) else (0.0, 0)


def _spread_of_totals(undone: np.ndarray, indptr: np.ndarray) -> float:
    """Coefficient of variation of the cells' totals; infinite for fewer than ten cells."""
    if len(indptr) <= _MIN_CELLS:
        return np.inf
    totals = np.add.reduceat(undone, indptr[:-1])
    return float(totals.std() / totals.mean())
