"""The predicted change of every gene against the observed one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from scdiva import metrics
from scdiva._constants import PREDICTED
from scdiva._docs import with_shared_docs
from scdiva.data.observed import OURS, Responses, observed_responses, response_score
from scdiva.data.predictions import read_prediction
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._labels import place_labels
from scdiva.pl._response import (
    COLOURS,
    find_condition,
    names_of,
    reference_mean,
    strongest_first,
    written_name,
)

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TOP = 20
"""Differentially expressed genes that are scored, and coloured, apart."""


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
    check_file(save)
    if n_names < 0:
        raise ValueError(f"n_names must be 0 or more, got {n_names}.")
    prediction = read_prediction(predicted, key)
    at = find_condition(prediction, condition)
    name = prediction.conditions.loc[at, "condition"]
    names = names_of(prediction, gene_symbols)
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
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


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
    turn = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    disc = np.concatenate([r * np.column_stack([np.cos(turn), np.sin(turn)]) for r in (0.0, 2.0, 4.0)])
    pixels = axes.transData.transform(points[named])
    around = (pixels[:, None] + disc).reshape(-1, 2)
    box = axes.texts[-1].get_window_extent()
    field = np.stack(np.meshgrid(np.arange(box.x0, box.x1, 2), np.arange(box.y0, box.y1, 2)), axis=-1).reshape(-1, 2)
    kept_clear = axes.transData.inverted().transform(np.concatenate([around, field]))
    dots = np.concatenate([points, kept_clear])
    place_labels(axes, dots, points[named], list(names[named]), [colour] * len(named), fontsize=7)
