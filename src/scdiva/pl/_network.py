"""A network of genes as a matrix, a factor amid its targets, and how edges are drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva._constants import VARP_GRN
from scdiva.data.network import Network, genes_of, network_of
from scdiva.pl._figure import axes_for, draw_legend, plot
from scdiva.pl._groups import gene_names
from scdiva.pl._heatmap import correlation_tree, draw_heatmap, draw_tree, text_inches

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

UP, DOWN = "#c8553d", "#3a7ca5"
"""Colours of edges with a weight above and below 0."""
_FIELD = 0.135
"""Inches of a field of the matrix, which hold a name."""
_MOST = 400
"""Genes of a side of the matrix: more can't be distinguished."""
_LINE = 0.17
"""Inches between the names of two targets of one side."""
_DASHES = (0, (3, 1.5))
_FILLS = {1: UP, -1: DOWN, 0: "0.6"}
"""Colour of the dot of a known target, by what the literature says."""
_KNOWN = {1: "known, activates", -1: "known, represses", 0: "known"}


def edge_looks(weight: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Give width (points) and opacity of edges, by the size of their weight among those drawn."""
    size = np.abs(weight)
    span = size.max() - size.min()
    share = (size - size.min()) / span if span > 0 else np.ones_like(size)
    return 0.5 + 2.0 * share, 0.35 + 0.55 * share


def edge_colours(weight: NDArray[np.float64], signed: bool) -> NDArray[np.float64]:
    """Give edges the colour of their sign, or one grey where no drawn weight is below 0, (n, 4)."""
    from matplotlib.colors import to_rgba_array

    if not signed or not (weight < 0).any():
        return to_rgba_array("0.45", 1.0).repeat(len(weight), axis=0)
    return np.where((weight > 0)[:, None], to_rgba_array(UP), to_rgba_array(DOWN))


@plot
def attention(
    adata: AnnData,
    *,
    key: str = VARP_GRN,
    group: str | None = None,
    genes: Sequence[str] | None = None,
    n_genes: int = 40,
    dendrogram: bool = False,
    gene_symbols: str | None = None,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw the weights between genes as a heatmap, similar genes side by side.

    Rows are targets (queries of attention), columns are sources (keys). Genes are ordered by hierarchical clustering of
    their weights to and from the others (average linkage, correlation, optimal leaf order), the same on both sides
    where both have the same genes. Weights with a sign, and differences between groups, have a colour map with white at
    0. Grey fields are not in the network: a gene with itself, and what `scdiva.tl.grn` did not keep
    (``n_targets=None`` keeps all).

    Parameters
    ----------
    adata
        Data with the network, of any method; nothing is written to it.
    key
        What `scdiva.tl.grn` called it (`key_added`).
    group
        One of the groups that it was made for (`groupby`).
    genes
        The genes drawn; those that the network does not have are left out, with a warning. None takes those with the
        largest sum of absolute weights.
    n_genes
        How many, if `genes` is None: on each side, where sources and targets are not the same.
    dendrogram
        Whether to draw the tree of the sources above.
    gene_symbols
        A column of ``adata.var`` with names to write instead of the var names.
    %(ax)s
    %(return_fig)s
    %(save)s

    Returns
    -------
    Figure or None
        The figure if `return_fig`, else None.

    Raises
    ------
    KeyError
        If there is no such network, group or column, or none of `genes` is in the network.
    ValueError
        If no source or no target is among `genes`, a side would have more than 400 genes, no weight between them is in
        the network, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(48, 60)
    >>> sd.tl.grn(adata, "attention", groupby="cell_type", n_targets=None)
    >>> sd.pl.attention(adata, group="type A", save="attention.png")
    """
    network = network_of(adata, key, group)
    if not 1 <= n_genes <= _MOST:
        raise ValueError(f"n_genes must be between 1 and {_MOST}, got {n_genes}.")
    sources, targets = _sides(network, None if genes is None else genes_of(network, genes, key), n_genes)
    if not len(sources) or not len(targets) or max(len(sources), len(targets)) > _MOST:
        raise ValueError(
            f"genes hold {len(sources):,} sources and {len(targets):,} targets of the network {key!r}, and 1 to "
            f"{_MOST} of each can be drawn."
        )
    values = _dense(network, sources, targets)
    if np.isnan(values).all():
        raise ValueError("no weight between these genes is kept: call scdiva.tl.grn(adata, ..., n_targets=None).")
    if set(sources) == set(targets):
        square = _profiles(network, sources, sources)
        tree, order = correlation_tree(np.concatenate([square, square.T], axis=1))
        rows, columns = sources[order], sources[order]
    else:
        profiles = _profiles(network, sources, targets)
        tree, order = correlation_tree(profiles.T)
        rows, columns = targets[correlation_tree(profiles)[1]], sources[order]
    names = gene_names(adata.var, gene_symbols)
    inches = text_inches(names[np.union1d(rows, columns)], 7) + 0.4
    width, height = (min(max(_FIELD * n, 1.8) + inches, 18.5) for n in (len(columns), len(rows)))
    fig, axes = axes_for(ax, (width + 1.4, height + 0.5))
    low, high, cmap = _scale(values[np.isfinite(values)], network)
    draw_heatmap(
        axes, _dense(network, columns, rows), names[rows], names[columns], network.unit.replace("\n", " ", 1),
        low=low, high=high, cmap=cmap, fontsize=7, rasterized=True,
    )  # fmt: skip
    keys, queries = ("source (key)", "target (query)") if network.method == "attention" else ("source", "target")
    axes.set_xlabel(keys, fontsize=9)
    axes.set_ylabel(queries, fontsize=9)
    with_tree = dendrogram and len(tree) > 0
    if with_tree:
        draw_tree(axes, tree, inches=0.5, lowest=0.0)
    axes.set_title(network.title, fontsize=10, pad=46 if with_tree else 6)
    return fig


def _scale(found: NDArray[np.float64], network: Network) -> tuple[float, float, str]:
    """Give where colours end, at the weight that one in a hundred fields passes, and the colours."""
    if network.signed or network.reference:
        high = float(np.quantile(np.abs(found), 0.99)) or float(np.abs(found).max()) or 1.0
        return -high, high, "RdBu_r"
    low, high = (float(x) for x in np.quantile(found, [0.01, 0.99]))
    if low == high:
        low, high = low - 0.5 * abs(low) - 1e-9, high + 0.5 * abs(high) + 1e-9
    return low, high, "Blues"


def _sides(
    network: Network, chosen: NDArray[np.intp] | None, n_genes: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Choose sources and targets: those named, or the ones with most weight."""
    if chosen is not None:
        return chosen[network.sources[chosen]], chosen[network.targets[chosen]]
    size = abs(network.weights)
    size.data[~np.isfinite(size.data)] = 0
    out, into = (np.asarray(size.sum(axis=axis)).ravel() for axis in (1, 0))
    if (network.sources == network.targets).all():
        out = into = out + into
    best = []
    for strength, among in ((out, network.sources), (into, network.targets)):
        order = np.argsort(-np.where(among, strength, -1.0), kind="stable")
        best.append(order[: min(n_genes, int(among.sum()))])
    return best[0], best[1]


def _dense(network: Network, sources: NDArray[np.intp], targets: NDArray[np.intp]) -> NDArray[np.float64]:
    """Give the weights of targets (rows) from sources (columns), NaN where none is kept."""
    kept = network.weights[sources][:, targets].tocoo()
    values = np.full((len(targets), len(sources)), np.nan)
    values[kept.col, kept.row] = kept.data
    values[targets[:, None] == sources] = np.nan
    return values


def _profiles(network: Network, sources: NDArray[np.intp], targets: NDArray[np.intp]) -> NDArray[np.float64]:
    """Give what genes are compared by: the weights, 0 where no edge is kept, NaN of a gene with itself."""
    values = np.nan_to_num(_dense(network, sources, targets), nan=0.0)
    values[targets[:, None] == sources] = np.nan
    return values


@plot
def regulon(
    regulon: pd.DataFrame,
    source: str | None = None,
    *,
    n_targets: int = 20,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw a factor amid its strongest targets.

    Targets stand around it by the size of their weight, the largest at the top right and on clockwise. Lines are the
    wider and darker the larger the weight, red for targets that rise with the factor and blue for those that fall.
    Where known targets were asked for (`known` of `scdiva.tl.regulon`), lines to them are whole and their dots filled,
    red for activation, blue for repression, grey for a mode that is not known; lines to the others are dashed.

    Parameters
    ----------
    regulon
        What `scdiva.tl.regulon` returned, or any frame with columns `source`, `target` and `weight`, the strongest
        first; `sign` (by default that of the weight) and `known` are optional.
    source
        The factor drawn, where the frame has several.
    n_targets
        Targets drawn, at most.
    %(ax)s
    %(return_fig)s
    %(save)s

    Returns
    -------
    Figure or None
        The figure if `return_fig`, else None.

    Raises
    ------
    KeyError
        If a column is missing, or the frame has no such factor.
    ValueError
        If the frame has several factors and none is named, it has no target with a weight, a target comes twice,
        `n_targets` is below 1, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc68k_reduced()
    >>> sd.tl.grn(adata, sources="tf", use_raw=True)
    >>> sd.pl.regulon(sd.tl.regulon(adata, "SPI1", use_raw=True), save="SPI1.png")
    """
    if n_targets < 1:
        raise ValueError(f"n_targets must be 1 or more, got {n_targets}.")
    rows, factor = _rows_of(regulon, source)
    rows = rows.iloc[:n_targets]
    weight = rows["weight"].to_numpy(dtype=np.float64)
    sign = np.sign(rows["sign"].to_numpy(dtype=np.float64) if "sign" in rows else weight)
    known = rows["known"].to_numpy(dtype=np.float64) if "known" in rows else None

    n = len(rows)
    height = _LINE * 1.25 * max((n + 1) // 2, 6)
    fig, axes = axes_for(ax, (5.4, height + 0.9))
    places, right = _around(n)
    widths, inks = edge_looks(weight)
    for i in range(n):
        signed = known is None or not np.isnan(known[i])
        axes.plot(
            [0, places[i, 0]], [0, places[i, 1]], color=_colour(sign[i]), alpha=inks[i], linewidth=widths[i],
            linestyle="-" if signed else _DASHES, zorder=2,
        )  # fmt: skip
        fill = "white" if known is None or not signed else _FILLS[int(np.sign(known[i]))]
        axes.scatter(
            places[i, 0], places[i, 1], s=34, color=fill, edgecolors=_colour(sign[i]), linewidths=1.2, zorder=3
        )
        axes.annotate(
            rows["target"].iloc[i], places[i], (7 if right[i] else -7, 0), textcoords="offset points",
            ha="left" if right[i] else "right", va="center", fontsize=8, annotation_clip=False,
            weight="bold" if known is not None and signed else "normal",
        )  # fmt: skip
    axes.text(
        0, 0, factor, ha="center", va="center", fontsize=10, weight="bold", zorder=4,
        bbox={"boxstyle": "round,pad=0.45", "facecolor": "white", "edgecolor": "0.2", "linewidth": 1.2},
    )  # fmt: skip
    axes.set(xlim=(-1.75, 1.75), ylim=(-1.08, 1.08))
    axes.axis("off")
    title = f"{factor}: {n} strongest target{'s' * (n > 1)}"
    if known is not None:
        title += f", {int((~np.isnan(known)).sum())} known"
    axes.set_title(title, fontsize=10)
    draw_legend(axes, "below", handles=_keys_of(weight, sign, known), ncols=3, handlelength=2.2, columnspacing=1.2)
    return fig


def _rows_of(regulon: pd.DataFrame, source: str | None) -> tuple[pd.DataFrame, str]:
    """Give the rows of one factor that have a weight, and its name."""
    missing = [name for name in ("source", "target", "weight") if name not in regulon]
    if missing:
        columns = ", ".join(map(str, regulon.columns)) or "none"
        raise KeyError(
            f"regulon has no column {missing[0]!r}, it has {columns}: give what scdiva.tl.regulon or scdiva.get.grn_df "
            "returned."
        )
    factors = list(dict.fromkeys(regulon["source"].astype(str)))
    if source is None and len(factors) > 1:
        raise ValueError(f"regulon has {len(factors):,} sources ({', '.join(factors[:3])}, ...): name one as source.")
    if source is not None and source not in factors:
        raise KeyError(f"source={source!r} is none of the {len(factors):,} of the frame: {', '.join(factors[:5])}.")
    factor = factors[0] if source is None and factors else source
    rows = regulon[(regulon["source"].astype(str) == factor) & regulon["weight"].notna()]
    if not len(rows):
        raise ValueError("regulon has no target with a weight: call scdiva.tl.regulon(adata, ...) for another gene.")
    if (twice := rows["target"].duplicated()).any():
        raise ValueError(f"{twice.sum():,} targets of {factor} come twice, first {rows['target'][twice].iloc[0]!r}.")
    return rows, str(factor)


def _around(n: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Give places clockwise from the top right, (n, 2), and which are at the right; no two of a side share a height."""
    first = (n + 1) // 2
    sides = []
    for count, side in ((first, 1.0), (n - first, -1.0)):
        y = 1 - (2 * np.arange(count) + 1) / max(count, 1)
        sides.append(np.column_stack([side * np.sqrt(1 - 0.85 * y**2), y])[:: int(side)])
    places = np.concatenate(sides)
    return places, places[:, 0] > 0


def _colour(sign: float) -> str:
    """Give the colour of a sign."""
    return UP if sign > 0 else DOWN if sign < 0 else "0.45"


def _keys_of(weight: NDArray[Any], sign: NDArray[Any], known: NDArray[Any] | None) -> list[Line2D]:
    """Give what the legend says lines and dots mean, of what is drawn."""
    from matplotlib.lines import Line2D

    handles = []
    for value, label in ((1, "with more of the target"), (-1, "with less")):
        if (sign == value).any():
            handles.append(Line2D([], [], color=_colour(value), linewidth=2, label=label))
    if known is not None:
        kinds: list[tuple[str, Any, str, NDArray[Any]]]
        kinds = [(_FILLS[mode], "-", label, np.sign(known) == mode) for mode, label in _KNOWN.items()]
        for fill, dashes, label, drawn in [*kinds, ("white", _DASHES, "not known", np.isnan(known))]:
            if drawn.any():
                look: dict[str, Any] = {"color": "0.45", "marker": "o", "markersize": 5, "markeredgecolor": "0.45"}
                handles.append(Line2D([], [], markerfacecolor=fill, linestyle=dashes, label=label, **look))
    low, high = np.abs(weight).min(), np.abs(weight).max()
    return [*handles, Line2D([], [], linestyle="", label=f"weight {low:.2g} to {high:.2g}")]
