"""Plots of gene networks: graph, matrix of weights, and targets of a transcription factor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
from anndata import AnnData
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from scdiva._checks import check_least, no_entry
from scdiva._constants import VAR_MODULE, VARP_GRN
from scdiva.get import grn_df
from scdiva.networks.network import Network, genes_of, network_of
from scdiva.pl._figure import axes_for, draw_heatmap, draw_legend, plot, similar_order, text_inches, write_names
from scdiva.pl._groups import distinct_colours, gene_names

UP, DOWN = "#c8553d", "#3a7ca5"
"""Colours of positive and negative edges."""
_COLOURED = 14
"""Number of modules with a colour, the largest; the others are grey."""
_SIGNS = {1: "increases with the factor", -1: "decreases with the factor"}
_KNOWN = {1: "known, activates", -1: "known, represses", 0: "known"}
"""Legend of the lines and dots of a regulon."""
_GREY, _ONE_COLOUR = (0.72, 0.72, 0.72), (0.30, 0.47, 0.66)
_MOST = 400
"""Maximum number of rows or columns of the matrix."""


@plot
def grn(
    adata: AnnData,
    *,
    key: str = VARP_GRN,
    group: str | None = None,
    genes: Sequence[str] | None = None,
    modules: str | None = VAR_MODULE,
    n_edges: int = 300,
    n_labels: int = 30,
    gene_symbols: str | None = None,
    ax: Axes | None = None,
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Graph of the strongest edges of a gene network, arranged by module.

    Lines are edges; stronger edges are wider and darker, and if weights have a sign, positive edges are red and
    negative ones blue. Dots are genes; their area shows the sum of the drawn weights, their colour the module. The
    strongest genes of each module are labelled. For undirected networks (``"embedding"``, ``"correlation"``), an edge
    and its reverse are one line with the larger weight; for directed networks (``"attention"``), up to 60 edges have
    arrowheads. The layout of each module, or connected component without modules, is deterministic.

    Parameters
    ----------
    adata
        Data with the network. Not changed.
    key
        `key_added` of `scdiva.tl.grn`.
    group
        Group of cells, if there is a network for each.
    genes
        Genes whose edges are drawn, such as ``scdiva.datasets.gene_family("HLA")``. None: all. Genes that are not in
        the network are ignored with a warning.
    modules
        Column of ``adata.var`` with modules, see `scdiva.tl.grn_modules`. None, or if the default column does not
        exist: all genes have one colour.
    n_edges
        Number of edges, the strongest as in :func:`scdiva.get.grn_df`.
    n_labels
        Maximum number of labelled genes.
    gene_symbols
        Column of ``adata.var`` with labels. None: var names.
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
    KeyError
        If there is no such network, group, column or module, or none of `genes` is in the network.
    ValueError
        If a number is out of range, no edge is left, or `save` has no suffix of an image format.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc3k_small()
    >>> sd.tl.grn(adata)
    >>> sd.tl.grn_modules(adata)
    >>> sd.pl.grn(adata, save="network.png")
    >>> sd.pl.grn(adata, genes=sd.datasets.gene_family("HLA"), save="hla.png")
    """
    check_least(n_edges=(n_edges, 1), n_labels=(n_labels, 0))
    network = network_of(adata, key, group)
    module = _modules_of(adata, modules)
    shown = gene_names(adata.var, gene_symbols)
    genes = None if genes is None else list(network.names[genes_of(network, genes, key)])
    edges = _strongest(adata, network, key, genes, n_edges).iloc[::-1]  # the weakest are drawn first
    size = edges["weight"].abs()
    strength = pd.concat([size.groupby(edges[end]).sum() for end in ("source", "target")]).groupby(level=0).sum()
    code = pd.Series(0, strength.index) if module is None else module.cat.codes.loc[strength.index].astype(int)
    heads = network.directed and len(edges) <= 60  # more would overlap
    graph = nx.from_pandas_edgelist(edges, create_using=nx.DiGraph if heads else nx.Graph)
    positions = _positions(graph, None if module is None else code)

    fig, axes = axes_for(ax, (8.2, 6.2))
    axes.set_title(f"{network.title}: {len(edges):,} strongest edges, {len(strength):,} genes", fontsize=10)
    axes.axis("off")
    axes.set_aspect("equal")
    axes.margins(0.08)
    share = ((size - size.min()) / (np.ptp(size) or 1.0)).to_numpy()
    signed = network.signed and bool((edges["weight"] < 0).any())
    shades = to_rgba_array(np.where(edges["weight"] > 0, UP, DOWN) if signed else ["0.45"] * len(edges))
    shades[:, 3] = 0.35 + 0.55 * share
    widest = np.clip(6_000 / len(strength), 40, 180)
    areas = widest * (0.15 + 0.85 * strength / strength.max()).to_numpy()
    edge_style: dict[str, Any] = {"arrows": True, "arrowsize": 8, "node_size": areas} if heads else {"arrows": False}
    ends = list(zip(edges["source"], edges["target"], strict=True))
    edge_style |= {"edgelist": ends, "nodelist": list(strength.index), "width": 0.5 + 2.0 * share, "edge_color": shades}
    nx.draw_networkx_edges(graph, positions, ax=axes, **edge_style)
    table = np.array([_ONE_COLOUR] if module is None else [*distinct_colours(_COLOURED), _GREY])
    colours = table[code.where((code >= 0) & (code < len(table)), len(table) - 1)]
    xy = np.array([positions[gene] for gene in strength.index])
    axes.scatter(xy[:, 0], xy[:, 1], s=areas, c=colours, edgecolors="white", linewidths=0.6, zorder=3)
    _explain(axes, None if module is None else module.cat.categories, code, table, edges, network)
    # the strongest gene of each module first
    rank = strength.groupby(code).rank(ascending=False, method="first")
    labelled = np.lexsort((-strength, rank))[:n_labels]
    at = pd.Index(network.names).get_indexer(strength.index[labelled])
    write_names(
        axes, xy, xy[labelled], list(shown[at]), [tuple(0.6 * colours[i]) for i in labelled], fontsize=7, clear=5
    )
    return fig


