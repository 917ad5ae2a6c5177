"""Place names on a scatter plot so that they can be read and hide few points.

Own code, since adjustText leaves names on points and on each other where many stand close.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EDGE = 4.0
"""Pixels kept between a name and the frame, and between two names."""
_REACH = 150.0
"""Pixels that a name moves away rather than lie with a sixth of it on points."""
_DOT = 30.0
"""Square pixels that a point takes, at least."""
_HIDING = 6.0
"""Cost of a name that lies on points wholly."""
_MOST = 5_000
"""Points that are counted under names; of more, every so many-th."""
_OVERLAP, _CROSSING = 10.0, 3.0
"""Cost of a name on another, and of a line through a name: the first outweighs any distance, the second nearly."""
_SWEEPS = 3
"""How often every name chooses anew, given where the others stand."""
_SAMPLE = 500
"""Points among which the middle of a group is looked for."""


def main_point(points: NDArray[np.floating]) -> NDArray[np.floating]:
    """Find where a group is thickest, in the half of it that lies closest together: an island of few has no say.

    Parameters
    ----------
    points
        Points of the group, (n, 2).

    Returns
    -------
    ndarray
        One of the points, (2,).
    """
    from scipy.spatial.distance import cdist

    some = points[:: -(-len(points) // _SAMPLE)]
    apart = cdist(some, some)
    reach = np.sort(apart, axis=1)  # by column, how far a point is from its so many nearest
    middle = int(reach[:, len(some) // 2].argmin())
    half = apart[middle].argsort(kind="stable")[: len(some) // 2 + 1]
    thickest = half[reach[half, min(max(5, len(some) // 10), len(some) - 1)].argmin()]
    found: NDArray[np.floating] = some[int(thickest)]
    return found


def place_labels(
    ax: Axes,
    dots: NDArray[np.floating],
    anchors: ArrayLike,
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
        Axes on which everything else is drawn already, since a name that is put on something can't be read.
    dots
        Points that names should not hide, (n, 2), in data coordinates.
    anchors
        Point that each name belongs to, (n_names, 2).
    names, colours
        Names and their colours, the most important first.
    fontsize
        Size of the letters in points.
    furthest
        Pixels from its anchor up to which a name may stand; a name for which there is no room so near is left out.
    """
    from matplotlib import patheffects

    if not len(names):
        return
    anchors = np.asarray(anchors, dtype=np.float64)
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
    sizes = np.array([(box.width, box.height) for box in (text.get_window_extent() for text in texts)])
    start = ax.transData.transform(anchors)
    frame = ax.get_window_extent()
    centres = free_places(
        start, sizes, ax.transData.transform(dots), (frame.x0, frame.y0, frame.x1, frame.y1), reach=furthest
    )
    where = ax.transData.inverted().transform(centres)
    kept: list[int] = []
    for i, moved in enumerate(np.abs(centres - start)):
        if np.isfinite(furthest) and (_room(centres[i], sizes[i], centres[kept], sizes[kept]) > 0).all(axis=1).any():
            texts[i].remove()
            continue
        kept.append(i)
        texts[i].set_position((float(where[i, 0]), float(where[i, 1])))
        if (moved > sizes[i] / 2 + 2).any():
            # from the anchor to the name's edge, not under it
            share = min(s / (2 * m) for s, m in zip(sizes[i], moved, strict=True) if m > 0)
            edge = where[i] + (anchors[i] - where[i]) * share
            ax.plot(*zip(anchors[i], edge, strict=True), color="0.3", linewidth=0.6, zorder=4)


def discs(ax: Axes, points: NDArray[np.floating], radius: ArrayLike) -> NDArray[np.floating]:
    """Give points all over the dots at `points`, (n, 2), of some radius in pixels, for names to keep clear of them."""
    turn = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    rays = np.concatenate([[[0.0, 0.0]], *(r * np.column_stack([np.cos(turn), np.sin(turn)]) for r in (0.5, 1.0))])
    pixels = ax.transData.transform(points)[:, None] + np.reshape(radius, (-1, 1, 1)) * rays
    found: NDArray[np.floating] = ax.transData.inverted().transform(pixels.reshape(-1, 2))
    return found


