"""Plots of reconstructed cells, and overlaps of gene sets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from anndata import AnnData
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from scdiva._checks import warn
from scdiva._constants import TRUE_RANK, UNS
from scdiva.get._frames import Recovered, parameters_of, recovered_of
from scdiva.pl._figure import axes_for, draw_legend, grid_of_axes, plot

_VISIBLE, _MASKED = "0.5", "#d1495b"
"""Colours of visible and of masked genes."""
_MOST_POINTS = 20_000
"""Maximum number of points in a panel; more are subsampled."""
_MAX_SETS, _MAX_OVERLAPS = 12, 40


@plot
def reconstruction(
    adata: AnnData,
    keys: Sequence[str] | str | None = None,
    *,
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Reconstructed cells compared with the input cells, one column for each reconstruction.

    Each point is a gene of a cell that the reconstructed cell also has: grey if it was visible, red if it was masked;
    of more than 20,000 points, a random subset is drawn. Top: ranks; middle: log-normalised values; dashed lines:
    identity. Bottom: errors of the values of masked genes, predicted − true, or in grey of all genes if none was
    masked; the range covers 99.5% of the errors, and the outermost bars contain the rest. For the columns of the
    paper's figure, call `scdiva.tl.reconstruct(adata, model, mask_ratio=[0, 0.3, 0.3], n_steps=[1, 1, 32])`.

    Titles show the mean over cells of Spearman's correlation within each cell; a correlation over all cells would be
    higher, because cells differ in their number of genes. Cells with fewer than three points or constant values are
    ignored. Masked genes that are not recovered have no point; the bottom panel shows the fraction of recovered genes
    and the root-mean-square error of their values.

    Parameters
    ----------
    adata
        Data with reconstructions by `scdiva.tl.reconstruct`.
    keys
        `key_added` of one or several reconstructions, in the order of the columns. None: all, sorted by mask ratio and
        number of steps.
    %(show)s
    %(return_fig)s
    %(save)s

    Returns
    -------
    Figure, Axes, list of Axes or None
        The figure if `return_fig`, else the axes if ``show=False`` (a list if there are several panels), else None.

    Raises
    ------
    KeyError
        If there is no such reconstruction, or none at all.
    ValueError
        If `keys` is empty or repeats a key, no gene of a cell is recovered, the layers do not match, or `save`
        has no suffix of an image format.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(12, 60)
    >>> sd.tl.reconstruct(adata, n_steps=1, key_added="one_step")
    >>> sd.tl.reconstruct(adata, n_steps=4, key_added="four_steps")
    >>> sd.pl.reconstruction(adata, ["one_step", "four_steps"], save="reconstruction.png")
    """
    chosen = _keys_of(adata, keys)
    genes = {key: _in_both(adata, key) for key in chosen}
    n = len(chosen)
    errors = {key: _errors(recovered) for key, (recovered, _) in genes.items()}
    # not dominated by a few large errors
    reach = max(float(np.quantile(np.abs(error), 0.995)) for error in errors.values()) or 1.0
    fig, axes = grid_of_axes(3, n, (2.8 * n + 1.2, 9.4), sharex="row", sharey="row")
    for column, key in zip(axes.T, chosen, strict=True):
        recovered, recall = genes[key]
        ratio, steps = _settings_of(adata, key)
        title = f"{ratio:.0%} masked, {steps} step{'s' * (steps != 1)}" if ratio else "nothing masked"
        title += f"\n{key}\n" if n > 1 else "\n"
        _scatter(column[0], recovered.rank, recovered.reconstructed_rank, recovered, "rank", title)
        _scatter(column[1], recovered.value, recovered.reconstructed_value, recovered, "value (log1p)")
        _histogram(column[2], errors[key], reach, recall)
    for first in axes[:2, 0]:  # one scale for both axes and all panels of a row
        ends = [*first.get_xlim(), *first.get_ylim()]
        first.set(xlim=(min(ends), max(ends)), ylim=(min(ends), max(ends)))
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_box_aspect(1)
    draw_legend(axes[0, -1], markerscale=2)
    return fig


