"""Scatter plots of cells in two dimensions, coloured by groups or numbers."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from anndata import AnnData
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from numpy.typing import NDArray

from scdiva._checks import check_choices, check_least, refuse_absent
from scdiva.pl._figure import axes_for, grid_of_axes, text_inches, write_names
from scdiva.pl._groups import MAX_GROUPS, MISSING

ON_DATA = 14
"""Maximum number of groups whose names are written on the cells by default."""
_LIMITS = ("vmin", "vmax", "vcenter", "norm")
"""Arguments that may be a list with an entry for each panel."""


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
    """`legend_loc` of scanpy, "none", or "auto": by the number of groups."""
    axis_names: tuple[str, str] = ("", "")
    limits: tuple[float | None, float | None] = (None, None)
    """Limits of the colour scale; None: those of the cells."""
    unit: str = ""
    """Label of the colour bar."""

    @property
    def groups(self) -> list[Hashable]:
        """The categories that have cells; none for numbers."""
        if self.column is None or not isinstance(self.column.dtype, pd.CategoricalDtype):
            return []
        used = self.column[np.isfinite(self.xy).all(axis=1)].unique()
        return [name for name in self.column.cat.categories if name in used]


def draw_maps(panels: Sequence[Panel], *, ax: Axes | None = None, ncols: int = 4, **kwargs: Any) -> Figure:
    """Draw panels in rows of `ncols`, with space for legends; a single one is larger, or drawn on `ax`.

    Parameters
    ----------
    panels
        What to draw.
    ax
        The user's axes.
    ncols, **kwargs
        Arguments of scanpy's ``pl.embedding``; colours of groups are those of the panels.
    """
    n = len(panels)
    check_kwargs(n, len(panels[0].xy), ncols=ncols, **kwargs)
    if (title := kwargs.pop("title", None)) is not None:
        titles = [title] if isinstance(title, str) else title
        panels = [panel._replace(title=one) for panel, one in zip(panels, titles, strict=True)]
    if "legend_loc" in kwargs:
        panels = [panel._replace(legend=kwargs["legend_loc"] or "none") for panel in panels]
    panels = [panel._replace(legend=_legend_place(panel)) for panel in panels]
    if groups := [kwargs["groups"]] if isinstance(kwargs.get("groups"), str) else list(kwargs.get("groups") or ()):
        refuse_absent(groups, {str(name) for panel in panels for name in panel.groups}, "groups have no cell")
    spaces = {name: kwargs.pop(name) for name in ("hspace", "wspace") if name in kwargs}
    ncols = min(ncols, n)
    legends = sum(max(map(_legend_inches, panels[i::ncols])) for i in range(ncols))
    if n == 1:
        fig, axes = axes_for(ax, (6.0 + legends, 5.0), framed=True)
        grid = [axes]
    else:
        n_rows = -(-n // ncols)
        fig, all_axes = grid_of_axes(n_rows, ncols, (4.0 * ncols + legends, 4.0 * n_rows))
        grid = list(all_axes.flat)
        cast(Any, fig.get_layout_engine()).set(**spaces)
    for axes in grid[n:]:
        axes.remove()
    for i, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
        limits = {name: kwargs[name][i] for name in _LIMITS if isinstance(kwargs.get(name), list | tuple)}
        _draw_cells(axes, panel, **{**kwargs, **limits})
    for axes, panel in zip(grid, panels, strict=False):  # once the legends have changed the size of the axes
        if panel.legend == "on data":
            _name_groups(axes, panel, groups, **kwargs)
    return fig


def check_kwargs(n: int, n_cells: int, *, ncols: int = 4, legend_loc: str | None = None, **kwargs: Any) -> None:
    """Raise an error if an argument for scanpy is invalid for `n` panels of `n_cells` cells."""
    check_least(ncols=(ncols, 1))
    locations = ("auto", "on data", "right margin", "none", None, *Legend.codes)
    check_choices(legend_loc=(legend_loc, locations))
    listed = {name: value for name, value in kwargs.items() if name in _LIMITS and isinstance(value, list | tuple)}
    if (title := kwargs.get("title")) is not None:
        listed["title"] = [title] if isinstance(title, str) else title
    for name, values in listed.items():
        if len(values) != n:
            raise ValueError(f"{name} has {len(values)} entries for {n} panels: give one for each")
    for name, value in ((key, kwargs.get(key)) for key in _LIMITS):
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, str) and not re.fullmatch(r"p(100(\.0*)?|\d{1,2}(\.\d*)?)", one):
                raise ValueError(f"{name}={one!r} is neither a number nor a percentile from 'p0' to 'p100'.")
    if not isinstance(kwargs.get("marker", "."), str):
        raise TypeError(f"marker must be one of matplotlib's markers; got {kwargs['marker']!r:.80}.")
    size = kwargs.get("size")
    if size is not None:
        sizes = np.asarray(size)
        if sizes.dtype.kind not in "iuf" or sizes.shape not in ((), (n_cells,)) or not (sizes >= 0).all():
            raise ValueError(
                f"size must be a number of at least 0, or one for each of the {n_cells:,} cells; got {size!r:.80}."
            )


def _legend_place(panel: Panel) -> str:
    """Place of the names of groups, by their number where it is "auto"."""
    if panel.legend != "auto":
        return panel.legend
    n = len(panel.groups)
    return "on data" if n <= ON_DATA else "right margin" if n <= MAX_GROUPS else "none"


def _legend_inches(panel: Panel) -> float:
    """Width of the colour bar, or of the legend with as many columns as in scanpy."""
    names = [str(name) for name in panel.groups]
    if not names:
        return 0.7
    n_columns = 1 + (len(names) > 14) + (len(names) > 30)
    return n_columns * (text_inches(names) + 0.4) if panel.legend == "right margin" else 0.0


def _draw_cells(axes: Axes, panel: Panel, **kwargs: Any) -> None:
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
        is_finite = np.isfinite(numbers)
        bar, missing = is_finite.any(), not is_finite.all()
        cells.obs["value"] = np.where(is_finite, numbers, np.nan)
    bar_at = kwargs.pop("colorbar_loc", "right") if bar else None
    size = kwargs.pop("size", None)
    size = float(np.clip(48_000 / len(shown), 4, 72)) if size is None else size
    defaults: dict[str, Any] = {"vmin": panel.limits[0], "vmax": panel.limits[1]} if kwargs.get("norm") is None else {}
    defaults |= {"na_color": "0.5" if panel.column is None else MISSING, "legend_fontsize": 8}
    panel_kwargs = {"legend_loc": None if panel.legend in ("on data", "none") else panel.legend, "title": panel.title}
    sc.pl.embedding(
        cells,
        "map",
        color=None if panel.column is None else "value",
        size=float(np.clip(48_000 / len(shown), 4, 72))
        if size is None
        else size
        if np.ndim(size) == 0
        else np.asarray(size)[shown],
        colorbar_loc=None,
        ax=axes,
        show=False,
        save=False,  # overrides scanpy's settings
        **{**defaults, **kwargs, **panel_kwargs},
    )
    if bar_at is not None:  # scanpy would draw it in pyplot's current figure
        axes.figure.colorbar(axes.collections[-1], ax=axes, pad=0.02, shrink=0.7, location=bar_at, label=panel.unit)
    axes.set(xlabel=panel.axis_names[0] + "\ngrey: NA" * missing, ylabel=panel.axis_names[1])


def _name_groups(axes: Axes, panel: Panel, chosen: Sequence[str], **kwargs: Any) -> None:
    """Write the names of groups at their median cell, in darker colours that are legible on white."""
    shown = np.isfinite(panel.xy).all(axis=1)
    names = [name for name in panel.groups if not chosen or str(name) in chosen]
    anchors = []
    for name in names:
        xy = panel.xy[shown & np.asarray(panel.column == name)]
        anchors.append(xy[np.abs(xy - np.median(xy, axis=0)).sum(axis=1).argmin()])
    colours = [tuple(0.7 * part for part in to_rgb(panel.colours[name])) for name in names]
    fonts = {"fontsize": "legend_fontsize", "weight": "legend_fontweight", "outline": "legend_fontoutline"}
    font_kwargs = {name: kwargs[key] for name, key in fonts.items() if kwargs.get(key) is not None}
    write_names(axes, panel.xy[shown], anchors, [str(name) for name in names], colours, **font_kwargs)
