"""Responses to perturbations: predicted ones, in the adata given or that of the predicted cells; and observed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scdiva._checks import speaking_of, warn
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
from scdiva._labels import read_labels
from scdiva._validate import Input
from scdiva.data.cells import log_normalised
from scdiva.data.genes import check_unique
from scdiva.data.results import check_anndata, our_uns
from scdiva.metrics import de_scores
from scdiva.perturbation.conditions import (
    doses,
    guides_as_noted,
    naming_as_noted,
    perturbations,
    same_genes,
    species_of,
)
from scdiva.tokenizer.vocabulary import load_vocabulary

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

Reference = Literal["control", "mean"]
REFERENCES: tuple[Reference, ...] = ("control", "mean")
"""From where changes are measured: the observed control cells of the group, or the mean perturbation of training."""
OURS = "scdiva"
"""Name of the prediction itself among the methods."""
_OF_CONDITIONS = ("condition", "perturbation", "group", "dose", "n_parts", "n_seen", "trained")
_TEXT = ("condition", "perturbation", "group", "genes")
_BASELINES = (*BASELINES, EXPECTED)
_VARM = {"mean": VARM_MEAN, "control_mean": VARM_CONTROL, "sd": VARM_SD}
"""Entries of what is kept in `uns`, conditions × genes, by the key in `varm` of the same, genes × conditions."""


@dataclass(frozen=True)
class Prediction:
    """What was predicted of some conditions.

    Attributes
    ----------
    conditions
        One row each: `condition`, `perturbation`, `group`, `dose`, `n_parts`, `n_seen`, `trained`.
    genes
        Their names.
    mean, control
        Float `(n_genes, n_conditions)`: predicted mean, and that of the control cells.
    sd
        Standard deviation of the predicted mean; None where there is none.
    baselines
        The means that simple baselines predict, by name; NaN where one is not defined. Of a fine-tuned model the
        expected response, too.
    notes
        What was asked for, and what was found in fitting.
    var
        What is known of the genes, in their order.
    cells
        The predicted cells, of these genes; None where the means are all that there is.
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
    """Read a prediction.

    Parameters
    ----------
    predicted
        What `tl.predict_perturbation` returned, or some of its cells or genes; or the adata that was given to it.
    key
        Of the latter, the entry of `uns`.

    Raises
    ------
    TypeError
        If it is no AnnData object.
    KeyError
        If it holds no prediction.
    ValueError
        If conditions and means do not belong together.
    """
    check_anndata(predicted)
    notes: Any = our_uns(predicted).get(PERTURBATION)
    kept = predicted.uns.get(key)
    cells = predicted if notes is not None and VARM_MEAN in predicted.varm else None
    if cells is not None:
        keys = _VARM | {name: VARM_BASELINE + name for name in _BASELINES}
        parts = {name: np.asarray(predicted.varm[of]) for name, of in keys.items() if of in predicted.varm}
        genes, var, where = predicted.var_names, predicted.var, f"varm[{VARM_MEAN!r}]"
    elif is_prediction(kept):
        notes, where, entries = kept, f"uns[{key!r}]", {**kept, **kept.get("baselines", {})}
        genes = pd.Index(_text(kept["genes"]))
        parts = {name: np.asarray(entries[name]).T for name in (*_VARM, *_BASELINES) if name in entries}
        var = predicted.var if genes.isin(predicted.var_names).all() or predicted.raw is None else predicted.raw.var
        var = var[~var.index.duplicated()].reindex(genes)
    else:
        if is_prediction(predicted.uns.get(PREDICTED)):
            raise KeyError(f"adata.uns[{key!r}] is no prediction: pass key={PREDICTED!r}.")
        where = f"uns[{UNS!r}] has no {PERTURBATION!r}" if notes is None else f"varm has no {VARM_MEAN!r}"
        raise KeyError(
            f"this is no prediction, it has no uns[{key!r}], and its {where}: pass what "
            "scdiva.tl.predict_perturbation returned, or the adata it was given."
        )
    columns = {name: _text(notes[name]) if name in _TEXT else np.asarray(notes[name]) for name in _OF_CONDITIONS}
    conditions = pd.DataFrame(columns)
    for name, part in parts.items():
        if part.shape != (len(genes), len(conditions)):
            raise ValueError(
                f"the prediction names {len(conditions)} conditions of {len(genes)} genes, but {where} has "
                f"{part.shape[-1]} of {len(part)} ({name}): the two are of different predictions. Predict anew."
            )
    baselines = {name: parts[name] for name in _BASELINES if name in parts}
    return Prediction(
        conditions, genes, parts["mean"], parts["control_mean"], parts.get("sd"), baselines, notes, var, cells
    )