def _keys_of(adata: AnnData, keys: Sequence[str] | str | None) -> list[str]:
    """Keys of the reconstructions, in the order of the columns."""
    if keys is not None:
        chosen = [keys] if isinstance(keys, str) else list(keys)
        if not chosen or len(set(chosen)) < len(chosen):
            raise ValueError(f"keys={keys!r} must name one reconstruction or several different ones.")
        return chosen
    uns = adata.uns.get(UNS, {})
    stored = [key for key in (uns if isinstance(uns, Mapping) else {}) if f"{key}_{TRUE_RANK}" in adata.layers]
    if not stored:
        raise KeyError("adata holds no reconstruction: call scdiva.tl.reconstruct(adata) first.")
    return sorted(stored, key=lambda key: (*_settings_of(adata, key), key))


def _settings_of(adata: AnnData, key: str) -> tuple[float, int]:
    """Mask ratio and number of steps."""
    note = parameters_of(adata, key)
    return float(note["mask_ratio"]), int(note["n_steps"])


def _in_both(adata: AnnData, key: str) -> tuple[Recovered, float]:
    """Genes that are both in a cell and in its reconstruction, and the fraction of masked genes among these."""
    genes = recovered_of(adata, key)
    in_both = genes.reconstructed_rank > 0
    if not in_both.any():
        raise ValueError(f"no gene of any cell is recovered in the reconstruction {key!r}: there is nothing to draw.")
    masked = in_both[genes.masked]
    return Recovered._make(part[in_both] for part in genes), float(masked.mean()) if len(masked) else np.nan


def spearman_within(x: NDArray[np.generic], y: NDArray[np.generic], cell: NDArray[np.intp]) -> float:
    """Mean over cells of Spearman's correlation within each cell with three or more values; NaN if there is none."""
    ranks = pd.DataFrame({"x": x, "y": y}).groupby(cell).rank()
    a, b = (ranks - ranks.groupby(cell).transform("mean")).to_numpy(dtype=np.float64).T
    xy, xx, yy = (np.bincount(cell, product) for product in (a * b, a * a, b * b))
    defined = (np.bincount(cell) >= 3) & (xx > 0) & (yy > 0)
    return float((xy[defined] / np.sqrt(xx[defined] * yy[defined])).mean()) if defined.any() else np.nan


def _scatter(
    ax: Axes, x: NDArray[np.generic], y: NDArray[np.generic], recovered: Recovered, what: str, title: str = ""
) -> None:
    """Scatter plot with masked genes on top and the correlations in the title."""
    shown = np.random.default_rng(0).permutation(len(x))[:_MOST_POINTS]
    texts = [f"ρ {spearman_within(x, y, recovered.cell):.2f} (all)"]
    masked = recovered.masked
    for name, subset, colour in (("visible", ~masked, _VISIBLE), ("masked", masked, _MASKED)):
        at = shown[subset[shown]]
        if len(at):
            ink = float(np.clip(1_500 / len(at), 0.12, 0.8))  # transparent, so that the density is visible
            size = float(np.clip(20_000 / len(shown), 2, 9))
            ax.scatter(x[at], y[at], s=size, color=colour, alpha=ink, linewidths=0, rasterized=True, label=name)
    if masked.any():
        texts.append(f"{spearman_within(x[masked], y[masked], recovered.cell[masked]):.2f} (masked)")
    ax.axline((0, 0), slope=1, color="0.3", linewidth=0.8, linestyle="--", zorder=4)
    ax.set(xlabel=f"true {what}", ylabel=f"reconstructed {what}")
    ax.set_title(title + ", ".join(texts), fontsize=9)


def _errors(recovered: Recovered) -> NDArray[np.float64]:
    """Errors of the values of masked genes, or of all genes if none was masked."""
    error = recovered.reconstructed_value.astype(np.float64) - recovered.value
    return error[recovered.masked] if recovered.masked.any() else error


