"""Predicted perturbations and the cells that were observed, matched: what the plots of both read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
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
    VARM_CONTROL,
    VARM_MEAN,
)
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
    group: str
    dose: float


class Observed(NamedTuple):
    """Cells that were measured, with the genes that the prediction has too."""

    values: sp.csr_matrix
    """log1p of counts per ten thousand, (n_cells, n_genes)."""
    obs: pd.DataFrame
    genes: NDArray[np.intp]
    """Of each column of `values`, its place among the genes predicted."""


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
    return [Condition(i, str(n), str(p), str(g), float(d)) for i, (n, p, g, d) in enumerate(names)]


def find_condition(predicted: AnnData, name: str) -> Condition:
    """Find a condition by its name, or by its perturbation where that is predicted in one group only."""
    conditions = conditions_of(predicted)
    for found in (
        [c for c in conditions if c.name == name],
        [c for c in conditions if c.perturbation == name],
    ):
        if len(found) == 1:
            return found[0]
        if found:
            raise KeyError(f"{name!r} is predicted {len(found)} times: name one, {', '.join(c.name for c in found)}.")
    names = [c.name for c in conditions]
    near = difflib.get_close_matches(str(name), names, 5, 0.3) or names[:5]
    raise KeyError(f"{name!r} is none of the {len(names)} predicted conditions; among them are {', '.join(near)}.")


def cells_of(obs: pd.DataFrame, condition: Condition, written: Mapping[str, Any], what: str) -> NDArray[np.bool_]:
    """Tell the cells of a condition."""
    perturbation = _column(obs, str(written["perturbation_key"]), what).astype(str).to_numpy()
    chosen = (perturbation == condition.perturbation) & _in_group(obs, condition, written, what)
    dose_key = str(written["dose_key"])
    if dose_key and (dose_key in obs or what == "observed"):
        dose = pd.to_numeric(_column(obs, dose_key, what), errors="coerce").to_numpy(dtype=np.float64)
        chosen &= np.isclose(dose, condition.dose)
    return chosen


def _in_group(
    obs: pd.DataFrame, condition: Condition, written: Mapping[str, Any], what: str
) -> NDArray[np.bool_]:
    """Tell the cells of the condition's group; all, where there are no groups."""
    groupby = str(written["groupby"])
    if not groupby:
        return np.ones(len(obs), dtype=bool)
    return _column(obs, groupby, what).astype(str).to_numpy() == condition.group


def _column(obs: pd.DataFrame, key: str, what: str) -> pd.Series:
    if key not in obs:
        columns = ", ".join(map(str, obs.columns)) or "none"
        raise KeyError(f"{key!r}, by which the perturbations were predicted, is no column of {what}.obs: {columns}.")
    return obs[key]


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
        If there is no such layer.
    ValueError
        If names of genes repeat, no gene is in both, or the matrix is neither counts nor log-normalised.
    """
    check_anndata(observed)
    values, var = log_normalised(observed, layer=layer, use_raw=use_raw, input=input)
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
    return Observed(values[:, place[genes]], observed.obs, genes)


def observed_response(condition: Condition, cells: Observed, written: Mapping[str, Any]) -> Response | None:
    """Compare the observed cells of a condition to the control cells of its group; None if no such cell was observed.

    Raises
    ------
    ValueError
        If there are no control cells.
    """
    chosen = cells_of(cells.obs, condition, written, "observed")
    if not chosen.any():
        return None
    perturbation = _column(cells.obs, str(written["perturbation_key"]), "observed").astype(str).to_numpy()
    control = (perturbation == str(written["control"])) & _in_group(cells.obs, condition, written, "observed")
    if not control.any():
        where = f" in {condition.group!r}" if condition.group else ""
        raise ValueError(
            f"observed has no control cells{where}: changes are counted from cells with "
            f"obs[{str(written['perturbation_key'])!r}] == {str(written['control'])!r}. Give them together with the "
            "perturbed cells."
        )
    perturbed, untouched = cells.values[chosen], cells.values[control]
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
    written = written_by_prediction(predicted)
    conditions = conditions_of(predicted)
    found = {c: r for c in conditions if (r := observed_response(c, cells, written)) is not None}
    if not found:
        raise ValueError(
            f"observed has cells of none of the {len(conditions)} predicted conditions (first: {conditions[0].name!r}) "
            f"by obs[{str(written['perturbation_key'])!r}]."
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
