"""Which genes tell the predicted types apart."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva._constants import OBS_LABEL
from scdiva._docs import with_shared_docs
from scdiva.data.cells import log_normalised
from scdiva.data.writing import check_anndata
from scdiva.pl._dendrogram import correlation_tree, draw_tree
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._groups import predicted_groups

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LIMIT = 3.0
"""Standard deviations from a gene's mean at which colours end."""
_ROUNDING = 1e-6
"""Differences of mean log expression that are none."""
_LETTER = 0.075
"""Inches of a letter of a name, about."""


@with_shared_docs
def marker_heatmap(
    adata: AnnData,
    key: str = OBS_LABEL,
    *,
    n_genes: int = 5,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_symbols: str | None = None,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw the top marker genes of each predicted type, to see whether its cells express what they should.

    Colours are the mean log-normalised expression of a type's cells (counts per ten thousand, log1p), standardised by
    gene over the types: 0 is the mean of the types, 1 a standard deviation above. Types stand in the order of the
    dendrogram above them (average linkage, correlation of mean expression around each gene's mean, optimal leaf
    order). Markers are chosen by scanpy's ``rank_genes_groups`` (t-test with overestimated variance, a type against all
    other cells); a gene is a marker of the one type in which it scores highest, and the framed fields are a type's own.

    Parameters
    ----------
    adata
        Cells with predicted types; nothing is written to it.
    key
        A column of ``adata.obs`` with the types, as `scdiva.tl.annotate` wrote it. Cells without one are left out;
        types of one cell are drawn, without markers of their own.
    n_genes
        Markers of each type; fewer, if no more score above 0 there.
    layer, use_raw
        Key of ``adata.layers``, or whether to take ``adata.raw``; by default ``adata.X``.
    input
        Unit of the matrix: ``"counts"``, ``"lognorm"`` (log1p of normalised counts, taken as it is), or ``"auto"`` to
        tell from the values.
    gene_symbols
        A column of ``adata.var`` (of ``adata.raw.var`` with `use_raw`) with names to write instead of the var names.
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
        If a column or layer does not exist.
    ValueError
        If there are fewer than two types, none of two cells, or more than 100; `n_genes` is below 1; the matrix is
        neither counts nor log-normalised; or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> reference, query = cells[:80].copy(), cells[80:].copy()
    >>> annotator = sd.tl.annotate(query, "cell_type", reference)
    >>> sd.pl.marker_heatmap(query, save="markers.png")
    """
    check_file(save)
    check_anndata(adata)
    if n_genes < 1:
        raise ValueError(f"n_genes must be at least 1, got {n_genes}.")
    types = predicted_groups(adata, key)
    kept = np.flatnonzero(types.notna())
    # clusters may have numbers, where scanpy wants names
    types = types.iloc[kept].cat.remove_unused_categories().cat.rename_categories(str)
    size = types.value_counts(sort=False)
    if len(size) < 2 or size.max() < 2:
        raise ValueError(
            f"adata.obs[{key!r}] holds {len(size)} types, the largest of {size.max()} cells: markers tell apart two "
            "types or more, one of them with two cells or more."
        )
    values, names = _lognorm(adata, layer, use_raw, input, gene_symbols)
    values = values[kept]
    membership = sp.csr_matrix(pd.get_dummies(types).to_numpy(dtype=np.float64))
    means = np.asarray((membership.T @ values).todense()) / size.to_numpy()[:, None]
    tree, order = correlation_tree(means - means.mean(axis=0))
    differs = np.ptp(means, axis=0) > _ROUNDING
    markers = _markers(values, types, n_genes, differs)
    own = [(int(place), gene) for place, code in enumerate(order) for gene in markers[code]]
    if not own:
        raise ValueError(f"no gene is higher in one type of adata.obs[{key!r}] than in the others.")
    genes = np.array([gene for _, gene in own])
    shown = means[order][:, genes]
    standard = (shown - shown.mean(axis=0)) / np.maximum(shown.std(axis=0), np.finfo(np.float64).tiny)
    columns = [str(size.index[code]) for code in order]
    fig, axes = axes_for(ax, _size(columns, names[genes]))
    _draw(fig, axes, standard.T, columns, names[genes], own)
    draw_tree(axes, tree, share=0.6 / fig.get_figheight(), lowest=0.8 * tree[:, 2].min())
    axes.set_xlabel(key, fontsize=9)
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


def _lognorm(
    adata: AnnData, layer: str | None, use_raw: bool, input: Any, gene_symbols: str | None
) -> tuple[sp.csr_matrix, NDArray[Any]]:
    """Read the matrix whole, as log1p of counts per ten thousand, and the names of its genes."""
    values, var = log_normalised(adata, layer=layer, use_raw=use_raw, input=input)
    if gene_symbols is not None and gene_symbols not in var:
        columns = ", ".join(map(str, var.columns)) or "none"
        raise KeyError(f"gene_symbols={gene_symbols!r} is no column of var, which has {columns}")
    return values, np.array([*map(str, var.index if gene_symbols is None else var[gene_symbols])], dtype=object)


def _markers(values: sp.csr_matrix, types: pd.Series, n_genes: int, differs: NDArray[np.bool_]) -> list[list[int]]:
    """Choose the column numbers of the best genes of each type, best first, each where it scores highest."""
    import scanpy as sc
    from anndata import AnnData

    groups = types.cat.categories
    enough = [name for name in groups if (types == name).sum() > 1]
    cells = AnnData(values, obs=pd.DataFrame({"type": types.to_numpy()}, index=np.arange(len(types)).astype(str)))
    cells.uns["log1p"] = {"base": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)  # genes without variance
        sc.tl.rank_genes_groups(cells, "type", groups=enough, method="t-test_overestim_var")
    score = np.zeros((len(groups), values.shape[1]))
    found = cells.uns["rank_genes_groups"]
    for name in enough:
        score[groups.get_loc(name), found["names"][name].astype(int)] = found["scores"][name]
    score = np.where(differs, np.nan_to_num(score), 0.0)
    best = score.argmax(axis=0)
    own = [np.flatnonzero((best == code) & (score[code] > 0)) for code in range(len(groups))]
    return [genes[np.argsort(-score[code, genes], kind="stable")][:n_genes].tolist() for code, genes in enumerate(own)]


def _size(columns: list[str], genes: NDArray[Any]) -> tuple[float, float]:
    """Inches that let every name be read."""
    width = max(0.3 * len(columns), 1.5) + _LETTER * max(map(len, genes)) + 1.2
    return width, 0.14 * len(genes) + _LETTER * max(map(len, columns)) + 1.4


def _draw(
    fig: Figure,
    axes: Axes,
    standard: NDArray[np.floating],
    columns: list[str],
    genes: NDArray[Any],
    own: list[tuple[int, int]],
) -> None:
    """Draw the fields, (n_genes, n_types), with their names, and a frame around the markers of each type."""
    from matplotlib.patches import Rectangle

    most = float(np.abs(standard).max())
    limit = min(_LIMIT, most)
    image = axes.pcolormesh(standard, cmap="RdBu_r", vmin=-limit, vmax=limit, rasterized=True)
    axes.invert_yaxis()
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90, fontsize=8)
    axes.set_yticks(np.arange(len(genes)) + 0.5, genes, fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    places = np.array([place for place, _ in own])
    for place in np.unique(places):
        rows = np.flatnonzero(places == place)
        axes.add_patch(
            Rectangle((place, rows[0]), 1, len(rows), fill=False, edgecolor="black", linewidth=0.8, clip_on=False)
        )
    extend = "both" if most > limit else "neither"
    bar = fig.colorbar(image, ax=axes, shrink=min(1.0, 15 / len(genes)), aspect=15, extend=extend)
    bar.set_label("standard deviations from the gene's mean", fontsize=8)
    bar.ax.tick_params(labelsize=8)