def _histogram(ax: Axes, error: NDArray[np.float64], reach: float, recall: float) -> None:
    """Histogram of errors with the RMSE and the recall."""
    share = np.full(len(error), 1 / len(error))
    colour = _MASKED if recall > 0 else _VISIBLE
    ax.hist(np.clip(error, -reach, reach), 61, range=(-reach, reach), weights=share, color=colour)
    ax.axvline(0, color="0.3", linewidth=0.8, linestyle="--")
    text = f"RMSE {np.sqrt(np.mean(error**2)):.2f}, {len(error):,} values"
    ax.set_title(text + (f"\n{recall:.0%} of masked genes recovered" if np.isfinite(recall) else ""), fontsize=9)
    ax.set(xlabel="predicted − true value", ylabel="share of values")


@plot
def gene_overlap(
    gene_sets: Mapping[str, Iterable[str]],
    *,
    ax: Axes | None = None,
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """UpSet plot of the overlaps of gene sets, such as well-reconstructed genes of several datasets.

    Each column [1]_ is an intersection: the genes that are in the sets with a dark dot and in no other, so every gene
    is counted once. The 40 largest intersections are shown.

    Parameters
    ----------
    gene_sets
        Names of the genes of each set, by the name of the set, such as results of `scdiva.get.reconstructed_genes`. All
        sets must use the same type of gene names.
    %(ax)s
    %(show)s
    %(return_fig)s
    %(save)s

    Returns
    -------
    Figure, Axes, list of Axes or None
        The figure if `return_fig`, else the axes if ``show=False`` (a list if there are several panels), else None.

    Raises
    ------
    TypeError
        If `gene_sets` is not a mapping, a set is one string, or a gene is not a string.
    ValueError
        If there are fewer than 2 sets or more than 12, a set is empty, or `save` has no suffix of an image
        format.

    Warns
    -----
    UserWarning
        If no two sets share a gene, which suggests different gene names, or if overlaps are not shown.

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
    genes = sorted(set().union(*sets.values()))
    member = pd.DataFrame({name: [gene in gene_set for gene in genes] for name, gene_set in sets.items()})
    sizes = member.groupby(list(member)).size().sort_values(ascending=False, kind="stable")
    if len(sizes) > _MAX_OVERLAPS:
        warn(f"{len(sizes) - _MAX_OVERLAPS:,} of {len(sizes):,} overlaps, the smallest, are not drawn")
        sizes = sizes.iloc[:_MAX_OVERLAPS]
    n, positions = len(sets), np.arange(len(sizes))
    fig, axes = axes_for(ax, (0.32 * len(sizes) + 2.6, 0.25 * n + 2.8))
    axes.axis("off")
    share = n / (n + 8)
    below = axes.inset_axes((0.0, 0.0, 1.0, share))
    above = axes.inset_axes((0.0, share, 1.0, 1.0 - share), sharex=below)
    above.bar_label(above.bar(positions, sizes, color="0.25"), fmt="{:,.0f}", fontsize=7)
    above.set_ylabel("genes of the overlap")
    above.locator_params(axis="y", integer=True)
    above.spines[["top", "right", "bottom"]].set_visible(False)
    inside = np.array(sizes.index.tolist())
    for x, y in np.ndindex(inside.shape):
        below.plot(x, y, "o", color="0.25" if inside[x, y] else "0.88")
    below.vlines(positions, inside.argmax(axis=1), n - 1 - inside[:, ::-1].argmax(axis=1), color="0.25", linewidth=1.5)
    below.set_yticks(np.arange(n), [f"{name} ({len(gene_set):,})" for name, gene_set in sets.items()], fontsize=8)
    below.set(ylim=(n - 0.5, -0.5), xticks=[])
    below.tick_params(length=0)
    below.spines[:].set_visible(False)
    return fig


def _checked(gene_sets: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Gene sets as Python sets, if they are valid."""
    if not isinstance(gene_sets, Mapping):
        raise TypeError(f"gene_sets must be a mapping, {{name: genes}}, got {type(gene_sets).__name__}.")
    sets: dict[str, set[str]] = {}
    for name, genes in gene_sets.items():
        listed = list(genes)
        if isinstance(genes, str) or not all(isinstance(gene, str) for gene in listed):
            raise TypeError(f"gene_sets[{name!r}] must be a list of gene names, such as adata.var_names[chosen].")
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
