"""A network of genes, its modules apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva._constants import VAR_MODULE, VARP_GRN
from scdiva.data.network import Network, genes_of, network_of
from scdiva.pl._figure import axes_for, draw_legend, plot
from scdiva.pl._groups import distinct_colours, gene_names
from scdiva.pl._labels import discs, place_labels
from scdiva.pl._network import edge_colours, edge_looks
from scdiva.pl._network_layout import place_genes

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURED = 18
"""Modules that have a colour of their own, the largest; the others share a grey."""
_SMALL = 3
"""Genes drawn of a module below which it gets no place of its own."""
_NAMED = 14
"""Modules named in the legend."""
_ARROWS = 60
"""Edges up to which they have heads: more are a thicket."""
_LINE_STEP = 24
"""Pixels between the points of a line that names keep clear of: far apart, so that names stay near their dots."""
_FURTHEST = 100.0
"""Pixels from its dot from which on a name is left out: no eye would follow a line so long through others."""
_GREY = (0.72, 0.72, 0.72, 1.0)
_ONE_COLOUR = (0.30, 0.47, 0.66, 1.0)


class _Edges(NamedTuple):
    """What is drawn: ends as numbers of the drawn genes, and weights."""

    genes: NDArray[np.intp]
    source: NDArray[np.intp]
    target: NDArray[np.intp]
    weight: NDArray[np.float64]

    @property
    def graph(self) -> sp.csr_matrix:
        """Sizes of the weights between drawn genes, symmetric."""
        n = len(self.genes)
        size = np.abs(self.weight)
        half = sp.csr_matrix((size, (self.source, self.target)), shape=(n, n))
        return half + half.T

    @property
    def strength(self) -> NDArray[np.float64]:
        """Sum of the sizes of the weights of a gene's drawn edges."""
        return np.asarray(self.graph.sum(axis=1)).ravel()


