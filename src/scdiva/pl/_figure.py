"""What every plot does before and after it draws."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from scdiva._outputs import refuse_unwritable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def axes_for(ax: Axes | None, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Give the axes to draw on, the user's or those of a new figure (`size` in inches), and their figure."""
    if ax is not None:
        return ax.get_figure(root=True), ax  # type: ignore[return-value]
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")


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