def _modules_of(adata: AnnData, modules: str | None) -> pd.Series | None:
    """Module of each gene, categorical; None without modules."""
    if modules is None or (modules == VAR_MODULE and modules not in adata.var):
        return None
    if modules not in adata.var:
        raise no_entry("adata.var", modules, adata.var, f"scdiva.tl.grn_modules(adata, ..., key_added={modules!r})")
    return adata.var[modules].astype("category").set_axis(adata.var_names.astype(str))


def _strongest(adata: AnnData, network: Network, key: str, genes: Sequence[str] | None, n_edges: int) -> pd.DataFrame:
    """Edges with the largest weights; for undirected networks one for both directions."""
    edges = grn_df(adata, key=key, group=network.group or None, sources=genes, targets=genes, top=2 * n_edges)
    edges = edges[np.isfinite(edges["weight"]) & (edges["weight"] != 0) & (edges["source"] != edges["target"])]
    if not network.directed:
        pairs = pd.DataFrame(np.sort(edges[["source", "target"]].to_numpy(dtype=str), axis=1), edges.index)
        edges = edges[~pairs.duplicated()]
    if edges.empty:
        raise ValueError(
            f"no edge between the {len(network.names) if genes is None else len(genes):,} genes asked for is in the "
            "network. scdiva.tl.grn(adata, n_targets=None) keeps all edges."
        )
    return edges.head(n_edges)