def stored_prediction(predicted: AnnData) -> dict[str, Any]:
    """Give what is kept in `uns` of a prediction, as h5ad and zarr can hold it.

    Parameters
    ----------
    predicted
        The predicted cells, with means in `varm`.
    """
    found = read_prediction(predicted)
    parts = {"mean": found.mean, "change": found.mean - found.control, "control_mean": found.control}
    if found.sd is not None:
        parts["sd"] = found.sd
    return {
        **found.notes,
        "genes": _text(found.genes),
        **{name: _rows(part) for name, part in parts.items()},
        # one that is defined for no condition is left out, as readers leave it out
        "baselines": {name: _rows(part) for name, part in found.baselines.items() if np.isfinite(part).any()},
    }


def is_prediction(stored: object) -> bool:
    """Whether an entry of `uns` is a prediction."""
    return isinstance(stored, Mapping) and {*_OF_CONDITIONS, "genes", "mean", "control_mean"} <= stored.keys()


def _rows(part: NDArray[np.floating]) -> NDArray[np.float32]:
    return np.ascontiguousarray(part.T, dtype=np.float32)


def _text(values: Any) -> NDArray[np.object_]:
    """Give names as text, whatever a file brought them back as: zarr brings numpy's own strings."""
    return np.array([str(value) for value in np.asarray(values)], dtype=object)


class Cells(NamedTuple):
    """Mean and variance (with n - 1) of some cells, per gene; a single cell has variance 0."""

    n: int
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]


