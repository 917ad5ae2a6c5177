"""The strongest genes of one predicted perturbation, cell by cell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva._constants import BASELINES, PREDICTED
from scdiva._docs import with_shared_docs
from scdiva.data.genes import check_unique
from scdiva.data.observed import OURS, observed_responses, response_score
from scdiva.data.predictions import Prediction, read_prediction
from scdiva.get import perturbation_df
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._response import (
    COLOURS,
    find_condition,
    names_of,
    parts_of,
    predicted_cells,
    strongest_first,
    written_name,
)

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {"control": "0.6", "predicted": COLOURS[OURS], "observed": "#30638e"}
"""Colours of the three kinds of cells."""
_MARKERS = dict(zip(BASELINES, "v^DsPX", strict=True))
_ROOM = 0.84
"""Width that the boxes of a gene share, where genes are 1 apart."""
_LETTER = 0.06
"""Inches of a letter of the legend, about."""


@with_shared_docs
def perturbation(
    predicted: AnnData,
    condition: str,
    observed: AnnData | None = None,
    *,
    n_genes: int = 20,
    baselines: Sequence[str] = (),
    gene_symbols: str | None = None,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    key: str = PREDICTED,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw the strongest genes of a perturbation: control, predicted and observed cells side by side.

    Boxes hold the middle half of the cells and a line at the median, whiskers 90% of them; dots are means, which tell
    more than medians where a gene is seen in few cells. Expression is log1p of counts per ten thousand. Names of
    perturbed genes are bold.

    With `observed`, the genes are those that differ most between the observed perturbed and control cells of the same
    group (Welch's t); the strongest first. Without, those of the largest predicted change, in units of its standard
    deviation where there is one; control cells are then a line at their mean.

    The predicted cells are those that the call returned. The adata that was given to it holds their means alone: of it,
    predicted is a dot at the mean, with a bar of one standard deviation of that mean, and no box.

    Parameters
    ----------
    predicted
        What `scdiva.tl.predict_perturbation` or `scdiva.tl.in_silico_perturbation` returned, or the adata that was
        given to them.
    condition
        One of those that were predicted; the perturbation is enough where it is
        predicted in one group only.
    observed
        Cells of that condition and control cells, counts or log-normalised, with the columns of obs by which was
        predicted. Genes are matched by var names. None draws the prediction alone.
    n_genes
        Genes drawn, at most.
    baselines
        Simple baselines whose predicted means are marked too, as ``["additive", "train_mean"]``.
    gene_symbols
        A column of ``predicted.var`` with names to write instead of the var names.
    layer, use_raw
        Where `observed` has the matrix: key of its ``layers``, or whether to take its ``raw``; by default its ``X``.
    input
        Unit of that matrix: ``"counts"``, ``"lognorm"`` (log1p of normalised counts, taken as it is), or ``"auto"`` to
        tell from the values.
    key
        Of that adata, the entry of ``uns`` with the prediction.
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
        If `predicted` is no prediction, the condition, a column or layer does not exist, or a baseline does not predict
        this condition.
    ValueError
        If `n_genes` is below 1, no cell of the condition or no control cell was observed, no cell of it is among those
        of `predicted`, no gene is in both, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> train = screen[screen.obs["perturbation"] != "A+B"].copy()
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["A+B"])
    >>> test = screen[screen.obs["perturbation"].isin(["control", "A+B"])].copy()
    >>> sd.pl.perturbation(predicted, "A+B", test, baselines=["additive"], save="a_b.png")
    """
    check_file(save)
    if n_genes < 1:
        raise ValueError(f"n_genes must be at least 1, got {n_genes}.")
    prediction = read_prediction(predicted, key)
    at = find_condition(prediction, condition)
    found = prediction.conditions.loc[at]
    means = _baseline_means(prediction, at, baselines)
    names = names_of(prediction, gene_symbols)
    of_condition = predicted_cells(prediction, found["condition"])
    cells: dict[str, sp.csr_matrix] = {}
    if observed is None:
        genes = _surest(predicted, prediction, found["condition"], n_genes, key)
    else:
        responses = observed_responses(prediction, observed, layer=layer, use_raw=use_raw, input=input, only=[at])
        change = responses.perturbed[at].mean - responses.control_of(at).mean
        best = strongest_first(change, response_score(responses, at))[:n_genes]
        genes = responses.genes[best]
        cells["control"] = responses.expression[responses.control_rows[found["group"]]][:, best]
        observed_cells = responses.expression[responses.rows[at]][:, best]
    if of_condition is not None:
        cells["predicted"] = sp.csr_matrix(of_condition.X[:, genes])
    if observed is not None:
        cells["observed"] = observed_cells

    fig, axes = axes_for(ax, (max(0.42 * len(genes) + 1.0, 4.6), 3.6))
    for place in range(1, len(genes), 2):
        axes.axvspan(place - 0.5, place + 0.5, color="0.96", linewidth=0, zorder=0)
    kinds = [kind for kind in _KINDS if kind in cells or kind == "predicted"]
    step = _ROOM / max(len(kinds), 2)
    shifts = dict(zip(kinds, step * (np.arange(len(kinds)) - (len(kinds) - 1) / 2), strict=True))
    for kind, shift in shifts.items():
        if kind in cells:
            _draw_boxes(axes, cells[kind].toarray(), np.arange(len(genes)) + shift, 0.8 * step, kind)
        else:
            _draw_means(axes, prediction, at, genes, np.arange(len(genes)) + shift)
    if observed is None:
        places, label = np.arange(len(genes)), "mean of control cells"
        control = prediction.control[genes, at]
        axes.hlines(control, places - 0.4, places + 0.4, color="0.35", linewidth=1.2, label=label)
    edges = 0.4 * step * np.linspace(-1, 1, max(len(means), 2))  # beside the dot of the predicted mean
    for (name, mean), edge in zip(means.items(), edges, strict=False):
        places = np.arange(len(genes)) + shifts["predicted"] + edge
        label = f"{written_name(name)}, mean"
        ink: dict[str, Any] = {"color": COLOURS[name], "edgecolors": "black", "linewidths": 0.4}
        axes.scatter(places, mean[genes], s=14, marker=_MARKERS[name], zorder=5, label=label, **ink)
    _name_genes(axes, names[genes], prediction.genes[genes], parts_of(prediction, found["perturbation"]))
    axes.set(xlim=(-0.6, len(genes) - 0.4), ylabel="log-normalised expression")
    axes.spines[["top", "right"]].set_visible(False)
    _legend_and_title(axes, found["condition"])
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


