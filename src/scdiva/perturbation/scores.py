"""Scores of predicted perturbations: predictions read from AnnData, compared with observed cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva._checks import check_arguments, check_choices, speaking_of, warn
from scdiva._constants import (
    BASELINES,
    EXPECTED,
    PERTURBATION,
    PREDICTED,
    UNS,
    VARM_BASELINE,
    VARM_CONTROL,
    VARM_MEAN,
    VARM_SD,
)
from scdiva._docs import with_shared_docs
from scdiva._labels import read_labels
from scdiva._validate import Input
from scdiva.data.cells import log_normalised
from scdiva.data.genes import check_unique
from scdiva.data.results import check_anndata, our_uns
from scdiva.metrics import de_scores, discrimination, perturbation_response
from scdiva.perturbation.conditions import ScreenDesign, doses, perturbations, same_genes, species_of
from scdiva.tokenizer.vocabulary import load_vocabulary

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

Reference = Literal["control", "mean"]
REFERENCES: tuple[Reference, ...] = ("control", "mean")
"""Reference of changes: the observed control cells of the group, or the mean over training perturbations."""
OURS = "scdiva"
"""Name of the prediction among the methods."""
_OF_CONDITIONS = ("condition", "perturbation", "group", "dose", "n_parts", "n_seen", "trained")
_TEXT = ("condition", "perturbation", "group", "genes")
_BASELINES = (*BASELINES, EXPECTED)
_VARM = {"mean": VARM_MEAN, "control_mean": VARM_CONTROL, "sd": VARM_SD}
"""Key in `varm` of the predicted cells (genes × conditions) of each entry in `uns` (conditions × genes)."""


@dataclass(frozen=True)
class Prediction:
    """Prediction of perturbed cells.

    Attributes
    ----------
    conditions
        One row a condition: `condition`, `perturbation`, `group`, `dose`, `n_parts`, `n_seen`, `trained`.
    genes
        Names of the genes.
    mean, control
        Float `(n_genes, n_conditions)`, predicted mean, and mean of the control cells.
    sd
        Standard deviation of the predicted mean; None if it was not stored.
    baselines
        Means by baseline, and for a fine-tuned model by the expected response; NaN where one is not defined.
    notes
        Design of the screen, and notes of the fit.
    var
        Annotation of the genes.
    cells
        The predicted cells; None if only the means are stored.
    """

    conditions: pd.DataFrame
    genes: pd.Index
    mean: NDArray[np.floating]
    control: NDArray[np.floating]
    sd: NDArray[np.floating] | None
    baselines: dict[str, NDArray[np.floating]]
    notes: Mapping[str, Any]
    var: pd.DataFrame
    cells: AnnData | None


def read_prediction(predicted: AnnData, key: str = PREDICTED) -> Prediction:
    """Read a prediction from the predicted cells, or from the dataset that it was written to.

    Parameters
    ----------
    predicted
        Cells that `tl.predict_perturbation` returned, or a subset of them; or the adata that it was called on.
    key
        Entry of `uns` with the prediction, in the adata that it was called on.

    Raises
    ------
    TypeError
        If `predicted` is not an AnnData object.
    KeyError
        If it contains no prediction.
    ValueError
        If conditions and means are of different predictions.
    """
    check_anndata(predicted)
    notes: Any = our_uns(predicted).get(PERTURBATION)
    stored = predicted.uns.get(key)
    cells = predicted if notes is not None and VARM_MEAN in predicted.varm else None
    if cells is not None:
        keys = _VARM | {name: VARM_BASELINE + name for name in _BASELINES}
        parts = {name: np.asarray(predicted.varm[of]) for name, of in keys.items() if of in predicted.varm}
        genes, var, where = predicted.var_names, predicted.var, f"varm[{VARM_MEAN!r}]"
    elif is_prediction(stored):
        notes, where, entries = stored, f"uns[{key!r}]", {**stored, **stored.get("baselines", {})}
        genes = pd.Index(_text(stored["genes"]))
        parts = {name: np.asarray(entries[name]).T for name in (*_VARM, *_BASELINES) if name in entries}
        var = predicted.var if genes.isin(predicted.var_names).all() or predicted.raw is None else predicted.raw.var
        var = var[~var.index.duplicated()].reindex(genes)
    else:
        if is_prediction(predicted.uns.get(PREDICTED)):
            raise KeyError(f"adata.uns[{key!r}] is not a prediction: pass key={PREDICTED!r}.")
        where = f"uns[{UNS!r}] has no {PERTURBATION!r}" if notes is None else f"varm has no {VARM_MEAN!r}"
        raise KeyError(
            f"this is not a prediction: it has no uns[{key!r}], and its {where}. Pass the result of "
            "scdiva.tl.predict_perturbation, or the adata that it was called on."
        )
    columns = {name: _text(notes[name]) if name in _TEXT else np.asarray(notes[name]) for name in _OF_CONDITIONS}
    conditions = pd.DataFrame(columns)
    for name, part in parts.items():
        if part.shape != (len(genes), len(conditions)):
            raise ValueError(
                f"the prediction names {len(conditions)} conditions of {len(genes)} genes, but {where} has "
                f"{part.shape[-1]} of {len(part)} ({name}). Run scdiva.tl.predict_perturbation again."
            )
    baselines = {name: parts[name] for name in _BASELINES if name in parts}
    return Prediction(
        conditions, genes, parts["mean"], parts["control_mean"], parts.get("sd"), baselines, notes, var, cells
    )


def stored_prediction(predicted: AnnData) -> dict[str, Any]:
    """Entry of `uns` for a prediction, as h5ad and zarr can hold it.

    Parameters
    ----------
    predicted
        The predicted cells, with means in `varm`.
    """
    prediction = read_prediction(predicted)
    means = {"mean": prediction.mean, "change": prediction.mean - prediction.control}
    means["control_mean"] = prediction.control
    if prediction.sd is not None:
        means["sd"] = prediction.sd

    def rows(part: NDArray[np.floating]) -> NDArray[np.float32]:
        return np.ascontiguousarray(part.T, dtype=np.float32)

    return {
        **prediction.notes,
        "genes": _text(prediction.genes),
        **{name: rows(part) for name, part in means.items()},
        # without baselines that are defined for no condition, which readers ignore
        "baselines": {name: rows(part) for name, part in prediction.baselines.items() if np.isfinite(part).any()},
    }


def is_prediction(stored: object) -> bool:
    """Whether an entry of `uns` is a prediction."""
    return isinstance(stored, Mapping) and {*_OF_CONDITIONS, "genes", "mean", "control_mean"} <= stored.keys()


def _text(values: Any) -> NDArray[np.object_]:
    """Names as Python strings; zarr returns numpy's string type."""
    return np.array([str(value) for value in np.asarray(values)], dtype=object)