def _positions(graph: nx.Graph, code: pd.Series | None) -> dict[str, NDArray[np.float64]]:
    """Positions of genes: each module or connected component in a disc, the largest disc in the centre."""
    parts = enumerate(nx.connected_components(graph.to_undirected()))
    block = pd.Series({gene: -1 - i for i, genes in parts for gene in genes}).sort_index()
    if code is not None:
        # modules of fewer than three genes have no disc
        block.update(code[(code >= 0) & (code.groupby(code).transform("size") >= 3)])
    turn = np.linspace(0, 2 * np.pi, 72, endpoint=False)
    rays = np.column_stack([np.cos(turn), np.sin(turn)])
    positions: dict[str, NDArray[np.float64]] = {}
    discs: list[tuple[NDArray[np.float64], float]] = []
    for name in block.value_counts(sort=False).sort_values(ascending=False, kind="stable").index:
        genes = list(block.index[block == name])
        part = nx.Graph()
        part.add_nodes_from(genes)
        part.add_edges_from(graph.subgraph(genes).edges)
        # for the layout, smaller components are connected to the largest
        pieces = sorted((sorted(piece) for piece in nx.connected_components(part)), key=lambda piece: -len(piece))
        nx.add_star(part, [max(piece, key=part.degree) for piece in pieces])
        is_small = len(genes) < 120  # the Kamada-Kawai layout is slow for more genes
        layout = nx.kamada_kawai_layout(part, weight=None) if is_small else nx.spring_layout(part, weight=None, seed=0)
        xy = np.sqrt(len(genes)) * np.array([layout[gene] for gene in genes])
        radius = float(np.linalg.norm(xy, axis=1).max()) + 1
        tries = np.zeros((1, 2))
        if discs:
            tries = np.concatenate([centre + (other + radius) * rays for centre, other in discs])
            gaps = [np.linalg.norm(tries - centre, axis=1) - 0.999 * (other + radius) for centre, other in discs]
            tries = tries[np.min(gaps, axis=0) >= 0]
        centre = tries[np.linalg.norm(tries * (0.8, 1), axis=1).round(6).argmin()]  # figures are wider than high
        discs.append((centre, radius))
        positions |= dict(zip(genes, xy + centre, strict=True))
    return positions


def _explain(
    axes: Axes, modules: pd.Index | None, code: pd.Series, table: NDArray[Any], edges: pd.DataFrame, network: Network
) -> None:
    """Legend of modules, with their numbers of genes, and of the width and colour of edges."""
    handles = []
    if modules is not None:
        handles.append(Line2D([], [], linestyle="", label="module (genes)"))
        counts = code[(code >= 0) & (code < _COLOURED)].value_counts().sort_index()
        listed = [(f"{modules[i]} ({n:,})", table[i]) for i, n in counts.items()]
        if rest := len(code) - counts.sum():
            listed.append((f"other ({rest:,})", table[-1]))
        handles += [Line2D([], [], color=ink, label=name, linestyle="", marker="o") for name, ink in listed]
    low, high = edges["weight"].abs().min(), edges["weight"].abs().max()
    handles.append(
        Line2D([], [], linestyle="", label=f"{network.unit}\n{low:.2g} to {high:.2g}, the wider the stronger")
    )
    if network.signed and (edges["weight"] < 0).any():
        handles += [Line2D([], [], color=ink, label=name) for ink, name in ((UP, "above 0"), (DOWN, "below 0"))]
    draw_legend(axes, handles=handles)