class Responses(NamedTuple):
    """Observed cells of predicted conditions; conditions are named by their number."""

    conditions: pd.DataFrame
    """As the prediction lists them; of these, some may not have been observed."""
    genes: NDArray[np.intp]
    """Which genes of the prediction were observed too; all else here is of these."""
    expression: sp.csr_matrix
    """log1p of counts per ten thousand of the observed cells, `(n_obs, n_genes)`."""
    rows: dict[int, NDArray[np.intp]]
    control_rows: dict[str, NDArray[np.intp]]
    """Which observed cells are of each condition, and which are the control cells of each group."""
    perturbed: dict[int, Cells]
    control: dict[str, Cells]
    means: dict[str, NDArray[np.float64]]
    """Predicted mean by method, genes × all conditions; ours first. NaN where a method predicts nothing."""

    def control_of(self, at: int) -> Cells:
        """Give the control cells of the group of a condition."""
        return self.control[self.conditions.loc[at, "group"]]

    def reference(self, at: int, kind: Reference) -> NDArray[np.float64] | None:
        """Give the mean from which changes of a condition are measured.

        That is the mean of its group's control cells, or that over the perturbations of training, if there is one.
        """
        if kind == "control":
            return self.control_of(at).mean
        return self.means["train_mean"][:, at] if "train_mean" in self.methods(at) else None

    def methods(self, at: int) -> list[str]:
        """Name the methods that predict a condition."""
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

    Conditions are matched by perturbation, in any order of its parts, and by group and dose where the prediction has
    them; genes by name.

    Parameters
    ----------
    prediction
        What :func:`read_prediction` read.
    observed
        Perturbed cells and, of each group, control cells.
    layer, use_raw, input
        What to read of `observed`, as for :func:`scdiva.tl.embed`.
    only
        Numbers of the conditions wanted; None takes all.

    Returns
    -------
    The responses of all conditions that were observed.

    Raises
    ------
    KeyError
        If `observed` lacks a column or layer.
    ValueError
        If they have no condition or fewer than two genes in common, genes bear one name, a label is missing, or a group
        observed has no control cells; if the control cells of the two are on different scales; or if the matrix is
        refused as by :func:`scdiva.tl.embed`.

    Warns
    -----
    UserWarning
        If only some genes of the prediction were observed.
    """
    check_anndata(observed)
    conditions = prediction.conditions
    wanted = conditions if only is None else conditions.loc[list(only)]
    rows, control_rows = _observed_rows(wanted, prediction.notes, observed)
    values, genes = _shared_genes(prediction, observed, layer=layer, use_raw=use_raw, input=input)
    control = {group: _summary(values[cells]) for group, cells in control_rows.items()}
    perturbed = {at: _summary(values[cells]) for at, cells in rows.items()}
    _check_scale(prediction, genes, control, list(rows))
    by_method = {OURS: prediction.mean, **prediction.baselines}
    means = {name: mean[genes].astype(np.float64) for name, mean in by_method.items()}
    means = {name: mean for name, mean in means.items() if name == OURS or np.isfinite(mean).all(axis=0).any()}
    return Responses(conditions, genes, values, rows, control_rows, perturbed, control, means)


def response_score(responses: Responses, at: int, reference: Reference = "control") -> NDArray[np.float64] | None:
    """Score the differential expression of a condition by Welch's t, against control cells or the mean perturbation.

    Parameters
    ----------
    responses
        What :func:`observed_responses` returned.
    at
        Number of a condition that was observed.
    reference
        Against what; the mean of perturbations is taken to have the spread of the control cells.

    Returns
    -------
    float64 `(n_genes,)`; None where there is no such reference, or a single cell on either side.
    """
    start, cells, control = responses.reference(at, reference), responses.perturbed[at], responses.control_of(at)
    if start is None or min(cells.n, control.n) < 2:
        return None
    return de_scores(cells.mean, cells.variance, cells.n, start, control.variance, control.n)


def _observed_rows(
    conditions: pd.DataFrame, ours: Mapping[str, Any], observed: AnnData
) -> tuple[dict[int, NDArray[np.intp]], dict[str, NDArray[np.intp]]]:
    """Find the cells of each condition, leaving out those that were not observed, and the control cells by group."""
    key, naming = str(ours["perturbation_key"]), naming_as_noted(ours)
    groupby, dose_key = str(ours["groupby"]), str(ours["dose_key"])
    predicted = {part for label in conditions["perturbation"] for part in naming.parts(label)}
    known = perturbations(observed, key, naming, guides_as_noted(ours), where="observed")
    called = _as_observed(predicted, {part for parts in known.parts for part in parts}, list(observed.var_names))
    group = read_labels(observed, groupby, where="observed") if groupby else np.full(observed.n_obs, "")
    dose = doses(observed, dose_key, where="observed") if dose_key else None
    codes = {parts: code for code, parts in enumerate(known.parts)}
    perturbed: dict[int, NDArray[np.intp]] = {}
    for at, condition in conditions.iterrows():
        named = naming.parts(str(condition["perturbation"]))
        code = codes.get(tuple(sorted({called.get(part, part) for part in named})))
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
            f"none of {len(conditions)} predicted conditions (first: {conditions['condition'].iloc[0]!r}) was "
            f"observed: observed.obs[{key!r}] names {len(known.parts) - 1} perturbations"
            f"{f' (first: {shown[0]!r})' if shown else ''}"
            f"{f', in groups such as {str(group[0])!r}' if groupby else ''}."
        )
    groups = list(dict.fromkeys(conditions.loc[list(perturbed), "group"]))
    control = {one: np.flatnonzero(known.is_control & (group == one)) for one in groups}
    names = " or ".join(map(repr, naming.control))
    without = [one for one, cells in control.items() if not len(cells)]
    if without:
        raise ValueError(
            f"{len(without)} of {len(groups)} groups have no control cells in observed (first: {without[0]!r}): pass "
            f"them along with the perturbed ones, those whose observed.obs[{key!r}] is {names}."
        )
    return perturbed, control


def _as_observed(predicted: set[str], observed: set[str], columns: list[str]) -> dict[str, str]:
    """Say of predicted genes that are observed by another name, an Ensembl id or an alias, by which."""
    if predicted == observed:
        return {}
    vocabulary = load_vocabulary()
    species = species_of(columns, vocabulary, None)
    other = same_genes(observed, predicted, vocabulary, species, "observed") if predicted & observed else {}
    if both := sorted(name for name, of in other.items() if of in predicted & observed):
        warn(
            f"observed names {len(both)} genes of the prediction in two ways, the first is both {both[0]!r} and "
            f"{other[both[0]]!r}: cells of {both[0]!r} are left out."
        )
    return {
        name: of
        for name, of in same_genes(predicted, observed, vocabulary, species, "the prediction").items()
        if of in observed
    }


def _shared_genes(prediction: Prediction, observed: AnnData, **reading: Any) -> tuple[sp.csr_matrix, NDArray[np.intp]]:
    """Read the observed expression of the genes of both; return it and which genes of the prediction they are."""
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
            f"{len(var)} genes of observed: pass it with all genes, unless those that are missing hold few counts."
        )
    return sp.csr_matrix(values[:, at[shared]]), shared


def _summary(cells: sp.csr_matrix) -> Cells:
    """Mean and variance of each gene; NaN variances of a single cell are never read."""
    n = cells.shape[0]
    mean = np.asarray(cells.mean(axis=0)).ravel()
    square = np.asarray(cells.multiply(cells).mean(axis=0)).ravel()
    variance = (square - mean**2) * (n / max(n - 1, 1))
    return Cells(n, mean, np.where(variance > 1e-12 * square, variance, 0.0))  # the rest is rounding


def _check_scale(prediction: Prediction, genes: NDArray[np.intp], control: dict[str, Cells], scored: list[int]) -> None:
    """Refuse control cells whose counts in the shared genes are far from those that the prediction was made from."""
    conditions = prediction.conditions
    for at in scored:
        here = float(np.expm1(control[conditions.loc[at, "group"]].mean).sum())
        there = float(np.expm1(prediction.control[genes, at].astype(np.float64)).sum())
        if not max(here, there) <= 2 * min(here, there):
            name = conditions.loc[at, "condition"]
            raise ValueError(
                f"the {len(genes)} shared genes hold {here:,.0f} counts of a control cell in observed, but "
                f"{there:,.0f} in the prediction (condition {name!r}): the two are on different scales. Cells are "
                "normalised to ten thousand counts over the genes that there are: pass observed with all genes of the "
                "prediction, and the same layer= and use_raw=; or predict from the genes of observed, "
                "adata[:, observed.var_names.intersection(adata.var_names)].copy()."
            )
