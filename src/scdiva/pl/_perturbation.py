"""One predicted perturbation: its strongest genes cell by cell, and the change of every gene."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva import metrics
from scdiva._constants import BASELINES, VARM_CONTROL, VARM_SD
from scdiva._docs import with_shared_docs
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._labels import place_labels
from scdiva.pl._response import (
    COLOURS,
    OURS,
    Condition,
    Response,
    cells_of,
    find_condition,
    observed_response,
    predicted_means,
    read_observed,
    reference_mean,
    written_by_prediction,
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

    Parameters
    ----------
    predicted
        What `scdiva.tl.predict_perturbation` or `scdiva.tl.in_silico_perturbation` returned.
    condition
        One of ``predicted.uns["scdiva"]["perturbation"]["condition"]``; the perturbation is enough where it is
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
        If `n_genes` is below 1, no cell of the condition or no control cell was observed, no gene is in both, or `save`
        ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["KLF1+SET"])
    >>> sd.pl.perturbation(predicted, "KLF1+SET", test, baselines=["additive"], save="klf1_set.png")
    """
    check_file(save)
    if n_genes < 1:
        raise ValueError(f"n_genes must be at least 1, got {n_genes}.")
    written, found = written_by_prediction(predicted), find_condition(predicted, condition)
    means = predicted_means(predicted, found)
    _check_baselines(baselines, means, found)
    names = _gene_names(predicted, gene_symbols)
    of_condition = np.flatnonzero(cells_of(predicted.obs, found, written, "predicted"))
    control = np.asarray(predicted.varm[VARM_CONTROL])[:, found.column]
    cells: dict[str, sp.csr_matrix] = {}
    if observed is None:
        score = means[OURS] - control
        if VARM_SD in predicted.varm:
            spread = np.asarray(predicted.varm[VARM_SD])[:, found.column]
            score = np.divide(score, spread, np.zeros_like(score), where=spread > 0) if (spread > 0).any() else score
        genes = in_matrix = np.argsort(-np.abs(score), kind="stable")[:n_genes]
    else:
        measured = read_observed(predicted, observed, layer=layer, use_raw=use_raw, input=input)
        response = _response(found, measured, written)
        in_matrix = np.argsort(-np.abs(response.score), kind="stable")[:n_genes]
        genes = measured.genes[in_matrix]
        cells["control"] = response.control_cells[:, in_matrix]
    cells["predicted"] = sp.csr_matrix(predicted.X[of_condition][:, genes])
    if observed is not None:
        cells["observed"] = response.cells[:, in_matrix]

    fig, axes = axes_for(ax, (max(0.42 * len(genes) + 1.0, 4.6), 3.6))
    for at in range(1, len(genes), 2):
        axes.axvspan(at - 0.5, at + 0.5, color="0.96", linewidth=0, zorder=0)
    step = _ROOM / max(len(cells), 2)
    shifts = dict(zip(cells, step * (np.arange(len(cells)) - (len(cells) - 1) / 2), strict=True))
    for kind, matrix in cells.items():
        _draw_boxes(axes, matrix.toarray(), np.arange(len(genes)) + shifts[kind], 0.8 * step, kind)
    if observed is None:
        at = np.arange(len(genes))
        axes.hlines(control[genes], at - 0.4, at + 0.4, color="0.35", linewidth=1.2, label="mean of control cells")
    for name in baselines:
        places = np.arange(len(genes)) + shifts["predicted"]
        ink = {"color": COLOURS[name], "edgecolors": "black", "linewidths": 0.4}
        axes.scatter(
            places, means[name][genes], s=16, marker=_MARKERS[name], zorder=5, label=f"{written_name(name)}, mean", **ink
        )
    _name_genes(axes, names[genes], predicted.var_names[genes], found.perturbation.split(str(written["separator"])))
    axes.set(xlim=(-0.6, len(genes) - 0.4), ylabel="log-normalised expression")
    axes.spines[["top", "right"]].set_visible(False)
    _legend_and_title(axes, found.name)
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


def _response(condition: Condition, measured: Any, written: dict[str, Any]) -> Response:
    """Give the observed response of a condition that must have been observed."""
    response = observed_response(condition, measured, written)
    if response is None:
        raise ValueError(
            f"observed has no cell of {condition.name!r} (by obs[{str(written['perturbation_key'])!r}]): give cells of "
            "it, or observed=None to draw the prediction alone."
        )
    return response


def _check_baselines(baselines: Sequence[str], means: dict[str, Any], condition: Condition) -> None:
    """Refuse baselines that do not exist or do not predict the condition."""
    missing = [name for name in baselines if name not in means or name == OURS]
    if isinstance(baselines, str) or missing:
        raise KeyError(
            f"baselines={baselines!r} must be a list of some of {', '.join(n for n in means if n != OURS) or 'none'}, "
            f"which predict {condition.name!r}."
        )


def _gene_names(predicted: AnnData, gene_symbols: str | None) -> NDArray[Any]:
    """Give the names of genes as they are written."""
    if gene_symbols is None:
        return np.asarray(predicted.var_names)
    if gene_symbols not in predicted.var:
        columns = ", ".join(map(str, predicted.var.columns)) or "none"
        raise KeyError(f"gene_symbols={gene_symbols!r} is no column of predicted.var, which has {columns}")
    return np.asarray(predicted.var[gene_symbols].astype(str))


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
    line = {"color": colour, "linewidth": 0.8}
    axes.boxplot(
        values, positions=places, widths=width, whis=(5, 95), showfliers=False, showcaps=False, patch_artist=True,
        manage_ticks=False, boxprops={"facecolor": to_rgba(colour, 0.35), "edgecolor": colour, "linewidth": 0.8},
        whiskerprops=line, medianprops={"color": colour, "linewidth": 1.6}, zorder=2,
    )  # fmt: skip
    label = f"{kind} ({len(values):,} cells)"
    dot = {"color": colour, "edgecolors": "white", "linewidths": 0.5}
    axes.scatter(places, values.mean(axis=0), s=13, zorder=4, label=label, **dot)