@plot
def grn(
    adata: AnnData,
    *,
    key: str = VARP_GRN,
    group: str | None = None,
    genes: Sequence[str] | None = None,
    modules: str | None = VAR_MODULE,
    module: str | None = None,
    n_edges: int = 300,
    n_labels: int = 30,
    min_size: int = 2,
    layout: Literal["auto", "modules", "components"] = "auto",
    gene_symbols: str | None = None,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw the strongest edges of a network of genes, its modules apart.

    Lines are edges, the wider and darker the stronger; where weights have a sign, red ones are positive and blue ones
    negative. Dots are genes with an edge, their area grows with the sum of their drawn weights, their colour
    is their module. Names are those of the strongest genes, shared out between modules by their drawn weights. Where an
    edge and its reverse are one thing (``"embedding"``, ``"correlation"``) they are one line, of the larger weight;
    where they are two (``"attention"``), up to 60 edges are drawn with heads. Places depend on the
    edges alone: the same network looks the same every time.

    Parameters
    ----------
    adata
        Data with the network; nothing is written to it.
    key
        What `scdiva.tl.grn` called it (`key_added`).
    group
        One of the groups that it was made for (`groupby`).
    genes
        Edges between these genes only, such as ``scdiva.datasets.gene_family("HLA")``; None takes all. Those that the
        network does not have are left out, with a warning.
    modules
        A column of ``adata.var`` with modules, as `scdiva.tl.grn_modules` wrote it; where the default column does not
        exist, or with None, genes have one colour.
    module
        The one module to draw; None draws all.
    n_edges
        Strongest edges drawn, as :func:`scdiva.get.grn_df` has them.
    n_labels
        Genes named, at most: names for which there is no room near their dot are left out.
    min_size
        Genes of the smallest component drawn; 3 leaves out pairs that hang together with nothing else.
    layout
        ``"modules"`` puts genes of a module together, ``"components"`` pays no heed to modules, ``"auto"`` takes the
        first where there are modules.
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
        If there is no such network, group, column or module, or none of `genes` is in the network.
    ValueError
        If a number is out of range, no edge is left, there are no modules for ``layout="modules"``, or `save` ends in
        no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.pbmc68k_reduced()
    >>> sd.tl.grn(adata, use_raw=True)
    >>> sd.tl.grn_modules(adata)
    >>> sd.pl.grn(adata, save="network.png")
    >>> sd.pl.grn(adata, genes=sd.datasets.gene_family("HLA"), save="hla.png")
    """
    for name, number, least in (("n_edges", n_edges, 1), ("n_labels", n_labels, 0), ("min_size", min_size, 2)):
        if number < least:
            raise ValueError(f"{name} must be {least} or more, got {number}.")
    if layout not in ("auto", "modules", "components"):
        raise ValueError(f"layout must be 'auto', 'modules' or 'components', got {layout!r}.")
    network = network_of(adata, key, group)
    kind = _modules_of(adata, modules)
    if kind is None and (module is not None or layout == "modules"):
        raise ValueError("there are no modules: call scdiva.tl.grn_modules(adata, ...) first, or name their column.")
    asked = np.arange(adata.n_vars) if genes is None else genes_of(network, genes, key)
    if module is not None and kind is not None:
        if str(module) not in kind.cat.categories:
            raise KeyError(f"module={module!r} is none of {', '.join(kind.cat.categories)}.")
        asked = asked[(kind == str(module)).to_numpy()[asked]]
    edges = _strongest(network, asked, n_edges, min_size)
    names = gene_names(adata.var, gene_symbols)[edges.genes]
    codes = np.zeros(len(names), dtype=np.intp) if kind is None else kind.cat.codes.to_numpy()[edges.genes]
    by_module = kind is not None and layout != "components"
    places = place_genes(edges.graph, _blocks(codes) if by_module else np.zeros_like(codes))

    fig, axes = axes_for(ax, (8.2, 6.2))
    colours = _colours(kind, codes)
    _explain(axes, kind, codes, colours, edges, network)
    n, of = len(edges.weight), "" if module is None else f", module {module}"
    axes.set_title(f"{network.title}{of}: {n:,} strongest edges, {len(names):,} genes", fontsize=10)
    _fill(axes, places)
    _draw(axes, places, edges, network, colours)
    _write_names(axes, places, edges, _named(edges.strength, codes, n_labels), names, colours)
    return fig


def _modules_of(adata: AnnData, modules: str | None) -> pd.Series | None:
    """Give the modules of genes as categories of text; None where there are none and nobody named a column."""
    if modules is None or (modules == VAR_MODULE and modules not in adata.var):
        return None
    if modules not in adata.var:
        raise KeyError(
            f"modules={modules!r} is no column of adata.var: call scdiva.tl.grn_modules(adata, ..., "
            f"key_added={modules!r}) first."
        )
    values = adata.var[modules].astype("category")
    return values.cat.rename_categories([str(name) for name in values.cat.categories])


def _strongest(network: Network, asked: NDArray[np.intp], n_edges: int, min_size: int) -> _Edges:
    """Choose the edges of the largest weights, one for both directions where these are one thing."""
    edges = network.weights[asked][:, asked].tocoo()
    real = np.flatnonzero(np.isfinite(edges.data) & (edges.data != 0) & (edges.row != edges.col))
    size = network.strength(edges.data[real])
    if len(real) > 2 * n_edges:  # as many as can matter, with those equal to the last: the rest need no order
        real = real[size >= np.partition(size, -2 * n_edges)[-2 * n_edges]]
    source, target, weight = asked[edges.row[real]], asked[edges.col[real]], edges.data[real].astype(np.float64)
    order = np.lexsort((target, source, -network.strength(weight)))
    if not network.directed:
        pairs = np.sort(np.column_stack([source, target])[order], axis=1)
        order = order[np.sort(np.unique(pairs, axis=0, return_index=True)[1])]
    order = order[:n_edges]
    source, target, weight = source[order], target[order], weight[order]
    genes = np.unique(np.concatenate([source, target]))
    ends = sp.csr_matrix((np.ones(len(order)), np.searchsorted(genes, [source, target])), shape=(len(genes),) * 2)
    _, part = sp.csgraph.connected_components(ends, directed=False)
    large = np.bincount(part, minlength=1)[part] >= min_size if len(genes) else np.zeros(0, dtype=bool)
    genes = genes[large]
    kept = np.isin(source, genes)
    if not kept.any():
        raise ValueError(
            f"no edge between the {len(asked):,} genes asked for is in the network"
            + (f", in a component of {min_size} genes or more." if min_size > 2 else ".")
            + " scdiva.tl.grn(adata, n_targets=None) keeps all edges."
        )
    return _Edges(genes, np.searchsorted(genes, source[kept]), np.searchsorted(genes, target[kept]), weight[kept])


def _blocks(codes: NDArray[np.intp]) -> NDArray[np.intp]:
    """Give the block in which a gene is placed: its module's, or one for all genes of modules that are small here."""
    _, at, counts = np.unique(codes, return_inverse=True, return_counts=True)
    return np.where((counts[at] < _SMALL) | (codes < 0), -1, codes)


def _colours(kind: pd.Series | None, codes: NDArray[np.intp]) -> NDArray[np.float64]:
    """Give each drawn gene the colour of its module, (n, 4); the same module has the same in every picture."""
    if kind is None:
        return np.tile(_ONE_COLOUR, (len(codes), 1))
    table = np.array([*((*colour, 1.0) for colour in distinct_colours(_COLOURED)), _GREY])
    return table[np.where((codes < 0) | (codes >= _COLOURED), _COLOURED, codes)]


def _fill(axes: Axes, places: NDArray[np.float64], *, least: float = 8.0, margin: float = 1.2) -> None:
    """Set limits, equal in both directions, that fill the axes with `places`; few genes are not blown up.

    Parameters
    ----------
    axes
        Axes with a legend and a title, which take their room.
    places
        Places of genes, (n, 2), the nearest about 1 apart.
    least
        Width that is shown at least, in the unit of places.
    margin
        Room around them, in that unit.
    """
    axes.axis("off")
    axes.figure.canvas.draw()  # a constrained layout settles only now
    box = axes.get_window_extent()
    size, low, high = np.array([box.width, box.height]), places.min(axis=0), places.max(axis=0)
    half = size / 2 * (np.maximum(high - low + 2 * margin, least) / size).max()
    (x0, y0), (x1, y1) = (low + high) / 2 - half, (low + high) / 2 + half
    axes.set(xlim=(x0, x1), ylim=(y0, y1), aspect="equal")


def _draw(axes: Axes, places: NDArray[np.float64], edges: _Edges, network: Network, colours: NDArray[Any]) -> None:
    """Draw lines and dots, dots as large as their neighbours leave room for; a few directed edges have heads."""
    import networkx as nx

    sizes = _dot_sizes(axes, edges)
    widths, inks = edge_looks(edges.weight)
    shades = edge_colours(edges.weight, network.signed)
    shades[:, 3] = inks
    ends = list(zip(edges.source.tolist(), edges.target.tolist(), strict=True))
    heads = network.directed and len(ends) <= _ARROWS
    both_ways = heads and not set(ends).isdisjoint((target, source) for source, target in ends)
    look: dict[str, Any] = {"arrows": False}
    if heads:
        look = {"arrows": True, "arrowsize": 8, "node_size": sizes, "connectionstyle": f"arc3,rad={0.15 * both_ways}"}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(places)))
    weakest_first = slice(None, None, -1)
    graph.add_edges_from(ends[weakest_first])
    nx.draw_networkx_edges(
        graph, places, edgelist=ends[weakest_first], width=widths[weakest_first], edge_color=shades[weakest_first],
        ax=axes, **look,
    )  # fmt: skip
    # above the lines from names to dots, which are drawn at 4
    axes.scatter(places[:, 0], places[:, 1], s=sizes, c=colours, edgecolors="white", linewidths=0.6, zorder=4.5)


