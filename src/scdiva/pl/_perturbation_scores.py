"""Many predicted perturbations: which genes were found, which conditions can be told apart, and scores by method."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva import metrics
from scdiva._constants import BASELINES
from scdiva._docs import with_shared_docs
from scdiva.pl._confusion import similar_order
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._response import (
    COLOURS,
    OURS,
    Condition,
    Observed,
    Response,
    matched_responses,
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

_KS = 200
"""Genes up to which hit rates are drawn by default."""
_SIDE, _LETTER = 0.2, 0.065
"""Inches of a field's side and of a letter of a name, about."""


@with_shared_docs
def hit_rate(
    predicted: AnnData,
    observed: AnnData,
    *,
    k: Sequence[int] | None = None,
    methods: Sequence[str] | None = None,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw how many of the k genes that really change most are among the k predicted to change most.

    Genes are ranked by the absolute change of mean log-normalised expression from the control cells, the observed ones
    by the absolute t of Welch's test between perturbed and control cells (see `scdiva.metrics.hit_rate`). Curves are
    means over the conditions of which cells were observed, bands a standard error of that mean, and the dashed line is
    chance, k / n_genes. A baseline is drawn where it predicts all of these conditions, so that all curves are of the
    same ones. Who knows only which genes are expressed at all is far above chance where many are not: curves are best
    compared with that of the train mean.

    Parameters
    ----------
    predicted
        What `scdiva.tl.predict_perturbation` or `scdiva.tl.in_silico_perturbation` returned.
    observed
        Cells of its conditions and control cells, counts or log-normalised, with the columns of obs by which was
        predicted. Genes are matched by var names.
    k
        Numbers of genes; None takes 5, 10, ... 200, at most half of the genes.
    methods
        Whose predictions: ``"scdiva"`` and names of baselines. None takes all that predict every condition, except "no
        change", which ranks nothing and is the line of chance.
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
        If `predicted` is no prediction, a column or layer does not exist, or a method does not predict all conditions.
    ValueError
        If no predicted condition or no control cell was observed, no gene is in both, a `k` is below 1 or above the
        number of genes, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["KLF1+SET", "KLF1+TGFBR2"])
    >>> sd.pl.hit_rate(predicted, test, save="hit_rate.png")
    """
    check_file(save)
    written_by_prediction(predicted)
    measured = read_observed(predicted, observed, layer=layer, use_raw=use_raw, input=input)
    responses = matched_responses(predicted, measured)
    n_genes = len(measured.genes)
    numbers = _numbers_of_genes(k, n_genes)
    means = {condition: predicted_means(predicted, condition) for condition in responses}
    drawn = _methods(methods, list(means.values()))

    fig, axes = axes_for(ax, (4.6, 3.6))
    axes.plot(numbers, numbers / n_genes, color="0.5", linewidth=1.0, linestyle="--", label="chance", zorder=1)
    for method in reversed(drawn):  # ours above the others
        rates = np.array(
            [
                metrics.hit_rate(means[condition][method][measured.genes] - response.control, response.score, numbers)
                for condition, response in responses.items()
            ]
        )
        curve = rates.mean(axis=0)
        axes.plot(
            numbers, curve, color=COLOURS[method], linewidth=2.0 if method == OURS else 1.2,
            label=written_name(method), zorder=4 if method == OURS else 3,
        )  # fmt: skip
        if len(rates) > 1:
            error = rates.std(axis=0, ddof=1) / np.sqrt(len(rates))
            axes.fill_between(numbers, curve - error, curve + error, color=COLOURS[method], alpha=0.15, linewidth=0)
    n = len(responses)
    axes.set(xlabel="k, strongest genes", ylabel="share of them found", ylim=(0, None))
    axes.set_xlim(numbers[0], numbers[-1]) if len(numbers) > 1 else None
    axes.set_title(f"hit rate, {n} condition{'s' * (n > 1)}, {n_genes:,} genes", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=7.5, frameon=False, handlelength=1.5)
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


def _numbers_of_genes(k: Sequence[int] | None, n_genes: int) -> NDArray[np.int64]:
    """Give the numbers of genes at which hit rates are drawn, ascending."""
    if k is None:
        most = max(min(_KS, n_genes // 2), 1)
        return np.arange(5, most + 1, 5) if most >= 10 else np.arange(1, most + 1)
    numbers = np.unique(np.atleast_1d(np.asarray(k, dtype=np.int64)))
    if not len(numbers) or numbers[0] < 1 or numbers[-1] > n_genes:
        raise ValueError(f"k must be numbers of genes from 1 to {n_genes:,}, which both have, got {k!r}.")
    return numbers


def _methods(methods: Sequence[str] | None, means: Sequence[dict[str, NDArray[np.float64]]]) -> list[str]:
    """Choose the methods drawn, ours first; refuse those that do not predict every condition."""
    everywhere = [name for name in (OURS, *BASELINES) if all(name in of_condition for of_condition in means)]
    if methods is None:
        return [name for name in everywhere if name != "no_change"]
    missing = [name for name in methods if name not in everywhere]
    if isinstance(methods, str) or missing or not len(methods):
        raise KeyError(
            f"methods={methods!r} must be a list of some of {', '.join(everywhere)}: these predict all "
            f"{len(means)} conditions that were observed."
        )
    return [name for name in everywhere if name in methods]


@with_shared_docs
def discrimination(
    predicted: AnnData,
    observed: AnnData,
    *,
    method: str = OURS,
    values: Literal["rank", "similarity"] = "rank",
    metric: Literal["l1", "l2", "cosine"] = "l1",
    reference: Literal["control", "mean"] = "control",
    group: str | None = None,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw how like each predicted condition is to each observed one.

    Rows are predictions, columns observations, both with like observed ones beside each other (average linkage of the
    observed changes). On the framed diagonal stands what belongs together; a column that is dark throughout is an
    observation to which all predictions are like. In the title: the mean discrimination, 1 if each
    prediction is closest to its own observation, 0.5 by chance (see `scdiva.metrics.discrimination`).

    Parameters
    ----------
    predicted
        What `scdiva.tl.predict_perturbation` or `scdiva.tl.in_silico_perturbation` returned.
    observed
        Cells of its conditions and control cells, counts or log-normalised, with the columns of obs by which was
        predicted. Genes are matched by var names. Conditions without cells are left out.
    method
        Whose prediction: ``"scdiva"``, or a baseline that predicts all these conditions.
    values
        Colour: ``"rank"``, the share of the other observed conditions that are farther from the prediction, 0 to 1,
        tied ones half; or ``"similarity"``, the cosine, or minus the distance, in log-normalised expression.
    metric
        What is compared are changes, by mean absolute difference (``"l1"``), Euclidean distance (``"l2"``) or cosine
        similarity.
    reference
        From where changes are counted: ``"control"``, or ``"mean"``, the mean over the perturbations of training.
    group
        The group of cells, where perturbations were predicted in several.
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
        If `predicted` is no prediction, a column or layer does not exist, there is no such group, or `method` does not
        predict all conditions.
    ValueError
        If fewer than two conditions of one group were observed, they are of several groups and none is named, no
        control cell was observed, no gene is in both, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["KLF1+SET", "KLF1+TGFBR2"])
    >>> sd.pl.discrimination(predicted, test, save="discrimination.png")
    """
    check_file(save)
    measured = read_observed(predicted, observed, layer=layer, use_raw=use_raw, input=input)
    responses = _of_one_group(matched_responses(predicted, measured), group)
    found, truth = _changes(predicted, measured, responses, method, reference)
    order = similar_order(truth)
    found, truth = found[order], truth[order]
    conditions = [list(responses)[i] for i in order]
    names = [c.perturbation if len({c.perturbation for c in conditions}) == len(conditions) else c.name for c in conditions]
    matrix = metrics.discrimination_matrix(found, truth, metric=metric, values=values)
    score = metrics.discrimination(found, truth, metric=metric).mean()

    from matplotlib.patches import Rectangle

    n = len(names)
    side = max(_SIDE, 2.4 / n)
    wide = _LETTER * max(map(len, names))
    fig, axes = axes_for(ax, (side * n + wide + 1.3, side * n + wide + 0.8))
    limits = {"vmin": 0.0, "vmax": 1.0} if values == "rank" else {}
    image = axes.pcolormesh(matrix, cmap="Blues", edgecolors="white", linewidth=0.3, **limits)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.set_xticks(np.arange(n) + 0.5, names, rotation=90, fontsize=7)
    axes.set_yticks(np.arange(n) + 0.5, names, fontsize=7)
    axes.tick_params(length=0)
    axes.set_xlabel("observed", fontsize=9)
    axes.set_ylabel("predicted" if method == OURS else f"predicted: {written_name(method)}", fontsize=9)
    axes.spines[:].set_visible(False)
    for i in range(n):
        frame = Rectangle((i, i), 1, 1, fill=False, edgecolor=COLOURS[OURS], linewidth=1.2, zorder=3, clip_on=False)
        axes.add_patch(frame)
    where = f" in {conditions[0].group}" if conditions[0].group else ""
    axes.set_title(f"discrimination {score:.2f}{where}", fontsize=10)
    bar = fig.colorbar(image, ax=axes, shrink=min(1.0, 2.0 / (side * n)), aspect=15)
    unit = {"l1": "minus mean absolute difference", "l2": "minus Euclidean distance", "cosine": "cosine similarity"}
    bar.set_label("share of the others farther away" if values == "rank" else unit[metric], fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


def _of_one_group(responses: dict[Condition, Response], group: str | None) -> dict[Condition, Response]:
    """Keep the conditions of one group; changes in several are told apart by their groups alone."""
    groups = list(dict.fromkeys(condition.group for condition in responses))
    if group is not None and group not in groups:
        raise KeyError(f"group={group!r} has no predicted condition that was observed; {groups} have.")
    if group is None and len(groups) > 1:
        raise ValueError(f"conditions of {len(groups)} groups were observed: name one, group={groups[0]!r} for example.")
    kept = {c: r for c, r in responses.items() if group is None or c.group == group}
    if len(kept) < 2:
        raise ValueError(
            f"only {next(iter(kept)).name!r} was both predicted and observed: it takes two conditions to tell apart."
        )
    return kept


def _changes(
    predicted: AnnData,
    measured: Observed,
    responses: dict[Condition, Response],
    method: str,
    reference: Literal["control", "mean"],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Give predicted and observed changes, (n_conditions, n_genes) each."""
    written = written_by_prediction(predicted)
    means = [predicted_means(predicted, condition) for condition in responses]
    (method,) = _methods([method], means)
    bases = np.array([reference_mean(response, measured, written, reference) for response in responses.values()])
    found = np.array([of_condition[method][measured.genes] for of_condition in means]) - bases
    return found, np.array([response.mean for response in responses.values()]) - bases


@with_shared_docs
def perturbation_scores(
    scores: pd.DataFrame,
    metric: str = "pearson_delta",
    *,
    reference: Literal["control", "mean"] = "control",
    methods: Sequence[str] | None = None,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw a score of every condition by each method, the best method on top.

    Dots are conditions, the line is their mean, which stands beside. Methods are drawn where they predict all
    conditions that ours does, so that means are of the same ones.

    Parameters
    ----------
    scores
        What `scdiva.tl.score_perturbation` returned; or rows of several calls.
    metric
        The column drawn. Of those with ``"mse"`` in their name, lower is better.
    reference
        From where changes were counted.
    methods
        Whose predictions: ``"scdiva"`` and names of baselines. None takes all that predict every condition.
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
        If there is no such column, or a method has no rows or does not predict all conditions.
    ValueError
        If no score is defined, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["KLF1+SET", "KLF1+TGFBR2"])
    >>> sd.pl.perturbation_scores(sd.tl.score_perturbation(predicted, test), "pearson_delta_top20")
    """
    check_file(save)
    missing = [name for name in ("method", "condition", "reference", metric) if name not in scores]
    if missing or not pd.api.types.is_numeric_dtype(scores[metric]):
        columns = ", ".join(map(str, scores.columns)) or "none"
        raise KeyError(f"{(missing or [metric])[0]!r} is no column of scores, or holds no numbers; it has {columns}.")
    values = {
        str(method): rows[metric].to_numpy(dtype=np.float64)
        for method, rows in scores[scores["reference"] == reference].dropna(subset=metric).groupby("method")
    }
    if not values:
        raise ValueError(f"no row has a {metric} with reference={reference!r}.")
    most = max(map(len, values.values()))
    complete = [name for name in values if len(values[name]) == most]
    lower = "mse" in metric
    wanted = complete if methods is None else list(methods)
    if isinstance(methods, str) or not wanted or set(wanted) - set(complete):
        raise KeyError(f"methods={methods!r} must be a list of some of {', '.join(complete)}: these predict all conditions.")
    order = sorted(wanted, key=lambda name: values[name].mean(), reverse=not lower)

    fig, axes = axes_for(ax, (4.8, 0.34 * len(order) + 1.0))
    for place, name in enumerate(order):
        of_method, colour = values[name], COLOURS.get(name, "0.3")
        # spread evenly in an order that has nothing to do with the score: the same picture every time
        height = place + 0.5 * (np.argsort(np.random.default_rng(0).random(most)) / max(most - 1, 1) - 0.5)
        axes.scatter(of_method, height, s=12, color=colour, alpha=0.6, linewidths=0, zorder=2)
        mean = of_method.mean()
        axes.vlines(mean, place - 0.38, place + 0.38, color=colour, linewidth=2.0, zorder=3)
        axes.text(1.02, place, f"{mean:.3g}", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.text(1.02, -0.75, "mean", transform=axes.get_yaxis_transform(), va="center", fontsize=8, color="0.4")
    axes.set_yticks(np.arange(len(order)), [written_name(name) for name in order], fontsize=9)
    axes.set_ylim(len(order) - 0.5, -0.5)
    better = "lower is better" if lower else "higher is better"
    axes.set_xlabel(f"{metric} to {reference}, {most} condition{'s' * (most > 1)} ({better})", fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)
