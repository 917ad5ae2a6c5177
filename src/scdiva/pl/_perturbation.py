"""Plots of predicted perturbations: one condition gene by gene, or scores of many conditions."""

from __future__ import annotations

import os
from typing import Literal

import numpy as np
import pandas as pd
from anndata import AnnData
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from scdiva import metrics
from scdiva._checks import check_least, nearest
from scdiva._constants import PREDICTED
from scdiva.data.genes import check_unique
from scdiva.get import perturbation_df
from scdiva.perturbation.conditions import ScreenDesign, same_genes, species_of
from scdiva.perturbation.scores import (
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
"""Colour of each method in all plots."""
_OBSERVED = "#30638e"
_TOP = 20
"""Number of top differentially expressed genes that are coloured and scored separately."""


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
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Dot plot of the predicted and observed change of the top genes of a perturbation.

    Dots are changes of mean expression (log1p of counts per ten thousand) from the control cells of the group. Bars are
    one standard deviation of the predicted mean, if there is one, and the 95% confidence interval of the observed
    change. Names of perturbed genes are bold.

    With `observed`, the genes with the largest absolute Welch t between the observed perturbed and control cells of the
    group are shown, in descending order. Without it, those with the largest predicted change (divided by its standard
    deviation if there is one).

    Parameters
    ----------
    %(predicted)s
    %(condition)s
    observed
        Cells of the condition and control cells, raw counts or log-normalised expression, with the columns of `obs`
        that the prediction was made with. Genes are matched by var names. None: only the prediction is drawn.
    n_genes
        Maximum number of genes.
    %(gene_symbols)s
    %(observed_matrix)s
    %(prediction_key)s
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
        If `predicted` is not a prediction, or the condition, a column or layer does not exist.
    TypeError
        If `condition` is not a string.
    ValueError
        If `n_genes` is below 1, no cell of the condition or no control cell was observed, the two share no gene, or
        the suffix of `save` is not a picture format.

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
    name, label = prediction.conditions.loc[at, ["condition", "perturbation"]]
    symbols = gene_names(prediction.var, gene_symbols, "predicted.var")
    drawn: dict[str, tuple[NDArray[np.floating], NDArray[np.floating] | None]] = {}
    if observed is None:
        check_unique(prediction.genes, "predicted")
        top = perturbation_df(predicted, condition=name, top=n_genes, key=key)["gene"]
        genes = prediction.genes.get_indexer(top)
        change = prediction.mean[genes, at] - prediction.control[genes, at]
    else:
        responses = observed_responses(prediction, observed, layer=layer, use_raw=use_raw, input=input, only=[at])
        best = np.argsort(-np.abs(_score_of(responses, at)), kind="stable")[:n_genes]
        genes = responses.genes[best]
        cells, control = responses.perturbed[at], responses.control_of(at)
        change = (responses.means[OURS][:, at] - control.mean)[best]
        interval = None
        if min(cells.n, control.n) > 1:
            interval = 1.96 * np.sqrt(cells.variance / cells.n + control.variance / control.n)[best]
        text = f"observed{', 95% CI' * (interval is not None)}\n({cells.n:,} cells, {control.n:,} control)"
        drawn[text] = (cells.mean - control.mean)[best], interval
    sd = None if prediction.sd is None else prediction.sd[genes, at]
    sd = sd if sd is not None and np.isfinite(sd).any() else None
    drawn["predicted" + " ± sd" * (sd is not None)] = change, sd

    n = len(genes)
    fig, axes = axes_for(ax, (4.2 + text_inches(list(symbols[genes])), max(0.24 * n, 1.2) + 1.0))
    axes.axvline(0, color="0.6", linewidth=0.9, linestyle="--", zorder=1)
    axes.grid(axis="y", color="0.93", linewidth=0.8)
    for i, (text, (x, error)) in enumerate(drawn.items()):
        colour = _OBSERVED if text.startswith("observed") else _COLOURS[OURS]
        y = np.arange(n) + 0.24 * (i - (len(drawn) - 1) / 2)
        axes.errorbar(x, y, xerr=error, fmt="o", color=colour, markersize=5, elinewidth=1.0, label=text, zorder=2 + i)
    axes.set_yticks(np.arange(n), symbols[genes], fontsize=8)
    perturbed = _parts_of(prediction, label)
    for tick, symbol, gene in zip(axes.get_yticklabels(), symbols[genes], prediction.genes[genes], strict=True):
        tick.set_fontweight("bold" if symbol in perturbed or gene in perturbed else "normal")
    axes.set(ylim=(n - 0.4, -0.6), xlabel="change from control cells\n(log-normalised expression)")
    axes.set_title(f"{name}: change of {n} top gene{'s' * (n > 1)}", fontsize=10)
    draw_legend(axes, reverse=True)
    return fig


def _find_condition(prediction: Prediction, name: str) -> int:
    """Number of a condition, by its name, or by any name of a perturbation that is predicted in one condition."""
    conditions = prediction.conditions
    if not isinstance(name, str):
        first = conditions["condition"].iloc[0]
        raise TypeError(
            f"condition must name a predicted condition, got {type(name).__name__}. Pass its name second and observed "
            f"cells third: (predicted, {first!r}, observed)."
        )
    matched = conditions.index[conditions["condition"] == name]
    if not len(matched):
        parts = [set(_parts_of(prediction, label)) for label in conditions["perturbation"]]
        requested, vocabulary = set(_parts_of(prediction, name)), load_vocabulary()
        species = species_of(list(map(str, prediction.genes)), vocabulary, None)
        renamed = same_genes(requested, set().union(*parts), vocabulary, species, "condition")
        requested = {renamed.get(part, part) for part in requested}
        matched = conditions.index[[of_one == requested for of_one in parts]]
    if len(matched) == 1:
        return int(matched[0])
    names = conditions["condition"].tolist()
    similar = [names[i] for i in matched] or nearest(name, names, 5, 0.3) or names[:5]
    raise KeyError(f"condition={name!r} must name one of the {len(names)} predicted, such as {', '.join(similar)}.")


def _parts_of(prediction: Prediction, label: str) -> tuple[str, ...]:
    """Parts of a perturbation, split as in the prediction."""
    return ScreenDesign.from_notes(prediction.notes).parts(label)


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
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Draw the predicted change of every gene against the observed change.

    Changes are differences of mean log-normalised expression (log1p of counts per ten thousand) from the observed
    control cells of the group. The 20 genes with the largest absolute Welch t of the observed perturbed against control
    cells are coloured, and the top ones labelled. The title contains the Pearson correlation over all genes and over
    these 20. On the dashed line both changes are equal.

    Parameters
    ----------
    %(predicted)s
    %(condition)s
    %(observed)s
    n_names
        Number of genes to label.
    %(gene_symbols)s
    %(observed_matrix)s
    %(prediction_key)s
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
        If `predicted` is not a prediction, or the condition, a column or layer does not exist.
    TypeError
        If `condition` is not a string.
    ValueError
        If `n_names` is negative, no cell of the condition or no control cell was observed, the two share no gene, or
        the suffix of `save` is not a picture format.

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
    # with equal scales, predictions that are too weak are visibly flat
    axes.set_aspect("equal", adjustable="datalim")
    axes.set(xlabel="observed change from control cells", ylabel="predicted change from control cells")
    scores = metrics.perturbation_response(mean, x + control, control, de_score=score, top=(_TOP,))
    title = f"Pearson r {scores['pearson_delta']:.2f} ({len(x):,} genes)"
    title += f", {scores[f'pearson_delta_top{_TOP}']:.2f} (top {len(top)})"
    axes.set_title(f"{name}\n{title}", fontsize=10)
    labelled, points = best[:n_names], np.column_stack([x, y])
    inks = [_COLOURS[OURS]] * len(labelled)
    write_names(axes, points, points[labelled], list(names[responses.genes][labelled]), inks, fontsize=7, clear=3)
    axes.set_adjustable("box")  # names stay at their dots if the layout changes later
    return fig


def _score_of(responses: Responses, at: int) -> NDArray[np.float64]:
    """Score that ranks genes: Welch's t of the observed change, or the change if a group has a single cell."""
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
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Draw the share of the top k observed genes that are among the top k predicted genes.

    Predicted genes are ranked by the absolute change of mean log-normalised expression from the control cells, observed
    genes by the absolute Welch t between perturbed and control cells (see `scdiva.metrics.hit_rate`). Curves are means
    over the observed conditions, bands their standard error, and the dashed line is chance, k / n_genes; k is 5, 10,
    ... 200, at most half of the genes. Only baselines that are defined for all observed conditions are drawn. Knowing
    which genes are expressed is enough to exceed chance; compare curves with that of the train mean.

    Parameters
    ----------
    %(predicted)s
    %(observed)s
    %(observed_matrix)s
    %(prediction_key)s
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
        If `predicted` is not a prediction, or a column or layer does not exist.
    ValueError
        If no predicted condition or no control cell was observed, the two share no gene, or the suffix of `save` is not
        a picture format.

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
    max_k = max(min(200, n_genes // 2), 1)
    k = np.arange(5, max_k + 1, 5) if max_k >= 10 else np.arange(1, max_k + 1)
    defined = [name for name in responses.means if all(name in responses.methods(at) for at in responses.rows)]
    methods = [name for name in defined if name != "no_change"]  # it does not rank genes: its curve is chance

    fig, axes = axes_for(ax, (5.6, 3.6))
    axes.plot(k, k / n_genes, color="0.5", linewidth=1.0, linestyle="--", label="chance", zorder=1)
    for method in reversed(methods):  # ours above the others
        changes = {at: responses.means[method][:, at] - responses.control_of(at).mean for at in responses.rows}
        rates = np.array([metrics.hit_rate(change, scores[at], k) for at, change in changes.items()])
        curve = rates.mean(axis=0)
        width = 2.0 if method == OURS else 1.2
        axes.plot(k, curve, color=_COLOURS[method], linewidth=width, label=method.replace("_", " "))
        if n > 1:
            error = rates.std(axis=0, ddof=1) / np.sqrt(n)
            axes.fill_between(k, curve - error, curve + error, color=_COLOURS[method], alpha=0.15, linewidth=0)
    axes.set(xlabel="k (number of top genes)", ylabel="share of the observed top k found", ylim=(0, None))
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
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Draw a score of every condition by each method, the best method on top.

    Dots are conditions, and lines their means. Only methods that are defined for all conditions are drawn, so that
    means are comparable. If some conditions were held out from the fit, only these are drawn.

    Parameters
    ----------
    scores
        Result of `scdiva.tl.score_perturbation`, or concatenated results of several calls.
    metric
        Column to draw. For columns with `"mse"` in their name, lower is better.
    reference
        Reference of changes.
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
        If there is no such column.
    ValueError
        If no score is defined, or the suffix of `save` is not a picture format.

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
        raise KeyError(f"{(missing or [metric])[0]!r} is not a numeric column of scores, which has {list(scores)}.")
    defined = scores[scores["reference"] == reference].dropna(subset=metric)
    some_held_out = "trained" in defined and not defined["trained"].all()
    if some_held_out:
        defined = defined[~defined["trained"].astype(bool)]
    values = {str(method): part.to_numpy(dtype=np.float64) for method, part in defined.groupby("method")[metric]}
    if not values:
        raise ValueError(f"no row has a {metric} with reference={reference!r}.")
    n = max(map(len, values.values()))
    lower = "mse" in metric
    complete = [name for name in values if len(values[name]) == n]
    order = sorted(complete, key=lambda name: values[name].mean(), reverse=not lower)

    fig, axes = axes_for(ax, (4.8, 0.34 * len(order) + 1.0))
    for row, name in enumerate(order):
        colour = _COLOURS.get(name, "0.3")
        # evenly spread in a fixed random order, which does not depend on the score
        spread = np.argsort(np.random.default_rng(0).random(n)) - (n - 1) / 2
        axes.scatter(
            values[name], row + 0.5 * spread / max(n - 1, 1), s=12, color=colour, alpha=0.6, linewidths=0, zorder=2
        )
        axes.vlines(values[name].mean(), row - 0.38, row + 0.38, color=colour, linewidth=2.0, zorder=3)
    names = [f"{name.replace('_', ' ')}, mean {values[name].mean():#.3g}" for name in order]
    axes.set_yticks(np.arange(len(order)), names, fontsize=9)
    axes.set_ylim(len(order) - 0.5, -0.5)
    better = "lower is better" if lower else "higher is better"
    conditions = f"{n} {'held-out ' * some_held_out}condition{'s' * (n > 1)}"
    axes.set_xlabel(f"{metric} to {reference} ({better})\n{conditions}", fontsize=9)
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
    show: bool | None = None,
    return_fig: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> Figure | Axes | list[Axes] | None:
    """Draw the discrimination score of each predicted condition against each observed condition.

    Rows are predicted and columns observed conditions, ordered by average linkage of the observed means. The colour is
    the share of the other observed conditions that are farther from the prediction by the mean absolute difference;
    ties count half. Matching conditions are framed. A dark column is an observed condition that all predictions are
    similar to. The title contains the mean discrimination: 1 if each prediction is closest to its own condition, 0.5 by
    chance (see `scdiva.metrics.discrimination`).

    Parameters
    ----------
    %(predicted)s
    %(observed)s
    group
        Group of cells; required if several groups were predicted.
    %(observed_matrix)s
    %(prediction_key)s
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
        If `predicted` is not a prediction, a column, layer or group does not exist, or there are several groups and
        `group` is None.
    ValueError
        If fewer than two conditions of the group were observed, no control cell was observed, the two share no gene, or
        the suffix of `save` is not a picture format.

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
    rows = _rows_of_group(responses, group)
    truth = np.array([responses.perturbed[at].mean for at in rows])
    order = similar_order(truth)
    truth, mean = truth[order], responses.means[OURS][:, rows].T[order]
    conditions = responses.conditions.loc[[rows[i] for i in order]]
    names = conditions["perturbation" if conditions["perturbation"].is_unique else "condition"].tolist()

    n = len(names)
    side = max(0.2, 2.4 / n) * n + text_inches(names)
    fig, axes = axes_for(ax, (side + 1.3, side + 0.8))
    draw_heatmap(
        axes, metrics.discrimination_matrix(mean, truth), names, names, "discrimination score",
        framed=[(i, i) for i in range(n)], vmin=0, vmax=1, cmap="Blues", edgecolors="white", linewidth=0.3,
    )  # fmt: skip
    axes.set(aspect="equal", xlabel="observed", ylabel="predicted")
    where = f" in {name}" if (name := conditions["group"].iloc[0]) else ""
    axes.set_title(f"discrimination {metrics.discrimination(mean, truth).mean():.2f}{where}", fontsize=10)
    return fig


def _rows_of_group(responses: Responses, group: str | None) -> list[int]:
    """Numbers of the observed conditions of a group."""
    observed = responses.conditions.loc[list(responses.rows)]
    groups = list(observed["group"].unique())
    if group not in groups and (group is not None or len(groups) > 1):
        raise KeyError(f"group={group!r} must be one of those with predicted and observed conditions: {groups}.")
    rows = observed.index[observed["group"] == (groups[0] if group is None else group)]
    if len(rows) < 2:
        name = observed.loc[rows[0], "condition"]
        raise ValueError(f"only one predicted condition was observed, {name!r}. Pass cells of two or more.")
    return [int(at) for at in rows]