def _name_genes(axes: Axes, names: NDArray[Any], var_names: Any, parts: list[str]) -> None:
    """Write the names under their boxes, those of the perturbed genes bold."""
    axes.set_xticks(np.arange(len(names)), names, rotation=90, fontsize=8)
    axes.tick_params(axis="x", length=0)
    for text, name, var_name in zip(axes.get_xticklabels(), names, var_names, strict=True):
        if name in parts or var_name in parts:
            text.set_fontweight("bold")


@with_shared_docs
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
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw the predicted change of every gene against the observed one.

    Changes are differences of mean log-normalised expression (log1p of counts per ten thousand) to the observed control
    cells of the same group. The 20 genes that differ most (Welch's t of observed perturbed against control cells) are
    dark, the first of them named. In the corner: Pearson correlation over all genes, and over those 20. On the dashed
    line prediction and observation agree.

    Parameters
    ----------
    predicted
        What `scdiva.tl.predict_perturbation` or `scdiva.tl.in_silico_perturbation` returned.
    condition
        One of ``predicted.uns["scdiva"]["perturbation"]["condition"]``; the perturbation is enough where it is
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
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["KLF1+SET"])
    >>> sd.pl.delta_scatter(predicted, "KLF1+SET", test, save="klf1_set_change.png")
    """
    check_file(save)
    if n_names < 0:
        raise ValueError(f"n_names must be 0 or more, got {n_names}.")
    written, found = written_by_prediction(predicted), find_condition(predicted, condition)
    means = predicted_means(predicted, found)
    if method not in means:
        raise KeyError(f"method={method!r} does not predict {found.name!r}; {', '.join(means)} do.")
    names = _gene_names(predicted, gene_symbols)
    measured = read_observed(predicted, observed, layer=layer, use_raw=use_raw, input=input)
    response = _response(found, measured, written)
    base = reference_mean(response, measured, written, reference)
    x, y = response.mean - base, means[method][measured.genes] - base
    best = np.argsort(-np.abs(response.score), kind="stable")
    top = best[:_TOP]

    fig, axes = axes_for(ax, (4.4, 4.4))
    rest = np.setdiff1d(np.arange(len(x)), top)
    axes.axline((0, 0), slope=1, color="0.6", linewidth=0.9, linestyle="--", zorder=1)
    axes.axhline(0, color="0.9", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.9", linewidth=0.8, zorder=0)
    if uncertainty:
        spread = np.full(len(x), np.nan)
        if method == OURS and VARM_SD in predicted.varm:
            spread = np.asarray(predicted.varm[VARM_SD], dtype=np.float64)[measured.genes, found.column]
        for genes, ink in ((rest, 0.15), (top, 0.4)):
            error = {"xerr": response.error[genes], "yerr": spread[genes]}
            axes.errorbar(x[genes], y[genes], **error, fmt="none", ecolor=("0.3", ink), elinewidth=0.6, zorder=1)
    axes.scatter(x[rest], y[rest], s=7, color="0.7", linewidths=0, zorder=2, rasterized=len(rest) > 5_000)
    axes.scatter(x[top], y[top], s=14, color=COLOURS[method], linewidths=0, zorder=3)
    low, high = min(x.min(), y.min()), max(x.max(), y.max())
    edge = 0.06 * (high - low) or 1.0
    # one scale: a prediction of the right pattern that is too weak lies flat
    axes.set(xlim=(low - edge, high + edge), ylim=(low - edge, high + edge), aspect="equal")
    unit = "change from control cells" if reference == "control" else "change from the mean perturbation"
    axes.set(xlabel=f"observed {unit}", ylabel=f"predicted {unit}")
    axes.set_title(found.name if method == OURS else f"{found.name}, {written_name(method)}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    scores = metrics.perturbation_response(y + base, response.mean, base, de_score=response.score, top=(_TOP,))
    corner = f"Pearson r {scores['pearson_delta']:.2f} ({len(x):,} genes)"
    if len(x) > _TOP:
        corner += f"\n{scores[f'pearson_delta_top{_TOP}']:.2f} (top {_TOP})"
    _write_in_corner(axes, corner, x, y)
    if n_names:
        _name_points(axes, np.column_stack([x, y]), best[:n_names], names[measured.genes], COLOURS[method])
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


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
    turn = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    disc = np.concatenate([r * np.column_stack([np.cos(turn), np.sin(turn)]) for r in (0.0, 2.0, 4.0)])
    pixels = axes.transData.transform(points[named])
    around = (pixels[:, None] + disc).reshape(-1, 2)
    box = axes.texts[-1].get_window_extent()
    field = np.stack(np.meshgrid(np.arange(box.x0, box.x1, 2), np.arange(box.y0, box.y1, 2)), axis=-1).reshape(-1, 2)
    kept_clear = axes.transData.inverted().transform(np.concatenate([around, field]))
    dots = np.concatenate([points, kept_clear])
    place_labels(axes, dots, points[named], list(names[named]), [colour] * len(named), fontsize=7)