@plot
def attention(
    adata: AnnData,
    *,
    key: str = VARP_GRN,
    group: str | None = None,
    genes: Sequence[str] | None = None,
    n_genes: int = 40,
    gene_symbols: str | None = None,
    ax: Axes | None = None,
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Heatmap of the weights between genes, ordered by similarity.

    To plot single layers or heads, select them when attention is computed:
    ``scdiva.tl.grn(adata, "attention", layers=3, heads=[0, 1, 2], key_added="layer3")``, then ``key="layer3"`` here.
    They are shown in the title.

    Rows are targets (queries of attention), columns are sources (keys). Genes are ordered by hierarchical clustering of
    their weights (average linkage, correlation, optimal leaf order), in the same order on both axes if these have the
    same genes. Signed weights and differences between groups have a diverging colour map with white at 0; the colour
    scale ends at the 1st and 99th percentile. Grey fields are not in the network: the diagonal, and edges that
    `scdiva.tl.grn` did not keep (``n_targets=None`` keeps all).

    Parameters
    ----------
    adata
        Data with a network of any method. Not changed.
    key
        `key_added` of `scdiva.tl.grn`.
    group
        Group of cells, if there is a network for each.
    genes
        Genes to plot; genes that are not in the network are ignored with a warning. None: the genes with the largest
        sum of absolute weights.
    n_genes
        Number of genes if `genes` is None; on each axis, if sources and targets differ.
    gene_symbols
        Column of ``adata.var`` with labels. None: var names.
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
    KeyError
        If there is no such network, group or column, or none of `genes` is in the network.
    ValueError
        If no source or no target is among `genes`, an axis would have more than 400 genes, no weight between them is in
        the network, or `save` has no suffix of an image format.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(48, 60)
    >>> sd.tl.grn(adata, "attention", groupby="cell_type", n_targets=None)
    >>> sd.pl.attention(adata, group="type A", save="attention.png")
    """
    network = network_of(adata, key, group)
    check_least(n_genes=(n_genes, 1))
    sources, targets = _sides(network, None if genes is None else genes_of(network, genes, key), n_genes)
    if not len(sources) or not len(targets) or max(len(sources), len(targets)) > _MOST:
        raise ValueError(
            f"genes hold {len(sources):,} sources and {len(targets):,} targets of the network {key!r}, and 1 to "
            f"{_MOST} of each can be drawn."
        )
    same = set(sources) == set(targets)
    targets = sources if same else targets
    values = _dense(network, sources, targets)
    if np.isnan(values).all():
        raise ValueError("no weight between these genes is kept: call scdiva.tl.grn(adata, ..., n_targets=None).")
    profiles = np.nan_to_num(values)
    if same:
        rows = columns = sources[similar_order(np.concatenate([profiles, profiles.T], axis=1), "correlation")]
    else:
        rows = targets[similar_order(profiles, "correlation")]
        columns = sources[similar_order(profiles.T, "correlation")]
    values = _dense(network, columns, rows)
    names = gene_names(adata.var, gene_symbols)
    inches = text_inches(names[np.union1d(rows, columns)], 7) + 0.4
    # fields are as high as their labels
    width, height = (min(max(0.135 * n, 1.8) + inches, 18.5) for n in (len(columns), len(rows)))
    fig, axes = axes_for(ax, (width + 1.4, height + 0.5))
    low, high = np.nanquantile(values, [0.01, 0.99])
    if diverging := network.signed or bool(network.reference):
        high = np.nanquantile(np.abs(values), 0.99)
        low = -high
    draw_heatmap(
        axes, values, names[rows], names[columns], network.unit.replace("\n", " ", 1), extend="both",
        vmin=low, vmax=high, cmap="RdBu_r" if diverging else "Blues", rasterized=True,
    )  # fmt: skip
    axes.set(xlabel="source gene", ylabel="target gene")
    axes.set_title(network.title, fontsize=10)
    return fig


def _sides(
    network: Network, chosen: NDArray[np.intp] | None, n_genes: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Sources and targets to plot: the chosen genes, or those with the largest weights."""
    if chosen is not None:
        return chosen[network.sources[chosen]], chosen[network.targets[chosen]]
    size = abs(network.weights)
    size.data[~np.isfinite(size.data)] = 0
    order = np.argsort(-np.asarray(size.sum(axis=1).A1 + size.sum(axis=0).A1), kind="stable")
    return order[network.sources[order]][:n_genes], order[network.targets[order]][:n_genes]


def _dense(network: Network, sources: NDArray[np.intp], targets: NDArray[np.intp]) -> NDArray[np.float64]:
    """Weights of targets (rows) from sources (columns); NaN if not in the network."""
    entries = network.weights[sources][:, targets].tocoo()
    values = np.full((len(targets), len(sources)), np.nan)
    values[entries.col, entries.row] = entries.data
    values[targets[:, None] == sources] = np.nan
    return values


@plot
def regulon(
    regulon: pd.DataFrame,
    source: str | None = None,
    *,
    n_targets: int = 20,
    ax: Axes | None = None,
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Strongest targets of a transcription factor, ordered by weight.

    Lines are red for targets that increase with the factor and blue for those that decrease. With known regulation
    (`known` of `scdiva.tl.regulon`), known targets have bold labels and filled dots: red for activation, blue for
    repression, grey if the sign is unknown. The dots of other targets are hollow.

    Parameters
    ----------
    regulon
        Result of `scdiva.tl.regulon`, or a data frame with columns `source`, `target` and `weight`, the strongest
        first; `sign` (default: that of the weight) and `known` are optional.
    source
        Transcription factor, if the frame has several.
    n_targets
        Maximum number of targets.
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
    KeyError
        If a column or the factor is missing, or the frame has several factors and `source` is None.
    ValueError
        If it has no target with a weight, a target is duplicated, `n_targets` is below 1, or `save` has no suffix of an
        image format.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc3k_small()
    >>> sd.tl.grn(adata, sources="tf")
    >>> sd.pl.regulon(sd.tl.regulon(adata, "SPI1"), save="SPI1.png")
    """
    check_least(n_targets=(n_targets, 1))
    rows, factor = _rows_of(regulon, source)
    rows = rows.iloc[:n_targets]
    weight = rows["weight"].to_numpy(dtype=np.float64)
    sign = np.sign(rows["sign"].to_numpy(dtype=np.float64) if "sign" in rows else weight)
    known_modes = rows["known"].to_numpy(dtype=np.float64) if "known" in rows else np.full(len(rows), np.nan)

    n = len(rows)
    fig, axes = axes_for(ax, (5.4 + text_inches(list(rows["target"])), 0.19 * n + 1.2))
    inks = [_colour(one) for one in sign]
    fills = ["white" if np.isnan(mode) else _colour(mode) for mode in known_modes]
    axes.hlines(np.arange(n), 0, np.abs(weight), color=inks, linewidth=1.6, zorder=2)
    axes.scatter(np.abs(weight), np.arange(n), s=34, c=fills, edgecolors=inks, linewidths=1.2, zorder=3)
    axes.set_yticks(np.arange(n), rows["target"], fontsize=8)
    axes.set(xlabel="absolute weight", xlim=(0, None), ylim=(n - 0.5, -0.5))
    for text, mode in zip(axes.get_yticklabels(), known_modes, strict=True):
        text.set_fontweight("normal" if np.isnan(mode) else "bold")
    handles = [Line2D([], [], color=_colour(one), label=_SIGNS[one]) for one in _SIGNS if (sign == one).any()]
    dot: dict[str, Any] = {"linestyle": "", "marker": "o", "markeredgecolor": "0.3"}
    modes = [mode for mode in _KNOWN if (np.sign(known_modes) == mode).any()]
    handles += [Line2D([], [], markerfacecolor=_colour(mode), label=_KNOWN[mode], **dot) for mode in modes]
    title = f"{factor}: {n} strongest target{'s' * (n > 1)}"
    axes.set_title(title + (f", {np.isfinite(known_modes).sum()} known" if "known" in rows else ""), fontsize=10)
    draw_legend(axes, handles=handles)
    return fig


def _rows_of(regulon: pd.DataFrame, source: str | None) -> tuple[pd.DataFrame, str]:
    """Rows of one factor with a weight, and its name."""
    if missing := {"source", "target", "weight"} - set(regulon):
        raise KeyError(f"regulon has no column {min(missing)!r}: give what scdiva.tl.regulon or get.grn_df returned.")
    factors = list(dict.fromkeys(regulon["source"].astype(str)))
    if source not in factors and (source is not None or len(factors) > 1):
        raise KeyError(f"source={source!r} must be one of the {len(factors):,} of the frame: {', '.join(factors[:5])}.")
    factor = source or "".join(factors)
    rows = regulon[(regulon["source"].astype(str) == factor) & regulon["weight"].notna()]
    if not len(rows):
        raise ValueError("regulon has no target with a weight: call scdiva.tl.regulon(adata, ...) for another gene.")
    if (twice := rows["target"].duplicated()).any():
        raise ValueError(f"{twice.sum():,} targets of {factor} come twice, first {rows['target'][twice].iloc[0]!r}.")
    return rows, factor


def _colour(sign: float) -> str:
    """Colour of a sign."""
    return UP if sign > 0 else DOWN if sign < 0 else "0.45"
