"""Whether a goal is met, missed, or within noise: by an interval over seeds, cells or whatever was repeated."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, inf, sqrt
from statistics import NormalDist, mean, pstdev, stdev
from typing import NamedTuple

import numpy as np
from _timing import goal

LEVEL, DRAWS = 0.95, 2000


class Score(NamedTuple):
    """A figure with its standard errors: None where nothing was repeated, or where it is no share of cells."""

    value: float
    error: float | None = None
    """Over seeds, or over what `over` says."""
    df: float = inf
    over: str = ""
    of_cells: float | None = None
    """Of the cells drawn, where the figure is a share of them."""
    n_cells: int = 0
    each: tuple[float, ...] = ()
    """The figure of each seed, where the row kept them."""


def over_seeds(key: str, values: Sequence[float]) -> dict:
    """What a row keeps of a score: the mean over the seeds, the standard deviation, and the score of each."""
    values = [float(value) for value in values]
    spread = {key: round(mean(values), 4), f"{key}_sd": round(pstdev(values), 4)}
    return spread | {f"{key}_seeds": [round(value, 5) for value in values]}


def share_error(value: float, n_cells: int) -> float:
    """Standard error of a share of cells; two successes and two failures more, so that no cell out of n is no none."""
    near = (value * n_cells + 2) / (n_cells + 4)
    return sqrt(max(near * (1 - near), 0.0) / (n_cells + 4))


def auroc_error(value: float, n_each: int) -> float:
    """Standard error of an AUROC of as many cells of both kinds (Hanley and McNeil 1982), half a cell from perfect."""
    a = min(max(value, 1 / (2 * n_each)), 1 - 1 / (2 * n_each))
    one, two = a / (2 - a), 2 * a * a / (1 + a)
    return sqrt(a * (1 - a) + (n_each - 1) * (one + two - 2 * a * a)) / n_each


def of_row(row: dict, key: str, ddof: int = 0, of_cells: float | None = None) -> Score:
    """A score of a row that is a mean over seeds, with the spread that the row says (`ddof` as it was taken)."""
    n = row.get("n_seeds", len(row.get("seeds", ())))
    each, n_cells = tuple(row.get(f"{key}_seeds", ())), row.get("n_cells", 0)
    if len(each) > 1:
        return Score(
            row[key], stdev(each) / sqrt(len(each)), len(each) - 1, f"{len(each)} seeds", of_cells, n_cells, each
        )
    if n > 1 and f"{key}_sd" in row:
        error = row[f"{key}_sd"] / sqrt(n - 1 + ddof)
        return Score(row[key], error, n - 1, f"{n} seeds", of_cells, n_cells)
    why = "one run" if n <= 1 else f"spread over {n} seeds not kept"
    return Score(row[key], None, inf, why, of_cells, n_cells)


def share_of_cells(row: dict, key: str, ddof: int = 0) -> Score:
    """The same of a share of the row's cells, such as an accuracy."""
    return of_row(row, key, ddof, share_error(row[key], row["n_cells"]) if row.get("n_cells") else None)


def across(values: Sequence[float], over: str) -> Score:
    """The mean of figures or leads of several types, groups or batches, its error by their spread."""
    if len(values) < 2:
        return Score(mean(values), None, inf, f"one of {over}")
    return Score(mean(values), stdev(values) / sqrt(len(values)), len(values) - 1, f"{len(values)} {over}")


