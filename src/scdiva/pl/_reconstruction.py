"""Reconstructed cells against the cells as they were, and the genes that several data sets share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva._checks import from_extra, warn
from scdiva._constants import TRUE_RANK, UNS
from scdiva._settings import settings
from scdiva.get._reconstruction import Recovered, parameters_of, recovered_of
from scdiva.pl._figure import axes_for, draw_legend, grid_of_axes, plot
from scdiva.pl._groups import distinct_colours

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_VISIBLE, _MASKED = "0.5", "#d1495b"
"""Colours of genes that the model saw and of those that it predicted."""
_BINS = 61
_WITHIN = 0.995
"""Share of errors that histograms reach to at least, so that a few large ones leave the others their room."""
_CIRCLES = 3
"""Sets up to which circles can show every overlap in its size."""
_MAX_SETS, _MAX_OVERLAPS = 12, 40
_NEEDS = "Plots of overlaps need matplotlib-venn and marsilea"


@plot
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

    A point is a gene of a cell that the reconstructed cell has too, grey where it was visible to the model, red where
    it was masked. Above, its rank in the cell; in the middle, its log-normalised value; on the dashed lines both agree.
    Below, the errors of the values of masked genes, predicted − true; where none was masked, those of all genes, in
    grey. It reaches as far as 99.5% of them; the few beyond are in the outermost bars. The paper's figure of generation
    has these columns: nothing masked, one step, 32 steps.

    In the corners stands Spearman's correlation, ties at their mean rank, within each cell and then the mean over the
    cells; over cells together it would be higher, since cells differ in their number of genes. Cells with fewer than
    three points, or whose values are all the same, have none. A masked gene that is not recovered has no point: the
    share of those that are is written below, with the root mean squared error of their values.

    Parameters
    ----------
    adata
        Cells that `scdiva.tl.reconstruct` wrote to.
    keys
        Its `key_added`, one or several, in the order of the columns. None takes all that adata has, those with fewer
        masked genes first, then those of fewer steps.
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
        If `max_points` is below 1, `keys` is empty or repeats a key, no gene of a cell is recovered, the layers do not
        belong together, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(12, 60)
    >>> sd.tl.reconstruct(adata, n_steps=1, key_added="one_step")
    >>> sd.tl.reconstruct(adata, n_steps=4, key_added="four_steps")
    >>> sd.pl.reconstruction(adata, ["one_step", "four_steps"], save="reconstruction.png")
    """
    if max_points < 1:
        raise ValueError(f"max_points must be at least 1, got {max_points}.")
    chosen = _keys_of(adata, keys)
    titles = _titles(adata, chosen)
    genes = {key: _in_both(adata, key) for key in chosen}
    errors = {key: _errors(both) for key, (both, _) in genes.items()}
    reach = max(float(np.quantile(np.abs(error), _WITHIN)) for error, _ in errors.values()) or 1.0
    draw = np.random.default_rng(settings.seed if rng is None else int(rng))

    n = len(chosen)
    fig, axes = grid_of_axes(3, n, (2.8 * n + 1.2, 8.8), sharex="row", sharey="row")
    for column, key, title in zip(axes.T, chosen, titles, strict=True):
        both, recall = genes[key]
        shown = draw.permutation(len(both.cell))[:max_points]
        column[0].set_title(title, fontsize=10)
        _scatter(column[0], both.rank, both.reconstructed_rank, both, shown)
        _scatter(column[1], both.value, both.reconstructed_value, both, shown)
        _histogram(column[2], *errors[key], reach, recall)
    _square(axes[0], 0, max(max(both.rank.max(), both.reconstructed_rank.max()) for both, _ in genes.values()))
    _square(axes[1])
    axes[0, 0].set_ylabel("reconstructed rank")
    axes[1, 0].set_ylabel("reconstructed value (log1p)")
    axes[2, 0].set_ylabel("share of values")
    for row, name in zip(axes, ("true rank", "true value (log1p)", "predicted − true value"), strict=True):
        for ax in row:
            ax.set_xlabel(name)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_box_aspect(1)
    masked = any(both.hidden.any() for both, _ in genes.values())
    for name, colour in (("visible", _VISIBLE), ("masked", _MASKED))[: 1 + masked]:
        axes[0, -1].scatter([], [], color=colour, s=16, linewidths=0, label=name)
    draw_legend(axes[0, -1])
    return fig


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
    """Give the share of masked genes and the number of steps."""
    note = parameters_of(adata, key)
    return float(note["mask_ratio"]), int(note["n_steps"])


