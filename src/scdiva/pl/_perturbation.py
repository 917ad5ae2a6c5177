"""Predicted perturbations: one, gene by gene, against the observed one; and many, by scores and discrimination."""

from __future__ import annotations

import os
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from numpy.typing import NDArray

from scdiva import metrics
from scdiva._checks import check_least, nearest
from scdiva._constants import OBS_CONDITION, PREDICTED
from scdiva.data.genes import check_unique
from scdiva.get import perturbation_df
from scdiva.perturbation.conditions import naming_as_noted, same_genes, species_of
from scdiva.perturbation.predictions import (
    OURS,
    Prediction,
    Responses,
    observed_responses,
    read_prediction,
    response_score,
)
from scdiva.pl._figure import axes_for, draw_heatmap, draw_legend, plot, similar_order, text_inches, write_names
from scdiva.pl._groups import gene_names
from scdiva.tokenizer.vocabulary import load_vocabulary

_COLOURS = {
    OURS: "#d1495b",
    "no_change": "0.55",
    "train_mean": "#e9a03b",
    "matching_mean": "#8a6fb0",
    "additive": "#2e86ab",
    "linear": "#5aa469",
    "elsewhere": "#8c5a3c",
    "expected": "#3d5a80",
}
"""Each way of predicting has one colour in all plots."""
_KINDS = {"control": "0.6", "predicted": _COLOURS[OURS], "observed": "#30638e"}
"""Colours of the three kinds of cells."""
_TOP = 20
"""Differentially expressed genes that are scored, and coloured, apart."""


