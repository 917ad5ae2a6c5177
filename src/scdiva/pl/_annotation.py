"""Plots of an annotation: confusion matrix, marker genes, features and calibration."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd
from anndata import AnnData
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scdiva import metrics
from scdiva._checks import check_least, no_entry, warn
from scdiva._constants import OBS_LABEL, OBSM_EMBEDDING, PROBABILITY, REJECTED, UNS
from scdiva.data.cells import log_normalised
from scdiva.data.results import our_uns
from scdiva.embedding.umap import basis_of
from scdiva.get import annotation_df
from scdiva.pl._figure import axes_for, draw_heatmap, draw_legend, plot, similar_order, text_inches
from scdiva.pl._groups import distinct_colours, gene_names, groups_of, predicted_groups

_NONE = "no label"
_SIDE = 0.36
"""Width and height of a cell of the matrix in inches."""


@plot
def confusion_matrix(
    adata: AnnData,
    labels_key: str,
    key: str = OBS_LABEL,
    *,
    ax: Axes | None = None,
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Confusion matrix of true and predicted cell types, ordered by similarity.

    A row is a type of `labels_key`, a column a predicted type; numbers are cells, colours their share of the row. Rows
    are clustered (average linkage of Hellinger distances between the rows' shares, optimal leaf order [1]_). Columns
    follow the rows, with correct predictions framed on the diagonal, then predicted names that are not a type of
    `labels_key`, and last "unknown". Empty columns are omitted unless they are a type of the annotator; a row without a
    frame is a type that could not be predicted.

    Parameters
    ----------
    adata
        Cells with both columns.
    labels_key
        A column of ``adata.obs`` with the true types. Cells without one are ignored.
    key
        A column of ``adata.obs`` with the predicted types, as `scdiva.tl.annotate` or any other annotator wrote it.
        Cells without one are counted as "no label".
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
    share = counts / totals[:, None]
    rows, columns = [f"{name} ({n:,})" for name, n in zip(table.index, totals, strict=True)], list(table.columns)
    width = _SIDE * len(columns) + text_inches(rows) + 1.6
    fig, axes = axes_for(ax, (max(width, 4.0), _SIDE * len(rows) + text_inches(columns) + 0.7))
    framed = [(i, columns.index(name)) for i, name in enumerate(table.index) if name in columns]
    draw_heatmap(
        axes, share, rows, columns, "share of the type's cells", framed=framed, vmin=0, vmax=1, cmap="Blues",
        edgecolors="0.9", linewidth=0.4,
    )  # fmt: skip
    axes.set(aspect="equal", xlabel=f"predicted: {key}", ylabel=f"annotated: {labels_key} (cells)")
    for i, j in zip(*np.nonzero(counts), strict=True):
        ink = "white" if share[i, j] > 0.55 else "0.15"
        axes.text(j + 0.5, i + 0.5, f"{counts[i, j]}", ha="center", va="center", fontsize=6.5, color=ink)
    return fig


def _table(adata: AnnData, labels_key: str, key: str) -> pd.DataFrame:
    """Number of cells by true and predicted type, in plotting order."""
    truth, predicted = groups_of(adata, labels_key), predicted_groups(adata, key)
    scored = truth.notna().to_numpy()
    names = predicted.astype(object).where(predicted.notna(), _NONE).astype(str)
    # without their index: names of cells may repeat
    table = pd.crosstab(truth.astype(object)[scored].astype(str).to_numpy(), names[scored].to_numpy())
    order = similar_order(np.sqrt(table.to_numpy() / table.to_numpy().sum(axis=1, keepdims=True)))
    rows = table.index[order]
    # names that are not a row are sorted by the row with most of their cells
    main_row = pd.Series(np.argmax(table.loc[rows].to_numpy(), axis=0), index=table.columns)
    annotator_labels = set(map(str, our_uns(adata).get(key, {}).get("labels", ())))
    last = [name for name in (REJECTED, _NONE) if name in table.columns and name not in rows]
    shared = [name for name in rows if name in table.columns or name in annotator_labels]
    others = [name for name in main_row.sort_values(kind="stable").index if name not in rows and name not in last]
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
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Heatmap of the top marker genes of each predicted type.

    Colours are the mean log-normalised expression of a type's cells (counts per ten thousand, log1p), as z-scores of
    each gene over the types. Types are ordered by similarity. Markers are selected by scanpy's ``rank_genes_groups``
    (t-test with overestimated variance, a type against all other cells). Each gene is a marker of the type in which its
    score is highest, which is framed.

    Parameters
    ----------
    adata
        Cells with predicted types; nothing is written to it.
    key
        A column of ``adata.obs`` with the types, as `scdiva.tl.annotate` wrote it. Cells without one are ignored;
        types of one cell are drawn without markers.
    n_genes
        Maximum number of markers of each type, all with a score above 0.
    layer, use_raw
        Key of ``adata.layers``, or whether to take ``adata.raw``; by default ``adata.X``.
    input
        Unit of the matrix: ``"counts"``, ``"lognorm"`` (log1p of counts scaled per cell, to any total), or ``"auto"``
        to tell from the values.
    gene_symbols
        A column of ``adata.var`` (of ``adata.raw.var`` with `use_raw`) with names to write instead of the var names.
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
    import scanpy as sc

    check_least(n_genes=(n_genes, 1))
    types = predicted_groups(adata, key)
    labelled = np.flatnonzero(types.notna())
    # scanpy requires names, and clusters may be numbers
    types = types.iloc[labelled].cat.remove_unused_categories().cat.rename_categories(str)
    size = types.value_counts(sort=False)
    if len(size) < 2 or size.max() < 2:
        raise ValueError(
            f"adata.obs[{key!r}] holds {len(size)} types, the largest of {size.max()} cells: markers need two "
            "types or more, one of them with two cells or more."
        )
    names = gene_names((adata.raw if use_raw and adata.raw else adata).var, gene_symbols)
    values, _ = log_normalised(adata, layer=layer, use_raw=use_raw, input=input)
    cells = AnnData(values[labelled], obs=pd.DataFrame({key: types.array}, index=np.arange(len(labelled)).astype(str)))
    cells.uns["log1p"] = {"base": None}
    markers = _markers(cells, key, size, n_genes)
    if markers.empty:
        raise ValueError(f"no gene is higher in one type of adata.obs[{key!r}] than in the others.")
    genes = markers["names"].to_numpy(dtype=int)
    means = sc.get.aggregate(cells[:, genes], key, "mean").layers["mean"]
    order = similar_order(means / means.max(axis=0))
    row_of = {name: row for row, name in enumerate(size.index[order])}
    framed = markers["type"].map(row_of).to_numpy()
    along = np.argsort(framed, kind="stable")  # the diagonal
    standard = ((means - means.mean(axis=0)) / means.std(axis=0))[order][:, along]
    limit = min(3.0, float(np.abs(standard).max()))  # standard deviations from a gene's mean
    wide, high = text_inches(list(row_of)), text_inches(names[genes])
    fig, axes = axes_for(ax, (0.16 * len(genes) + wide + 1.4, max(0.2 * len(row_of) + high, 2.0) + 0.6))
    draw_heatmap(
        axes, standard, list(row_of), names[genes[along]], "mean expression (z-score)", vmin=-limit, vmax=limit,
        framed=list(zip(framed[along], range(len(genes)), strict=True)), cmap="RdBu_r", rasterized=True,
    )  # fmt: skip
    axes.set_ylabel(key, fontsize=9)
    return fig


def _markers(cells: AnnData, key: str, size: pd.Series, n_genes: int) -> pd.DataFrame:
    """`names` of the top genes of each `type`, in decreasing order, each in the type of its highest score."""
    import scanpy as sc

    enough = list(size.index[size > 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)  # genes without variance
        sc.tl.rank_genes_groups(cells, key, groups=enough, method="t-test_overestim_var")
    # differences by rounding are ignored
    differs = cells.var_names[np.ptp(sc.get.aggregate(cells, key, "mean").layers["mean"], axis=0) > 1e-6]
    ranked = pd.concat({name: sc.get.rank_genes_groups_df(cells, name) for name in enough}, names=["type"])
    # scanpy >= 1.12 gives score 0 against a single cell, which has no variance; use the fold change instead
    ranked["scores"] = ranked["scores"].where(ranked["scores"] != 0, ranked["logfoldchanges"])
    ranked = ranked[(ranked["scores"] > 0) & ranked["names"].isin(differs)].reset_index("type")
    best = ranked.sort_values("scores", ascending=False, kind="stable").drop_duplicates("names")
    return best.groupby("type").head(n_genes)


@plot
def feature_heatmap(
    adata: AnnData,
    groupby: str = OBS_LABEL,
    *,
    basis: str = OBSM_EMBEDDING,
    n_cells: int | None = None,
    ax: Axes | None = None,
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Heatmap of the features of an embedding by cell type, with hierarchically clustered rows and columns.

    Each feature (a column of the embedding) is standardised over all cells with a type. A row is the mean of the cells
    of a type, or, with `n_cells`, a single cell. Types, features and the cells within a type are ordered by
    hierarchical clustering (average linkage of Euclidean distances between means, of correlation distances between
    features, optimal leaf order). Colours end at three standard deviations or the largest absolute value, whichever is
    smaller.

    Parameters
    ----------
    adata
        Cells with the embedding and the types; nothing is written to it.
    groupby
        A column of ``adata.obs``, such as the predicted types of `scdiva.tl.annotate`. Cells without a value are not
        drawn.
    basis
        Key of ``adata.obsm``. Cells without a finite embedding are not drawn, with a warning.
    n_cells
        Maximum number of cells drawn per type, evenly spaced in the order of `adata`. None: the mean of each type.
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
        If there is no such column or embedding.
    ValueError
        If the column has no or more than 100 groups, no cell has both a type and a finite embedding, the embedding does
        not vary, `n_cells` is below 1, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(120, 100)
    >>> sd.tl.embed(adata)
    >>> sd.pl.feature_heatmap(adata, "cell_type", save="features.png")
    """
    if n_cells is not None:
        check_least(n_cells=(n_cells, 1))
    types = groups_of(adata, groupby, f"scdiva.tl.annotate(adata, ..., key_added={groupby!r})")
    basis = basis_of(adata, basis)
    if basis not in adata.obsm:
        raise no_entry("adata.obsm", basis, adata.obsm, "scdiva.tl.embed(adata)")
    stored = adata.obsm[basis]
    features = np.asarray(stored.toarray() if hasattr(stored, "toarray") else stored, dtype=np.float64)
    features = features.reshape(len(features), -1)
    labelled, finite = types.notna().to_numpy(), np.isfinite(features).all(axis=1)
    if n_lost := int((labelled & ~finite).sum()):
        warn(f"{n_lost:,} of {labelled.sum():,} cells have no finite embedding and are not drawn")
    drawn = np.flatnonzero(labelled & finite)
    if not len(drawn):
        raise ValueError(f"no cell has both a value in adata.obs[{groupby!r}] and a finite adata.obsm[{basis!r}].")
    types, features = types.iloc[drawn].cat.remove_unused_categories(), features[drawn]
    spread = features.std(axis=0)
    varies = spread > 1e-9 * np.abs(features).max(axis=0)
    if not varies.any():
        raise ValueError(f"adata.obsm[{basis!r}] is the same in all {len(drawn):,} cells.")
    number = np.flatnonzero(varies)
    features = (features[:, number] - features[:, number].mean(axis=0)) / spread[number]

    code, names, sizes = types.cat.codes.to_numpy(), types.cat.categories, types.value_counts(sort=False)
    means = np.stack([features[code == i].mean(axis=0) for i in range(len(names))])
    along = similar_order(means)
    rows, label = means[along], "mean feature (z-score)"
    ends = np.arange(1, len(along) + 1)
    if n_cells is not None:
        blocks = []
        for i in along:
            cells = features[code == i]
            cells = cells[np.linspace(0, len(cells) - 1, min(n_cells, len(cells))).round().astype(int)]
            blocks.append(cells[similar_order(cells)])
        rows, label, ends = np.concatenate(blocks), "feature (z-score)", np.cumsum([len(block) for block in blocks])
    across = similar_order(rows.T, "correlation" if len(rows) > 2 else "euclidean")
    values = rows[:, across]
    limit = min(3.0, float(np.abs(values).max())) or 1.0
    tick_labels = [f"{names[i]} ({sizes.iloc[i]:,})" for i in along]
    width = float(np.clip(0.03 * len(across), 3.0, 9.0)) + text_inches(tick_labels) + 1.2
    height = float(np.clip(0.012 * len(rows), 0.24 * len(tick_labels), 12.0)) if n_cells else 0.24 * len(tick_labels)
    fig, axes = axes_for(ax, (width, max(height, 1.6) + 0.8))
    draw_heatmap(
        axes, values, [], [str(n) for n in number[across]] if len(across) <= 40 else [], label,
        vmin=-limit, vmax=limit, cmap="RdBu_r", rasterized=True, extend="both",
    )  # fmt: skip
    starts = np.concatenate([[0], ends[:-1]])
    axes.set_yticks((starts + ends) / 2, tick_labels)
    axes.hlines(ends[:-1], 0, len(across), color="white", linewidth=1.0 if n_cells else 0.4)
    axes.set(xlabel=f"features of {basis} ({len(across):,})", ylabel=f"{groupby} (cells)")
    return fig


