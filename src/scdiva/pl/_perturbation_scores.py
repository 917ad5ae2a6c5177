"""Many predicted perturbations: strongest genes that are found, scores by method, and discrimination of conditions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva import metrics
from scdiva._constants import PREDICTED
from scdiva.data.predictions import OURS, Responses, observed_responses, read_prediction, response_score
from scdiva.pl._figure import axes_for, plot
from scdiva.pl._heatmap import draw_heatmap, similar_order, text_inches
from scdiva.pl._response import COLOURS, methods_of, reference_mean, written_name

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KS = 200
"""Genes up to which hit rates are drawn by default."""
_SIDE = 0.2
"""Inches of a field's side, about."""
_UNITS = {"l1": "minus mean absolute difference", "l2": "minus Euclidean distance", "cosine": "cosine similarity"}
"""What the colours are, by metric."""


@plot
def hit_rate(
    predicted: AnnData,
    observed: AnnData,
    *,
    k: Sequence[int] | None = None,
    methods: Sequence[str] | None = None,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    key: str = PREDICTED,
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
        What `scdiva.tl.predict_perturbation` or `scdiva.tl.in_silico_perturbation` returned, or the adata that was
        given to them.
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
        If `predicted` is no prediction, a column or layer does not exist, or a method does not predict all conditions.
    ValueError
        If no predicted condition or no control cell was observed, no gene is in both, a `k` is below 1 or above the
        number of genes, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> train = screen[~screen.obs["perturbation"].isin(["A+B", "B+C"])].copy()
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["A+B", "B+C"])
    >>> sd.pl.hit_rate(predicted, screen, save="hit_rate.png")
    """
    responses = observed_responses(read_prediction(predicted, key), observed, layer=layer, use_raw=use_raw, input=input)
    n_genes = len(responses.genes)
    numbers = _numbers_of_genes(k, n_genes)
    drawn = methods_of(responses, list(responses.rows), methods)

    fig, axes = axes_for(ax, (4.6, 3.6))
    axes.plot(numbers, numbers / n_genes, color="0.5", linewidth=1.0, linestyle="--", label="chance", zorder=1)
    for method in reversed(drawn):  # ours above the others
        rates = np.array([_rates(responses, at, method, numbers) for at in responses.rows])
        curve = rates.mean(axis=0)
        axes.plot(
            numbers, curve, color=COLOURS[method], linewidth=2.0 if method == OURS else 1.2,
            label=written_name(method), zorder=4 if method == OURS else 3,
        )  # fmt: skip
        if len(rates) > 1:
            error = rates.std(axis=0, ddof=1) / np.sqrt(len(rates))
            axes.fill_between(numbers, curve - error, curve + error, color=COLOURS[method], alpha=0.15, linewidth=0)
    n = len(responses.rows)
    axes.set(xlabel="k, strongest genes", ylabel="share of them found", ylim=(0, None))
    if len(numbers) > 1:
        axes.set_xlim(numbers[0], numbers[-1])
    axes.set_title(f"hit rate, {n} condition{'s' * (n > 1)}, {n_genes:,} genes", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=7.5, frameon=False, handlelength=1.5)
    return fig


def _rates(responses: Responses, at: int, method: str, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Give the hit rates of one condition."""
    scores = metrics.perturbation_response(
        responses.means[method][:, at],
        responses.perturbed[at].mean,
        responses.control_of(at).mean,
        de_score=response_score(responses, at),
        top=numbers.tolist(),
    )
    return np.array([scores[f"hit_rate_{k}"] for k in numbers])