def judge(
    what: str,
    ours: Score,
    theirs: Score | None = None,
    /,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    share: bool = False,
    **details: object,
) -> dict:
    """The row of a goal: met, missed, or within noise, by a 95% interval.

    The interval is of ours, of ours less theirs (less `share`: of ours as a share of theirs). Over seeds it is of
    paired differences where both rows kept a figure for each seed, otherwise of two means apart (Welch); over cells it
    is that of shares of as many cells drawn apart, which on the same cells is too wide. The wider of the two counts: a
    fit that draws nothing has no spread over seeds, and would be sure of one cell. Met: all of the interval is on the
    good side of the goal; missed: none of it; within noise otherwise. Where nothing was repeated and no cells were
    counted, a goal can be missed, but not met.
    """
    value = ours.value if theirs is None else ours.value / theirs.value if share else ours.value - theirs.value
    # of a share by the relative errors
    scale = [1.0] if theirs is None else [1 / theirs.value, value / theirs.value] if share else [1.0, 1.0]
    both = [ours] if theirs is None else [ours, theirs]
    widths = {}
    if (drawn := _over_seeds(both, scale, share)) is not None:
        widths[" and ".join(dict.fromkeys(one.over for one in both if one.error))] = drawn
    if all(one.of_cells is not None for one in both):
        error = hypot(*(abs(part) * one.of_cells for part, one in zip(scale, both, strict=True) if one.of_cells))
        widths[f"{min(one.n_cells for one in both):,} cells"] = NormalDist().inv_cdf((1 + LEVEL) / 2) * error
    value = round(value, 5)
    if not widths:
        why = next((one.over for one in both if one.error is None and one.over), "nothing drawn")
        return goal(what, value, at_least, at_most, over=why, **details)
    over = max(widths, key=lambda name: widths[name])
    interval = (value - widths[over], value + widths[over])
    if theirs is None and ours.of_cells is not None:  # a share is one
        interval = (max(interval[0], 0.0), min(interval[1], 1.0))
    return goal(what, value, at_least, at_most, interval=interval, over=over, **details)


def _over_seeds(both: list[Score], scale: list[float], share: bool) -> float | None:
    """Half the width of the interval over seeds; None where nothing was repeated, or all repeats agree."""
    from scipy.stats import t  # not for processes whose memory is measured

    if any(one.error is None for one in both):
        return None
    if len(both) == 2 and not share and len(both[0].each) == len(both[1].each) > 1:
        apart = across([a - b for a, b in zip(both[0].each, both[1].each, strict=True)], "seeds")
        error, df = apart.error or 0.0, apart.df
    else:
        parts = [(abs(by) * one.error) ** 2 for by, one in zip(scale, both, strict=True) if one.error is not None]
        error = sqrt(sum(parts))
        df = sum(parts) ** 2 / sum(part**2 / one.df for part, one in zip(parts, both, strict=True)) if error else inf
    return float(t.ppf((1 + LEVEL) / 2, df)) * error if error > 0 else None


def judge_times(
    what: str,
    times: Sequence[float],
    others: Sequence[float],
    *,
    scale: float = 1.0,
    at_least: float | None = None,
    at_most: float | None = None,
    **details: object,
) -> dict:
    """The row of a goal on the ratio of two arms' best times, `scale` times; the interval is over rounds drawn again.

    Arms take turns, so a round is drawn with what both took in it; where one arm ran more often, each on its own.
    """
    one, other = (np.asarray(some, dtype=float) for some in (times, others))
    value = scale * one.min() / other.min()
    if min(len(one), len(other)) < 2:
        return goal(what, value, at_least, at_most, **details)
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(one), size=(DRAWS, len(one)))
    beside = drawn if len(one) == len(other) else rng.integers(len(other), size=(DRAWS, len(other)))
    ratios = scale * one[drawn].min(axis=1) / other[beside].min(axis=1)
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    rounds = f"{min(len(one), len(other))} rounds"
    return goal(what, value, at_least, at_most, interval=(low, high), over=rounds, **details)


def judge_number(what: str, rows: Sequence[dict], at_least: int, of: str, **details: object) -> dict:
    """The row of a goal on how many of some judged rows are met, from those surely met to those not surely missed."""
    number = sum(
        row["value"] >= row["at_least"] if "at_least" in row else row["value"] <= row["at_most"] for row in rows
    )
    least, most = sum(row["met"] is True for row in rows), sum(row["met"] is not False for row in rows)
    return goal(what, number, at_least=at_least, interval=(least, most), over=f"{len(rows)} {of}", **details)
