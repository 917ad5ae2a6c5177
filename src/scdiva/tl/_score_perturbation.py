"""`tl.score_perturbation`: predicted responses, and the baselines beside them, against observed cells."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva import _constants as C
from scdiva._validate import Input
from scdiva.data.conditions import column, perturbation_parts, perturbations, predicted_conditions
from scdiva.data.expression import log_normalised
from scdiva.metrics import de_scores, discrimination, perturbation_response

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

OURS = "scdiva"
"""Name of the prediction itself among the methods."""
_OTHER_SCALE = 2.0
"""Times that the mean expression of control cells may differ before the two are taken to be of different scales."""


class _Cells(NamedTuple):
    """Mean and variance of some cells, per gene."""

    n: int
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]


def score_perturbation(
    predicted: AnnData,
    observed: AnnData,
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Input = "auto",
    metric: Literal["l1", "l2", "cosine"] = "l1",
) -> pd.DataFrame:
    """Score predicted responses to perturbations against cells that had them, and the simple baselines the same way.

    Conditions are matched by perturbation, and by group and dose where the prediction has them; genes by name. Those
    that only one of the two has are left out.

    Parameters
    ----------
    predicted
        What :func:`predict_perturbation` or :func:`in_silico_perturbation` returned.
    observed
        Perturbed cells and, of each group, control cells; all columns of `obs` that the prediction was made by. The
        data it was fitted on may be passed whole: `trained` tells which conditions were fitted.
    layer, use_raw, input
        What to read of `observed`, as for :func:`embed`: counts, or log1p of counts per ten thousand.
    metric
        Distance by which `discrimination` ranks conditions.

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
    """
    conditions = predicted_conditions(predicted)
    ours = predicted.uns[C.UNS][C.PERTURBATION]
    rows = _observed_rows(conditions, ours, observed)
    values, genes = _shared_genes(predicted, observed, layer=layer, use_raw=use_raw, input=input)
    control = {group: _summary(values[cells]) for group, cells in rows.control.items()}
    truth = {at: _summary(values[cells]) for at, cells in rows.perturbed.items()}
    _check_scale(predicted, conditions, genes, control, list(truth))
    means = _predicted_means(predicted, genes)
    references = _references(predicted, conditions, genes, control, ours)
    frames = []
    for at, cells in truth.items():
        of_group = control[conditions.loc[at, "group"]]
        for reference, from_what in references.items():
            start = from_what[at]
            score = None
            if min(cells.n, of_group.n) > 1 and start is not None:
                score = de_scores(cells.mean, cells.variance, cells.n, start, of_group.variance, of_group.n)
            for method, mean in means.items():
                found = {}
                if start is not None and np.isfinite(mean[:, at]).all():
                    found = perturbation_response(mean[:, at], cells.mean, start, de_score=score, weights=of_group.mean)
                frames.append({"method": method, "at": at, "n_cells": cells.n, "reference": reference, **found})
    frame = pd.DataFrame(frames)
    frame["discrimination"] = _discrimination(frame, conditions, means, truth, references, metric)
    about = conditions.loc[frame["at"], ["condition", "perturbation", "group", "n_parts", "n_seen", "trained"]]
    frame = pd.concat([about.reset_index(drop=True), frame.drop(columns="at")], axis=1)
    frame.insert(0, "method", frame.pop("method"))
    order = {method: i for i, method in enumerate(means)}
    return frame.sort_values("method", key=lambda names: names.map(order), kind="stable", ignore_index=True)


class _Rows(NamedTuple):
    """Rows of observed cells: by number of the predicted condition, and the control cells by group."""

    perturbed: dict[int, NDArray[np.intp]]
    control: dict[str, NDArray[np.intp]]


def _observed_rows(conditions: pd.DataFrame, ours: dict[str, Any], observed: AnnData) -> _Rows:
    """Find the cells of each predicted condition; leave out those that were not observed."""
    key, name, separator = str(ours["perturbation_key"]), str(ours["control"]), str(ours["separator"])
    groupby, dose_key = str(ours["groupby"]), str(ours["dose_key"])
    known = perturbations(observed, key, name, separator, where="observed")
    group = column(observed, groupby, where="observed") if groupby else np.full(observed.n_obs, "")
    dose = _doses(observed, dose_key) if dose_key else None
    codes = {parts: code for code, parts in enumerate(known.parts)}
    perturbed: dict[int, NDArray[np.intp]] = {}
    for at, condition in conditions.iterrows():
        code = codes.get(perturbation_parts(str(condition["perturbation"]), name, separator))
        if not code:
            continue
        cells = (known.code == code) & (group == condition["group"])
        if dose is not None and np.isfinite(condition["dose"]):
            cells &= np.isclose(dose, condition["dose"])
        if cells.any():
            perturbed[int(str(at))] = np.flatnonzero(cells)
    if not perturbed:
        shown = [" + ".join(parts) for parts in known.parts if parts][:3]
        raise ValueError(
            f"none of {len(conditions)} predicted conditions (first: {conditions.loc[0, 'condition']!r}) was observed: "
            f"observed.obs[{key!r}] names {len(known.parts) - 1} perturbations"
            f"{f' (first: {shown[0]!r})' if shown else ''}"
            f"{f', in groups such as {str(group[0])!r}' if groupby else ''}."
        )
    groups = list(dict.fromkeys(conditions.loc[list(perturbed), "group"]))
    control = {one: np.flatnonzero(known.is_control & (group == one)) for one in groups}
    without = [one for one, cells in control.items() if not len(cells)]
    if without:
        raise ValueError(
            f"{len(without)} of {len(groups)} groups have no control cells in observed (first: {without[0]!r}): pass "
            f"them along with the perturbed ones, those with observed.obs[{key!r}] == {name!r}."
        )
    return _Rows(perturbed, control)


def _doses(observed: AnnData, dose_key: str) -> NDArray[np.float64]:
    """Read the dose of each cell; NaN where it is no number."""
    if dose_key not in observed.obs:
        columns = ", ".join(map(repr, observed.obs.columns))
        raise KeyError(f"observed.obs has no column {dose_key!r}; it has {columns}.")
    return pd.to_numeric(observed.obs[dose_key].astype(object), errors="coerce").to_numpy(dtype=np.float64)


def _shared_genes(predicted: AnnData, observed: AnnData, **reading: Any) -> tuple[sp.csr_matrix, NDArray[np.intp]]:
    """Read the observed expression of the genes of both; return it and which genes of `predicted` they are."""
    values, var = log_normalised(observed, **reading)
    for names, where in ((predicted.var_names, "predicted"), (var.index, "observed")):
        if not names.is_unique:
            again = names[names.duplicated()]
            raise ValueError(
                f"{len(again)} genes of {where} bear the name of another (first: {again[0]!r}): call "
                f"{where}.var_names_make_unique() on both, in the same order of genes."
            )
    at = var.index.get_indexer(predicted.var_names)
    shared = np.flatnonzero(at >= 0)
    if len(shared) < 2:
        raise ValueError(
            f"predicted and observed have {len(shared)} genes in common, by name: {predicted.n_vars} such as "
            f"{predicted.var_names[0]!r} and {len(var)} such as {var.index[0]!r}."
        )
    if len(shared) < predicted.n_vars:
        warnings.warn(
            f"{predicted.n_vars - len(shared)} of {predicted.n_vars} predicted genes were not observed (first: "
            f"{predicted.var_names[at < 0][0]!r}); scores are over the {len(shared)} others.",
            UserWarning,
            stacklevel=3,
        )
    return sp.csr_matrix(values[:, at[shared]]), shared


def _summary(cells: sp.csr_matrix) -> _Cells:
    """Mean and variance of each gene; NaN variances of a single cell are never read."""
    n = cells.shape[0]
    mean = np.asarray(cells.mean(axis=0)).ravel()
    square = np.asarray(cells.multiply(cells).mean(axis=0)).ravel()
    variance = (square - mean**2) * (n / max(n - 1, 1))
    return _Cells(n, mean, np.where(variance > 1e-12 * square, variance, 0.0))  # the rest is rounding


def _check_scale(
    predicted: AnnData,
    conditions: pd.DataFrame,
    genes: NDArray[np.intp],
    control: dict[str, _Cells],
    scored: list[int],
) -> None:
    """Refuse control cells that are far from those the prediction was made from."""
    for at in scored:
        here = float(control[conditions.loc[at, "group"]].mean.mean())
        there = float(np.asarray(predicted.varm[C.VARM_CONTROL])[genes, at].mean(dtype=np.float64))
        if not max(here, there) <= _OTHER_SCALE * min(here, there):
            raise ValueError(
                f"control cells have a mean log-normalised expression of {here:.3g} in observed, but {there:.3g} in "
                f"the prediction (condition {conditions.loc[at, 'condition']!r}): the two are on different scales. "
                "Both must be log1p of counts per ten thousand of the same genes: pass what the prediction was made "
                "from, the same layer=, use_raw= and input= included."
            )


def _predicted_means(predicted: AnnData, genes: NDArray[np.intp]) -> dict[str, NDArray[np.float64]]:
    """Means by method, genes × conditions; baselines that predict nothing are left out."""
    means = {OURS: np.asarray(predicted.varm[C.VARM_MEAN], dtype=np.float64)[genes]}
    for name in C.BASELINES:
        key = C.VARM_BASELINE + name
        if key in predicted.varm:
            mean = np.asarray(predicted.varm[key], dtype=np.float64)[genes]
            if np.isfinite(mean).all(axis=0).any():
                means[name] = mean
    return means


def _references(
    predicted: AnnData,
    conditions: pd.DataFrame,
    genes: NDArray[np.intp],
    control: dict[str, _Cells],
    ours: dict[str, Any],
) -> dict[str, list[NDArray[np.float64] | None]]:
    """Means from which changes are measured, by condition; None where there is none."""
    key = C.VARM_BASELINE + "train_mean"
    by_condition = np.asarray(predicted.varm[key], dtype=np.float64) if key in predicted.varm else None
    overall = np.asarray(ours.get("train_mean", ()), dtype=np.float64)
    is_whole = len(overall) == predicted.n_vars and bool(np.isfinite(overall).all())  # not if genes were taken out
    mean: list[NDArray[np.float64] | None] = []
    for at in range(len(conditions)):
        if by_condition is not None and np.isfinite(by_condition[:, at]).all():
            mean.append(by_condition[genes, at])
        else:
            mean.append(overall[genes] if is_whole else None)
    of_group = [control[group].mean if group in control else None for group in conditions["group"]]
    return {"control": of_group, "mean": mean}


def _discrimination(
    frame: pd.DataFrame,
    conditions: pd.DataFrame,
    means: dict[str, NDArray[np.float64]],
    truth: dict[int, _Cells],
    references: dict[str, list[NDArray[np.float64] | None]],
    metric: Literal["l1", "l2", "cosine"],
) -> NDArray[np.float64]:
    """Score each row of the frame among the observed conditions of its group."""
    found: dict[tuple[str, int, str], float] = {}
    groups = conditions.loc[list(truth), "group"]
    for _, members in groups.groupby(groups, sort=False):
        for reference, from_what in references.items():
            rows = [at for at in members.index if from_what[at] is not None]
            if not rows:
                continue
            start = np.stack([from_what[at] for at in rows])
            observed = np.stack([truth[at].mean for at in rows]) - start
            for method, mean in means.items():
                change = mean[:, rows].T - start
                defined = np.isfinite(change).all(axis=1)
                scores = discrimination(np.where(defined[:, None], change, 0.0), observed, metric=metric)
                for at, score, is_defined in zip(rows, scores, defined, strict=True):
                    found[method, at, reference] = float(score) if is_defined else np.nan
    keys = zip(frame["method"], frame["at"], frame["reference"], strict=True)
    return np.array([found.get(key, np.nan) for key in keys])