class CellSummary(NamedTuple):
    """Number of cells, and mean and sample variance of each gene; the variance of a single cell is 0."""

    n: int
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]


class Responses(NamedTuple):
    """Observed cells of the predicted conditions.

    Attributes
    ----------
    conditions
        Conditions of the prediction; not all of them need to be observed. Other attributes refer to their numbers.
    genes
        Genes of the prediction that were observed; all other attributes are restricted to them.
    expression
        log1p of counts per ten thousand of the observed cells, `(n_obs, n_genes)`.
    rows, control_rows
        Observed cells of each condition, and control cells of each group.
    perturbed, control
        Their summaries.
    means
        Predicted mean of each method, genes × all conditions, ours first; NaN where a method is not defined.
    """

    conditions: pd.DataFrame
    genes: NDArray[np.intp]
    expression: sp.csr_matrix
    rows: dict[int, NDArray[np.intp]]
    control_rows: dict[str, NDArray[np.intp]]
    perturbed: dict[int, CellSummary]
    control: dict[str, CellSummary]
    means: dict[str, NDArray[np.float64]]

    def control_of(self, at: int) -> CellSummary:
        """Control cells of the group of a condition."""
        return self.control[self.conditions.loc[at, "group"]]

    def reference(self, at: int, kind: Reference) -> NDArray[np.float64] | None:
        """Mean from which changes of a condition are measured; None if there is none.

        The mean of the control cells of its group, or the mean over training perturbations.
        """
        if kind == "control":
            return self.control_of(at).mean
        return self.means["train_mean"][:, at] if "train_mean" in self.methods(at) else None

    def methods(self, at: int) -> list[str]:
        """Methods that are defined for a condition."""
        return [name for name, mean in self.means.items() if np.isfinite(mean[:, at]).all()]


