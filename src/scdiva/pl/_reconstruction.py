"""Reconstructed cells against the cells as they were."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva._constants import TRUE_RANK, UNS
from scdiva._docs import with_shared_docs
from scdiva._settings import settings
from scdiva.data.reconstructed import Recovered, parameters_of, recovered_of
from scdiva.data.writing import check_anndata
from scdiva.pl._figure import check_file, finish

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VISIBLE, HIDDEN = "0.5", "#d1495b"
"""Colours of genes that the model was shown and of those it had to tell."""
_BINS = 61
_WITHIN = 0.995
"""Share of errors that histograms reach to at least, so that a few large ones leave the others their room."""


@with_shared_docs
def reconstruction(
    adata: AnnData,
    keys: Sequence[str] | str | None = None,
    *,
    max_points: int = 20_000,
    rng: int | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw reconstructed cells against the cells as they were, one column for each reconstruction.

    A point is a gene of a cell that the reconstructed cell has too, grey where the model was shown it, red where it was
    hidden. Above, its place in the ranking of the cell; in the middle, its log-normalised value; on the dashed lines
    both agree. Below, by how much the values of the hidden genes are off, predicted − true; where none was hidden,
    those of all genes, in grey. It reaches as far as 99.5% of them; the few beyond are in the outermost bars. The
    paper's figure of generation has these columns: nothing hidden, one step, 32 steps.

    In the corners stands Spearman's correlation, ties at their mean rank, within each cell and then the mean over the
    cells; over cells together it would be higher, since cells differ in how many genes they show. Cells with fewer than
    three points, or whose values are all the same, have none. A hidden gene that does not come back has no point: the
    share of those that do is written below, with the root mean squared error of their values.

    Parameters
    ----------
    adata
        Cells that `scdiva.tl.reconstruct` wrote to.
    keys
        Its `key_added`, one or several, in the order of the columns. None takes all that adata has, those with fewer
        hidden genes first, then those of fewer steps.
    max_points
        Points drawn in a panel; of more, so many are drawn at random. Numbers and histograms are of all.
    %(rng)s
    %(return_fig)s
    %(save)s

    Returns
    -------
    Figure or None
        The figure if `return_fig`, else None.

    Raises
    ------
    KeyError
        If there is no such reconstruction, or none at all.
    ValueError
        If `max_points` is below 1, `keys` is empty or repeats a key, no gene of a cell comes back, the layers do not
        belong together, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(12, 60)
    >>> sd.tl.reconstruct(adata, n_steps=1, key_added="one_step")
    >>> sd.tl.reconstruct(adata, n_steps=4, key_added="four_steps")
    >>> sd.pl.reconstruction(adata, ["one_step", "four_steps"], save="reconstruction.png")
    """
    check_file(save)
    check_anndata(adata)
    if max_points < 1:
        raise ValueError(f"max_points must be at least 1, got {max_points}.")
    chosen = _keys_of(adata, keys)
    titles = _titles(adata, chosen)
    genes = {key: _in_both(adata, key) for key in chosen}
    draw = np.random.default_rng(settings.seed if rng is None else int(rng))

    import matplotlib.pyplot as plt

    n = len(chosen)
    fig, axes = plt.subplots(
        3, n, figsize=(2.8 * n + 0.4, 8.8), layout="constrained", squeeze=False, sharex="row", sharey="row"
    )
    errors = {key: _errors(both) for key, (both, _) in genes.items()}
    reach = max(float(np.quantile(np.abs(error), _WITHIN)) for error, _ in errors.values()) or 1.0
    for column, key, title in zip(axes.T, chosen, titles, strict=True):
        both, recall = genes[key]
        shown = draw.permutation(len(both.cell))[:max_points]
        column[0].set_title(title, fontsize=10)
        _scatter(column[0], both.rank, both.reconstructed_rank, both, shown)
        _scatter(column[1], both.value, both.reconstructed_value, both, shown)
        _histogram(column[2], *errors[key], reach, recall)
    for row, low, top in (
        (axes[0], 0, max(max(both.rank.max(), both.reconstructed_rank.max()) for both, _ in genes.values())),
        (axes[1], None, None),
    ):
        _square(row, low, top)
    axes[0, 0].set_ylabel("reconstructed rank")
    axes[1, 0].set_ylabel("reconstructed value (log1p)")
    axes[2, 0].set_ylabel("share of values")
    for row, name in zip(axes, ("true rank", "true value (log1p)", "predicted − true value"), strict=True):
        for ax in row:
            ax.set_xlabel(name)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_box_aspect(1)
    _legend(axes[0, 0], any(both.hidden.any() for both, _ in genes.values()))
    return finish(fig, own=True, return_fig=return_fig, save=save)


def _keys_of(adata: AnnData, keys: Sequence[str] | str | None) -> list[str]:
    """Say which reconstructions are drawn, in which order."""
    if keys is not None:
        chosen = [keys] if isinstance(keys, str) else list(keys)
        if not chosen or len(set(chosen)) < len(chosen):
            raise ValueError(f"keys={keys!r} must name one reconstruction or several different ones.")
        return chosen
    ours = adata.uns.get(UNS, {})
    found = [key for key in (ours if isinstance(ours, Mapping) else {}) if f"{key}_{TRUE_RANK}" in adata.layers]
    if not found:
        raise KeyError("adata holds no reconstruction: call scdiva.tl.reconstruct(adata) first.")
    return sorted(found, key=lambda key: (*_settings_of(adata, key), key))


def _settings_of(adata: AnnData, key: str) -> tuple[float, int]:
    """Give the share of hidden genes and the number of steps."""
    note = parameters_of(adata, key)
    return float(note["mask_ratio"]), int(note["n_steps"])


