"""`tl.score_perturbation`: predicted responses, and the baselines beside them, against observed cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from scdiva._constants import PREDICTED
from scdiva._validate import Input
from scdiva.data.observed import REFERENCES, Responses, observed_responses, response_score
from scdiva.data.predictions import read_prediction
from scdiva.data.writing import check_anndata
from scdiva.metrics import discrimination, perturbation_response

if TYPE_CHECKING:
    from anndata import AnnData

_OF_CONDITION = ["condition", "perturbation", "group", "n_parts", "n_seen", "trained"]


def score_perturbation(
    predicted: AnnData,
    observed: AnnData,
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Input = "auto",
    metric: Literal["l1", "l2", "cosine"] = "l1",
    key: str = PREDICTED,
) -> pd.DataFrame:
    """Score predicted responses to perturbations against cells that had them, and the simple baselines the same way.

    Conditions are matched by perturbation, and by group and dose where the prediction has them; genes by name. Those
    that only one of the two has are left out.

    Parameters
    ----------
    predicted
        What :func:`predict_perturbation` or :func:`in_silico_perturbation` returned, or the adata that was given to
        them.
    observed
        Perturbed cells and, of each group, control cells; all columns of `obs` that the prediction was made by. The
        data it was fitted on may be passed whole: `trained` tells which conditions were fitted.
    layer, use_raw, input
        What to read of `observed`, as for :func:`embed`: counts, or log1p of counts per ten thousand.
    metric
        Distance by which `discrimination` ranks conditions.
    key
        Of the adata that was given, the entry of `uns` with the prediction: the `key_added` of the call.

    Returns
    -------
    One row for each method, condition and reference:

    `method`
        `"scdiva"`, and each baseline that is defined for any condition.
    `condition`, `perturbation`, `group`, `n_parts`, `n_seen`, `trained`
        As in the prediction.
    `n_cells`
        Cells observed.
    `reference`
        What changes are measured from: `"control"`, the observed control cells of the group; or `"mean"`, the mean of
        training perturbations (of the group, where that baseline is defined), which leaves what is particular to this
        perturbation.
    `pearson_delta`, `mse`, `wmse`, `sign_accuracy`
        See :func:`scdiva.metrics.perturbation_response`; the WMSE weighs genes by their mean in control cells.
    `pearson_delta_top20`, `mse_top20`, `hit_rate_20`; `pearson_delta_top100`, `mse_top100`, `hit_rate_100`
        The same for the genes of the largest Welch t: against the control cells; or against the mean, with the spread
        of control cells. Of a single cell, for those that change most. The sign accuracy is that of the first 20.
    `discrimination`
        Rank of the true condition among the observed ones of the group (:func:`scdiva.metrics.discrimination`).

    What is not defined is NaN: a baseline's scores where it predicts nothing, discrimination of a single condition.

    Raises
    ------
    KeyError
        If `predicted` is no prediction, or `observed` lacks a column or layer.
    ValueError
        If they have no gene or no condition in common, genes bear one name, a label is missing, or a group observed
        has no control cells; if the control cells of the two are on different scales; or if the matrix is refused as
        by :func:`embed`.

    Warns
    -----
    UserWarning
        If only some genes of the prediction were observed.

    Examples
    --------
    >>> import scdiva as sd
    >>> screen = sd.datasets.toy(120, 100)
    >>> screen.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 20
    >>> train = screen[screen.obs["perturbation"] != "A+B"].copy()
    >>> predicted = sd.tl.predict_perturbation(train, "perturbation", predict=["A+B"])
    >>> scores = sd.tl.score_perturbation(predicted, screen)
    >>> sorted(set(scores["method"]))[:2]
    ['additive', 'linear']
    """
    check_anndata(observed)
    prediction = read_prediction(predicted, key)
    found = observed_responses(prediction, observed, layer=layer, use_raw=use_raw, input=input)
    among = _discrimination(found, metric)
    de_score = {(at, kind): response_score(found, at, kind) for at in found.perturbed for kind in REFERENCES}
    rows = []
    for method, mean in found.means.items():
        for at, cells in found.perturbed.items():
            for reference in REFERENCES:
                start, scores = found.reference(at, reference), {}
                if start is not None and method in found.methods(at):
                    weights = found.control_of(at).mean
                    scores = perturbation_response(
                        mean[:, at], cells.mean, start, de_score=de_score[at, reference], weights=weights
                    )
                named = {"method": method, **found.conditions.loc[at, _OF_CONDITION], "n_cells": cells.n}
                score = among.get((method, at, reference), np.nan)
                rows.append({**named, "reference": reference, **scores, "discrimination": score})
    frame = pd.DataFrame(rows)
    return frame[[*(name for name in frame if name != "discrimination"), "discrimination"]]


def _discrimination(responses: Responses, metric: Literal["l1", "l2", "cosine"]) -> dict[tuple[str, int, str], float]:
    """Score each observed condition among those of its group, by method, condition and reference."""
    found: dict[tuple[str, int, str], float] = {}
    groups = responses.conditions.loc[list(responses.rows), "group"]
    for _, members in groups.groupby(groups, sort=False):
        for reference in REFERENCES:
            start_of = {at: responses.reference(at, reference) for at in members.index}
            starts = {at: start for at, start in start_of.items() if start is not None}
            if not starts:
                continue
            rows, start = list(starts), np.stack(list(starts.values()))
            observed = np.stack([responses.perturbed[at].mean for at in rows]) - start
            for method, mean in responses.means.items():
                change = mean[:, rows].T - start
                defined = np.asarray(np.isfinite(change).all(axis=1))
                scores = discrimination(np.where(defined[:, None], change, 0.0), observed, metric=metric)
                for at, score, known in zip(rows, scores, defined, strict=True):
                    found[method, at, reference] = float(score) if known else np.nan
    return found
