"""Which types are taken for which."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva._constants import OBS_LABEL, REJECTED, UNS
from scdiva._docs import with_shared_docs
from scdiva.data.writing import check_anndata
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._groups import groups_of, predicted_groups

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIDE = 0.36
"""Inches of a field's side; a count of four digits fits."""
_FEW = 6
"""Up to so many types fields are larger, so that the names beside them have room."""
_LETTER = 0.07
"""Inches of a letter of a name, about."""
_NONE = "no label"


@with_shared_docs
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
    """Draw how cells of each type were annotated, with like types beside each other.

    A row is a type of `labels_key`, a column a predicted one; the numbers are cells. Types whose cells are annotated
    alike stand together: rows are clustered (average linkage of Hellinger distances between the rows' shares, optimal
    leaf order [1]_). Columns follow the rows, so that what is right lies on the diagonal, in frames; then come
    predicted names that are no type of `labels_key`, and last "unknown". A column that would be empty is left out,
    unless it is a type that the annotator knows; so a row without a framed field is a type that could not be found.

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
    check_file(save)
    check_anndata(adata)
    table = _table(adata, labels_key, key)
    counts = table.to_numpy()
    totals = counts.sum(axis=1)
    colour = counts / totals[:, None] if normalize else counts
    rows, columns = [f"{name} ({n:,})" for name, n in zip(table.index, totals, strict=True)], list(table.columns)

    from matplotlib.patches import Rectangle

    side = _SIDE if len(rows) > _FEW else 1.5 * _SIDE
    wide, high = (_LETTER * max(map(len, names)) for names in (rows, columns))
    fig, axes = axes_for(ax, (side * len(columns) + wide + 1.6, side * len(rows) + 0.7 * high + 0.7))
    image = axes.pcolormesh(
        colour, cmap="Blues", vmin=0, vmax=1 if normalize else None, edgecolors="0.9", linewidth=0.4
    )
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, fontsize=8)
    if max(map(len, columns)) > 3:
        for text in axes.get_xticklabels():
            text.set(rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows, fontsize=8)
    axes.tick_params(length=0)
    axes.set_xlabel(f"predicted: {key}", fontsize=9)
    axes.set_ylabel(f"annotated: {labels_key} (cells)", fontsize=9)
    axes.spines[:].set_visible(False)
    for i, j in zip(*np.nonzero(counts), strict=True):
        ink = "white" if colour[i, j] > 0.55 * colour.max() else "0.15"
        axes.text(j + 0.5, i + 0.5, f"{counts[i, j]}", ha="center", va="center", fontsize=6.5, color=ink)
    for i, name in enumerate(table.index):
        if name in columns:
            corner = (columns.index(name), i)
            frame = Rectangle(corner, 1, 1, fill=False, edgecolor="0.25", linewidth=1.0, zorder=3, clip_on=False)
            axes.add_patch(frame)
    bar = fig.colorbar(image, ax=axes, shrink=min(1.0, 2.4 / (side * len(rows))), aspect=15)
    bar.set_label("share of the type's cells" if normalize else "cells", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


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
    place = pd.Series(np.argmax(table.loc[rows].to_numpy(), axis=0), index=table.columns)
    known = _known_to_annotator(adata, key)
    last = [name for name in (REJECTED, _NONE) if name in table.columns and name not in rows]
    shared = [name for name in rows if name in table.columns or name in known]
    others = [name for name in place.sort_values(kind="stable").index if name not in rows and name not in last]
    return table.reindex(index=rows, columns=[*shared, *others, *last], fill_value=0)


def _known_to_annotator(adata: AnnData, key: str) -> set[str]:
    """Names of the types that the annotator of `key` can give; empty where it is not ours."""
    ours = adata.uns.get(UNS, {})
    return set(map(str, ours.get(key, {}).get("labels", ()))) if hasattr(ours, "get") else set()


def similar_order(profiles: NDArray[np.floating]) -> NDArray[np.intp]:
    """Order rows so that like ones stand beside each other; the end that comes first in the rows given stays first.

    Parameters
    ----------
    profiles
        What is compared, by Euclidean distance, (n, n_features).
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import pdist

    if len(profiles) < 3:
        return np.arange(len(profiles))
    order = leaves_list(linkage(pdist(profiles), method="average", optimal_ordering=True)).astype(np.intp)
    found: NDArray[np.intp] = order if order[0] < order[-1] else order[::-1]
    return found
