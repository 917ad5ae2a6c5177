"""What an annotation says: on the map, and how far it can be believed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva import metrics
from scdiva._constants import CONFIDENCE, OBS_LABEL, OBSM_EMBEDDING, PROBABILITY, REJECTED, UNS
from scdiva._docs import with_shared_docs
from scdiva._settings import settings
from scdiva.data.writing import check_anndata, our_uns
from scdiva.get import annotation_df
from scdiva.pl._coordinates import coordinates, embedding_of
from scdiva.pl._dots import (
    distinct_colours,
    draw_groups,
    draw_legend,
    draw_numbers,
    legend_columns,
    name_groups,
    palette,
)
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._groups import groups_of, predicted_groups

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_ON_PANEL = 14
"""With more types than this their names would fill the small panels, and go beside them."""
_REJECTED_COLOUR = (0.15, 0.15, 0.15, 1.0)


@with_shared_docs
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
    """Draw annotated and predicted types side by side on one UMAP, and how sure the prediction is.

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
    check_file(save)
    check_anndata(adata)
    panels = {} if labels_key is None else {f"annotated: {labels_key}": groups_of(adata, labels_key)}
    panels[f"predicted: {key}"] = predicted_groups(adata, key)
    colours = _shared_palette(adata, labels_key or key, list(panels.values()))
    types = pd.CategoricalDtype(list(colours))
    panels = {title: values.cat.rename_categories(str).astype(types) for title, values in panels.items()}
    sure = adata.obs.get(f"{key}_{CONFIDENCE}")
    embedding_of(adata, basis)
    seed = settings.seed if rng is None else int(rng)
    xy = coordinates(adata, basis, n_neighbors=n_neighbors, min_dist=min_dist, seed=seed)

    import matplotlib.pyplot as plt

    seen = pd.concat(list(panels.values()), ignore_index=True)
    aside = seen.nunique() > _MAX_ON_PANEL
    n = len(panels) + (sure is not None)
    beside = (0.065 * max(map(len, colours)) + 0.5) * legend_columns(seen) if aside else 0.0
    width = 4.0 * n + beside + (0.6 if sure is not None else 0)
    fig, axes = plt.subplots(1, n, figsize=(width, 4.0), layout="constrained", squeeze=False)
    for ax, (title, values) in zip(axes[0], panels.items(), strict=False):
        ax.set_title(title)
        draw_groups(ax, xy, values, colours, "none", size)
        if not aside:  # rejected cells have no place of their own
            name_groups(ax, xy, values.where(values != REJECTED), colours)
            if (values == REJECTED).any():
                ax.scatter([], [], color=_REJECTED_COLOUR, s=20, label=REJECTED)
                ax.legend(fontsize=8, frameon=False, handletextpad=0.1, borderpad=0.1)
    if aside:
        draw_legend(axes[0, len(panels) - 1], seen, colours)
    if sure is not None:
        axes[0, -1].set_title(CONFIDENCE)
        draw_numbers(fig, axes[0, -1], xy, sure.to_numpy(dtype=np.float64), size, limits=(0.0, 1.0))
    for ax in axes[0]:
        ax.set(xticks=[], yticks=[])
    return finish(fig, own=True, return_fig=return_fig, save=save)


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


@with_shared_docs
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
    """Draw how often predictions come true, by how sure the annotator was.

    On the diagonal, of the cells annotated with 70% confidence 70% are annotated rightly; below it, the annotator is
    too sure. Dots have areas that grow with the cells of a bin, which the bars above show; whiskers are 95% intervals
    (Wilson). The legend names the expected calibration error (ECE, see `scdiva.metrics.calibration`).

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
    check_file(save)
    check_anndata(adata)
    best = annotation_df(adata, key=key)
    drawn = {}
    if (held_out := _bins_of(adata, key)) is not None:
        drawn["held-out reference"] = held_out
    if labels_key is not None:
        truth = groups_of(adata, labels_key)
        told = ~np.isnan(np.asarray(adata.obsm[f"{key}_{PROBABILITY}"])).any(axis=1)
        truth = truth[told]
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

    fig, axes = axes_for(ax, (4.4, 5.2))
    above = axes.inset_axes((0.0, 1.03, 1.0, 0.25), sharex=axes)
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1.0, linestyle="--", zorder=1)
    for (name, found), colour in zip(drawn.items(), ("tab:blue", "tab:orange"), strict=False):
        _draw_bins(axes, above, found, name, colour)
    axes.set(
        xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="confidence", ylabel="share annotated rightly", aspect="equal"
    )
    # among the bars, which are low at the left as a rule; points may be anywhere
    above.legend(*axes.get_legend_handles_labels(), loc="upper left", fontsize=7.5, edgecolor="none", handlelength=1.5)
    above.tick_params(labelbottom=False, bottom=False, labelsize=7)
    above.set_ylabel("share of\ncells", fontsize=8)
    above.spines[["top", "right"]].set_visible(False)
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


def _draw_bins(axes: Axes, above: Axes, found: Mapping[str, NDArray[Any]], name: str, colour: str) -> None:
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
