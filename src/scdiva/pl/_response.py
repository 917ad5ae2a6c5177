"""Predicted perturbations and the cells that were observed, matched: what the plots of both read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from scdiva import metrics
from scdiva._constants import (
    BASELINES,
    PERTURBATION,
    UNS,
    VARM_BASELINE,
    VARM_MEAN,
)
from scdiva.data.conditions import Perturbations, column, perturbation_parts, perturbations
from scdiva.data.expression import log_normalised
from scdiva.data.writing import check_anndata

if TYPE_CHECKING:
    from anndata import AnnData

OURS = "scdiva"
"""Name of the prediction beside those of the baselines."""
COLOURS = {
    OURS: "#d1495b",
    "no_change": "0.55",
    "train_mean": "#e9a03b",
    "matching_mean": "#8a6fb0",
    "additive": "#2e86ab",
    "linear": "#5aa469",
    "elsewhere": "#8c5a3c",
}
"""Each way of predicting has one colour in all plots."""


class Condition(NamedTuple):
    """A perturbation, in a group of cells if there are groups, at a dose if there are doses."""

    column: int
    """Its column in `varm`."""
    name: str
    perturbation: str
    parts: tuple[str, ...]
    group: str
    dose: float


class Observed(NamedTuple):
    """Cells that were measured, with the genes that the prediction has too."""

    expression: sp.csr_matrix
    """log1p of counts per ten thousand, (n_cells, n_genes)."""
    genes: NDArray[np.intp]
    """Of each column, its place among the genes predicted."""
    labels: Perturbations
    group: NDArray[np.str_] | None
    dose: NDArray[np.float64] | None
    """Of each cell; None where conditions have none."""


class Response(NamedTuple):
    """How the cells of a condition differ from control cells of the same group."""

    cells: sp.csr_matrix
    control_cells: sp.csr_matrix
    mean: NDArray[np.float64]
    control: NDArray[np.float64]
    """Mean log expression of both, (n_genes,)."""
    error: NDArray[np.float64]
    """Standard error of the difference; NaN where one of both has a single cell."""
    score: NDArray[np.float64]
    """t of Welch's test, 0 for genes without variance; the difference where one of both has a single cell."""


def written_by_prediction(predicted: AnnData) -> dict[str, Any]:
    """Give what `tl.predict_perturbation` left in `uns`; say how it comes about if it is not there."""
    check_anndata(predicted)
    ours = predicted.uns.get(UNS, {})
    if not isinstance(ours, Mapping) or PERTURBATION not in ours or VARM_MEAN not in predicted.varm:
        raise KeyError(
            "these cells hold no predicted perturbations: give the AnnData that scdiva.tl.predict_perturbation(adata, "
            "...) returns, not the adata it was given."
        )
    return dict(ours[PERTURBATION])


def conditions_of(predicted: AnnData) -> list[Condition]:
    """List the predicted conditions in the order of the columns of `varm`."""
    written = written_by_prediction(predicted)
    names = zip(written["condition"], written["perturbation"], written["group"], written["dose"], strict=True)
    return [
        Condition(i, str(name), str(label), _parts(str(label), written), str(group), float(dose))
        for i, (name, label, group, dose) in enumerate(names)
    ]


def _parts(label: str, written: Mapping[str, Any]) -> tuple[str, ...]:
    return perturbation_parts(label, str(written["control"]), str(written["separator"]))


def find_condition(predicted: AnnData, name: str) -> Condition:
    """Find a condition by its name, or by its perturbation where that is predicted once only."""
    conditions = conditions_of(predicted)
    exact = [c for c in conditions if c.name == name]
    parts = _parts(name, written_by_prediction(predicted))
    found = exact or [c for c in conditions if c.parts == parts]
    if len(found) == 1:
        return found[0]
    if found:
        raise KeyError(f"{name!r} is predicted {len(found)} times: name one, {', '.join(c.name for c in found)}.")
    names = [c.name for c in conditions]
    near = difflib.get_close_matches(name, names, 5, 0.3) or names[:5]
    raise KeyError(f"{name!r} is none of the {len(names)} predicted conditions; among them are {', '.join(near)}.")


def predicted_cells(predicted: AnnData, condition: Condition) -> NDArray[np.intp]:
    """Give the numbers of the predicted cells of a condition."""
    written = written_by_prediction(predicted)
    chosen = column(predicted, str(written["perturbation_key"]), where="predicted") == condition.perturbation
    if str(written["groupby"]):
        chosen &= column(predicted, str(written["groupby"]), where="predicted") == condition.group
    if str(written["dose_key"]) in predicted.obs:
        chosen &= np.isclose(_doses(predicted, str(written["dose_key"])), condition.dose)
    return np.flatnonzero(chosen)


def _doses(adata: AnnData, key: str) -> NDArray[np.float64]:
    return pd.to_numeric(adata.obs[key], errors="coerce").to_numpy(dtype=np.float64)