def free_places(
    anchors: NDArray[np.floating],
    sizes: NDArray[np.floating],
    dots: NDArray[np.floating],
    frame: tuple[float, float, float, float],
    *,
    reach: float = np.inf,
) -> NDArray[np.floating]:
    """Choose a place for each box, near its anchor, off the other boxes and their lines, and off the dots.

    Parameters
    ----------
    anchors, sizes
        Where each box belongs, and its width and height, (n, 2), in pixels.
    dots
        Points that boxes should not lie on, (n_dots, 2).
    frame
        Left, lower, right and upper edge, within which boxes stay.
    reach
        Pixels that a box may be from its anchor.

    Returns
    -------
    ndarray
        Centres of the boxes, (n, 2).
    """
    from scipy.spatial import cKDTree

    turn = np.arange(16) * (np.pi / 8)
    rays = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    steps = np.concatenate(
        [np.zeros((1, 2)), *(radius * rays for radius in np.arange(8.0, min(2 * _REACH, reach), 8.0))]
    )
    corner, far = np.array(frame[:2]), np.array(frame[2:])
    share = -(-len(dots) // _MOST)
    dots = dots[:: max(share, 1)]
    centres = np.array(anchors, dtype=np.float64)
    placed: list[int] = []
    # where room is short the first have the choice, else the longest, which find a place least easily
    order = list(range(len(centres))) if np.isfinite(reach) else sorted(range(len(centres)), key=lambda i: -sizes[i, 0])
    for i in order * _SWEEPS:
        half = sizes[i] / 2
        low = corner + half + _EDGE
        places = np.clip(anchors[i] + steps, low, np.maximum(far - half - _EDGE, low))
        under = cKDTree(dots / half).query_ball_point(places / half, 1, p=np.inf, return_length=True)
        cost = _HIDING * np.minimum(under * share * _DOT / sizes[i].prod(), 1.0)
        cost += np.linalg.norm(places - anchors[i], axis=1) / _REACH
        for j in placed:
            if i != j:
                cost += _OVERLAP * (_room(places, sizes[i], centres[j], sizes[j]) > 0).all(axis=1)
                cost += _CROSSING * _through(anchors[i], places, centres[j], sizes[j])
                cost += _CROSSING * _through(anchors[j], centres[j], places, sizes[i])
                cost += _crossed(anchors[i], places, anchors[j], centres[j])
        # opposite directions cost the same: which is taken must not hang on how a CPU rounds
        centres[i] = places[int(np.argmin(cost.round(6)))]
        placed = [*placed, i] if i not in placed else placed
    return centres


def _room(
    a: NDArray[np.floating], size_a: NDArray[np.floating], b: NDArray[np.floating], size_b: NDArray[np.floating]
) -> NDArray[np.floating]:
    """Give by how much two boxes are too near in each direction, given their centres, (..., 2)."""
    found: NDArray[np.floating] = (size_a + size_b) / 2 + _EDGE - np.abs(a - b)
    return found


def _through(
    start: NDArray[np.floating], end: NDArray[np.floating], centre: NDArray[np.floating], size: NDArray[np.floating]
) -> NDArray[np.bool_]:
    """Whether the lines from `start` to `end` pass through the boxes around `centre`, each (2,) or (n, 2)."""
    start, end, centre = np.broadcast_arrays(start, end, centre)
    with np.errstate(divide="ignore", invalid="ignore"):  # a line along an axis is between both sides or never
        sides = np.stack([centre - size / 2 - 1 - start, centre + size / 2 + 1 - start]) / (end - start)
    enters, leaves = np.maximum(sides.min(axis=0).max(axis=-1), 0), np.minimum(sides.max(axis=0).min(axis=-1), 1)
    found: NDArray[np.bool_] = enters < leaves
    return found


def _crossed(
    start: NDArray[np.floating], ends: NDArray[np.floating], a: NDArray[np.floating], b: NDArray[np.floating]
) -> NDArray[np.bool_]:
    """Whether the lines from `start` to each of `ends`, (n, 2), cross the one from `a` to `b`."""

    def side(p: NDArray[Any], q: NDArray[Any], r: NDArray[Any]) -> NDArray[Any]:
        along, aside = (q - p).T, (r - p).T
        found: NDArray[Any] = np.sign(along[0] * aside[1] - along[1] * aside[0])
        return found

    crossed: NDArray[np.bool_] = (side(start, ends, a) * side(start, ends, b) < 0) & (
        side(a, b, start) * side(a, b, ends) < 0
    )
    return crossed