def _numbers_of_genes(k: Sequence[int] | None, n_genes: int) -> NDArray[np.int64]:
    """Give the numbers of genes at which hit rates are drawn, ascending."""
    if k is None:
        most = max(min(_KS, n_genes // 2), 1)
        return np.arange(5, most + 1, 5) if most >= 10 else np.arange(1, most + 1)
    numbers = np.unique(np.atleast_1d(np.asarray(k, dtype=np.int64)))
    if not len(numbers) or numbers[0] < 1 or numbers[-1] > n_genes:
        raise ValueError(f"k must be numbers of genes from 1 to {n_genes:,}, which both have, got {k!r}.")
    return numbers


@plot
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
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> train = screen[~screen.obs["perturbation"].isin(["A+B", "B+C"])].copy()
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["A+B", "B+C"])
    >>> scores = sd.tl.score_perturbation(predicted, screen)
    >>> sd.pl.perturbation_scores(scores, "pearson_delta_top20", save="scores.png")
    """
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
        raise KeyError(
            f"methods={methods!r} must be a list of some of {', '.join(complete)}: these predict all {most} conditions."
        )
    order = sorted(wanted, key=lambda name: values[name].mean(), reverse=not lower)

    fig, axes = axes_for(ax, (4.8, 0.34 * len(order) + 1.0))
    for place, name in enumerate(order):
        of_method, colour = values[name], COLOURS.get(name, "0.3")
        # spread evenly in an order that has nothing to do with the score: the same picture every time
        spread = np.argsort(np.random.default_rng(0).random(most)) - (most - 1) / 2
        height = place + 0.5 * spread / max(most - 1, 1)
        axes.scatter(of_method, height, s=12, color=colour, alpha=0.6, linewidths=0, zorder=2)
        mean = of_method.mean()
        axes.vlines(mean, place - 0.38, place + 0.38, color=colour, linewidth=2.0, zorder=3)
        axes.text(1.02, place, f"{mean:#.3g}", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.text(1.02, -0.75, "mean", transform=axes.get_yaxis_transform(), va="center", fontsize=8, color="0.4")
    axes.set_yticks(np.arange(len(order)), [written_name(name) for name in order], fontsize=9)
    axes.set_ylim(len(order) - 0.5, -0.5)
    better = "lower is better" if lower else "higher is better"
    axes.set_xlabel(f"{metric} to {reference}, {most} condition{'s' * (most > 1)} ({better})", fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return fig


@plot
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
    key: str = PREDICTED,
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
        What `scdiva.tl.predict_perturbation` or `scdiva.tl.in_silico_perturbation` returned, or the adata that was
        given to them.
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
        If `predicted` is no prediction, a column or layer does not exist, there is no such group, or `method` does not
        predict all conditions.
    ValueError
        If fewer than two conditions of one group were observed, they are of several groups and none is named, no
        control cell was observed, no gene is in both, or `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> train = screen[~screen.obs["perturbation"].isin(["A+B", "B+C"])].copy()
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["A+B", "B+C"])
    >>> sd.pl.discrimination(predicted, screen, save="discrimination.png")
    """
    responses = observed_responses(read_prediction(predicted, key), observed, layer=layer, use_raw=use_raw, input=input)
    chosen = _of_one_group(responses, group)
    methods_of(responses, chosen, [method])
    bases = np.array([reference_mean(responses, at, reference) for at in chosen])
    truth = np.array([responses.perturbed[at].mean for at in chosen]) - bases
    found = responses.means[method][:, chosen].T - bases
    order = similar_order(truth)
    found, truth = found[order], truth[order]
    conditions = responses.conditions.loc[[chosen[i] for i in order]]
    names = conditions["perturbation" if conditions["perturbation"].is_unique else "condition"].tolist()  # by dose
    matrix = metrics.discrimination_matrix(found, truth, metric=metric, values=values)
    score = metrics.discrimination(found, truth, metric=metric).mean()

    from matplotlib.patches import Rectangle

    n = len(names)
    side = max(_SIDE, 2.4 / n)
    wide = text_inches(names)
    fig, axes = axes_for(ax, (side * n + wide + 1.3, side * n + wide + 0.8))
    low, high = (0.0, 1.0) if values == "rank" else (None, None)
    label = "share of the others farther away" if values == "rank" else _UNITS[metric]
    axes.set_aspect("equal")
    draw_heatmap(
        axes, matrix, names, names, label, low=low, high=high, fontsize=7, edgecolors="white", linewidth=0.3
    )  # fmt: skip
    axes.set_xlabel("observed", fontsize=9)
    axes.set_ylabel("predicted" if method == OURS else f"predicted: {written_name(method)}", fontsize=9)
    for i in range(n):
        frame = Rectangle((i, i), 1, 1, fill=False, edgecolor=COLOURS[OURS], linewidth=1.2, zorder=3, clip_on=False)
        axes.add_patch(frame)
    where = f" in {name}" if (name := conditions["group"].iloc[0]) else ""
    axes.set_title(f"discrimination {score:.2f}{where}", fontsize=10)
    return fig


def _of_one_group(responses: Responses, group: str | None) -> list[int]:
    """Choose the observed conditions of one group; those of several differ by their groups alone."""
    observed = responses.conditions.loc[list(responses.rows)]
    groups = list(observed["group"].unique())
    if group is not None and group not in groups:
        raise KeyError(f"group={group!r} has no predicted condition that was observed; {', '.join(groups)} have.")
    if group is None and len(groups) > 1:
        raise ValueError(f"conditions of {len(groups)} groups were observed: name one, such as group={groups[0]!r}.")
    chosen = observed.index[observed["group"] == (groups[0] if group is None else group)]
    if len(chosen) < 2:
        raise ValueError(
            f"only {observed.loc[chosen[0], 'condition']!r} was both predicted and observed: it takes two to tell "
            "apart."
        )
    return [int(at) for at in chosen]
