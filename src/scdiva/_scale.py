"""On which scale expression values are: counts, counts scaled per cell, or which function of those."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

MAX_EXPONENT = 20.0
"""Largest value whose logarithm is undone; log2(1 + 1e6), a cell's whole million in one gene, is 19.9."""
_FITS = 0.9
_MAY_FIT = 0.8
"""Shares of values that are multiples of one count: above the first a scale fits, above the second it may fit."""
_TOLERANCE = 0.05
_MIN_VALUES = 100
_MIN_CELLS = 10
_MIN_DISTINCT = 5
_MIN_VARIED = 30
_MIN_EVEN = 5
"""Least values, cells, different values of a cell, cells whose variance is taken, and genes that vary too little."""

# What undoes each scale, and the largest value for which that makes sense.
_UNDO: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "log1p": (np.expm1, MAX_EXPONENT),
    "log2": (lambda x: np.exp2(x) - 1, MAX_EXPONENT),
    "log10": (lambda x: 10.0**x - 1, MAX_EXPONENT),
    "log1p twice": (lambda x: np.expm1(np.expm1(x)), 3.0),
    "square root": (np.square, np.inf),
    "linear": (lambda x: x, np.inf),
}
SCALED_LOG = "scaled log"
REMEDIES = {
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
    ``"log1p"``, ``"log2"``, ``"log10"``, ``"log1p twice"``, ``"square root"`` or ``"linear"``; ``"scaled log"`` for
    logarithms that were scaled per cell (PFlog, unit length); ``"unlike counts"`` if there are values enough and none
    of these fits; None if there are too few values to tell, or two scales fit.
    """
    if not len(values):
        return None
    if _are_scaled_logs(values, indptr):
        return SCALED_LOG
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


def _are_scaled_logs(values: np.ndarray, indptr: np.ndarray) -> bool:
    """Whether the values of cells are logarithms of 1 + multiples, times a factor that differs from cell to cell.

    The three smallest values of a cell are those of one, two and three counts, a log(1 + s), a log(1 + 2 s) and
    a log(1 + 3 s). The first two give a and s, and so the third.
    """
    cells = [np.unique(values[start:stop]) for start, stop in itertools.pairwise(indptr)]
    cells = [cell[np.r_[True, np.diff(cell) > 1e-4 * cell[1:]]][:3] for cell in cells if len(cell) >= _MIN_DISTINCT]
    one, two, three = np.array([cell for cell in cells if len(cell) == 3]).reshape(-1, 3).T
    if len(one) < _MIN_CELLS:
        return False
    low, high = np.full(len(one), -12.0), np.full(len(one), 12.0)  # log s; two / one falls from 2 to 1 with it
    for _ in range(40):
        middle = (low + high) / 2
        above = np.log1p(2 * np.exp(middle)) / np.log1p(np.exp(middle)) > two / one
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    size = np.exp((low + high) / 2)
    factor = one / np.log1p(size)
    fits = (np.abs(factor * np.log1p(3 * size) / three - 1) < 1e-4) & (size > 1e-3) & (size < 1e3)
    return bool(fits.mean() > _MAY_FIT and np.std(factor[fits]) > 1e-3 * np.mean(factor[fits]))


def are_ranks(cells: Sequence[np.ndarray]) -> bool:
    """Whether the values of every cell are their own ranks within the cell, as 1 to n or as shares of n.

    Parameters
    ----------
    cells
        The values above zero of each of some cells. Fewer than ten, or cells of one value alone, say nothing.

    Returns
    -------
    True for ranks of which ties have the least, the largest or the mean; and for ranks without gaps if they go up to 20
    or more: hardly a cell of counts has all numbers up to its largest.
    """
    cells = [cell for cell in cells if (cell != cell[0]).any()]  # of one value alone nothing can be said
    if len(cells) < _MIN_CELLS:
        return False
    kinds = np.ones(4, dtype=bool)
    largest = []
    for cell in cells:
        found, n = np.unique(cell, return_counts=True)
        if found[-1] <= 1:  # shares
            found = found * len(cell)
        last = np.cumsum(n)
        first, order = last - n + 1, np.arange(1, len(found) + 1)
        kinds &= [np.allclose(found, rank, rtol=1e-4) for rank in (first, last, (first + last) / 2, order)]
        largest.append(found[-1])
        if not kinds.any():
            return False
    return bool(kinds[:3].any() or np.median(largest) >= 20)


def unlike_counts(
    n_obs: int, sums: np.ndarray, squares: np.ndarray, detected: np.ndarray, small: np.ndarray
) -> str | None:
    """Say why small integers can be no counts, if so: what is drawn at random varies, and falls off in a known way.

    A count of molecules is drawn at a rate of its own, gene by gene and cell by cell. So its variance over cells is not
    below its mean (half of it, were half of all molecules caught); and of the numbers of values 1, 2 and 3, taken over
    everything, the first times the third is at least two thirds of the square of the second, whatever the rates.

    Parameters
    ----------
    n_obs
        Cells.
    sums, squares, detected
        float64 `(n_vars,)`: of each gene, the sum of values and of their squares, and the cells where it is above zero.
    small
        Number of values 1, 2 and 3.

    Returns
    -------
    The reason, or None: they may be counts.
    """
    often = detected >= 0.9 * n_obs
    if n_obs >= _MIN_VARIED and often.any():
        mean = sums[often] / n_obs
        even = int(((squares[often] / n_obs - mean**2) < 0.5 * mean).sum())
        if even >= max(_MIN_EVEN, 0.2 * often.sum()):
            return (
                f"{even} of {int(often.sum())} genes that nearly all cells express have a variance below half of their "
                "mean"
            )
    one, two, three = map(float, small)
    if two >= _MIN_VALUES and one * (three + 3 * three**0.5 + 5) < two**2 / 3:
        return f"there are {two:,.0f} values 2 beside {one:,.0f} values 1 and {three:,.0f} values 3"
    return None


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