def _baseline_means(prediction: Prediction, at: int, baselines: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Give the means that baselines predict of a condition; refuse those that do not exist or do not predict it."""
    of_condition = {name: of_all[:, at] for name, of_all in prediction.baselines.items()}
    means = {name: mean for name, mean in of_condition.items() if np.isfinite(mean).all()}
    if isinstance(baselines, str) or set(baselines) - set(means):
        raise KeyError(
            f"baselines={baselines!r} must be a list of some of {', '.join(means) or 'none'}: these predict it."
        )
    return {name: means[name] for name in baselines}


def _surest(predicted: AnnData, prediction: Prediction, condition: str, n_genes: int, key: str) -> NDArray[np.intp]:
    """Give the genes whose predicted change is largest for its uncertainty."""
    genes = prediction.genes
    check_unique(genes, "predicted")
    found: NDArray[np.intp] = genes.get_indexer(
        perturbation_df(predicted, condition=condition, top=n_genes, key=key)["gene"]
    )
    return found


def _legend_and_title(axes: Axes, title: str) -> None:
    """Write the legend above the axes, in as many rows as its width asks for, and the title above the legend."""
    axes.figure.canvas.draw()  # a constrained layout settles only now
    room = axes.get_window_extent().width / axes.figure.get_dpi()
    handles, labels = axes.get_legend_handles_labels()
    wide = [_LETTER * len(label) + 0.35 for label in labels]
    columns = len(labels) if sum(wide) < room else max(int(room / max(wide)), 1)
    axes.legend(
        handles, labels, fontsize=7.5, frameon=False, ncols=columns, loc="lower left", bbox_to_anchor=(0.0, 1.0),
        borderpad=0.2, borderaxespad=0.0, handlelength=1.2, handletextpad=0.3, columnspacing=1.0,
    )  # fmt: skip
    rows = -(-len(labels) // columns)
    axes.set_title(title, fontsize=10, loc="left", pad=6 + 11 * rows)


def _draw_boxes(axes: Axes, values: NDArray[Any], places: NDArray[np.float64], width: float, kind: str) -> None:
    """Draw a thin box for each column of `values`, (n_cells, n_genes), and a dot at its mean."""
    from matplotlib.colors import to_rgba

    colour = _KINDS[kind]
    line: dict[str, Any] = {"color": colour, "linewidth": 0.8}
    axes.boxplot(
        values, positions=places, widths=width, whis=(5, 95), showfliers=False, showcaps=False, patch_artist=True,
        manage_ticks=False, boxprops={"facecolor": to_rgba(colour, 0.35), "edgecolor": colour, "linewidth": 0.8},
        whiskerprops=line, medianprops={"color": colour, "linewidth": 1.6}, zorder=2,
    )  # fmt: skip
    label = f"{kind} ({len(values):,} cells)"
    mean = values.mean(axis=0)
    axes.scatter(places, mean, s=13, color=colour, edgecolors="white", linewidths=0.5, zorder=4, label=label)


def _draw_means(
    axes: Axes, prediction: Prediction, at: int, genes: NDArray[np.intp], places: NDArray[np.float64]
) -> None:
    """Draw a dot at the predicted mean of each gene, and its standard deviation where there is one."""
    mean = prediction.mean[genes, at]
    sd = None if prediction.sd is None else prediction.sd[genes, at]
    axes.errorbar(
        places, mean, yerr=sd, fmt="o", markersize=4.5, color=_KINDS["predicted"], elinewidth=1.0, zorder=4,
        label="predicted mean" + (" ± sd" if sd is not None and np.isfinite(sd).any() else ""),
    )  # fmt: skip


def _name_genes(axes: Axes, names: NDArray[Any], var_names: Any, parts: Sequence[str]) -> None:
    """Write the names under their boxes, those of the perturbed genes bold."""
    axes.set_xticks(np.arange(len(names)), names, rotation=90, fontsize=8)
    axes.tick_params(axis="x", length=0)
    for text, name, var_name in zip(axes.get_xticklabels(), names, var_names, strict=True):
        if name in parts or var_name in parts:
            text.set_fontweight("bold")
