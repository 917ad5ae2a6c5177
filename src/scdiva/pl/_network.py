"""How edges are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UP, DOWN = "#c8553d", "#3a7ca5"
"""Colours of edges with a weight above and below 0."""


def edge_looks(weight: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Give width (points) and opacity of edges, by the size of their weight among those drawn."""
    size = np.abs(weight)
    span = size.max() - size.min()
    share = (size - size.min()) / span if span > 0 else np.ones_like(size)
    return 0.5 + 2.0 * share, 0.35 + 0.55 * share


def edge_colours(weight: NDArray[np.float64], signed: bool) -> NDArray[np.float64]:
    """Give edges the colour of their sign, or one grey where no drawn weight is below 0, (n, 4)."""
    from matplotlib.colors import to_rgba_array

    if not signed or not (weight < 0).any():
        return to_rgba_array("0.45", 1.0).repeat(len(weight), axis=0)
    return np.where((weight > 0)[:, None], to_rgba_array(UP), to_rgba_array(DOWN))


def fill_axes(axes: Axes, places: NDArray[np.float64], *, least: float = 8.0, margin: float = 1.2) -> None:
    """Set limits, equal in both directions, that fill the axes with `places`; few genes are not blown up.

    Legend and title are there already: pixels count from here on.
    """
    axes.axis("off")
    axes.figure.canvas.draw()  # a constrained layout settles only now
    box = axes.get_window_extent()
    low, high = places.min(axis=0), places.max(axis=0)
    span = np.maximum(high - low + 2 * margin, least)
    unit = max(span[0] / box.width, span[1] / box.height)
    half, middle = np.array([box.width, box.height]) * unit / 2, (low + high) / 2
    axes.set(xlim=(middle[0] - half[0], middle[0] + half[0]), ylim=(middle[1] - half[1], middle[1] + half[1]))
    axes.set_aspect("equal")