@plot
def perturbation(
    predicted: AnnData,
    condition: str,
    observed: AnnData | None = None,
    *,
    n_genes: int = 20,
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
        What `scdiva.tl.predict_perturbation` returned, or the adata that was given to it.
    condition
        Name of a predicted condition; or its perturbation, by any name of the genes, if that is predicted in one group
        only.
    observed
        Cells of that condition and control cells, counts or log-normalised, with the columns of obs by which was
        predicted. Genes are matched by var names. None draws the prediction alone.
    n_genes
        Genes drawn, at most.
    gene_symbols
        A column of ``predicted.var`` with names to write instead of the var names.
    layer, use_raw
        Where `observed` has the matrix: key of its ``layers``, or whether to take its ``raw``; by default its ``X``.
    input
        Unit of that matrix: ``"counts"``, ``"lognorm"`` (log1p of counts scaled per cell, to any total), or ``"auto"``
        to tell from the values.
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
        If `predicted` is no prediction, or the condition, a column or layer does not exist.
    TypeError
        If `condition` is no text.
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
    >>> sd.pl.perturbation(predicted, "A+B", test, save="a_b.png")
    """
    check_least(n_genes=(n_genes, 1))
    prediction = read_prediction(predicted, key)
    at = _find_condition(prediction, condition)
    found = prediction.conditions.loc[at]
    names = gene_names(prediction.var, gene_symbols, "predicted.var")
    of_condition = _predicted_cells(prediction, found["condition"])
    cells: dict[str, sp.csr_matrix] = {}
    if observed is None:
        check_unique(prediction.genes, "predicted")
        strongest = perturbation_df(predicted, condition=found["condition"], top=n_genes, key=key)["gene"]
        genes = prediction.genes.get_indexer(strongest)
    else:
        responses = observed_responses(prediction, observed, layer=layer, use_raw=use_raw, input=input, only=[at])
        best = np.argsort(-np.abs(_score_of(responses, at)), kind="stable")[:n_genes]
        genes = responses.genes[best]
        cells["control"] = responses.expression[responses.control_rows[found["group"]]][:, best]
        cells["observed"] = responses.expression[responses.rows[at]][:, best]
    if of_condition is not None:
        cells["predicted"] = sp.csr_matrix(of_condition.X[:, genes])

    fig, axes = axes_for(ax, (max(0.42 * len(genes) + 1.0, 4.6), 3.8))
    places = np.arange(len(genes))
    for place in places[1::2]:
        axes.axvspan(place - 0.5, place + 0.5, color="0.96", linewidth=0, zorder=0)
    kinds = [kind for kind in _KINDS if kind in cells or kind == "predicted"]
    step = 0.84 / max(len(kinds), 2)  # genes are 1 apart
    shifts = dict(zip(kinds, step * (np.arange(len(kinds)) - (len(kinds) - 1) / 2), strict=True))
    for kind, shift in shifts.items():
        if kind in cells:
            _draw_boxes(axes, cells[kind].toarray(), places + shift, 0.8 * step, kind)
        else:
            sd = None if prediction.sd is None else prediction.sd[genes, at]
            label = "predicted mean" + (" ± sd" if sd is not None and np.isfinite(sd).any() else "")
            look: dict[str, Any] = {"fmt": "o", "color": _KINDS[kind], "markersize": 4.5, "zorder": 4}
            axes.errorbar(places + shift, prediction.mean[genes, at], yerr=sd, label=label, **look)
    if observed is None:
        control = prediction.control[genes, at]
        axes.hlines(control, places - 0.4, places + 0.4, color="0.35", label="mean of control cells")
    axes.set_xticks(places, names[genes], rotation=90, fontsize=8)
    perturbed = _parts_of(prediction, found["perturbation"])
    for text, name, var_name in zip(axes.get_xticklabels(), names[genes], prediction.genes[genes], strict=True):
        text.set_fontweight("bold" if name in perturbed or var_name in perturbed else "normal")
    axes.set(xlim=(-0.6, len(genes) - 0.4), ylabel="log-normalised expression")
    axes.set_title(found["condition"], fontsize=10)
    draw_legend(axes)
    return fig


def _find_condition(predicted: Prediction, name: str) -> int:
    """Return the number of a condition, by its name, or by any name of a perturbation that is predicted once."""
    if not isinstance(name, str):
        first = predicted.conditions["condition"].iloc[0]
        raise TypeError(
            f"condition must name a predicted condition, got {type(name).__name__}: the second argument names it, the "
            f"third holds observed cells, such as (predicted, {first!r}, observed)."
        )
    conditions = predicted.conditions
    found = conditions.index[conditions["condition"] == name]
    if not len(found):
        parts = [set(_parts_of(predicted, label)) for label in conditions["perturbation"]]
        asked, vocabulary = set(_parts_of(predicted, name)), load_vocabulary()
        species = species_of(list(map(str, predicted.genes)), vocabulary, None)
        called = same_genes(asked, set().union(*parts), vocabulary, species, "condition")
        found = conditions.index[[of == {called.get(part, part) for part in asked} for of in parts]]
    if len(found) == 1:
        return int(found[0])
    names = conditions["condition"].tolist()
    meant = [names[i] for i in found] or nearest(name, names, 5, 0.3) or names[:5]
    raise KeyError(f"condition={name!r} must name one of the {len(names)} predicted, such as {', '.join(meant)}.")


def _parts_of(predicted: Prediction, label: str) -> tuple[str, ...]:
    """Split the label of a perturbation as the prediction did."""
    return naming_as_noted(predicted.notes).parts(label)


def _predicted_cells(predicted: Prediction, condition: str) -> AnnData | None:
    """Give the predicted cells of a condition; None where there are none of any, but their means alone."""
    if predicted.cells is None:
        return None
    labels = predicted.cells.obs.get(OBS_CONDITION, pd.Series(dtype=object))
    chosen = np.flatnonzero(labels.astype(str) == condition)
    if not len(chosen):
        raise ValueError(f"no cell of predicted is of {condition!r} in obs[{OBS_CONDITION!r}]: give all that it had.")
    return predicted.cells[chosen]


def _draw_boxes(axes: Axes, values: NDArray[Any], places: NDArray[np.float64], width: float, kind: str) -> None:
    """Draw a thin box for each column of `values`, (n_cells, n_genes), and a dot at its mean."""
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


@plot
def delta_scatter(
    predicted: AnnData,
    condition: str,
    observed: AnnData,
    *,
    n_names: int = 10,
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
    coloured, the first of them named. In the title: Pearson correlation over all genes, and over
    those 20. On the dashed line prediction and observation agree.

    Parameters
    ----------
    predicted
        What `scdiva.tl.predict_perturbation` returned, or the adata that was given to it.
    condition
        Name of a predicted condition; or its perturbation, by any name of the genes, if that is predicted in one group
        only.
    observed
        Cells of that condition and control cells, counts or log-normalised, with the columns of obs by which was
        predicted. Genes are matched by var names.
    n_names
        Genes named; 0 names none.
    gene_symbols
        A column of ``predicted.var`` with names to write instead of the var names.
    layer, use_raw
        Where `observed` has the matrix: key of its ``layers``, or whether to take its ``raw``; by default its ``X``.
    input
        Unit of that matrix: ``"counts"``, ``"lognorm"`` (log1p of counts scaled per cell, to any total), or ``"auto"``
        to tell from the values.
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
        If `predicted` is no prediction, or the condition, a column or layer does not exist.
    TypeError
        If `condition` is no text.
    ValueError
        If `n_names` is negative, no cell of the condition or no control cell was observed, no gene is in both, or
        `save` ends in no picture format.

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
    check_least(n_names=(n_names, 0))
    prediction = read_prediction(predicted, key)
    at = _find_condition(prediction, condition)
    name = prediction.conditions.loc[at, "condition"]
    names = gene_names(prediction.var, gene_symbols, "predicted.var")
    responses = observed_responses(prediction, observed, layer=layer, use_raw=use_raw, input=input, only=[at])
    control, mean, score = responses.control_of(at).mean, responses.means[OURS][:, at], _score_of(responses, at)
    x, y = responses.perturbed[at].mean - control, mean - control
    best = np.argsort(-np.abs(score), kind="stable")
    top, rest = best[:_TOP], best[_TOP:]

    fig, axes = axes_for(ax, (4.4, 4.7))
    axes.axline((0, 0), slope=1, color="0.6", linewidth=0.9, linestyle="--", zorder=1)
    axes.axhline(0, color="0.9", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.9", linewidth=0.8, zorder=0)
    axes.scatter(x[rest], y[rest], s=7, color="0.7", linewidths=0, zorder=2, rasterized=len(rest) > 5_000)
    axes.scatter(x[top], y[top], s=14, color=_COLOURS[OURS], linewidths=0, zorder=3)
    # on one scale a prediction of the right pattern that is too weak lies flat
    axes.set_aspect("equal", adjustable="datalim")
    axes.set(xlabel="observed change from control cells", ylabel="predicted change from control cells")
    scores = metrics.perturbation_response(mean, x + control, control, de_score=score, top=(_TOP,))
    title = f"Pearson r {scores['pearson_delta']:.2f} ({len(x):,} genes)"
    title += f", {scores[f'pearson_delta_top{_TOP}']:.2f} (top {len(top)})"
    axes.set_title(f"{name}\n{title}", fontsize=10)
    named, points = best[:n_names], np.column_stack([x, y])
    inks = [_COLOURS[OURS]] * len(named)
    write_names(axes, points, points[named], list(names[responses.genes][named]), inks, fontsize=7, clear=3)
    return fig


def _score_of(responses: Responses, at: int) -> NDArray[np.float64]:
    """Give what genes are ranked by: the observed change in units of its error, or itself where that is not known."""
    score = response_score(responses, at)
    return responses.perturbed[at].mean - responses.control_of(at).mean if score is None else score


@plot
def hit_rate(
    predicted: AnnData,
    observed: AnnData,
    *,
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
    chance, k / n_genes; k is 5, 10, ... 200, at most half of the genes. A baseline is drawn where it predicts all of
    these conditions, so that all curves are of the same ones. Who knows only which genes are expressed at all is far
    above chance where many are not: curves are best compared with that of the train mean.

    Parameters
    ----------
    predicted
        What `scdiva.tl.predict_perturbation` returned, or the adata that was given to it.
    observed
        Cells of its conditions and control cells, counts or log-normalised, with the columns of obs by which was
        predicted. Genes are matched by var names.
    layer, use_raw
        Where `observed` has the matrix: key of its ``layers``, or whether to take its ``raw``; by default its ``X``.
    input
        Unit of that matrix: ``"counts"``, ``"lognorm"`` (log1p of counts scaled per cell, to any total), or ``"auto"``
        to tell from the values.
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
        If `predicted` is no prediction, or a column or layer does not exist.
    ValueError
        If no predicted condition or no control cell was observed, no gene is in both, or `save` ends in no picture
        format.

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
    scores = {at: _score_of(responses, at) for at in responses.rows}
    n_genes, n = len(responses.genes), len(responses.rows)
    most = max(min(200, n_genes // 2), 1)
    numbers = np.arange(5, most + 1, 5) if most >= 10 else np.arange(1, most + 1)
    everywhere = [name for name in responses.means if all(name in responses.methods(at) for at in responses.rows)]
    drawn = [name for name in everywhere if name != "no_change"]  # it ranks nothing, and is the line of chance

    fig, axes = axes_for(ax, (5.6, 3.6))
    axes.plot(numbers, numbers / n_genes, color="0.5", linewidth=1.0, linestyle="--", label="chance", zorder=1)
    for method in reversed(drawn):  # ours above the others
        changes = {at: responses.means[method][:, at] - responses.control_of(at).mean for at in responses.rows}
        rates = np.array([metrics.hit_rate(change, scores[at], numbers) for at, change in changes.items()])
        curve = rates.mean(axis=0)
        width = 2.0 if method == OURS else 1.2
        axes.plot(numbers, curve, color=_COLOURS[method], linewidth=width, label=method.replace("_", " "))
        if n > 1:
            error = rates.std(axis=0, ddof=1) / np.sqrt(n)
            axes.fill_between(numbers, curve - error, curve + error, color=_COLOURS[method], alpha=0.15, linewidth=0)
    axes.set(xlabel="k, strongest genes", ylabel="share of them found", ylim=(0, None))
    axes.set_title(f"hit rate, {n} condition{'s' * (n > 1)}, {n_genes:,} genes", fontsize=10)
    draw_legend(axes, reverse=True)
    return fig


@plot
def perturbation_scores(
    scores: pd.DataFrame,
    metric: str = "pearson_delta",
    *,
    reference: Literal["control", "mean"] = "control",
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw a score of every condition by each method, the best method on top.

    Dots are conditions, the line is their mean. Methods are drawn where they predict all
    conditions that ours does, so that means are of the same ones.

    Parameters
    ----------
    scores
        What `scdiva.tl.score_perturbation` returned; or rows of several calls.
    metric
        The column drawn. Of those with ``"mse"`` in their name, lower is better.
    reference
        From where changes were counted.
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
        If there is no such column.
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
        raise KeyError(f"{(missing or [metric])[0]!r} is no column of scores, or holds no numbers: {list(scores)}.")
    known = scores[scores["reference"] == reference].dropna(subset=metric)
    values = {str(method): own.to_numpy(dtype=np.float64) for method, own in known.groupby("method")[metric]}
    if not values:
        raise ValueError(f"no row has a {metric} with reference={reference!r}.")
    most = max(map(len, values.values()))
    complete = [name for name in values if len(values[name]) == most]
    lower = "mse" in metric
    order = sorted(complete, key=lambda name: values[name].mean(), reverse=not lower)

    fig, axes = axes_for(ax, (4.8, 0.34 * len(order) + 1.0))
    for place, name in enumerate(order):
        of_method, colour = values[name], _COLOURS.get(name, "0.3")
        # spread evenly in an order that has nothing to do with the score: the same picture every time
        spread = np.argsort(np.random.default_rng(0).random(most)) - (most - 1) / 2
        height = place + 0.5 * spread / max(most - 1, 1)
        axes.scatter(of_method, height, s=12, color=colour, alpha=0.6, linewidths=0, zorder=2)
        axes.vlines(of_method.mean(), place - 0.38, place + 0.38, color=colour, linewidth=2.0, zorder=3)
    names = [f"{name.replace('_', ' ')}, mean {values[name].mean():#.3g}" for name in order]
    axes.set_yticks(np.arange(len(order)), names, fontsize=9)
    axes.set_ylim(len(order) - 0.5, -0.5)
    better = "lower is better" if lower else "higher is better"
    axes.set_xlabel(f"{metric} to {reference}, {most} condition{'s' * (most > 1)} ({better})", fontsize=9)
    return fig


@plot
def discrimination(
    predicted: AnnData,
    observed: AnnData,
    *,
    group: str | None = None,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    key: str = PREDICTED,
    ax: Axes | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | None:
    """Draw the similarity of each predicted condition to each observed one.

    Rows are predictions, columns observations, both with similar observed ones beside each other (average linkage of
    the observed means). The colour is the share of the other observed conditions that are farther from the prediction,
    by the mean absolute difference; tied ones count half. On the framed diagonal stands what belongs together; a column
    that is dark throughout is an observation to which all predictions are like. In the title: the mean discrimination,
    1 if each prediction is closest to its own observation, 0.5 by chance (see `scdiva.metrics.discrimination`).

    Parameters
    ----------
    predicted
        What `scdiva.tl.predict_perturbation` returned, or the adata that was given to it.
    observed
        Cells of its conditions and control cells, counts or log-normalised, with the columns of obs by which was
        predicted. Genes are matched by var names. Conditions without cells are left out.
    group
        The group of cells, where perturbations were predicted in several.
    layer, use_raw
        Where `observed` has the matrix: key of its ``layers``, or whether to take its ``raw``; by default its ``X``.
    input
        Unit of that matrix: ``"counts"``, ``"lognorm"`` (log1p of counts scaled per cell, to any total), or ``"auto"``
        to tell from the values.
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
        If `predicted` is no prediction, a column, layer or group does not exist, or there are several groups and none
        is named.
    ValueError
        If fewer than two conditions of one group were observed, no control cell was observed, no gene is in both, or
        `save` ends in no picture format.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> train = screen[~screen.obs["perturbation"].isin(["A+B", "B+C"])].copy()
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["A+B", "B+C"])
    >>> sd.pl.discrimination(predicted, screen, save="discrimination.png")
    """
    prediction = read_prediction(predicted, key)
    if group not in (groups := sorted({*prediction.conditions["group"]})) and group is not None:
        raise KeyError(f"group={group!r} must be one of those with predicted conditions: {groups}.")
    responses = observed_responses(prediction, observed, layer=layer, use_raw=use_raw, input=input)
    chosen = _of_one_group(responses, group)
    truth = np.array([responses.perturbed[at].mean for at in chosen])
    order = similar_order(truth)
    truth, found = truth[order], responses.means[OURS][:, chosen].T[order]
    conditions = responses.conditions.loc[[chosen[i] for i in order]]
    names = conditions["perturbation" if conditions["perturbation"].is_unique else "condition"].tolist()  # by dose

    n = len(names)
    side = max(0.2, 2.4 / n) * n + text_inches(names)
    fig, axes = axes_for(ax, (side + 1.3, side + 0.8))
    draw_heatmap(
        axes, metrics.discrimination_matrix(found, truth), names, names, "share of the others farther away",
        framed=[(i, i) for i in range(n)], vmin=0, vmax=1, cmap="Blues", edgecolors="white", linewidth=0.3,
    )  # fmt: skip
    axes.set(aspect="equal", xlabel="observed", ylabel="predicted")
    where = f" in {name}" if (name := conditions["group"].iloc[0]) else ""
    axes.set_title(f"discrimination {metrics.discrimination(found, truth).mean():.2f}{where}", fontsize=10)
    return fig


def _of_one_group(responses: Responses, group: str | None) -> list[int]:
    """Choose the observed conditions of one group; those of several differ by their groups alone."""
    observed = responses.conditions.loc[list(responses.rows)]
    names, groups = observed["condition"], list(observed["group"].unique())
    if group not in groups and (group is not None or len(groups) > 1):
        raise KeyError(f"group={group!r} must be one of those with predicted and observed conditions: {groups}.")
    chosen = observed.index[observed["group"] == (groups[0] if group is None else group)]
    if len(chosen) < 2:
        raise ValueError(f"only one of the predicted conditions was observed, {names[chosen[0]]!r}: it takes two.")
    return [int(at) for at in chosen]
