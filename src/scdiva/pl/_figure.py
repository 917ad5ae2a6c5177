"""What every plot does before and after it draws: checks, axes, legends, files."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from scdiva._checks import refuse_unwritable
from scdiva._docs import with_shared_docs
from scdiva.data.writing import check_anndata

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., "Figure | None"])

_LEGENDS: dict[str, dict[str, Any]] = {
    "right": {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)},
    "above": {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2},
    "below": {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0)},
}


def plot(function: F) -> F:
    """Make a public plot of a function that draws and gives its figure, whatever `return_fig` and `save` are.

    Before it draws, what is declared as AnnData and is none is refused, and so is a file that can't be written. Then
    the figure is written to `save`, closed if nobody else will see it, and returned if `return_fig`. Shared
    descriptions are filled into the docstring.
    """
    signature = inspect.signature(function)
    cells = {name for name, parameter in signature.parameters.items() if "AnnData" in str(parameter.annotation)}

    @functools.wraps(with_shared_docs(function))
    def drawn(*args: Any, **kwargs: Any) -> Figure | None:
        given = signature.bind(*args, **kwargs).arguments
        for name in cells & given.keys():
            if given[name] is not None or signature.parameters[name].default is inspect.Parameter.empty:
                check_anndata(given[name])
        check_file(given.get("save"))
        fig = cast("Figure", function(*args, **kwargs))
        own = given.get("ax") is None
        return finish(fig, own=own, return_fig=given.get("return_fig", False), save=given.get("save"))

    return cast("F", drawn)


def axes_for(ax: Axes | None, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Give the axes to draw on, the user's or those of a new figure (`size` in inches), and their figure."""
    if ax is not None:
        return cast("Figure", ax.get_figure(root=True)), ax
    fig, axes = grid_of_axes(1, 1, size)
    return fig, axes[0, 0]


def grid_of_axes(n_rows: int, n_columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, NDArray[Any]]:
    """Give a new figure (`size` in inches) and its axes, (n_rows, n_columns)."""
    import matplotlib.pyplot as plt

    return plt.subplots(n_rows, n_columns, figsize=size, layout="constrained", squeeze=False, **options)


def draw_legend(axes: Axes, where: str = "right", **options: Any) -> Any:
    """Draw a legend beside the axes, ``"right"``, ``"above"`` or ``"below"``, so that it never covers data."""
    return axes.legend(**{"frameon": False, "fontsize": 8, "handletextpad": 0.4, **_LEGENDS[where], **options})


def check_file(save: str | os.PathLike[str] | None) -> None:
    """Refuse a file that names no picture format, or can't be written, before anything is computed."""
    from matplotlib.backend_bases import FigureCanvasBase

    if save is None:
        return
    formats = FigureCanvasBase.get_supported_filetypes()
    if Path(save).suffix.lower().removeprefix(".") not in formats:
        raise ValueError(
            f"save={os.fspath(save)!r} must end in a picture format: one of .{', .'.join(sorted(formats))}"
        )
    refuse_unwritable(Path(save))
    if Path(save).is_dir():
        raise IsADirectoryError(f"save={os.fspath(save)!r} is a folder. Name a file, in it or beside it.")


def finish(fig: Figure, *, own: bool, return_fig: bool, save: str | os.PathLike[str] | None) -> Figure | None:
    """Write the figure if asked to, and close it where nobody else will see it.

    A figure is written beside its file and renamed, so that a broken-off call leaves the old picture.
    """
    if save is not None:
        path = Path(save)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.stem}.part{path.suffix}")
        try:
            fig.savefig(part, dpi=200, bbox_inches="tight")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        if own and not return_fig:
            import matplotlib.pyplot as plt

            plt.close(fig)
    return fig if return_fig else None
