"""On which scale expression values are: counts scaled per cell, or which function of those."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MAX_EXPONENT = 20.0
"""Largest value whose logarithm is undone; log2(1 + 1e6), a cell's whole million in one gene, is 19.9."""
_FITS = 0.9
_MAY_FIT = 0.8
"""Shares of values that are multiples of one count: above the first a scale fits, above the second it may fit."""
_TOLERANCE = 0.05
_MIN_VALUES = 100
_MIN_CELLS = 10

# What undoes each scale, and the largest value for which that makes sense.
_UNDO: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "log1p": (np.expm1, MAX_EXPONENT),
    "log2": (lambda x: np.exp2(x) - 1, MAX_EXPONENT),
    "log10": (lambda x: 10.0**x - 1, MAX_EXPONENT),
    "log1p twice": (lambda x: np.expm1(np.expm1(x)), 3.0),
    "square root": (np.square, np.inf),
    "linear": (lambda x: x, np.inf),
}
MENDS = {
    "log2": "adata.X = adata.X * np.log(2)",
    "log10": "adata.X = adata.X * np.log(10)",
    "log1p twice": "adata.X = np.expm1(adata.X)",
    "square root": "adata.X = adata.X ** 2 (for sparse X, adata.X.data **= 2)",
}
"""The call that turns a scale into one that scdiva reads."""


def find_scale(values: np.ndarray, indptr: np.ndarray) -> str | None:
    """Tell the scale of expression values from what integer counts and normalisation leave in them.

    Undone rightly, the values of a cell are multiples of its smallest one, which is one count; and cells that were
    normalised have one total. Neither holds when a wrong function is undone. The first survives the choice of genes
    after normalising, the second corrected counts and TPM.

    Parameters
    ----------
    values
        float64, the values above zero of some cells, cell after cell.
    indptr
        Cell i holds ``values[indptr[i]:indptr[i + 1]]``; no cell is empty.

    Returns
    -------
    ``"log1p"``, ``"log2"``, ``"log10"``, ``"log1p twice"``, ``"square root"`` or ``"linear"``; ``"unlike counts"`` if
    there are values enough and none of these fits; None if there are too few values to tell, or two scales fit.
    """
    if not len(values):
        return None
    largest = values.max()
    undone = {scale: undo(values) for scale, (undo, limit) in _UNDO.items() if largest <= limit}
    multiples = {scale: _multiples(u, indptr) for scale, u in undone.items()}
    spread = {scale: _spread_of_totals(u, indptr) for scale, u in undone.items()}
    natural_spread = spread.get("log1p", np.inf)
    for scale in undone:
        if scale != "log1p" and spread[scale] < min(1e-3, natural_spread / 10):
            return scale
    if natural_spread < 1e-3:
        return "log1p"
    share = {scale: fit for scale, (fit, n) in multiples.items() if n >= _MIN_VALUES}
    if not share:
        return None
    # The scales that need no mending come first: the squares of multiples are multiples too.
    for scales in (("log1p", "linear"), tuple(share)):
        best = max(scales, key=lambda scale: share.get(scale, 0.0))
        if share.get(best, 0.0) > _MAY_FIT:
            return best if share[best] > _FITS else None
    return "unlike counts" if share.get("log1p", 0.0) < 0.5 else None


def one_count(values: np.ndarray, indptr: np.ndarray) -> np.ndarray | None:
    """Give what one count is in each cell of log-normalised expression, before the logarithm.

    Parameters
    ----------
    values, indptr
        As for :func:`find_scale`, log1p.

    Returns
    -------
    float64 `(n_cells,)`, each cell's smallest value; None if the values are no multiples of it, as TPM are not.
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
