"""Scatter plots of cells in two dimensions, coloured by groups or numbers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from anndata import AnnData
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from scdiva.pl._figure import axes_for, grid_of_axes, text_inches, write_names
from scdiva.pl._groups import MAX_GROUPS, MISSING

ON_DATA = 14
"""Maximum number of groups whose names are written on the cells by default."""


class Panel(NamedTuple):
    """One scatter plot: coordinates and colours of the cells."""

    title: str
    xy: NDArray[np.floating]
    """(n_cells, 2); cells with NaN are not drawn."""
    column: pd.Series | None = None
    """Categories, numbers, or None: all cells grey."""
    colours: Mapping[Hashable, Any] = {}
    """Colour of each category."""
    legend: str = "auto"
    """Place of the names of groups: "on data", "right", "none", or "auto", by their number."""
    axis_names: tuple[str, str] = ("", "")
    limits: tuple[float | None, float | None] = (None, None)
    """Limits of the colour scale; None: those of the cells."""

    @property
    def groups(self) -> list[Hashable]:
        """The categories that have cells; none for numbers."""
        if self.column is None or not isinstance(self.column.dtype, pd.CategoricalDtype):
            return []
        used = self.column[np.isfinite(self.xy).all(axis=1)].unique()
        return [name for name in self.column.cat.categories if name in used]


def draw_maps(
    panels: Sequence[Panel], *, n_columns: int = 4, size: float | None = None, ax: Axes | None = None
) -> Figure:
    """Draw panels in rows of `n_columns`, with space for legends; a single one is larger, or drawn on `ax`."""
    panels = [panel._replace(legend=_legend_place(panel)) for panel in panels]
    n_columns = min(n_columns, len(panels))
    legends = sum(max(map(_legend_inches, panels[i::n_columns])) for i in range(n_columns))
    if len(panels) == 1:
        fig, axes = axes_for(ax, (6.0 + legends, 5.0), framed=True)
        grid = [axes]
    else:
        n_rows = -(-len(panels) // n_columns)
        fig, all_axes = grid_of_axes(n_rows, n_columns, (4.0 * n_columns + legends, 4.0 * n_rows))
        grid = list(all_axes.flat)
    for axes, panel in zip(grid, panels, strict=False):
        _draw_cells(axes, panel, size)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid, panels, strict=False):  # once the legends have changed the size of the axes
        if panel.legend == "on data":
            _name_groups(axes, panel)
    return fig


def _legend_place(panel: Panel) -> str:
    """Place of the names of groups, by their number where it is "auto"."""
    if panel.legend != "auto":
        return panel.legend
    n = len(panel.groups)
    return "on data" if n <= ON_DATA else "right" if n <= MAX_GROUPS else "none"


def _legend_inches(panel: Panel) -> float:
    """Width of the colour bar, or of the legend with as many columns as in scanpy."""
    names = [str(name) for name in panel.groups]
    if not names:
        return 0.7
    n_columns = 1 + (len(names) > 14) + (len(names) > 30)
    return n_columns * (text_inches(names) + 0.4) if panel.legend == "right" else 0.0


def _draw_cells(axes: Axes, panel: Panel, size: float | None) -> None:
    """Draw the cells of a panel with scanpy, cells without a value first."""
    import scanpy as sc

    # in random order, so that later groups do not hide earlier ones
    shown = np.random.default_rng(0).permutation(np.flatnonzero(np.isfinite(panel.xy).all(axis=1)))
    cells = AnnData(shape=(len(shown), 0), obsm={"map": panel.xy[shown]})
    bar = missing = False
    if panel.groups and panel.column is not None:
        column = panel.column.iloc[shown].cat.set_categories(panel.groups).cat.rename_categories(str)
        cells.uns["value_colors"] = [to_hex(panel.colours[name]) for name in panel.groups]
        cells.obs["value"] = column.array  # keeps the order of categories and colours
    elif panel.column is not None:
        numbers = pd.to_numeric(panel.column.iloc[shown].astype(object), errors="coerce").to_numpy(dtype=np.float64)
        known = np.isfinite(numbers)
        bar, missing = known.any(), not known.all()
        cells.obs["value"] = np.where(known, numbers, np.nan)
    sc.pl.embedding(
        cells,
        "map",
        color=None if panel.column is None else "value",
        title=panel.title,
        size=float(np.clip(48_000 / len(shown), 4, 72)) if size is None else size,
        na_color="0.5" if panel.column is None else MISSING,
        vmin=panel.limits[0],
        vmax=panel.limits[1],
        legend_loc="right margin" if panel.legend == "right" else None,
        legend_fontsize=8,
        colorbar_loc=None,
        ax=axes,
        show=False,
        save=False,  # overrides scanpy's settings
    )
    if bar:  # scanpy would draw it in pyplot's current figure
        axes.figure.colorbar(axes.collections[-1], ax=axes, pad=0.02, shrink=0.7)
    axes.set(xlabel=panel.axis_names[0] + "\ngrey: NA" * missing, ylabel=panel.axis_names[1])


def _name_groups(axes: Axes, panel: Panel) -> None:
    """Write the names of groups at their median cell, in darker colours that are legible on white."""
    shown = np.isfinite(panel.xy).all(axis=1)
    anchors = []
    for name in panel.groups:
        xy = panel.xy[shown & np.asarray(panel.column == name)]
        anchors.append(xy[np.abs(xy - np.median(xy, axis=0)).sum(axis=1).argmin()])
    colours = [tuple(0.7 * part for part in to_rgb(panel.colours[name])) for name in panel.groups]
    write_names(axes, panel.xy[shown], anchors, [str(name) for name in panel.groups], colours)
