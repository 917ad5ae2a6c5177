"""A matrix as coloured fields, with similar rows side by side and the tree of them above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

    Names = Sequence[str] | NDArray[np.object_]

_NAMED = 120
"""Rows or columns up to which they are named."""
_BAR = 2.4
"""Inches of a colour bar, at most."""


def text_inches(names: Names, fontsize: float = 8.0) -> float:
    """Give the inches that the longest name takes, about."""
    return max(map(len, names), default=0) * fontsize * 0.0088


def draw_heatmap(
    axes: Axes,
    values: NDArray[np.floating],
    rows: Names,
    columns: Names,
    label: str,
    *,
    low: float | None = None,
    high: float | None = None,
    cmap: str = "Blues",
    fontsize: float = 8.0,
    turn: float = 90.0,
    **look: Any,
) -> QuadMesh:
    """Draw `values`, (n_rows, n_columns), from the top, NaN as grey, with names and a colour bar.

    Parameters
    ----------
    label
        What the colours are.
    low, high
        Where colours end; None ends them at the values. Where values go on, the ends of the bar are pointed.
    turn
        Angle of the names of columns, in degrees.
    **look
        Passed to matplotlib's ``pcolormesh``.
    """
    axes.set_facecolor("0.88")
    known = values[np.isfinite(values)]
    image = axes.pcolormesh(np.ma.masked_invalid(values), cmap=cmap, vmin=low, vmax=high, **look)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    slant: dict[str, Any] = {"rotation": turn} | ({"ha": "right", "rotation_mode": "anchor"} if 0 < turn < 90 else {})
    for names, set_ticks, angle in ((columns, axes.set_xticks, slant), (rows, axes.set_yticks, {})):
        if len(names) <= _NAMED:
            set_ticks(np.arange(len(names)) + 0.5, names, fontsize=fontsize, **angle)
        else:
            set_ticks([])
    under, over = (low is not None and known.min() < low), (high is not None and known.max() > high)
    extend = "both" if under and over else "min" if under else "max" if over else "neither"
    tall = axes.get_position().height * _inches_high(axes)
    bar = axes.figure.colorbar(image, ax=axes, shrink=min(1.0, _BAR / tall), aspect=15, extend=extend, pad=0.02)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return image


def _inches_high(axes: Axes) -> float:
    return cast("Figure", axes.get_figure(root=True)).get_figheight()


def frame_fields(axes: Axes, column: int, row: int, n_rows: int = 1, **look: Any) -> None:
    """Draw a frame around fields of a column."""
    from matplotlib.patches import Rectangle

    style = {"edgecolor": "0.2", "linewidth": 1.0, "zorder": 3, **look}
    axes.add_patch(Rectangle((column, row), 1, n_rows, fill=False, clip_on=False, **style))


def similar_order(profiles: NDArray[np.floating]) -> NDArray[np.intp]:
    """Order rows so that similar ones stand beside each other; the end that comes first in the rows stays first.

    Parameters
    ----------
    profiles
        What is compared, by Euclidean distance, (n, n_features).
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import pdist

    if len(profiles) < 3:
        return np.arange(len(profiles))
    order = leaves_list(linkage(pdist(profiles), method="average", optimal_ordering=True)).astype(np.intp)
    found: NDArray[np.intp] = order if order[0] < order[-1] else order[::-1]
    return found


def correlation_tree(profiles: NDArray[np.floating]) -> tuple[NDArray[np.floating], NDArray[np.intp]]:
    """Cluster rows by correlation (average linkage, optimal leaf order), what is NaN taken as the row's mean.

    Returns
    -------
    ndarray
        The tree as scipy's ``linkage`` gives it, (n - 1, 4).
    ndarray
        The rows in its order, (n,).
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import pdist

    n = len(profiles)
    if n < 2:
        return np.empty((0, 4)), np.arange(n)
    known = np.ma.masked_invalid(profiles)
    filled = np.where(known.mask, known.mean(axis=1, keepdims=True).filled(0), profiles)
    # of a constant row the correlation is not a number: it is like no other row
    distance = np.clip(np.nan_to_num(pdist(filled, "correlation"), nan=1.0), 0, 2)
    tree = linkage(distance, method="average", optimal_ordering=True)
    return tree, leaves_list(tree).astype(np.intp)


def draw_tree(axes: Axes, tree: NDArray[np.floating], *, inches: float, lowest: float) -> None:
    """Draw the tree above the fields, its leaves over their columns, from the distance `lowest` on."""
    from scipy.cluster.hierarchy import dendrogram

    drawn = dendrogram(tree, no_plot=True)
    height = max(inches / _inches_high(axes), 0.04)
    above = axes.inset_axes((0.0, 1.01, 1.0, height), sharex=axes)
    for x, y in zip(drawn["icoord"], drawn["dcoord"], strict=True):
        above.plot(np.array(x) / 10, y, color="0.3", linewidth=0.8)  # scipy's leaves are at 5, 15, ...
    above.set_ylim(lowest, 1.02 * tree[:, 2].max())
    above.set_xlim(0, len(tree) + 1)
    above.axis("off")