def read_observed(
    predicted: AnnData,
    observed: AnnData,
    *,
    layer: str | None,
    use_raw: bool,
    input: Literal["auto", "counts", "lognorm"],
) -> Observed:
    """Read the measured cells log-normalised, with the genes that both have, in the order of the prediction.

    Raises
    ------
    KeyError
        If there is no such layer, or a column is missing by which was predicted.
    ValueError
        If there are no control cells, a cell has no label, names of genes repeat, no gene is in both, or the matrix is
        neither counts nor log-normalised.
    """
    written = written_by_prediction(predicted)
    check_anndata(observed)
    labels = perturbations(
        observed,
        str(written["perturbation_key"]),
        str(written["control"]),
        str(written["separator"]),
        where="observed",
    )
    groupby, dose_key = str(written["groupby"]), str(written["dose_key"])
    group = column(observed, groupby, where="observed") if groupby else None
    if dose_key:
        column(observed, dose_key, where="observed")  # is it there?
    dose = _doses(observed, dose_key) if dose_key else None
    expression, var = log_normalised(observed, layer=layer, use_raw=use_raw, input=input)
    for what, names in (("predicted", predicted.var_names), ("observed", var.index)):
        if not names.is_unique:
            repeated = names[names.duplicated()]
            raise ValueError(
                f"{len(repeated)} names of genes of {what} repeat (first: {repeated[0]!r}): call "
                f"{what}.var_names_make_unique() before predicting."
            )
    place = var.index.get_indexer(predicted.var_names)
    genes = np.flatnonzero(place >= 0)
    if not len(genes):
        raise ValueError(
            f"none of the {predicted.n_vars:,} predicted genes (first: {predicted.var_names[0]!r}) is among the "
            f"{len(var):,} of observed (first: {var.index[0]!r}): genes are matched by var names."
        )
    return Observed(expression[:, place[genes]], genes, labels, group, dose)


def observed_response(condition: Condition, cells: Observed) -> Response | None:
    """Compare the observed cells of a condition to the control cells of its group; None if no such cell was observed.

    Raises
    ------
    ValueError
        If its group has no control cells.
    """
    labels = cells.labels
    in_group = np.ones(len(labels.code), dtype=bool) if cells.group is None else cells.group == condition.group
    chosen = in_group & (
        labels.code == labels.parts.index(condition.parts) if condition.parts in labels.parts else False
    )
    if cells.dose is not None:
        chosen &= np.isclose(cells.dose, condition.dose)
    if not chosen.any():
        return None
    control = in_group & labels.is_control
    if not control.any():
        raise ValueError(
            f"observed has no control cells in {condition.group!r}: changes are counted from them, so give the control "
            "cells of each group together with its perturbed cells."
        )
    perturbed, untouched = cells.expression[chosen], cells.expression[control]
    (mean, variance, n), (base, base_variance, base_n) = _moments(perturbed), _moments(untouched)
    error, score = np.full(len(mean), np.nan), mean - base
    if min(n, base_n) > 1:
        error = np.sqrt(variance / n + base_variance / base_n)
        score = metrics.de_scores(mean, variance, n, base, base_variance, base_n)
    return Response(perturbed, untouched, mean, base, error, score)


def _moments(cells: sp.csr_matrix) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Give mean and variance (with n - 1) of each gene, and the number of cells; a single cell has variance 0."""
    n = cells.shape[0]
    mean = np.asarray(cells.mean(axis=0)).ravel()
    square = np.asarray(cells.multiply(cells).mean(axis=0)).ravel()
    return mean, np.maximum(square - mean**2, 0) * n / max(n - 1, 1), n


def matched_responses(predicted: AnnData, cells: Observed) -> dict[Condition, Response]:
    """Give the response of every predicted condition of which cells were observed.

    Raises
    ------
    ValueError
        If there is none, or control cells are missing.
    """
    conditions = conditions_of(predicted)
    found = {c: r for c in conditions if (r := observed_response(c, cells)) is not None}
    if not found:
        raise ValueError(
            f"observed has cells of none of the {len(conditions)} predicted conditions (first: {conditions[0].name!r})."
        )
    return found


def predicted_means(predicted: AnnData, condition: Condition) -> dict[str, NDArray[np.float64]]:
    """Give the mean expression of a condition by each method that predicts it, (n_vars,): ours, then the baselines."""
    keys = {OURS: VARM_MEAN, **{name: VARM_BASELINE + name for name in BASELINES}}
    means = {
        name: np.asarray(predicted.varm[key])[:, condition.column].astype(np.float64)
        for name, key in keys.items()
        if key in predicted.varm
    }
    return {name: mean for name, mean in means.items() if not np.isnan(mean).any()}


def reference_mean(
    response: Response, cells: Observed, written: Mapping[str, Any], reference: Literal["control", "mean"]
) -> NDArray[np.float64]:
    """Give the mean expression from which changes are counted, (n_genes,) as in `cells`."""
    if reference not in ("control", "mean"):
        raise ValueError(f"reference must be 'control' or 'mean', got {reference!r}.")
    if reference == "control":
        return response.control
    train_mean = np.asarray(written.get("train_mean", ()), dtype=np.float64)
    if not len(train_mean) or np.isnan(train_mean).any():
        raise ValueError(
            "reference='mean' counts changes from the mean over the perturbations of training, and this prediction has "
            "none: take reference='control'."
        )
    return train_mean[cells.genes]


def written_name(method: str) -> str:
    """Give the name of a method as it is written in pictures."""
    return method.replace("_", " ")


def response_of(condition: Condition, measured: Observed) -> Response:
    """Give the observed response of a condition that must have been observed."""
    response = observed_response(condition, measured)
    if response is None:
        raise ValueError(
            f"observed has no cell of {condition.name!r}: give cells of it, or draw the prediction alone by "
            "scdiva.pl.perturbation(predicted, condition)."
        )
    return response


def gene_names(predicted: AnnData, gene_symbols: str | None) -> NDArray[Any]:
    """Give the names of genes as they are written."""
    if gene_symbols is None:
        return np.asarray(predicted.var_names)
    if gene_symbols not in predicted.var:
        columns = ", ".join(map(str, predicted.var.columns)) or "none"
        raise KeyError(f"gene_symbols={gene_symbols!r} is no column of predicted.var, which has {columns}")
    return np.asarray(predicted.var[gene_symbols].astype(str))


def methods_of(methods: Sequence[str] | None, means: Sequence[dict[str, NDArray[np.float64]]]) -> list[str]:
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