def _dot_sizes(axes: Axes, edges: _Edges) -> NDArray[np.float64]:
    """Give the areas of dots, square points: the widest as wide as two neighbours are apart, 14 points at most."""
    (x0, _), (x1, _) = axes.transData.transform([(0, 0), (1, 0)])
    apart = (x1 - x0) * 72 / axes.figure.dpi
    widest = float(np.clip(0.85 * apart, 4.0, 14.0))
    found: NDArray[np.float64] = widest**2 * (0.15 + 0.85 * edges.strength / edges.strength.max())
    return found


def _named(strength: NDArray[np.float64], codes: NDArray[np.intp], n_labels: int) -> NDArray[np.intp]:
    """Choose the genes named, the strongest of each module; modules get names by the root of their drawn weight."""
    order = np.lexsort((np.arange(len(codes)), -strength))
    claim = {code: np.sqrt(strength[codes == code].sum()) for code in np.unique(codes)}
    rank = pd.Series(codes[order]).groupby(codes[order]).cumcount().to_numpy()
    share = np.array([claim[code] for code in codes[order]]) / (rank + 1)
    return order[np.argsort(-share, kind="stable")][:n_labels]


def _write_names(
    axes: Axes,
    places: NDArray[np.float64],
    edges: _Edges,
    named: NDArray[np.intp],
    names: NDArray[Any],
    colours: NDArray[np.float64],
) -> None:
    """Write names beside their dots, off the dots and, where there is room, off the lines."""
    to_pixels = axes.transData.transform
    radius = np.sqrt(_dot_sizes(axes, edges)) / 2 * axes.figure.dpi / 72
    start, end = places[edges.source], places[edges.target]
    steps = np.maximum(np.linalg.norm(to_pixels(end) - to_pixels(start), axis=1) / _LINE_STEP, 2).astype(int)
    lines = [a + np.linspace(0, 1, n)[:, None] * (b - a) for a, b, n in zip(start, end, steps, strict=True)]
    kept_clear = np.concatenate([discs(axes, places, radius), *lines])
    darker = [tuple(0.6 * part for part in colours[i, :3]) for i in named]
    place_labels(axes, kept_clear, places[named], list(names[named]), darker, fontsize=7, furthest=_FURTHEST)