def _titles(adata: AnnData, keys: list[str]) -> list[str]:
    """Say how each was made; with its key where that does not tell them apart."""
    titles = []
    for key in keys:
        ratio, steps = _settings_of(adata, key)
        titles.append(f"{ratio:.0%} masked, {steps} step{'s' if steps != 1 else ''}" if ratio else "nothing masked")
    return [f"{title}\n{key}" if titles.count(title) > 1 else title for key, title in zip(keys, titles, strict=True)]


def _in_both(adata: AnnData, key: str) -> tuple[Recovered, float]:
    """Give the genes that a cell and its reconstruction share, and which share of the masked ones they are."""
    genes = recovered_of(adata, key)
    there = genes.reconstructed_rank > 0
    if not there.any():
        raise ValueError(f"no gene of any cell is recovered in the reconstruction {key!r}: there is nothing to draw.")
    hidden = there[genes.hidden]
    return Recovered._make(part[there] for part in genes), float(hidden.mean()) if len(hidden) else np.nan


def _errors(both: Recovered) -> tuple[NDArray[np.float64], bool]:
    """Give the errors that are counted, and whether they are those of masked genes."""
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
    ranks = pd.DataFrame({"x": x, "y": y}).groupby(cell).rank()
    a, b = (ranks - ranks.groupby(cell).transform("mean")).to_numpy(dtype=np.float64).T
    xy, xx, yy = (np.bincount(cell, product) for product in (a * b, a * a, b * b))
    known = (np.bincount(cell) >= at_least) & (xx > 0) & (yy > 0)
    return float((xy[known] / np.sqrt(xx[known] * yy[known])).mean()) if known.any() else np.nan


def _scatter(
    ax: Axes, x: NDArray[np.generic], y: NDArray[np.generic], both: Recovered, shown: NDArray[np.intp]
) -> None:
    """Draw points, masked genes on top, and write the correlations into the corner."""
    look: dict[str, Any] = {"linewidths": 0, "rasterized": True, "s": float(np.clip(20_000 / len(shown), 2, 9))}
    for these, colour, order in ((~both.hidden[shown], _VISIBLE, 2), (both.hidden[shown], _MASKED, 3)):
        at = shown[these]
        ink = float(np.clip(1_500 / max(len(at), 1), 0.12, 0.8))  # many points are faint, so that their density shows
        ax.scatter(x[at], y[at], color=colour, alpha=ink, zorder=order, **look)
    ax.axline((0, 0), slope=1, color="0.3", linewidth=0.8, linestyle="--", zorder=4)
    groups = {"all": np.ones(len(both.cell), dtype=bool)}
    if both.hidden.any():
        groups["masked"] = both.hidden
    each = {name: spearman_within(x[these], y[these], both.cell[these]) for name, these in groups.items()}
    lines = [f"ρ {value:.2f} ({name})" if np.isfinite(value) else f"no ρ ({name})" for name, value in each.items()]
    box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.0}
    ax.text(
        0.02, 0.98, "\n".join(lines), transform=ax.transAxes, ha="left", va="top", fontsize=8, zorder=6, bbox=box
    )  # fmt: skip


