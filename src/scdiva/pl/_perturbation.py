"""One predicted perturbation: its strongest genes, cell by cell; the change of every gene against the observed one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva import metrics
from scdiva._constants import BASELINES, PREDICTED
from scdiva.data.genes import check_unique
from scdiva.data.predictions import (
    OURS,
    Prediction,
    Responses,
    observed_responses,
    read_prediction,
    response_score,
)
from scdiva.get import perturbation_df
from scdiva.pl._figure import axes_for, draw_legend, plot
from scdiva.pl._groups import gene_names
from scdiva.pl._labels import discs, place_labels
from scdiva.pl._response import (
    COLOURS,
    find_condition,
    parts_of,
    predicted_cells,
    reference_mean,
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
_TOP = 20
"""Differentially expressed genes that are scored, and coloured, apart."""


@plot
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
    if n_genes < 1:
        raise ValueError(f"n_genes must be at least 1, got {n_genes}.")
    prediction = read_prediction(predicted, key)
    at = find_condition(prediction, condition)
    found = prediction.conditions.loc[at]
    means = _baseline_means(prediction, at, baselines)
    names = gene_names(prediction.var, gene_symbols, "predicted.var")
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
    return fig


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
    _, labels = axes.get_legend_handles_labels()
    wide = [_LETTER * len(label) + 0.35 for label in labels]
    columns = len(labels) if sum(wide) < room else max(int(room / max(wide)), 1)
    tight = {"borderpad": 0.2, "borderaxespad": 0.0, "handlelength": 1.2, "handletextpad": 0.3, "columnspacing": 1.0}
    draw_legend(axes, "above", fontsize=7.5, ncols=columns, **tight)
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


@plot
def delta_scatter(
    predicted: AnnData,
    condition: str,
    observed: AnnData,
    *,
    method: str = OURS,
    reference: Literal["control", "mean"] = "control",
    n_names: int = 10,
    uncertainty: bool = False,
    gene_symbols: str | None = None,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    key: str = PREDICTED,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw the predicted change of every gene against the observed one.

    Changes are differences of mean log-normalised expression (log1p of counts per ten thousand) to the observed control
    cells of the same group. The 20 genes that differ most (Welch's t of observed perturbed against control cells) are
    in the colour of the method, the first of them named. In the corner: Pearson correlation over all genes, and over
    those 20. On the dashed line prediction and observation agree.

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
        predicted. Genes are matched by var names.
    method
        Whose prediction: ``"scdiva"``, or a baseline such as ``"additive"``.
    reference
        From where changes are counted: ``"control"``, or ``"mean"``, the mean over the perturbations of training, which
        leaves what is special to this one.
    n_names
        Genes named; 0 names none.
    uncertainty
        Whether to draw faint bars of one standard deviation: of the predicted mean, where there is one, and the
        standard error of the observed change.
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
        If `predicted` is no prediction, the condition, a column or layer does not exist, or `method` does not predict
        this condition.
    ValueError
        If `n_names` is negative, no cell of the condition or no control cell was observed, no gene is in both, there is
        no mean for ``reference="mean"``, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> train = screen[screen.obs["perturbation"] != "A+B"].copy()
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["A+B"])
    >>> test = screen[screen.obs["perturbation"].isin(["control", "A+B"])].copy()
    >>> sd.pl.delta_scatter(predicted, "A+B", test, save="a_b_change.png")
    """
    if n_names < 0:
        raise ValueError(f"n_names must be 0 or more, got {n_names}.")
    prediction = read_prediction(predicted, key)
    at = find_condition(prediction, condition)
    name = prediction.conditions.loc[at, "condition"]
    names = gene_names(prediction.var, gene_symbols, "predicted.var")
    responses = observed_responses(prediction, observed, layer=layer, use_raw=use_raw, input=input, only=[at])
    if method not in responses.methods(at):
        raise KeyError(f"method={method!r} does not predict {name!r}; {', '.join(responses.methods(at))} do.")
    base = reference_mean(responses, at, reference)
    mean, score = responses.means[method][:, at], response_score(responses, at, reference)
    x, y = responses.perturbed[at].mean - base, mean - base
    best = strongest_first(x, score)
    top = best[:_TOP]

    fig, axes = axes_for(ax, (4.4, 4.4))
    rest = np.setdiff1d(np.arange(len(x)), top)
    axes.axline((0, 0), slope=1, color="0.6", linewidth=0.9, linestyle="--", zorder=1)
    axes.axhline(0, color="0.9", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.9", linewidth=0.8, zorder=0)
    if uncertainty:
        error, spread = _errors(responses, at, reference), np.full(len(x), np.nan)
        if method == OURS and prediction.sd is not None:
            spread = prediction.sd[responses.genes, at].astype(np.float64)
        for genes, ink in ((rest, 0.15), (top, 0.4)):
            axes.errorbar(
                x[genes], y[genes], xerr=error[genes], yerr=spread[genes], fmt="none", ecolor=("0.3", ink),
                elinewidth=0.6, zorder=1,
            )  # fmt: skip
    axes.scatter(x[rest], y[rest], s=7, color="0.7", linewidths=0, zorder=2, rasterized=len(rest) > 5_000)
    axes.scatter(x[top], y[top], s=14, color=COLOURS[method], linewidths=0, zorder=3)
    low, high = min(x.min(), y.min()), max(x.max(), y.max())
    edge = 0.06 * (high - low) or 1.0
    # one scale: a prediction of the right pattern that is too weak lies flat
    axes.set(xlim=(low - edge, high + edge), ylim=(low - edge, high + edge), aspect="equal")
    unit = "change from control cells" if reference == "control" else "change from the mean perturbation"
    axes.set(xlabel=f"observed {unit}", ylabel=f"predicted {unit}")
    axes.set_title(name if method == OURS else f"{name}, {written_name(method)}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    scores = metrics.perturbation_response(mean, x + base, base, de_score=score, top=(_TOP,))
    corner = f"Pearson r {scores['pearson_delta']:.2f} ({len(x):,} genes)"
    if len(x) > _TOP:
        corner += f"\n{scores[f'pearson_delta_top{_TOP}']:.2f} (top {_TOP})"
    _write_in_corner(axes, corner, x, y)
    if n_names:
        _name_points(axes, np.column_stack([x, y]), best[:n_names], names[responses.genes], COLOURS[method])
    return fig


def _errors(responses: Responses, at: int, reference: Literal["control", "mean"]) -> NDArray[np.float64]:
    """Give the standard error of the observed change; NaN where it rests on a single cell."""
    sides = [responses.perturbed[at], *([responses.control_of(at)] if reference == "control" else [])]
    return np.sqrt(sum(cells.variance / cells.n if cells.n > 1 else np.nan * cells.mean for cells in sides))


def _write_in_corner(axes: Axes, text: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    """Write into the corner beside the diagonal that has fewer genes."""
    middle = sum(axes.get_xlim()) / 2
    above = ((x < middle) & (y > middle)).sum() <= ((x > middle) & (y < middle)).sum()
    place: dict[str, Any] = {"ha": "left", "va": "top"} if above else {"ha": "right", "va": "bottom"}
    at = (0.02, 0.98) if above else (0.98, 0.02)
    axes.text(*at, text, transform=axes.transAxes, fontsize=8, zorder=6, **place)


def _name_points(
    axes: Axes, points: NDArray[np.float64], named: NDArray[np.intp], names: NDArray[Any], colour: str
) -> None:
    """Write names beside their points, clear of these and of the text in the corner."""
    axes.figure.canvas.draw()  # a constrained layout settles only now, and pixels count from here on
    box = axes.texts[-1].get_window_extent()
    corner = np.stack(np.meshgrid(np.arange(box.x0, box.x1, 2), np.arange(box.y0, box.y1, 2)), axis=-1).reshape(-1, 2)
    dots = np.concatenate([points, discs(axes, points[named], 4.0), axes.transData.inverted().transform(corner)])
    place_labels(axes, dots, points[named], list(names[named]), [colour] * len(named), fontsize=7)
