"""An annotation on the map, against true types, by marker genes, and its calibration."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva import metrics
from scdiva._constants import CONFIDENCE, OBS_LABEL, OBSM_EMBEDDING, PROBABILITY, REJECTED, UNS
from scdiva.data.cells import log_normalised
from scdiva.data.writing import our_uns
from scdiva.get import annotation_df
from scdiva.pl._figure import axes_for, draw_legend, plot
from scdiva.pl._groups import distinct_colours, gene_names, groups_of, palette, predicted_groups
from scdiva.pl._heatmap import correlation_tree, draw_heatmap, draw_tree, frame_fields, similar_order, text_inches
from scdiva.pl._maps import ON_SMALL, Panel, coordinates, draw_maps, embedding_of

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_REJECTED_COLOUR = (0.15, 0.15, 0.15, 1.0)
_NONE = "no label"
_SIDE, _FEW = 0.36, 6
"""Inches of the side of a field with a count; up to so many types fields are larger, so that names have room."""
_LIMIT = 3.0
"""Standard deviations from a gene's mean at which colours end."""
_ROUNDING = 1e-6
"""Differences of mean log expression that are none."""


@plot
def annotation(
    adata: AnnData,
    labels_key: str | None = None,
    *,
    key: str = OBS_LABEL,
    basis: str = OBSM_EMBEDDING,
    n_neighbors: int = 15,
    min_dist: float = 0.5,
    size: float | None = None,
    rng: int | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw annotated and predicted types side by side on one UMAP, and the confidence of the prediction.

    A type has one colour in both panels. "unknown" is near black; cells without a label are light grey. The map is
    computed and kept as `scdiva.pl.umap` does, (n_obs, 2) in ``obsm[basis + "_umap"]``.

    Parameters
    ----------
    adata
        Cells that `scdiva.tl.annotate` annotated, with an embedding.
    labels_key
        A column of ``adata.obs`` with the true types; None leaves out its panel.
    key
        A column of ``adata.obs`` with the predicted types; the last panel shows ``adata.obs[key + "_confidence"]``, 0
        to 1, and is left out if there is none.
    basis
        Key of the embedding in ``adata.obsm``, (n_obs, dim).
    n_neighbors
        Neighbours of each cell in UMAP's graph; at most n_obs - 1 are used.
    min_dist
        How close UMAP may put two cells.
    size
        Area of a dot in points squared; None fits it to the number of cells.
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
        If a column is not in obs, or `basis` not in obsm.
    ValueError
        If a column has no or more than 100 groups, there are fewer than five cells with a finite embedding, or `save`
        ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> reference, query = cells[:80].copy(), cells[80:].copy()
    >>> annotator = sd.tl.annotate(query, "cell_type", reference)
    >>> sd.tl.embed(query)
    >>> sd.pl.annotation(query, "cell_type", save="annotation.png")
    """
    panels = {} if labels_key is None else {f"annotated: {labels_key}": groups_of(adata, labels_key)}
    panels[f"predicted: {key}"] = predicted_groups(adata, key)
    colours = _shared_palette(adata, labels_key or key, list(panels.values()))
    panels = {
        title: values.cat.rename_categories(str).astype(pd.CategoricalDtype([*colours]))
        for title, values in panels.items()
    }
    sure = adata.obs.get(f"{key}_{CONFIDENCE}")
    embedding_of(adata, basis)
    xy = coordinates(adata, basis, n_neighbors=n_neighbors, min_dist=min_dist, rng=rng)
    seen = pd.concat(list(panels.values()), ignore_index=True)
    legends = ["on data"] * 2 if seen.nunique() <= ON_SMALL else ["none", "right"][-len(panels) :]
    # rejected cells have no place of their own, where their name could stand
    maps = [
        Panel(title, xy, values, colours, legend, below=[REJECTED], named=seen)
        for (title, values), legend in zip(panels.items(), legends, strict=False)
    ]
    if sure is not None:
        maps.append(Panel(CONFIDENCE, xy, sure, limits=(0.0, 1.0)))
    return draw_maps(maps, size=size)


def _shared_palette(adata: AnnData, first_key: str, panels: Sequence[pd.Series]) -> dict[str, Any]:
    """Give each name one colour: those that `scdiva.pl.umap` gives to the first column, and others that differ."""
    from matplotlib.colors import to_rgba

    colours = {str(name): to_rgba(colour) for name, colour in palette(adata, first_key, panels[0]).items()}
    names = dict.fromkeys(str(name) for values in panels for name in values.cat.categories)
    spare = (colour for c in distinct_colours(2 * len(names)) if (colour := to_rgba(c)) not in colours.values())
    for name in names:
        if name == REJECTED:  # also where the first column is that of the predicted types
            colours[name] = _REJECTED_COLOUR
        elif name not in colours:
            colours[name] = next(spare)
    return colours


def _bins_of(adata: AnnData, key: str) -> dict[str, Any] | None:
    """Give the reliability of the reference's held-out cells as `tl.annotate` kept it; None if there were none."""
    ours = our_uns(adata).get(key, {})
    if not np.asarray(ours.get("reliability", {}).get("n_cells", 0)).any():  # empty where no cell could be held out
        return None
    return {"ece": float(ours["ece"]), **{name: np.asarray(column) for name, column in ours["reliability"].items()}}


@plot
def confusion_matrix(
    adata: AnnData,
    labels_key: str,
    key: str = OBS_LABEL,
    *,
    normalize: bool = True,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw how cells of each type were annotated, with similar types beside each other.

    A row is a type of `labels_key`, a column a predicted one; the numbers are cells. Types with similar annotations
    stand together: rows are clustered (average linkage of Hellinger distances between the rows' shares, optimal leaf
    order [1]_). Columns follow the rows, so that correct predictions lie on the diagonal, in frames; then come
    predicted names that are no type of `labels_key`, and last "unknown". A column that would be empty is left out,
    unless it is a type that the annotator knows; so a row without a framed field is a type that could not be predicted.

    Parameters
    ----------
    adata
        Cells with both columns.
    labels_key
        A column of ``adata.obs`` with the true types. Cells without one are left out.
    key
        A column of ``adata.obs`` with the predicted types, as `scdiva.tl.annotate` or any other annotator wrote it.
        Cells without one are counted as "no label".
    normalize
        Whether colour is the share of the row's cells; else it is their number.
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
        If a column is not in obs.
    ValueError
        If a column has no or more than 100 groups, or `save` ends in no picture format.

    References
    ----------
    .. [1] Bar-Joseph, Gifford & Jaakkola, Fast optimal leaf ordering for hierarchical clustering, Bioinformatics 2001.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> reference, query = cells[:80].copy(), cells[80:].copy()
    >>> annotator = sd.tl.annotate(query, "cell_type", reference)
    >>> sd.pl.confusion_matrix(query, "cell_type", save="confusion.png")
    """
    table = _table(adata, labels_key, key)
    counts = table.to_numpy()
    totals = counts.sum(axis=1)
    colour = counts / totals[:, None] if normalize else counts
    rows, columns = [f"{name} ({n:,})" for name, n in zip(table.index, totals, strict=True)], list(table.columns)
    side = _SIDE if len(rows) > _FEW else 1.5 * _SIDE
    fig, axes = axes_for(
        ax, (side * len(columns) + text_inches(rows) + 1.6, side * len(rows) + 0.7 * text_inches(columns) + 0.7)
    )
    draw_heatmap(
        axes, colour, rows, columns, "share of the type's cells" if normalize else "cells",
        low=0, high=1 if normalize else None, turn=45 if max(map(len, columns)) > 3 else 0,
        edgecolors="0.9", linewidth=0.4,
    )  # fmt: skip
    axes.set_aspect("equal")
    axes.set_xlabel(f"predicted: {key}", fontsize=9)
    axes.set_ylabel(f"annotated: {labels_key} (cells)", fontsize=9)
    for i, j in zip(*np.nonzero(counts), strict=True):
        ink = "white" if colour[i, j] > 0.55 * colour.max() else "0.15"
        axes.text(j + 0.5, i + 0.5, f"{counts[i, j]}", ha="center", va="center", fontsize=6.5, color=ink)
    for i, name in enumerate(table.index):
        if name in columns:
            frame_fields(axes, columns.index(name), i)
    return fig


def _table(adata: AnnData, labels_key: str, key: str) -> pd.DataFrame:
    """Count cells by true and predicted type, in the order of the picture."""
    truth, predicted = groups_of(adata, labels_key), predicted_groups(adata, key)
    scored = truth.notna().to_numpy()
    named = predicted.astype(object).where(predicted.notna(), _NONE).astype(str)
    # without their index: names of cells may repeat
    table = pd.crosstab(truth.astype(object)[scored].astype(str).to_numpy(), named[scored].to_numpy())
    order = similar_order(np.sqrt(table.to_numpy() / table.to_numpy().sum(axis=1, keepdims=True)))
    rows = table.index[order]
    # where each predicted name that is no row has most of its cells
    row = pd.Series(np.argmax(table.loc[rows].to_numpy(), axis=0), index=table.columns)
    known = set(map(str, our_uns(adata).get(key, {}).get("labels", ())))  # to the annotator, where it is ours
    last = [name for name in (REJECTED, _NONE) if name in table.columns and name not in rows]
    shared = [name for name in rows if name in table.columns or name in known]
    others = [name for name in row.sort_values(kind="stable").index if name not in rows and name not in last]
    return table.reindex(index=rows, columns=[*shared, *others, *last], fill_value=0)


@plot
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
    """Draw the top marker genes of each predicted type, to check whether its cells express them.

    Colours are the mean log-normalised expression of a type's cells (counts per ten thousand, log1p), as z-scores of
    each gene over the types. Types stand in the order of the dendrogram above them (average linkage, correlation of
    mean expression around each gene's mean, optimal leaf order). Markers are chosen by scanpy's ``rank_genes_groups``
    (t-test with overestimated variance, a type against all other cells); a gene is a marker of the one type in which it
    scores highest, and the framed fields are a type's own.

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
    if n_genes < 1:
        raise ValueError(f"n_genes must be at least 1, got {n_genes}.")
    types = predicted_groups(adata, key)
    kept = np.flatnonzero(types.notna())
    # clusters may have numbers, where scanpy wants names
    types = types.iloc[kept].cat.remove_unused_categories().cat.rename_categories(str)
    size = types.value_counts(sort=False)
    if len(size) < 2 or size.max() < 2:
        raise ValueError(
            f"adata.obs[{key!r}] holds {len(size)} types, the largest of {size.max()} cells: markers need two "
            "types or more, one of them with two cells or more."
        )
    values, var = log_normalised(adata, layer=layer, use_raw=use_raw, input=input)
    names, values = gene_names(var, gene_symbols), values[kept]
    membership = sp.csr_matrix(pd.get_dummies(types).to_numpy(dtype=np.float64))
    means = np.asarray((membership.T @ values).todense()) / size.to_numpy()[:, None]
    tree, order = correlation_tree(means - means.mean(axis=0))
    differs = np.ptp(means, axis=0) > _ROUNDING
    markers = _markers(values, types, n_genes, differs)
    own = [(column, gene) for column, code in enumerate(order) for gene in markers[code]]
    if not own:
        raise ValueError(f"no gene is higher in one type of adata.obs[{key!r}] than in the others.")
    genes = np.array([gene for _, gene in own])
    shown = means[order][:, genes]
    standard = (shown - shown.mean(axis=0)) / np.maximum(shown.std(axis=0), np.finfo(np.float64).tiny)
    columns = [str(size.index[code]) for code in order]
    width = max(0.3 * len(columns), 1.5) + text_inches(names[genes]) + 1.2
    fig, axes = axes_for(ax, (width, 0.14 * len(genes) + text_inches(columns) + 1.4))
    limit = min(_LIMIT, float(np.abs(standard).max()))
    draw_heatmap(
        axes, standard.T, list(names[genes]), columns, "mean expression (z-score)",
        low=-limit, high=limit, cmap="RdBu_r", fontsize=7, rasterized=True,
    )  # fmt: skip
    framed = [column for column, _ in own]
    for column in dict.fromkeys(framed):
        frame_fields(axes, column, framed.index(column), framed.count(column))
    draw_tree(axes, tree, inches=0.6, lowest=0.8 * tree[:, 2].min())
    axes.set_xlabel(key, fontsize=9)
    return fig


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


@plot
def reliability(
    adata: AnnData,
    key: str = OBS_LABEL,
    labels_key: str | None = None,
    *,
    n_bins: int = 15,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw the accuracy of predicted types by their confidence (a reliability diagram).

    On the diagonal, 70% of the predictions of 70% confidence are correct; below it, the annotator is overconfident.
    Dots have areas that grow with the cells of a bin, which the bars above show; whiskers are 95% intervals (Wilson).
    The legend gives the expected calibration error (ECE, see `scdiva.metrics.calibration`).

    Drawn are the cells of the reference that the annotator was not fitted on, as `scdiva.tl.annotate` left them in
    ``adata.uns``; and, where their types are known, these cells: each with its most probable label, whether or not it
    was rejected or backed off afterwards. Cells of a type that the reference lacks count as wrong, whatever they are
    called.

    Parameters
    ----------
    adata
        Cells that `scdiva.tl.annotate` annotated.
    key
        Its `key_added`.
    labels_key
        A column of ``adata.obs`` with the true types, to draw these cells too; cells without one are left out.
    n_bins
        Bins of equal width for these cells; those of the reference are as they were written, 15.
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
        If there is no such annotation or column.
    ValueError
        If there is nothing to draw: no held-out reference cells, and no `labels_key` or no cell with both a label and a
        probability; or if `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> reference, query = cells[:80].copy(), cells[80:].copy()
    >>> annotator = sd.tl.annotate(query, "cell_type", reference)
    >>> sd.pl.reliability(query, save="reliability.png")
    """
    best = annotation_df(adata, key=key)
    drawn = {}
    if (held_out := _bins_of(adata, key)) is not None:
        drawn["held-out reference"] = held_out
    if labels_key is not None:
        truth = groups_of(adata, labels_key)
        predicted = ~np.isnan(np.asarray(adata.obsm[f"{key}_{PROBABILITY}"])).any(axis=1)
        truth = truth[predicted]
        scored = truth.notna().to_numpy()
        if not scored.any():
            raise ValueError(f"no cell has both a label in adata.obs[{labels_key!r}] and a probability")
        right = (best["label"].astype(str).to_numpy() == truth.astype(str).to_numpy())[scored]
        drawn["these cells"] = metrics.calibration(
            best["probability"].to_numpy()[scored].clip(0, 1), right, n_bins=n_bins
        )
    if not drawn:
        raise ValueError(
            f"adata.uns[{UNS!r}][{key!r}] holds no held-out reference cells: name the column with the true types of "
            "these cells, labels_key=..."
        )

    fig, axes = axes_for(ax, (4.4, 5.8))
    above = axes.inset_axes((0.0, 1.03, 1.0, 0.25), sharex=axes)
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1.0, linestyle="--", zorder=1)
    for (name, found), colour in zip(drawn.items(), distinct_colours(2), strict=False):
        _draw_bins(axes, above, found, name, colour)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="confidence", ylabel="accuracy", aspect="equal")
    handles, labels = axes.get_legend_handles_labels()
    draw_legend(above, "above", handles=handles, labels=labels, handlelength=1.5)
    above.tick_params(labelbottom=False, bottom=False, labelsize=7)
    above.set_ylabel("share of\ncells", fontsize=8)
    above.spines[["top", "right"]].set_visible(False)
    return fig


def _draw_bins(axes: Axes, above: Axes, found: Mapping[str, NDArray[Any]], name: str, colour: Any) -> None:
    """Draw accuracy by confidence with its intervals, and the share of cells of each bin above."""
    from scipy.stats import binomtest

    n_cells = found["n_cells"].astype(int)
    filled = n_cells > 0
    n, x, y = n_cells[filled], found["confidence"][filled], found["accuracy"][filled]
    limits = [binomtest(round(a * k), k).proportion_ci(method="wilson") for a, k in zip(y, n, strict=True)]
    whiskers = np.maximum([y - [limit.low for limit in limits], [limit.high for limit in limits] - y], 0)
    label = f"{name}: ECE {found['ece']:.3f} ({n.sum():,} cells)"
    share = n / n.sum()
    axes.errorbar(x, y, yerr=whiskers, color=colour, label=label, linewidth=1.2, elinewidth=0.8, zorder=2)
    axes.scatter(x, y, s=6 + 150 * share, color=colour, linewidths=0, zorder=3)
    edges = np.linspace(0, 1, len(n_cells) + 1)
    above.stairs(n_cells / n.sum(), edges, color=colour, fill=True, alpha=0.25)
    above.stairs(n_cells / n.sum(), edges, color=colour, linewidth=1.0)