def _explain(
    axes: Axes,
    kind: pd.Series | None,
    codes: NDArray[np.intp],
    colours: NDArray[np.float64],
    edges: _Edges,
    network: Network,
) -> None:
    """Name modules with their drawn genes, and what width and colour of lines mean, at the right."""
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 6}
    handles = []
    if kind is not None:
        handles.append(Line2D([], [], linestyle="", label="module (genes)"))
        found, counts = np.unique(codes[(codes >= 0) & (codes < _COLOURED)], return_counts=True)
        most = np.sort(np.argsort(-counts, kind="stable")[:_NAMED])
        for i in most:
            colour = colours[codes == found[i]][0]
            handles.append(
                Line2D([], [], color=colour, label=f"{kind.cat.categories[found[i]]} ({counts[i]:,})", **dot)
            )
        if rest := len(codes) - int(counts[most].sum()):
            handles.append(Line2D([], [], color=_GREY, label=f"other ({rest:,})", **dot))
    handles.append(Line2D([], [], linestyle="", label=network.unit))
    sizes = np.unique(np.abs(edges.weight)[[np.abs(edges.weight).argmin(), np.abs(edges.weight).argmax()]])
    digits = 2 if len({f"{size:.2g}" for size in sizes}) == len(sizes) else 4
    signs = (1, -1) if network.signed and (edges.weight < 0).any() else (1,)
    shown = np.concatenate([sign * sizes for sign in signs])
    for weight, width, ink, colour in zip(shown, *edge_looks(shown), edge_colours(shown, network.signed), strict=True):
        label = f"{weight:.{digits}g}".replace("-", "−")
        handles.append(Line2D([], [], color=colour, alpha=ink, linewidth=width, label=label))
    for text in draw_legend(axes, handles=handles, handletextpad=0.5).get_texts():
        if text.get_text() in ("module (genes)", network.unit):
            text.set_fontweight("bold")
            text.set_x(-26)
