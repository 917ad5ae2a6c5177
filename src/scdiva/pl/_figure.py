"""Figures: checks, axes, legends, labels, heatmaps, files."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import matplotlib.pyplot as plt
import numpy as np
from anndata import AnnData
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike, NDArray

from scdiva._checks import check_arguments, or_nearest, refuse_unwritable
from scdiva._docs import with_shared_docs
from scdiva._files import output_path, whole_or_not
from scdiva.data.results import check_anndata

Names: TypeAlias = Sequence[str] | NDArray[np.object_]
Drawn: TypeAlias = Figure | Axes | list[Axes] | None
F = TypeVar("F", bound=Callable[..., Drawn])

_REACH, _STEP, _MARGIN = 150.0, 8.0, 4.0
"""Maximum distance of a label from its anchor, step of the search, and distance from the frame, in pixels."""
OF_SCANPY = (
    "add_outline", "alpha", "cmap", "color_map", "colorbar_loc", "edgecolors", "frameon", "groups", "hspace",
    "legend_fontoutline", "legend_fontsize", "legend_fontweight", "legend_loc", "linewidths", "marker", "na_color",
    "na_in_legend", "ncols", "norm", "outline_color", "outline_width", "palette", "rasterized", "scale_factor", "size",
    "sort_order", "title", "vcenter", "vmax", "vmin", "wspace",
)  # fmt: skip
"""Arguments that plots of cells pass to ``scanpy.pl.embedding``."""
_LEGENDS: dict[str, dict[str, Any]] = {
    "right": {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)},
    "above": {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2},
}


def plot(function: F) -> F:
    """Decorate a plot: check arguments and `save`, write and close the figure; restore adata if drawing fails.

    The function returns its figure; the decorated one returns it only if `return_fig`, or its axes if `show` is False.
    Shared descriptions are filled into the docstring.
    """
    signature = inspect.signature(function)
    cells = {name for name, parameter in signature.parameters.items() if "AnnData" in str(parameter.annotation)}

    @functools.wraps(function)
    def drawn(*args: Any, **kwargs: Any) -> Drawn:
        arguments = signature.bind(*args, **kwargs).arguments
        if unknown := [name for name in arguments.get("kwargs", {}) if name not in OF_SCANPY]:
            near = or_nearest(unknown[0], [*(signature.parameters.keys() - {"kwargs"}), *OF_SCANPY])
            raise TypeError(f"scdiva.pl.{function.__name__}() has no argument {unknown[0]!r}{near}.")
        for name in cells & arguments.keys():
            if arguments[name] is not None or signature.parameters[name].default is inspect.Parameter.empty:
                check_anndata(arguments[name])
        save, show, return_fig = (arguments.get(name) for name in ("save", "show", "return_fig"))
        _check_file(save)
        with contextlib.ExitStack() as on_error:
            on_error.callback(_close_others, plt.get_fignums())
            for name in cells & arguments.keys():
                if (adata := arguments[name]) is not None:
                    on_error.callback(_restore, adata, dict(adata.obsm), dict(adata.uns))
            fig = cast(Figure, function(*args, **kwargs))
            if save is not None:
                path = output_path(save, "save")
                path.parent.mkdir(parents=True, exist_ok=True)
                with whole_or_not(path) as new:
                    fig.savefig(new, dpi=200, bbox_inches="tight")
            on_error.pop_all()
        if show:
            plt.show()
        if save is not None and arguments.get("ax") is None and not return_fig and show is not False:
            plt.close(fig)
        if return_fig or show is not False:
            return fig if return_fig else None
        ax = arguments.get("ax")
        axes = [one for one in fig.axes if one.get_label() != "<colorbar>"] if ax is None else [ax]
        return axes if len(axes) > 1 else axes[0]

    return with_shared_docs(check_arguments(cast("F", drawn)))


def axes_for(ax: Axes | None, size: tuple[float, float], *, framed: bool = False) -> tuple[Figure, Axes]:
    """Figure and axes: the user's axes, or a new figure of `size` inches; without `framed`, no top and right spines."""
    axes: Axes = grid_of_axes(1, 1, size)[1][0, 0] if ax is None else ax
    if not framed:
        axes.spines[["top", "right"]].set_visible(False)
    return cast(Figure, axes.get_figure(root=True)), axes


