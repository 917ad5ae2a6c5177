"""Cells as dots on a map: coloured by group or by number, with a legend or names among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva.pl._labels import main_point, place_labels

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PER_COLUMN = 22
"""Names under each other in a legend at the side."""
MAX_ON_DATA = 30
"""With more groups than this their names would hide the cells, and go beside the plot."""
MISSING = (0.83, 0.83, 0.83, 1.0)
"""Colour of cells without a value."""


def legend_columns(values: pd.Series) -> int:
    """Columns of a legend at the side for the groups that have cells; numbers have none."""
    return -(-n_present(values) // _PER_COLUMN) if isinstance(values.dtype, pd.CategoricalDtype) else 0


def dots(size: float | None, n_cells: int) -> dict[str, Any]:
    dot = size if size is not None else float(np.clip(12_000 / n_cells, 1.0, 18.0))
    return {"s": dot, "linewidths": 0, "rasterized": True}


def palette(adata: AnnData, color: str, values: pd.Series) -> dict[Any, Any]:
    """Give a colour to each category: scanpy's where it has set them, else well-separated ones."""
    names = list(values.cat.categories)
    given = adata.uns.get(f"{color}_colors")
    if given is not None and len(given) >= len(names):
        return dict(zip(names, given, strict=False))
    return dict(zip(names, distinct_colours(len(names)), strict=False))


def distinct_colours(n: int) -> list[Any]:
    """Give well-separated colours, n or more."""
    import matplotlib as mpl

    if n <= 20:
        # Strong colours first: groups take pale ones only from the eleventh on.
        strong_then_pale = [*range(0, 20, 2), *range(1, 20, 2)]
        return [mpl.colormaps["tab20"](i) for i in strong_then_pale]
    i = np.arange(n)
    turn = i * 0.618 % 1.0  # golden angle: neighbours in the list are far apart in hue
    light = 0.5 + 0.45 * ((i + i // 21) % 3) / 2  # hues come again after 21, in another lightness
    return list(mpl.colors.hsv_to_rgb(np.stack([turn, np.full(n, 0.75), light], axis=1)))


def draw_groups(
    ax: Axes,
    xy: NDArray[np.floating],
    values: pd.Series,
    colours_of: dict[Any, Any],
    where: str,
    size: float | None = None,
) -> None:
    """Draw cells coloured by group, unlabelled ones grey below, and name the groups that have cells."""
    shown = np.isfinite(xy).all(axis=1)
    xy, values = xy[shown], values[shown]
    codes = values.cat.codes.to_numpy()
    names = list(values.cat.categories)
    colours = np.array([MISSING, *(_rgba(colours_of[name]) for name in names)])
    # One shuffled layer, so that no group hides another only because it comes later in the alphabet.
    order = np.random.default_rng(0).permutation(len(xy))
    order = order[np.argsort(codes[order] >= 0, kind="stable")]
    ax.scatter(xy[order, 0], xy[order, 1], c=colours[codes[order] + 1], **dots(size, len(xy)))
    if where == "on data":
        name_groups(ax, xy, values, colours_of)
    elif where == "right":
        draw_legend(ax, values, colours_of)


def name_groups(ax: Axes, xy: NDArray[np.floating], values: pd.Series, colours_of: dict[Any, Any]) -> None:
    """Write the names of the groups that have cells where most of these are."""
    shown = np.isfinite(xy).all(axis=1)
    xy, values = xy[shown], values[shown]
    groups, codes = _present(values), values.cat.codes.to_numpy()
    if not groups:
        return
    names = [values.cat.categories[i] for i in groups]
    low, high = xy.min(axis=0), xy.max(axis=0)
    anchors = np.array([main_point(xy[codes == i], low, high) for i in groups])
    darker = [tuple(0.7 * part for part in _rgba(colours_of[name])[:3]) for name in names]
    place_labels(ax, xy, anchors, [str(name) for name in names], darker)


def draw_legend(ax: Axes, values: pd.Series, colours_of: dict[Any, Any]) -> None:
    """Name the groups that have cells at the right of the axes, and the cells without one."""
    if not (groups := _present(values)):
        return
    for i in groups:
        name = values.cat.categories[i]
        ax.scatter([], [], color=_rgba(colours_of[name]), s=30, label=str(name))
    if values.isna().any():
        ax.scatter([], [], color=MISSING, s=30, label="NA")
    ax.legend(
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=8,
        ncols=legend_columns(values),
        handletextpad=0.2,
    )


def draw_numbers(
    fig: Figure,
    ax: Axes,
    xy: NDArray[np.floating],
    number: NDArray[np.floating],
    size: float | None = None,
    limits: tuple[float | None, float | None] = (None, None),
) -> None:
    """Draw cells coloured by a number, high ones on top, with a colour bar; None in `limits` fits them to the cells.

    Cells without a finite number are grey below, and named so under the colour bar.
    """
    shown = np.isfinite(xy).all(axis=1)
    known = shown & np.isfinite(number)
    missing = shown & ~known
    grey = None
    if missing.any():
        grey = ax.scatter(xy[missing, 0], xy[missing, 1], color=MISSING, **dots(size, int(shown.sum())))
    if not known.any():
        if grey is not None:
            ax.legend([grey], ["NA"], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
        return
    order = np.flatnonzero(known)[np.argsort(number[known], kind="stable")]
    low, high = limits
    coloured = ax.scatter(
        xy[order, 0], xy[order, 1], c=number[order], cmap="viridis", vmin=low, vmax=high, **dots(size, int(shown.sum()))
    )
    bar = fig.colorbar(coloured, ax=ax, shrink=0.7)
    if grey is not None:
        bar.ax.legend(
            [grey], ["NA"], loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False, fontsize=8,
            handletextpad=0.1, borderpad=0.0, markerscale=2.0,
        )  # fmt: skip


def n_present(values: pd.Series) -> int:
    """Count the groups that have cells."""
    return len(_present(values))


def _present(values: pd.Series) -> list[int]:
    """Codes of the categories that have cells."""
    return [int(code) for code in np.unique(values.cat.codes) if code >= 0]


def _rgba(colour: Any) -> tuple[float, float, float, float]:
    from matplotlib.colors import to_rgba

    return to_rgba(colour)
