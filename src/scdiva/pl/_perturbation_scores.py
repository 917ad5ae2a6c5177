"""Many predicted perturbations: how many of the strongest genes are found, and scores by method."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva import metrics
from scdiva._constants import PREDICTED
from scdiva._docs import with_shared_docs
from scdiva.data.observed import OURS, Responses, observed_responses, response_score
from scdiva.data.predictions import read_prediction
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._response import (
    COLOURS,
    methods_of,
    written_name,
)

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KS = 200
"""Genes up to which hit rates are drawn by default."""


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
    check_file(save)
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
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


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
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> train = screen[~screen.obs["perturbation"].isin(["A+B", "B+C"])].copy()
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["A+B", "B+C"])
    >>> scores = sd.tl.score_perturbation(predicted, screen)
    >>> sd.pl.perturbation_scores(scores, "pearson_delta_top20", save="scores.png")
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
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)
