"""A network as a matrix of its genes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scdiva._constants import VARP_GRN
from scdiva._docs import with_shared_docs
from scdiva.data.network import Network, genes_of, network_of
from scdiva.data.writing import check_anndata
from scdiva.pl._dendrogram import correlation_tree, draw_tree
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._response import gene_names

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FIELD = 0.135
"""Inches of a field, which hold a name."""
_MOST = 400
"""Genes of a side: more can't be distinguished."""
_NAMED = 120
"""Genes of a side up to which they are named."""


@with_shared_docs
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
    check_anndata(adata)
    check_file(save)
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
    names = gene_names(adata, gene_symbols, called="adata")

    fig, axes = axes_for(ax, _size(len(rows), len(columns), names[np.union1d(rows, columns)]))
    _draw(fig, axes, _dense(network, columns, rows), network)
    _write_names(axes, names[rows], names[columns])
    keys, queries = ("source (key)", "target (query)") if network.method == "attention" else ("source", "target")
    axes.set_xlabel(keys, fontsize=9)
    axes.set_ylabel(queries, fontsize=9)
    if dendrogram and len(tree):
        draw_tree(axes, tree, share=0.5 / fig.get_figheight(), lowest=0.0)
    axes.set_title(network.title, fontsize=10, pad=46 if dendrogram and len(tree) else 6)
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


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


def _size(n_rows: int, n_columns: int, names: NDArray[Any]) -> tuple[float, float]:
    """Inches that let every name be read."""
    name = 0.065 * max(map(len, names)) + 0.4
    return min(max(_FIELD * n_columns, 1.8) + name + 1.4, 20.0), min(max(_FIELD * n_rows, 1.8) + name + 0.5, 20.0)


def _draw(fig: Figure, axes: Axes, values: NDArray[np.float64], network: Network) -> None:
    """Draw the fields and their colour bar; colours end at the weight that one in a hundred fields passes."""
    found = values[np.isfinite(values)]
    if network.signed or network.reference:
        high = float(np.quantile(np.abs(found), 0.99)) or float(np.abs(found).max()) or 1.0
        low, colours = -high, "RdBu_r"
    else:
        low, high = (float(x) for x in np.quantile(found, [0.01, 0.99]))
        if low == high:
            low, high = low - 0.5 * abs(low) - 1e-9, high + 0.5 * abs(high) + 1e-9
        colours = "Blues"
    under, over = found.min() < low, found.max() > high
    axes.set_facecolor("0.88")
    image = axes.pcolormesh(np.ma.masked_invalid(values), cmap=colours, vmin=low, vmax=high, rasterized=True)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    extend = "both" if under and over else "min" if under else "max" if over else "neither"
    share = min(1.0, 12 / max(len(values), 1) + 0.2)
    bar = fig.colorbar(image, ax=axes, shrink=share, aspect=18, extend=extend, pad=0.02)
    bar.set_label(network.unit.replace("\n", " ", 1), fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _write_names(axes: Axes, rows: NDArray[Any], columns: NDArray[Any]) -> None:
    """Name rows and columns where names can be read."""
    axes.tick_params(length=0)
    for names, set_ticks, turn in ((columns, axes.set_xticks, 90), (rows, axes.set_yticks, 0)):
        if len(names) <= _NAMED:
            set_ticks(np.arange(len(names)) + 0.5, names, rotation=turn, fontsize=7)
        else:
            set_ticks([])
