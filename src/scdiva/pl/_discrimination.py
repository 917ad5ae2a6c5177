"""Which observed condition each predicted one is like."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import numpy as np

from scdiva import metrics
from scdiva._constants import PREDICTED
from scdiva._docs import with_shared_docs
from scdiva.data.observed import OURS, Responses, observed_responses
from scdiva.data.predictions import read_prediction
from scdiva.pl._figure import axes_for, check_file, finish
from scdiva.pl._heatmap import similar_order
from scdiva.pl._response import (
    COLOURS,
    methods_of,
    reference_mean,
    written_name,
)

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIDE, _LETTER = 0.2, 0.065
"""Inches of a field's side and of a letter of a name, about."""


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
    check_file(save)
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
    wide = _LETTER * max(map(len, names))
    fig, axes = axes_for(ax, (side * n + wide + 1.3, side * n + wide + 0.8))
    low, high = (0.0, 1.0) if values == "rank" else (matrix.min(), matrix.max())
    image = axes.pcolormesh(matrix, cmap="Blues", vmin=low, vmax=high, edgecolors="white", linewidth=0.3)
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
    where = f" in {name}" if (name := conditions["group"].iloc[0]) else ""
    axes.set_title(f"discrimination {score:.2f}{where}", fontsize=10)
    bar = fig.colorbar(image, ax=axes, shrink=min(1.0, 2.0 / (side * n)), aspect=15)
    unit = {"l1": "minus mean absolute difference", "l2": "minus Euclidean distance", "cosine": "cosine similarity"}
    bar.set_label("share of the others farther away" if values == "rank" else unit[metric], fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return finish(fig, own=ax is None, return_fig=return_fig, save=save)


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