def _histogram(ax: Axes, error: NDArray[np.float64], masked: bool, reach: float, recall: float) -> None:
    """Draw how errors are spread, and write how large they are."""
    bins = np.linspace(-reach, reach, _BINS + 1)
    share = np.histogram(np.clip(error, -reach, reach), bins)[0] / len(error)
    ax.stairs(share, bins, fill=True, color=_MASKED if masked else _VISIBLE)
    ax.axvline(0, color="0.3", linewidth=0.8, linestyle="--", zorder=4)
    lines = [f"RMSE {np.sqrt(np.mean(error**2)):.2f}", f"{len(error):,} values"]
    if np.isfinite(recall):
        lines.append(f"{recall:.0%} of masked\ngenes recovered")
    ax.text(0.98, 0.98, "\n".join(lines), transform=ax.transAxes, ha="right", va="top", fontsize=8, zorder=6)


def _square(row: Sequence[Axes], low: float | None = None, top: float | None = None) -> None:
    """Give both directions of all panels of a row one scale."""
    ends = np.concatenate([[*ax.dataLim.intervalx, *ax.dataLim.intervaly] for ax in row])
    lower, upper = (ends.min() if low is None else low), (ends.max() if top is None else top)
    edge = 0.03 * (upper - lower) or 1.0
    for ax in row:
        ax.set(xlim=(lower - edge, upper + edge), ylim=(lower - edge, upper + edge))