@plot
def reliability(
    adata: AnnData,
    key: str = OBS_LABEL,
    labels_key: str | None = None,
    *,
    ax: Axes | None = None,
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Reliability diagram: accuracy of predicted types by their confidence.

    On the diagonal, 70% of the predictions of 70% confidence are correct; below it, the annotator is overconfident. The
    area of a dot grows with the number of cells of a bin; whiskers are 95% confidence intervals (Wilson). The legend
    gives the expected calibration error (ECE, see `scdiva.metrics.calibration`).

    The diagram shows the held-out cells of the reference, which `scdiva.tl.annotate` stores in ``adata.uns``, and with
    `labels_key` the cells of `adata`, each with its most probable label, whether or not it was rejected or replaced by
    a group. Cells of a type that the reference lacks are errors.

    Parameters
    ----------
    adata
        Cells that `scdiva.tl.annotate` annotated.
    key
        Its `key_added`.
    labels_key
        A column of ``adata.obs`` with the true types, to draw these cells too; cells without one are ignored.
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
        If there is no such annotation or column.
    ValueError
        If there is nothing to draw: no held-out reference cells and no `labels_key`, or no cell with both a label and a
        probability; or if `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> cells = sd.datasets.toy(120, 100)
    >>> reference, query = cells[:80].copy(), cells[80:].copy()
    >>> annotator = sd.tl.annotate(query, "cell_type", reference)
    >>> sd.pl.reliability(query, save="reliability.png")
    """
    from scipy.stats import binomtest

    best = annotation_df(adata, key=key)
    drawn: dict[str, Mapping[str, Any]] = {}
    notes = our_uns(adata).get(key, {})
    if np.asarray(notes.get("reliability", {}).get("n_cells", 0)).any():  # empty without held-out cells
        drawn["held-out reference"] = {"ece": notes["ece"], **notes["reliability"]}
    if labels_key is not None:
        truth = groups_of(adata, labels_key)[~np.isnan(np.asarray(adata.obsm[f"{key}_{PROBABILITY}"])).any(axis=1)]
        scored = truth.notna().to_numpy()
        if not scored.any():
            raise ValueError(f"no cell has both a label in adata.obs[{labels_key!r}] and a probability")
        correct = best["label"].astype(str).to_numpy()[scored] == truth[scored].astype(str).to_numpy()
        drawn["these cells"] = metrics.calibration(best["probability"].to_numpy()[scored].clip(0, 1), correct)
    if not drawn:
        raise ValueError(
            f"adata.uns[{UNS!r}][{key!r}] holds no held-out reference cells: name the column with the true types of "
            "these cells, labels_key=..."
        )

    fig, axes = axes_for(ax, (4.4, 4.8), framed=True)
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1.0, linestyle="--", zorder=1)
    for (name, bins), colour in zip(drawn.items(), distinct_colours(2), strict=False):
        filled = np.asarray(bins["n_cells"]) > 0
        n, x, y = (np.asarray(bins[column])[filled] for column in ("n_cells", "confidence", "accuracy"))
        limits = [binomtest(round(a * k), int(k)).proportion_ci(method="wilson") for a, k in zip(y, n, strict=True)]
        whiskers = np.maximum([y - [limit.low for limit in limits], [limit.high for limit in limits] - y], 0)
        label = f"{name}: ECE {float(bins['ece']):.3f} ({n.sum():,} cells)"
        axes.errorbar(x, y, yerr=whiskers, color=colour, label=label, linewidth=1.2, elinewidth=0.8, zorder=2)
        axes.scatter(x, y, s=6 + 150 * n / n.sum(), color=colour, linewidths=0, zorder=3)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="confidence", ylabel="accuracy", aspect="equal")
    draw_legend(axes, "above", handlelength=1.5)
    return fig