def grid_of_axes(n_rows: int, n_columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, NDArray[Any]]:
    """New figure (`size` in inches) and its axes, (n_rows, n_columns)."""
    return plt.subplots(n_rows, n_columns, figsize=size, layout="constrained", squeeze=False, **options)


def draw_legend(axes: Axes, where: str = "right", **options: Any) -> Any:
    """Draw a legend next to the axes, ``"right"`` or ``"above"``, so that it does not cover data."""
    return axes.legend(**{"frameon": False, "fontsize": 8, "handletextpad": 0.4, **_LEGENDS[where], **options})


def text_inches(names: Names, fontsize: float = 8.0) -> float:
    """Approximate width of the longest name in inches."""
    return max(map(len, names), default=0) * fontsize * 0.0088


def write_names(
    axes: Axes,
    dots: ArrayLike,
    anchors: ArrayLike,
    names: Sequence[str],
    colours: Sequence[Any],
    *,
    fontsize: Any = 8.0,
    weight: Any = "bold",
    outline: float = 2.5,
    clear: float = 0.0,
) -> None:
    """Place each label close to its anchor without overlaps, connected by a thin line if it is moved.

    Parameters
    ----------
    axes
        Axes that are otherwise complete.
    dots
        Points that labels should not cover, (n, 2), in data coordinates.
    anchors
        Point of each label, (n_names, 2).
    names, colours
        Labels and their colours; the first ones are placed first.
    fontsize
        Font size in points, or as matplotlib takes it.
    weight, outline
        Font weight, and width of the white outline in points.
    clear
        Distance from dots in pixels, if every dot should be visible; 0: labels may cover a small share of the dots.
    """
    axes.autoscale_view()
    axes.figure.canvas.draw()  # applies constrained layout and aspect, which change pixels
    axes.autoscale(False)
    pixels, frame = axes.transData, axes.get_window_extent()
    at_dots = pixels.transform(np.asarray(dots))
    at_dots = at_dots[:: max(len(at_dots) // 3_000, 1)]  # a subsample of many dots
    turn, radii = np.arange(16) * np.pi / 8, np.arange(_STEP, _REACH, _STEP)
    rings = radii[:, None, None] * np.stack([np.cos(turn), np.sin(turn)], axis=1)
    steps = np.concatenate([np.zeros((1, 2)), rings.reshape(-1, 2)])
    share = np.linspace(0, 1, 16)[:, None, None]
    boxes: list[NDArray[np.float64]] = []
    lines = np.zeros((0, 2))
    for anchor, name, colour in zip(np.asarray(anchors, dtype=np.float64), names, colours, strict=True):
        text = axes.text(anchor[0], anchor[1], name, ha="center", va="center", color=colour, zorder=5)
        stroke = patheffects.withStroke(linewidth=outline, foreground="white")
        text.set(fontsize=fontsize, weight=weight, in_layout=False, path_effects=[stroke])
        half = np.array(text.get_window_extent().size) / 2 + 2
        low = np.array(frame.min) + half + _MARGIN
        start = pixels.transform(anchor)
        positions = np.clip(start + steps, low, np.maximum(np.array(frame.max) - half - _MARGIN, low))
        paths = start + share * (positions - start)
        hidden = (np.abs(positions[:, None] - at_dots) < half + clear).all(axis=2).sum(axis=1)
        cost = hidden * (0.5 if clear else 40 / len(at_dots)) + np.linalg.norm(steps, axis=1) / _REACH
        cost += 3 * (np.abs(positions[:, None] - lines) < half).all(axis=2).any(axis=1)
        for centre, size in boxes:
            cost += 10 * (np.abs(positions - centre) < half + size).all(axis=1)
            cost += 3 * (np.abs(paths - centre) < size).all(axis=2).any(axis=0)
        best = int(cost.round(6).argmin())  # rounded, for the same choice on every machine
        boxes.append(np.stack([positions[best], half]))
        text.set(position=pixels.inverted().transform(positions[best]))
        if (np.abs(positions[best] - start) > half).any():
            lines = np.concatenate([lines, paths[:, best]])
            edge = pixels.inverted().transform(np.clip(start, positions[best] - half, positions[best] + half))
            axes.plot([anchor[0], edge[0]], [anchor[1], edge[1]], color="0.3", linewidth=0.6, zorder=4)


def draw_heatmap(
    axes: Axes,
    values: NDArray[np.floating],
    rows: Names,
    columns: Names,
    label: str,
    *,
    framed: Collection[tuple[int, int]] = (),
    extend: str = "neither",
    **kwargs: Any,
) -> None:
    """Draw a heatmap of `values`, (n_rows, n_columns), with names and a colour bar; NaN are grey.

    Parameters
    ----------
    axes, values, rows, columns
        Axes, values, and names of rows and columns; more than 120 names are not drawn.
    label
        Label of the colour bar.
    framed
        Row and column of fields with a frame.
    extend
        As for matplotlib's ``colorbar``.
    **kwargs
        Passed to matplotlib's ``pcolormesh``.
    """
    axes.set_facecolor("0.88")
    image = axes.pcolormesh(np.ma.masked_invalid(values), **kwargs)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=7)
    for names, set_ticks, angle in ((columns, axes.set_xticks, 90), (rows, axes.set_yticks, 0)):
        shown = list(names) if len(names) <= 120 else []
        set_ticks(np.arange(len(shown)) + 0.5, shown, rotation=angle)
    for row, column in framed:
        axes.add_patch(Rectangle((column, row), 1, 1, fill=False, clip_on=False, edgecolor="0.2", zorder=3))
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.6, aspect=15, extend=extend, pad=0.02)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def similar_order(profiles: NDArray[np.floating], metric: str = "euclidean") -> NDArray[np.intp]:
    """Order of rows (n, n_features) by hierarchical clustering, with a `metric` of scipy's ``pdist``.

    Constant rows have no correlation and the distance 1 to all others.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import pdist

    if len(profiles) < 3:
        return np.arange(len(profiles))
    distance = np.clip(np.nan_to_num(pdist(profiles, metric), nan=1.0), 0, None)
    order: NDArray[np.intp] = leaves_list(linkage(distance, method="average", optimal_ordering=True)).astype(np.intp)
    return order if order[0] < order[-1] else order[::-1]


def _check_file(save: str | os.PathLike[str] | None) -> None:
    """Check the format and folder of a figure file before anything is computed."""
    if save is None:
        return
    path = output_path(save, "save")
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise ValueError(
            f"save={os.fspath(save)!r} must end in a picture format: one of .{', .'.join(sorted(formats))}"
        )
    refuse_unwritable(path)
    if path.is_dir():
        raise IsADirectoryError(f"save={os.fspath(save)!r} is a folder. Name a file, in it or beside it.")


def _close_others(numbers: list[int]) -> None:
    """Close the figures that a plot opened before it failed: all but those of these numbers."""
    for number in set(plt.get_fignums()) - set(numbers):
        plt.close(number)


def _restore(adata: AnnData, obsm: dict[str, Any], uns: dict[str, Any]) -> None:
    """Remove UMAPs and colours that a plot wrote before it failed."""
    if adata.is_view:  # writing to a view would make it a copy
        return
    for key in set(adata.obsm) - obsm.keys():
        del adata.obsm[key]
    for key, value in obsm.items():
        if adata.obsm[key] is not value:
            adata.obsm[key] = value
    for key in set(adata.uns) - uns.keys():
        del adata.uns[key]
    adata.uns.update(uns)
