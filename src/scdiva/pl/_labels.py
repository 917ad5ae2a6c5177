"""Place the names of groups on a scatter plot so that they can be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GAP = 2.0
"""Pixels kept between two labels."""


def densest_point(points: NDArray[np.floating]) -> NDArray[np.floating]:
    """Find where a group is thickest: a mean or median can lie between two islands, on a third group's cells.

    Parameters
    ----------
    points
        Coordinates, (n, 2), at least one row.

    Returns
    -------
    ndarray
        The one of the points whose neighbours (a tenth of the group, at least five) are nearest, (2,).
    """
    from scipy.spatial import cKDTree

    k = min(len(points), max(5, len(points) // 10))
    reach = cKDTree(points).query(points, k=[k])[0][:, 0]
    return points[int(np.argmin(reach))]


def place_labels(ax: Axes, anchors: NDArray[np.floating], names: list[str], *, fontsize: float = 9.0) -> None:
    """Write each name at its anchor, outlined in white, then push overlapping names apart.

    A name that had to move away from its anchor gets a thin line back to it.

    Parameters
    ----------
    ax
        The axes; their limits must be final.
    anchors
        Data coordinates, (n, 2).
    names
        What to write, n of them.
    fontsize
        In points.
    """
    from matplotlib import patheffects

    outline = [patheffects.withStroke(linewidth=2.5, foreground="white")]
    texts = [
        ax.text(x, y, name, ha="center", va="center", fontsize=fontsize, weight="bold", path_effects=outline, zorder=5)
        for (x, y), name in zip(anchors, names, strict=True)
    ]
    ax.figure.canvas.draw()  # a constrained layout settles only now, and pixels count from here on
    boxes = [text.get_window_extent() for text in texts]
    sizes = np.array([(box.width, box.height) for box in boxes]).reshape(-1, 2)
    start = ax.transData.transform(anchors).reshape(-1, 2)
    frame = ax.get_window_extent()
    centres = spread(start, sizes, (frame.x0, frame.y0, frame.x1, frame.y1))
    where = ax.transData.inverted().transform(centres)
    for text, position, anchor, moved, size in zip(texts, where, anchors, np.abs(centres - start), sizes, strict=True):
        text.set_position(tuple(position))
        if (moved > size / 2 + 2).any():
            ax.plot(
                *zip(anchor, position, strict=True), color="0.25", linewidth=0.7, zorder=4, scalex=False, scaley=False
            )


def spread(
    centres: NDArray[np.floating], sizes: NDArray[np.floating], frame: tuple[float, float, float, float]
) -> NDArray[np.floating]:
    """Move boxes as little as it takes until none overlaps another, inside a frame.

    Of each overlapping pair both boxes step back by half of the smaller overlap, along its axis, until nothing moves.
    Deterministic; where there are more boxes than room it ends with the overlaps that are left.

    Parameters
    ----------
    centres
        Where the boxes want to be, pixels, (n, 2).
    sizes
        Widths and heights, pixels, (n, 2).
    frame
        x0, y0, x1, y1 in pixels.

    Returns
    -------
    ndarray
        Where the boxes end up, (n, 2).
    """
    at = np.array(centres, dtype=np.float64)
    low = np.array(frame[:2]) + sizes / 2
    high = np.maximum(np.array(frame[2:]) - sizes / 2, low)
    for _ in range(500):
        at = np.clip(at, low, high)
        moved = False
        for i in range(len(at)):
            for j in range(i):
                apart = at[i] - at[j]
                overlap = (sizes[i] + sizes[j]) / 2 + _GAP - np.abs(apart)
                if (overlap <= 1e-6).any():
                    continue
                axis = int(np.argmin(overlap))
                step = (1.0 if apart[axis] >= 0 else -1.0) * overlap[axis] / 2
                at[i, axis] += step
                at[j, axis] -= step
                moved = True
        if not moved:
            break
    return np.clip(at, low, high)