def observed_responses(
    prediction: Prediction,
    observed: AnnData,
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Input = "auto",
    only: Sequence[int] | None = None,
) -> Responses:
    """Find the observed cells of predicted conditions, and the control cells of their groups.

    Conditions are matched by perturbation, and by group and dose if the prediction has them; genes by name.

    Parameters
    ----------
    prediction
        The prediction.
    observed
        Perturbed cells, and control cells of each group.
    layer, use_raw, input
        Matrix of `observed`, as for :func:`scdiva.tl.embed`.
    only
        Numbers of the conditions to find. None: all.

    Raises
    ------
    KeyError
        If `observed` lacks a column or layer.
    ValueError
        If they have no condition or fewer than two genes in common, gene names repeat, a label is missing, or an
        observed group has no control cells; if the control cells of the two are on different scales; or if the matrix
        is not valid for :func:`scdiva.tl.embed`.

    Warns
    -----
    UserWarning
        If only some genes of the prediction were observed.
    """
    conditions = prediction.conditions
    selected = conditions if only is None else conditions.loc[list(only)]
    rows, control_rows = _observed_rows(selected, ScreenDesign.from_notes(prediction.notes), observed)
    values, genes = _shared_genes(prediction, observed, layer=layer, use_raw=use_raw, input=input)
    control = {group: _summary(values[cells]) for group, cells in control_rows.items()}
    perturbed = {at: _summary(values[cells]) for at, cells in rows.items()}
    _check_scale(prediction, genes, control, list(rows))
    by_method = {OURS: prediction.mean, **prediction.baselines}
    means = {name: mean[genes].astype(np.float64) for name, mean in by_method.items()}
    means = {name: mean for name, mean in means.items() if name == OURS or np.isfinite(mean).all(axis=0).any()}
    return Responses(conditions, genes, values, rows, control_rows, perturbed, control, means)


def response_score(responses: Responses, at: int, reference: Reference = "control") -> NDArray[np.float64] | None:
    """Welch's t of the differential expression of a condition.

    Parameters
    ----------
    responses
        The observed cells.
    at
        Number of an observed condition.
    reference
        Reference of the change; the mean over perturbations gets the variance of the control cells.

    Returns
    -------
    float64 `(n_genes,)`; None without this reference, or with a single perturbed or control cell.
    """
    start, cells, control = responses.reference(at, reference), responses.perturbed[at], responses.control_of(at)
    if start is None or min(cells.n, control.n) < 2:
        return None
    return de_scores(cells.mean, cells.variance, cells.n, start, control.variance, control.n)


def _observed_rows(
    conditions: pd.DataFrame, design: ScreenDesign, observed: AnnData
) -> tuple[dict[int, NDArray[np.intp]], dict[str, NDArray[np.intp]]]:
    """Cells of each observed condition, and control cells of each group."""
    key, groupby = design.perturbation_key, design.groupby
    predicted = {part for label in conditions["perturbation"] for part in design.parts(label)}
    cells = perturbations(observed, design, where="observed")
    renamed = _observed_names(predicted, {part for parts in cells.parts for part in parts}, list(observed.var_names))
    group = read_labels(observed, groupby, where="observed") if groupby else np.full(observed.n_obs, "")
    dose = doses(observed, design.dose_key, where="observed") if design.dose_key else None
    codes = {parts: code for code, parts in enumerate(cells.parts)}
    rows: dict[int, NDArray[np.intp]] = {}
    for at, condition in conditions.iterrows():
        parts = design.parts(str(condition["perturbation"]))
        code = codes.get(tuple(sorted({renamed.get(part, part) for part in parts})))
        if not code:
            continue
        mask = (cells.code == code) & (group == condition["group"])
        if dose is not None and np.isfinite(condition["dose"]):
            mask &= np.isclose(dose, condition["dose"])
        if mask.any():
            rows[int(str(at))] = np.flatnonzero(mask)
    if not rows:
        shown = [" + ".join(parts) for parts in cells.parts if parts][:1]
        raise ValueError(
            f"none of {len(conditions)} predicted conditions (first: {conditions['condition'].iloc[0]!r}) was "
            f"observed: observed.obs[{key!r}] names {len(cells.parts) - 1} perturbations"
            f"{f' (first: {shown[0]!r})' if shown else ''}"
            f"{f', in groups such as {str(group[0])!r}' if groupby else ''}."
        )
    groups = list(dict.fromkeys(conditions.loc[list(rows), "group"]))
    control = {one: np.flatnonzero(cells.is_control & (group == one)) for one in groups}
    without = [one for one, of_group in control.items() if not len(of_group)]
    if without:
        raise ValueError(
            f"{len(without)} of {len(groups)} groups have no control cells in observed (first: {without[0]!r}). Pass "
            f"control cells, too: those whose observed.obs[{key!r}] is {' or '.join(map(repr, design.control))}."
        )
    return rows, control


