"""Place the names of groups on a scatter plot so that they can be read and hide few cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EDGE = 4.0
"""Pixels kept between a label and the frame, and between two labels."""
_REACH = 150.0
"""Pixels that a label may move away to hide half of its own area less of the cells."""


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


def place_labels(
    ax: Axes,
    dots: NDArray[np.floating],
    anchors: NDArray[np.floating],
    names: Sequence[str],
    colours: Sequence[Any],
    *,
    fontsize: float = 8.0,
) -> None:
    """Write each name near its anchor, outlined in white; one that stands off gets a thin line to its anchor.

    Parameters
    ----------
    ax
        The axes, with everything else drawn: their limits are final from here on.
    dots
        The cells that names had better not hide, data coordinates, (n_cells, 2).
    anchors
        Data coordinates, (n, 2).
    names, colours
        What to write, and in which colour, n of each.
    fontsize
        In points.
    """
    from matplotlib import patheffects

    ax.autoscale_view()  # limits are worked out only when asked for; frozen before that they are still (0, 1)
    ax.autoscale(False)
    texts = [
        ax.text(x, y, name, ha="center", va="center", fontsize=fontsize, weight="bold", color=colour, zorder=5)
        for (x, y), name, colour in zip(anchors, names, colours, strict=True)
    ]
    for text in texts:
        text.set_in_layout(False)  # names lie on the plot and claim no room beside it
        text.set_path_effects([patheffects.withStroke(linewidth=2.5, foreground="white")])
    ax.figure.canvas.draw()  # a constrained layout settles only now, and pixels count from here on
    boxes = [text.get_window_extent() for text in texts]
    sizes = np.array([(box.width, box.height) for box in boxes])
    start = ax.transData.transform(anchors)
    frame = ax.get_window_extent()
    centres = free_places(start, sizes, ax.transData.transform(dots), (frame.x0, frame.y0, frame.x1, frame.y1))
    where = ax.transData.inverted().transform(centres)
    for text, at, anchor, moved, size in zip(texts, where, anchors, np.abs(centres - start), sizes, strict=True):
        text.set_position((float(at[0]), float(at[1])))
        if (moved > size / 2 + 2).any():
            ax.plot([anchor[0], at[0]], [anchor[1], at[1]], color="0.3", linewidth=0.6, zorder=4)


def free_places(
    anchors: NDArray[np.floating],
    sizes: NDArray[np.floating],
    dots: NDArray[np.floating],
    frame: tuple[float, float, float, float],
) -> NDArray[np.floating]:
    """Choose a place for each box, near its anchor, off the other boxes and off the dots.

    Boxes choose in turn, the widest first, among 16 directions at several distances. A box takes the place that costs
    least: its distance, plus twice the share of it that dots cover. Overlap with a box that stands already costs more
    than any place without, so it happens only where there is no room left. Nothing is random.

    Parameters
    ----------
    anchors
        Where the boxes want to be, pixels, (n, 2).
    sizes
        Widths and heights, pixels, (n, 2).
    dots
        What had better stay in sight, pixels, (n_dots, 2).
    frame
        x0, y0, x1, y1 in pixels.

    Returns
    -------
    ndarray
        Centres of the boxes, (n, 2).
    """
    turn = np.arange(16) * (np.pi / 8)
    rays = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    steps = np.concatenate([np.zeros((1, 2)), *(radius * rays for radius in np.arange(8.0, 2 * _REACH, 8.0))])
    centres = np.array(anchors, dtype=np.float64)
    placed: list[int] = []
    for i in sorted(range(len(centres)), key=lambda i: (-sizes[i, 0], i)):
        half = sizes[i] / 2
        low = np.array(frame[:2]) + half + _EDGE
        places = np.clip(anchors[i] + steps, low, np.maximum(np.array(frame[2:]) - half - _EDGE, low))
        inside = (np.abs(dots[None] - places[:, None]) < half + 1).all(axis=2).sum(axis=1)
        # A dot hides about 12 square pixels; a box is covered at most wholly.
        cost = 2 * np.minimum(inside * 12 / sizes[i].prod(), 1.0) + np.linalg.norm(places - anchors[i], axis=1) / _REACH
        for j in placed:
            room = (sizes[i] + sizes[j]) / 2 + _EDGE - np.abs(places - centres[j])
            cost += 10.0 * (room > 0).all(axis=1)
        centres[i] = places[int(np.argmin(cost))]
        placed.append(i)
    return centres