def _titles(adata: AnnData, keys: list[str]) -> list[str]:
    """Say how each was made; with its key where that does not tell them apart."""
    titles = []
    for key in keys:
        ratio, steps = _settings_of(adata, key)
        titles.append(f"{ratio:.0%} hidden, {steps} step{'s' if steps != 1 else ''}" if ratio else "nothing hidden")
    return [f"{title}\n{key}" if titles.count(title) > 1 else title for key, title in zip(keys, titles, strict=True)]


def _in_both(adata: AnnData, key: str) -> tuple[Recovered, float]:
    """Give the genes that a cell and its reconstruction share, and which share of the hidden ones they are."""
    genes = recovered_of(adata, key)
    there = genes.reconstructed_rank > 0
    if not there.any():
        raise ValueError(f"no gene of any cell comes back in the reconstruction {key!r}: there is nothing to draw.")
    hidden = there[genes.hidden]
    return Recovered._make(part[there] for part in genes), float(hidden.mean()) if len(hidden) else np.nan


def _errors(both: Recovered) -> tuple[NDArray[np.float64], bool]:
    """Give the errors that are counted, and whether they are those of hidden genes."""
    error = both.reconstructed_value.astype(np.float64) - both.value
    return (error[both.hidden], True) if both.hidden.any() else (error, False)


def spearman_within(
    x: NDArray[np.generic], y: NDArray[np.generic], cell: NDArray[np.intp], *, at_least: int = 3
) -> float:
    """Give the mean over cells of Spearman's correlation within each, ties at their mean rank.

    Parameters
    ----------
    x, y
        What is compared, (n,).
    cell
        Number of the cell of each, (n,).
    at_least
        Values that a cell must have to count.

    Returns
    -------
    NaN if no cell has a correlation.
    """
    ranks = pd.DataFrame({"x": x, "y": y}).groupby(cell).rank().to_numpy()
    n = np.bincount(cell)
    cells = np.maximum(n, 1)
    # ranks within a cell have the mean (n + 1) / 2, with ties too
    x_, y_ = (ranks - ((cells + 1) / 2)[cell][:, None]).T
    xy, xx, yy = (np.bincount(cell, product) for product in (x_ * y_, x_ * x_, y_ * y_))
    known = (n >= at_least) & (xx > 0) & (yy > 0)
    return float((xy[known] / np.sqrt(xx[known] * yy[known])).mean()) if known.any() else np.nan


def _scatter(
    ax: Axes, x: NDArray[np.generic], y: NDArray[np.generic], both: Recovered, shown: NDArray[np.intp]
) -> None:
    """Draw points, hidden genes on top, and write the correlations into the corner."""
    look: dict[str, Any] = {"linewidths": 0, "rasterized": True, "s": float(np.clip(20_000 / len(shown), 2, 9))}
    for these, colour, order in ((~both.hidden[shown], VISIBLE, 2), (both.hidden[shown], HIDDEN, 3)):
        at = shown[these]
        ink = float(np.clip(1_500 / max(len(at), 1), 0.12, 0.8))  # many points are faint, so that their density shows
        ax.scatter(x[at], y[at], color=colour, alpha=ink, zorder=order, **look)
    ax.axline((0, 0), slope=1, color="0.3", linewidth=0.8, linestyle="--", zorder=4)
    groups = {"all": np.ones(len(both.cell), dtype=bool)}
    if both.hidden.any():
        groups["hidden"] = both.hidden
    each = {name: spearman_within(x[these], y[these], both.cell[these]) for name, these in groups.items()}
    lines = [f"ρ {value:.2f} ({name})" if np.isfinite(value) else f"no ρ ({name})" for name, value in each.items()]
    box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.0}
    ax.text(
        0.02, 0.98, "\n".join(lines), transform=ax.transAxes, ha="left", va="top", fontsize=8, zorder=6, bbox=box
    )  # fmt: skip


def _histogram(ax: Axes, error: NDArray[np.float64], hidden: bool, reach: float, recall: float) -> None:
    """Draw how errors are spread, and write how large they are."""
    bins = np.linspace(-reach, reach, _BINS + 1)
    share = np.histogram(np.clip(error, -reach, reach), bins)[0] / len(error)
    ax.stairs(share, bins, fill=True, color=HIDDEN if hidden else VISIBLE)
    ax.axvline(0, color="0.3", linewidth=0.8, linestyle="--", zorder=4)
    lines = [f"RMSE {np.sqrt(np.mean(error**2)):.2f}", f"{len(error):,} values"]
    if np.isfinite(recall):
        lines.append(f"{recall:.0%} of hidden\ngenes come back")
    ax.text(0.98, 0.98, "\n".join(lines), transform=ax.transAxes, ha="right", va="top", fontsize=8, zorder=6)


def _square(row: Sequence[Axes], low: float | None, top: float | None) -> None:
    """Give both directions of all panels of a row one scale."""
    ends = np.concatenate([[*ax.dataLim.intervalx, *ax.dataLim.intervaly] for ax in row])
    lower, upper = (ends.min() if low is None else low), (ends.max() if top is None else top)
    edge = 0.03 * (upper - lower) or 1.0
    for ax in row:
        ax.set(xlim=(lower - edge, upper + edge), ylim=(lower - edge, upper + edge))


def _legend(ax: Axes, hidden: bool) -> None:
    """Say what the colours are."""
    for name, colour in (("shown", VISIBLE), ("hidden", HIDDEN))[: 1 + hidden]:
        ax.scatter([], [], color=colour, s=16, linewidths=0, label=name)
    ax.legend(loc="lower right", fontsize=8, frameon=False, handletextpad=0.1, borderpad=0.1)