def _observed_names(predicted: set[str], observed: set[str], columns: list[str]) -> dict[str, str]:
    """Observed name of each predicted gene that was observed under another name, an Ensembl id or an alias."""
    if predicted == observed:
        return {}
    vocabulary = load_vocabulary()
    species = species_of(columns, vocabulary, None)
    other = same_genes(observed, predicted, vocabulary, species, "observed") if predicted & observed else {}
    if both := sorted(name for name, gene in other.items() if gene in predicted & observed):
        warn(
            f"observed contains two names of {len(both)} predicted genes (first: {both[0]!r} and {other[both[0]]!r}): "
            f"cells of {both[0]!r} are ignored."
        )
    renamed = same_genes(predicted, observed, vocabulary, species, "the prediction")
    return {name: gene for name, gene in renamed.items() if gene in observed}


def _shared_genes(prediction: Prediction, observed: AnnData, **reading: Any) -> tuple[sp.csr_matrix, NDArray[np.intp]]:
    """Observed expression of the shared genes, and their indices in the prediction."""
    with speaking_of("observed"):
        values, var = log_normalised(observed, **reading)
    check_unique(prediction.genes, "predicted")
    check_unique(var.index, "observed")
    at = var.index.get_indexer(prediction.genes)
    shared = np.flatnonzero(at >= 0)
    if len(shared) < 2:
        raise ValueError(
            f"predicted and observed have {len(shared)} genes in common, by name: {len(at)} such as "
            f"{prediction.genes[0]!r} and {len(var)} such as {var.index[0]!r}."
        )
    if len(shared) < len(at):
        warn(
            f"{len(at) - len(shared)} of {len(at)} predicted genes were not observed (first: "
            f"{prediction.genes[at < 0][0]!r}); the {len(shared)} others are compared. Cells are normalised over the "
            f"{len(var)} genes of observed: pass it with all genes, unless the missing ones have few counts."
        )
    return sp.csr_matrix(values[:, at[shared]]), shared


def _summary(cells: sp.csr_matrix) -> CellSummary:
    """Mean and variance of each gene."""
    n = cells.shape[0]
    mean = np.asarray(cells.mean(axis=0)).ravel()
    square = np.asarray(cells.multiply(cells).mean(axis=0)).ravel()
    variance = (square - mean**2) * (n / max(n - 1, 1))
    return CellSummary(n, mean, np.where(variance > 1e-12 * square, variance, 0.0))  # the rest is rounding


def _check_scale(
    prediction: Prediction, genes: NDArray[np.intp], control: dict[str, CellSummary], scored: list[int]
) -> None:
    """Raise an error if the counts of control cells in the shared genes differ from those of the prediction."""
    conditions = prediction.conditions
    for at in scored:
        observed = float(np.expm1(control[conditions.loc[at, "group"]].mean).sum())
        predicted = float(np.expm1(prediction.control[genes, at].astype(np.float64)).sum())
        if not max(observed, predicted) <= 2 * min(observed, predicted):
            name = conditions.loc[at, "condition"]
            raise ValueError(
                f"the {len(genes)} shared genes have {observed:,.0f} counts in a control cell of observed, but "
                f"{predicted:,.0f} in the prediction (condition {name!r}): they are on different scales. Cells are "
                "normalised to ten thousand counts over all genes. Pass observed with all genes of the prediction and "
                "the same layer= and use_raw=; or predict from the genes of observed, "
                "adata[:, observed.var_names.intersection(adata.var_names)].copy()."
            )


