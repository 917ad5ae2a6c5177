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
"""Pixels that a label moves away rather than lie with a sixth of it on cells."""
_DOT = 12.0
"""Square pixels that a cell takes, at least."""
_HIDING = 6.0
"""Cost of a label that lies on cells wholly."""
_GRID = 2.0
"""Pixels to which the places of cells are rounded when those under a label are counted."""
_ISLANDS = 40
"""Fields along each side of a map; cells of a group in fields that touch are one island."""
_OVERLAP, _CROSSING = 10.0, 3.0
"""Cost of a label on another, and of a line through a label: the first outweighs any distance, the second nearly."""
_SWEEPS = 3
"""How often every label chooses anew, given where the others stand."""


def main_point(points: NDArray[np.floating], low: NDArray[np.floating], high: NDArray[np.floating]) -> NDArray[Any]:
    """Find where a group is thickest in its largest island.

    A mean or median can lie between two islands, on a third group's cells; the thickest place of all can be in a small
    tight island, away from most of the group.

    Parameters
    ----------
    points
        Coordinates, (n, 2), at least one row.
    low, high
        Corners of the whole map, (2,) each.

    Returns
    -------
    ndarray
        The one of the island's points whose neighbours (a tenth of the island, at least five) are nearest, (2,).
    """
    from scipy.ndimage import label
    from scipy.spatial import cKDTree

    span = np.maximum(np.asarray(high) - low, np.finfo(np.float64).tiny)
    fields = np.clip(((points - low) / span * _ISLANDS).astype(int), 0, _ISLANDS - 1)
    taken = np.zeros((_ISLANDS, _ISLANDS), dtype=bool)
    taken[fields[:, 0], fields[:, 1]] = True
    island = label(taken, structure=np.ones((3, 3)))[0][fields[:, 0], fields[:, 1]]
    points = points[island == np.bincount(island).argmax()]
    k = min(len(points), max(5, len(points) // 10))
    reach = cKDTree(points).query(points, k=[k])[0][:, 0]
    found: NDArray[Any] = points[int(np.argmin(reach))]
    return found


def place_labels(
    ax: Axes,
    dots: NDArray[np.floating],
    anchors: NDArray[np.floating],
    names: Sequence[str],
    colours: Sequence[Any],
    *,
    fontsize: float = 8.0,
    furthest: float = np.inf,
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
    furthest
        Pixels from its anchor beyond which no name stands: where one would, the last of the names around are left out.
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
    corners = (frame.x0, frame.y0, frame.x1, frame.y1)
    kept = np.arange(len(texts))
    while True:
        centres = free_places(start[kept], sizes[kept], ax.transData.transform(dots), corners, reach=furthest + 17)
        far = np.linalg.norm(centres - start[kept], axis=1) > furthest
        if not far.any():
            break
        crowd = np.linalg.norm(start[kept][far][:, None] - start[kept], axis=2) <= furthest
        last = [np.flatnonzero(near)[-max(near.sum() // 4, 1) :] for near in crowd]
        kept = np.delete(kept, np.concatenate(last))
    for i in np.setdiff1d(np.arange(len(texts)), kept):
        texts[i].remove()
    where = ax.transData.inverted().transform(centres)
    for i, at, moved in zip(kept, where, np.abs(centres - start[kept]), strict=True):
        text, anchor, size = texts[i], anchors[i], sizes[i]
        text.set_position((float(at[0]), float(at[1])))
        if (moved > size / 2 + 2).any():
            # from the cells to the label's edge, not under it
            edge = at + (anchor - at) * min(s / (2 * m) for s, m in zip(size, moved, strict=True) if m > 0)
            ax.plot([anchor[0], edge[0]], [anchor[1], edge[1]], color="0.3", linewidth=0.6, zorder=4)


def free_places(
    anchors: NDArray[np.floating],
    sizes: NDArray[np.floating],
    dots: NDArray[np.floating],
    frame: tuple[float, float, float, float],
    *,
    reach: float = np.inf,
) -> NDArray[np.floating]:
    """Choose a place for each box, near its anchor, off the other boxes and their lines, and off the dots.

    Boxes choose in turn, the widest first, among 16 directions at several distances, and a few times over, because the
    first do not know yet where the last will stand. A box takes the place that costs least: its distance, plus the
    share of it that dots cover. Overlap with another box costs more than any place without, and a line from an
    anchor to its box through another box more than most, so they happen only where there is no room. Lines that cross
    cost as much as the distance `_REACH`. Nothing is random.

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
    reach
        Pixels from its anchor that a box may be put, at most; `2 * _REACH` in any case.

    Returns
    -------
    ndarray
        Centres of the boxes, (n, 2).
    """
    turn = np.arange(16) * (np.pi / 8)
    rays = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    steps = np.concatenate(
        [np.zeros((1, 2)), *(radius * rays for radius in np.arange(8.0, min(2 * _REACH, reach), 8.0))]
    )
    corner, far = np.array(frame[:2]), np.array(frame[2:])
    below = _counts_below(dots, corner, far)
    centres = np.array(anchors, dtype=np.float64)
    placed: list[int] = []
    order = sorted(range(len(centres)), key=lambda i: (-sizes[i, 0], i))
    for i in order * _SWEEPS:
        half = sizes[i] / 2
        low = corner + half + _EDGE
        places = np.clip(anchors[i] + steps, low, np.maximum(far - half - _EDGE, low))
        hidden = _dots_inside(below, places - half - corner, places + half - corner)
        cost = _HIDING * np.minimum(hidden * _DOT / sizes[i].prod(), 1.0)
        cost += np.linalg.norm(places - anchors[i], axis=1) / _REACH
        for j in placed:
            if i == j:
                continue
            room = (sizes[i] + sizes[j]) / 2 + _EDGE - np.abs(places - centres[j])
            cost += _OVERLAP * (room > 0).all(axis=1)
            own = _through(anchors[i], places, centres[j], sizes[j] / 2 + 1)
            other = _through(anchors[j], centres[j], places, half + 1)
            cost += _CROSSING * own + _CROSSING * other + _crossed(anchors[i], places, anchors[j], centres[j])
        # opposite directions cost the same: which is taken must not hang on how a CPU rounds
        centres[i] = places[int(np.argmin(cost.round(6)))]
        placed = [*placed, i] if i not in placed else placed
    return centres


def _through(
    start: NDArray[np.floating], end: NDArray[np.floating], centre: NDArray[np.floating], half: NDArray[np.floating]
) -> NDArray[np.bool_]:
    """Whether the segments from `start` to `end` pass through the boxes around `centre`, all (2,) or (n, 2)."""
    start, end, centre = np.broadcast_arrays(start, end, centre)
    with np.errstate(divide="ignore", invalid="ignore"):  # a segment along an axis is between both sides or never
        sides = np.stack([centre - half - start, centre + half - start]) / (end - start)
    found: NDArray[np.bool_] = np.maximum(sides.min(axis=0).max(axis=-1), 0) < np.minimum(
        sides.max(axis=0).min(axis=-1), 1
    )
    return found


def _crossed(
    start: NDArray[np.floating], ends: NDArray[np.floating], a: NDArray[np.floating], b: NDArray[np.floating]
) -> NDArray[np.bool_]:
    """Whether the segments from `start` to each of `ends`, (n, 2), cross the one from `a` to `b`."""

    def side(p: NDArray[Any], q: NDArray[Any], r: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = np.sign(
            (q[..., 0] - p[..., 0]) * (r[..., 1] - p[..., 1]) - (q[..., 1] - p[..., 1]) * (r[..., 0] - p[..., 0])
        )
        return found

    apart = side(start, ends, a) * side(start, ends, b) < 0
    found: NDArray[np.bool_] = apart & (side(a, b, start) * side(a, b, ends) < 0)
    return found


def _counts_below(
    dots: NDArray[np.floating], corner: NDArray[np.floating], far: NDArray[np.floating]
) -> NDArray[np.floating]:
    """Count the dots left of and below each point of a grid over the frame: any box is then four look-ups."""
    n = np.maximum(np.ceil((far - corner) / _GRID).astype(int), 1)
    x, y = (dots - corner).T
    counts = np.histogram2d(x, y, bins=n.tolist(), range=[(0, n[0] * _GRID), (0, n[1] * _GRID)])[0]
    return np.pad(counts.cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))


def _dots_inside(
    below: NDArray[np.floating], low: NDArray[np.floating], high: NDArray[np.floating]
) -> NDArray[np.floating]:
    """Count the dots in each box, given the lower and upper corners from the frame's, (n, 2)."""
    most = np.array(below.shape) - 1
    x0, y0 = np.clip(np.floor(low / _GRID).astype(int), 0, most).T
    x1, y1 = np.clip(np.ceil(high / _GRID).astype(int), 0, most).T
    found: NDArray[np.floating] = below[x1, y1] - below[x0, y1] - below[x1, y0] + below[x0, y0]
    return found