@plot
def gene_overlap(
    gene_sets: Mapping[str, Iterable[str]],
    *,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw how many genes sets of genes share, such as those well reconstructed in each of several data sets.

    Two or three sets are drawn as circles (Venn); areas follow the numbers as far as circles can, so read the numbers.
    From four sets on (UpSet [1]_) a column is an overlap: the genes that are in the sets with a dot and in no other.
    The largest come first, at most 40 of them, or all of the largest size where more are of that; bars at the side are
    the sets. In both every gene is counted once.

    Parameters
    ----------
    gene_sets
        Names of genes of each set, by the name of the set; a gene that a set names twice counts once. See
        `scdiva.get.reconstructed_genes`. Sets of different data must use the same gene names.
    ax
        The matplotlib axes to draw on, for two or three sets; None makes a figure.
    %(return_fig)s
    %(save)s

    Returns
    -------
    Figure or None
        The figure if `return_fig`, else None.

    Raises
    ------
    TypeError
        If `gene_sets` is no mapping, a set is one string, or a gene is no string.
    ValueError
        If there are fewer than 2 sets or more than 12, a set is empty, `ax` is given for more than three sets, or
        `save` ends in no picture format.
    ImportError
        If matplotlib-venn or marsilea is not installed.

    Warns
    -----
    UserWarning
        If no two sets share a gene, since they may name genes differently; or if overlaps are left out.

    References
    ----------
    .. [1] Lex, Gehlenborg, Strobelt, Vuillemot & Pfister, UpSet: visualization of intersecting sets, IEEE Transactions
       on Visualization and Computer Graphics 2014.

    Examples
    --------
    >>> import scdiva as sd
    >>> found = {"first": ["CD3D", "LYZ", "NKG7"], "second": ["LYZ", "NKG7", "MS4A1"]}
    >>> sd.pl.gene_overlap(found, save="overlap.png")
    """
    sets = _checked(gene_sets)
    if len(sets) <= _CIRCLES:
        return _venn(sets, ax)
    if ax is not None:
        raise ValueError(f"{len(sets)} sets take a figure of their own: leave ax out, or draw at most {_CIRCLES} sets.")
    return _upset(sets)


def _checked(gene_sets: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Give the sets as sets, once they can be compared."""
    if not isinstance(gene_sets, Mapping):
        raise TypeError(f"gene_sets must be a mapping, {{name: genes}}, got {type(gene_sets).__name__}.")
    sets: dict[str, set[str]] = {}
    for name, genes in gene_sets.items():
        if isinstance(genes, str):
            raise TypeError(f"gene_sets[{name!r}] is one string, {genes!r}: give a list of gene names.")
        listed = list(genes)
        strange = [gene for gene in listed if not isinstance(gene, str)]
        if strange:
            raise TypeError(
                f"gene_sets[{name!r}] holds {len(strange):,} entries that are no gene names (first: {strange[0]!r}): "
                "give names, such as adata.var_names[chosen]."
            )
        if not listed:
            raise ValueError(f"gene_sets[{name!r}] is empty: leave it out.")
        sets[str(name)] = set(listed)
    if not 2 <= len(sets) <= _MAX_SETS:
        raise ValueError(f"gene_sets has {len(sets)} sets: give 2 to {_MAX_SETS} of different names.")
    if sum(map(len, sets.values())) == len(set().union(*sets.values())):
        first, second = list(sets)[:2]
        warn(
            f"no two sets share a gene (the first of {first!r} is {min(sets[first])!r}, of {second!r} "
            f"{min(sets[second])!r}): do they use the same gene names?"
        )
    return sets


def _venn(sets: dict[str, set[str]], ax: Axes | None) -> Figure:
    """Draw two or three circles."""
    venn = from_extra("matplotlib_venn", "plot", _NEEDS)
    fig, axes = axes_for(ax, (4.2, 3.8))
    names = [f"{name}\n({len(genes):,})" for name, genes in sets.items()]
    draw = venn.venn2 if len(sets) == 2 else venn.venn3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # circles that cannot show an overlap: its number is written all the same
        drawn = draw(
            tuple(sets.values()),
            names,
            set_colors=distinct_colours(len(sets)),
            alpha=0.55,
            ax=axes,
            subset_label_formatter=lambda n: f"{n:,}",
        )
    for text in [*drawn.set_labels, *drawn.subset_labels]:
        if text is not None:
            text.set_fontsize(9)
    return fig


def _upset(sets: dict[str, set[str]]) -> Figure:
    """Draw a column for each overlap."""
    from_extra("marsilea", "plot", _NEEDS)
    import matplotlib.pyplot as plt
    from marsilea.plotter import Numbers
    from marsilea.upset import Upset, UpsetData

    genes = sorted(set().union(*sets.values()))  # in an order of their own, sets would give ties another one each run
    member = np.array([[gene in these for these in sets.values()] for gene in genes], dtype=int)
    data = UpsetData(member, sets_names=list(sets), items=genes)
    sizes = np.sort(data.cardinality().to_numpy())[::-1]
    least = 1
    if len(sizes) > _MAX_OVERLAPS:
        least = min(sizes[_MAX_OVERLAPS] + 1, sizes[0])
    if sizes[-1] < least:
        warn(f"{(sizes < least).sum():,} of {len(sizes):,} overlaps, of fewer than {least:,} genes, are not drawn")
    # The largest first, in spite of the minus. Bars are added here, as those of Upset leave no way to their axes.
    upset = Upset(
        data,
        color="0.25",
        sort_subsets="-cardinality",
        min_cardinality=int(least),
        add_intersections=False,
        add_sets_size=False,
    )
    bars: dict[str, Any] = {"color": "0.25", "fmt": "{:,.0f}", "props": {"fontsize": 7}}
    upset.add_top(Numbers(upset.sets_table["cardinality"], **bars), size=1.2, pad=0.1, name="overlaps")
    upset.add_left(Numbers(upset.sets_size, **bars), size=1.0, pad=0.1, name="sets")
    upset.set_margin(0.4)  # inches, in which the axes' names stand
    fig = plt.figure()
    upset.render(fig)
    upset.get_ax("overlaps").set_ylabel("genes of the overlap", fontsize=8)
    upset.get_ax("sets").set_xlabel("genes of the set", fontsize=8)
    for name in ("overlaps", "sets"):
        upset.get_ax(name).tick_params(labelsize=7)
    return fig
