"""What a training run logged: loss, validation by share of masked genes and by study, cells a second."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scdiva.pl._figure import draw_legend, grid_of_axes, plot

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TRAIN, _VALIDATION, _SPREAD = "#3b6ea5", "#d1495b", "0.75"
_MEASURE = "perplexity of masked genes"
_MOST = 20
"""Studies drawn, those predicted worst."""


@plot
def training(
    path: str | os.PathLike[str], *, return_fig: bool = False, save: str | os.PathLike[str] | None = None
) -> Figure | None:
    """Draw what a training run logged, also while it runs.

    Up to four panels: loss in training (each logged step faint, their running mean drawn out) and in validation;
    perplexity of masked genes (exp of the mean cross-entropy: among how many genes the network hesitates) at each share
    of masked genes; that of the 20 validation studies predicted worst, at the first validation (hollow) and the last
    (filled); cells a second. A panel of which nothing was logged is left out.

    Of a run that was resumed the parts are joined: what a later start logged replaces what an earlier one had logged
    from that step on.

    Parameters
    ----------
    path
        Folder of a run (the `out_dir` of :func:`scdiva.train.fit`, the `out` of ``scdiva pretrain``), or one
        `metrics.csv`, with its `validation.csv` beside it.
    %(return_fig)s
    %(save)s

    Returns
    -------
    Figure or None
        The figure if `return_fig`, else None.

    Raises
    ------
    FileNotFoundError
        If there is no log at `path`.
    ValueError
        If nothing was logged yet, the file is no log of a training run, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> sd.pl.training("run", save="training.png")  # doctest: +SKIP
    """
    files = _logs(Path(path))
    log = _joined(files)
    if log is None or "train/loss" not in log or not log["train/loss"].notna().any():
        raise ValueError(f"{os.fspath(path)!r} has no training loss yet: nothing was logged so far.")
    table = _joined([file.with_name("validation.csv") for file in files])

    drawn: list[Callable[[Axes], None]] = [lambda ax: _draw_loss(ax, log)]
    if table is not None:
        drawn.append(lambda ax: _draw_ratios(ax, table))
        if table["study"].notna().any():
            drawn.append(lambda ax: _draw_studies(ax, table))
    if "train/cells_per_second" in log:
        drawn.append(lambda ax: _draw_rate(ax, log))
    n_rows, n_columns = -(-len(drawn) // 2), min(2, len(drawn))
    fig, axes = grid_of_axes(n_rows, n_columns, (5.0 * n_columns, 3.4 * n_rows))
    for ax, draw in zip(axes.flat, drawn, strict=False):
        draw(ax)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes.flat[len(drawn) :]:
        ax.set_axis_off()
    return fig


def _logs(path: Path) -> list[Path]:
    """Find the logs of a run, in the order of its starts."""
    if path.is_file():
        return [path]
    found = [path / "metrics.csv"] if (path / "metrics.csv").is_file() else list(path.glob("log/version_*/metrics.csv"))
    if not found:
        raise FileNotFoundError(f"no log at {str(path)!r}: pass the folder of a run, or its metrics.csv.")
    return sorted(found, key=lambda file: int(re.sub(r"\D", "", file.parent.name) or 0))


def _joined(files: list[Path]) -> pd.DataFrame | None:
    """Read files that follow one another; None if none of them holds a line."""
    import pandas as pd

    whole: pd.DataFrame | None = None
    for file in files:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        text = text[: text.rfind("\n") + 1]  # a kill may leave the last line unfinished
        if not text.strip():
            continue
        part = pd.read_csv(io.StringIO(text), dtype={"study": "string"})
        if "step" not in part:
            raise ValueError(f"{str(file)!r} is no log of a training run: it has no column 'step'.")
        if not len(part):
            continue
        whole = part if whole is None else pd.concat([whole[whole["step"] < part["step"].min()], part])
    return None if whole is None else whole.reset_index(drop=True)


def _draw_loss(ax: Axes, log: pd.DataFrame) -> None:
    """Draw the loss in training, and in validation if there was one."""
    steps = log.dropna(subset="train/loss")
    x, y = steps["step"] + 1, steps["train/loss"]
    n = max(1, len(y) // 50)
    ax.plot(x, y, color=_TRAIN, alpha=0.3, linewidth=0.8)
    ax.plot(x, y.rolling(n, min_periods=1).mean(), color=_TRAIN, linewidth=1.4, label="training")
    if "val/loss" in log and log["val/loss"].notna().any():
        seen = log.dropna(subset="val/loss")
        ax.plot(seen["step"] + 1, seen["val/loss"], color=_VALIDATION, marker="o", markersize=3, label="validation")
    draw_legend(ax, "above", ncols=2)
    ax.set(xlabel="optimiser step", ylabel="loss")


def _draw_ratios(ax: Axes, table: pd.DataFrame) -> None:
    """Draw a line for each share of masked genes."""
    import matplotlib as mpl

    ratios = sorted(table["mask_ratio"].dropna().unique())
    colours = mpl.colormaps["viridis"](np.linspace(0, 0.85, len(ratios)))
    for ratio, colour in zip(ratios, colours, strict=True):
        of_ratio = table[table["mask_ratio"] == ratio]
        ax.plot(of_ratio["step"], of_ratio["perplexity"], color=colour, marker="o", markersize=3, label=f"{ratio:.0%}")
    draw_legend(ax, title="masked", title_fontsize=8)
    ax.set(xlabel="optimiser step", ylabel=_MEASURE, yscale="log")


def _draw_studies(ax: Axes, table: pd.DataFrame) -> None:
    """Draw the studies at the last validation, the worst on top, and where they began."""
    of_studies = table[table["study"].notna()]
    by_step = of_studies.pivot_table(index="study", columns="step", values="perplexity", aggfunc="last", dropna=False)
    last = by_step[by_step.columns.max()].dropna().sort_values()
    shown = last.iloc[-_MOST:]
    first = by_step.loc[shown.index, by_step.columns.min()]
    place = np.arange(len(shown))
    ax.hlines(place, np.fmin(first, shown), np.fmax(first, shown), color=_SPREAD, linewidth=1)
    ax.plot(first, place, "o", markersize=4, markerfacecolor="none", markeredgecolor="0.5")
    ax.plot(shown, place, "o", markersize=5, color=_VALIDATION)
    ax.set_yticks(place, [name if len(name) <= 28 else f"{name[:27]}…" for name in shown.index], fontsize=6)
    ax.set(xlabel=_MEASURE, ylim=(-0.7, len(shown) - 0.3))
    worst = f", the worst {len(shown)} of {len(last)} studies" if len(shown) < len(last) else ""
    ax.set_title(f"first validation (○) to last (●){worst}", fontsize=8)


def _draw_rate(ax: Axes, log: pd.DataFrame) -> None:
    """Draw cells a second."""
    steps = log.dropna(subset="train/cells_per_second")
    ax.plot(steps["step"] + 1, steps["train/cells_per_second"], color="0.3", linewidth=1)
    ax.set(xlabel="optimiser step", ylabel="cells per second")
    ax.set_ylim(bottom=0)