@check_arguments
@with_shared_docs
def score_perturbation(
    predicted: AnnData,
    observed: AnnData,
    *,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    metric: Literal["l1", "l2", "cosine"] = "l1",
    key: str = PREDICTED,
) -> pd.DataFrame:
    """Score predicted responses to perturbations, and those of the simple baselines, against observed cells.

    Conditions are matched by perturbation, and by group and dose if the prediction has them; genes by name. Conditions
    and genes of only one of the two datasets are ignored. A perturbed gene is matched by any of its names: symbol,
    alias, Ensembl id.

    Parameters
    ----------
    %(predicted)s
    observed
        Perturbed cells, and control cells of each group, with the columns of `obs` that the prediction was made with.
        The dataset that the model was fitted on may be passed whole: `trained` marks the conditions of the fit. Cells
        are normalised to ten thousand counts over all genes of `observed`.
    %(observed_matrix)s
    metric
        Distance by which `discrimination` ranks conditions.
    %(prediction_key)s

    Returns
    -------
    One row for each method, condition and reference:

    `method`
        `"scdiva"`, and each baseline that is defined for any condition; for a fine-tuned model also `"expected"`, the
        expected response, which the same call predicts without fine-tuning unless a baseline is better.
    `condition`, `perturbation`, `group`, `n_parts`, `n_seen`, `trained`
        As in the prediction.
    `n_cells`
        Number of observed cells.
    `reference`
        Reference of changes: `"control"`, the observed control cells of the group; or `"mean"`, the mean over training
        perturbations (of the group, if that baseline is defined), which leaves the effect specific to the
        perturbation.
    `pearson_delta`, `mse`, `wmse`, `sign_accuracy`
        See :func:`scdiva.metrics.perturbation_response`; the WMSE weights genes by their mean in control cells.
    `pearson_delta_top20`, `mse_top20`, `hit_rate_20`; `pearson_delta_top100`, `mse_top100`, `hit_rate_100`
        The same scores over the genes with the largest Welch t from the reference (the mean gets the variance of the
        control cells), or for a single cell with the largest change. The sign accuracy is that of the first 20.
    `discrimination`
        Rank of the true condition among the observed ones of the group (:func:`scdiva.metrics.discrimination`).

    Undefined scores are NaN: those of a baseline that is not defined, and the discrimination of a single condition.

    Raises
    ------
    KeyError
        If `predicted` is not a prediction, or `observed` lacks a column or layer.
    ValueError
        If the two share no gene or no condition, gene names repeat, a label is missing, an observed group has no
        control cells, the control cells of the two are on different scales, or the matrix is not valid for
        :func:`embed`.

    Warns
    -----
    UserWarning
        If some genes of the prediction were not observed, or a perturbed gene was observed under two names.

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
    check_choices(metric=(metric, ("l1", "l2", "cosine")))
    responses = observed_responses(read_prediction(predicted, key), observed, layer=layer, use_raw=use_raw, input=input)
    rank_of = _discrimination(responses, metric)
    de_score = {(at, kind): response_score(responses, at, kind) for at in responses.perturbed for kind in REFERENCES}
    rows, ranks = [], []
    for method, mean in responses.means.items():
        for at, cells in responses.perturbed.items():
            for reference in REFERENCES:
                start, scores = responses.reference(at, reference), {}
                if start is not None and method in responses.methods(at):
                    weights = responses.control_of(at).mean
                    scores = perturbation_response(
                        mean[:, at], cells.mean, start, de_score=de_score[at, reference], weights=weights
                    )
                columns = ["condition", "perturbation", "group", "n_parts", "n_seen", "trained"]
                condition = responses.conditions.loc[at, columns]
                rows.append({"method": method, **condition, "n_cells": cells.n, "reference": reference, **scores})
                ranks.append(rank_of.get((method, at, reference), np.nan))
    return pd.DataFrame(rows).assign(discrimination=ranks)


def _discrimination(responses: Responses, metric: Literal["l1", "l2", "cosine"]) -> dict[tuple[str, int, str], float]:
    """Discrimination of each observed condition within its group, by method, condition and reference."""
    ranks: dict[tuple[str, int, str], float] = {}
    groups = responses.conditions.loc[list(responses.rows), "group"]
    for _, members in groups.groupby(groups, sort=False):
        for reference in REFERENCES:
            references = ((at, responses.reference(at, reference)) for at in members.index)
            starts = {at: start for at, start in references if start is not None}
            if not starts:
                continue
            rows, start = list(starts), np.stack(list(starts.values()))
            observed = np.stack([responses.perturbed[at].mean for at in rows]) - start
            for method, mean in responses.means.items():
                change = mean[:, rows].T - start
                defined = np.asarray(np.isfinite(change).all(axis=1))
                scores = discrimination(np.where(defined[:, None], change, 0.0), observed, metric=metric)
                for at, score, is_defined in zip(rows, scores, defined, strict=True):
                    ranks[method, at, reference] = float(score) if is_defined else np.nan
    return ranks
