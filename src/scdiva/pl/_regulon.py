"""One factor and its targets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva._docs import with_shared_docs
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._network import DOWN, UP, edge_looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINE = 0.17
"""Inches between the names of two targets of one side."""
_FILLS = {1: UP, -1: DOWN, 0: "0.6"}
"""Colour of the dot of a known target, by what the literature says."""


@with_shared_docs
def regulon(
    regulon: pd.DataFrame,
    source: str | None = None,
    *,
    n_targets: int = 20,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw a factor amid its strongest targets.

    Targets stand around it by the size of their weight, the largest at the top right and on clockwise. Lines are the
    wider and darker the larger the weight, red where the factor goes with more of the target and blue where with less.
    Where known targets were asked for (`known` of `scdiva.tl.regulon`), lines to them are whole and their dots filled,
    red for activation, blue for repression, grey for a mode that is not known; lines to the others are dashed.

    Parameters
    ----------
    regulon
        What `scdiva.tl.regulon` returned, or any frame with columns `source`, `target` and `weight`, the strongest
        first; `sign` (by default that of the weight) and `known` are optional.
    source
        The factor drawn, where the frame has several.
    n_targets
        Targets drawn, at most.
    %(ax)s
    %(return_fig)s
    %(save)s

    Returns
    -------
    Figure or None
        The figure if `return_fig`, else None.

    Raises
    ------
    KeyError
        If a column is missing, or the frame has no such factor.
    ValueError
        If the frame has several factors and none is named, it has no target with a weight, a target comes twice,
        `n_targets` is below 1, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc68k_reduced()
    >>> sd.tl.grn(adata, sources="tf", use_raw=True)
    >>> sd.pl.regulon(sd.tl.regulon(adata, "SPI1", use_raw=True), save="SPI1.png")
    """
    check_file(save)
    if n_targets < 1:
        raise ValueError(f"n_targets must be 1 or more, got {n_targets}.")
    rows, factor = _rows_of(regulon, source)
    rows = rows.iloc[:n_targets]
    weight = rows["weight"].to_numpy(dtype=np.float64)
    sign = np.sign(rows["sign"].to_numpy(dtype=np.float64) if "sign" in rows else weight)
    known = rows["known"].to_numpy(dtype=np.float64) if "known" in rows else None

    n = len(rows)
    height = _LINE * 1.25 * max((n + 1) // 2, 6)
    fig, axes = axes_for(ax, (5.4, height + 0.9))
    places, right = _around(n)
    widths, inks = edge_looks(weight)
    for i in range(n):
        signed = known is None or not np.isnan(known[i])
        axes.plot(
            [0, places[i, 0]], [0, places[i, 1]], color=_colour(sign[i]), alpha=inks[i], linewidth=widths[i],
            linestyle="-" if signed else (0, (3, 1.5)), zorder=2,
        )  # fmt: skip
        fill = "white" if known is None or not signed else _FILLS[int(np.sign(known[i]))]
        axes.scatter(
            places[i, 0], places[i, 1], s=34, color=fill, edgecolors=_colour(sign[i]), linewidths=1.2, zorder=3
        )
        axes.annotate(
            rows["target"].iloc[i], places[i], (7 if right[i] else -7, 0), textcoords="offset points",
            ha="left" if right[i] else "right", va="center", fontsize=8, annotation_clip=False,
            weight="bold" if known is not None and signed else "normal",
        )  # fmt: skip
    axes.text(
        0, 0, factor, ha="center", va="center", fontsize=10, weight="bold", zorder=4,
        bbox={"boxstyle": "round,pad=0.45", "facecolor": "white", "edgecolor": "0.2", "linewidth": 1.2},
    )  # fmt: skip
    axes.set(xlim=(-1.75, 1.75), ylim=(-1.08, 1.08))
    axes.axis("off")
    title = f"{factor}: {n} strongest target{'s' * (n > 1)}"
    if known is not None:
        title += f", {int((~np.isnan(known)).sum())} known"
    axes.set_title(title, fontsize=10)
    _draw_legend(axes, weight, sign, known)
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


def _rows_of(regulon: pd.DataFrame, source: str | None) -> tuple[pd.DataFrame, str]:
    """Give the rows of one factor that have a weight, and its name."""
    missing = [name for name in ("source", "target", "weight") if name not in regulon]
    if missing:
        columns = ", ".join(map(str, regulon.columns)) or "none"
        raise KeyError(
            f"regulon has no column {missing[0]!r}, it has {columns}: give what scdiva.tl.regulon or scdiva.get.grn_df "
            "returned."
        )
    factors = list(dict.fromkeys(regulon["source"].astype(str)))
    if source is None and len(factors) > 1:
        raise ValueError(f"regulon has {len(factors):,} sources ({', '.join(factors[:3])}, ...): name one as source.")
    if source is not None and source not in factors:
        raise KeyError(f"source={source!r} is none of the {len(factors):,} of the frame: {', '.join(factors[:5])}.")
    factor = factors[0] if source is None and factors else source
    rows = regulon[(regulon["source"].astype(str) == factor) & regulon["weight"].notna()]
    if not len(rows):
        raise ValueError("regulon has no target with a weight: call scdiva.tl.regulon(adata, ...) for another gene.")
    if (twice := rows["target"].duplicated()).any():
        raise ValueError(f"{twice.sum():,} targets of {factor} come twice, first {rows['target'][twice].iloc[0]!r}.")
    return rows, str(factor)


def _around(n: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Give places clockwise from the top right, (n, 2), and which are at the right; no two of a side share a height."""
    first = (n + 1) // 2
    sides = []
    for count, side in ((first, 1.0), (n - first, -1.0)):
        y = 1 - (2 * np.arange(count) + 1) / max(count, 1)
        sides.append(np.column_stack([side * np.sqrt(1 - 0.85 * y**2), y])[:: int(side)])
    places = np.concatenate(sides)
    return places, places[:, 0] > 0


def _colour(sign: float) -> str:
    """Give the colour of a sign."""
    return UP if sign > 0 else DOWN if sign < 0 else "0.45"


def _draw_legend(axes: Axes, weight: NDArray[Any], sign: NDArray[Any], known: NDArray[Any] | None) -> None:
    """Say below what lines and dots mean, of what is drawn."""
    from matplotlib.lines import Line2D

    handles = []
    for value, label in ((1, "with more of the target"), (-1, "with less")):
        if (sign == value).any():
            handles.append(Line2D([], [], color=_colour(value), linewidth=2, label=label))
    if known is not None:
        for mode, label in ((1, "known, activates"), (-1, "known, represses"), (0, "known")):
            if (np.sign(known) == mode).any():
                handles.append(
                    Line2D([], [], color="0.45", marker="o", markersize=5, markerfacecolor=_FILLS[mode], label=label,
                           markeredgecolor="0.45")
                )  # fmt: skip
        if np.isnan(known).any():
            handles.append(
                Line2D([], [], color="0.45", marker="o", markersize=5, markerfacecolor="white", label="not known",
                       linestyle=(0, (3, 1.5)))
            )  # fmt: skip
    low, high = np.abs(weight).min(), np.abs(weight).max()
    handles.append(Line2D([], [], linestyle="", label=f"weight {low:.2g} to {high:.2g}"))
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, frameon=False, fontsize=7.5,
        handlelength=2.2, columnspacing=1.2,
    )  # fmt: skip
