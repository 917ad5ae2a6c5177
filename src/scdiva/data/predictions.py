"""Predicted responses to perturbations, in the adata that was given or in that of the predicted cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scdiva._constants import (
    BASELINES,
    IN_SILICO,
    PERTURBATION,
    PREDICTED,
    UNS,
    VARM_BASELINE,
    VARM_CONTROL,
    VARM_MEAN,
    VARM_SD,
)
from scdiva.data.writing import check_anndata, our_uns

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

_OF_CONDITIONS = ("condition", "perturbation", "group", "dose", "n_parts", "n_seen", "trained")
_TEXT = ("condition", "perturbation", "group")
_GENES, _BASELINES = "genes", "baselines"
_MEAN, _CHANGE, _SD, _CONTROL = "mean", "change", "sd", "control_mean"
_WHAT = "what scdiva.tl.predict_perturbation or scdiva.tl.in_silico_perturbation returned, or the adata they were given"


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
        The means that simple baselines predict, by name; NaN where one is not defined.
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
        What `tl.predict_perturbation` or `tl.in_silico_perturbation` returned, or some of its cells or genes; or the
        adata that was given to them.
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
    notes = our_uns(predicted).get(PERTURBATION)
    if notes is not None and VARM_MEAN in predicted.varm:
        return _of_cells(predicted, notes)
    stored = predicted.uns.get(key)
    if not is_prediction(stored):
        others = [name for name in (PREDICTED, IN_SILICO) if is_prediction(predicted.uns.get(name))]
        if others:
            raise KeyError(f"adata.uns[{key!r}] is no prediction: pass key={others[0]!r}.")
        where = f"uns[{UNS!r}] has no {PERTURBATION!r}" if notes is None else f"varm has no {VARM_MEAN!r}"
        raise KeyError(f"this is no prediction, it has no uns[{key!r}], and its {where}: pass {_WHAT}.")
    return _of_uns(predicted, stored, key)


def stored_prediction(predicted: AnnData) -> dict[str, Any]:
    """Give what is kept in `uns` of a prediction, as h5ad and zarr can hold it.

    Parameters
    ----------
    predicted
        The predicted cells, with means in `varm`.
    """
    found = read_prediction(predicted)
    parts = {_MEAN: found.mean, _CHANGE: found.mean - found.control, _CONTROL: found.control}
    if found.sd is not None:
        parts[_SD] = found.sd
    return {
        **found.notes,
        _GENES: _text(found.genes),
        **{name: _rows(part) for name, part in parts.items()},
        # one that is defined for no condition is left out, as readers leave it out
        _BASELINES: {name: _rows(part) for name, part in found.baselines.items() if np.isfinite(part).any()},
    }


def is_prediction(stored: object) -> bool:
    """Whether an entry of `uns` is a prediction."""
    needed = {*_OF_CONDITIONS, _GENES, _MEAN, _CONTROL}
    return isinstance(stored, Mapping) and needed <= stored.keys()


def _rows(part: NDArray[np.floating]) -> NDArray[np.float32]:
    return np.ascontiguousarray(part.T, dtype=np.float32)


def _of_cells(predicted: AnnData, notes: Mapping[str, Any]) -> Prediction:
    varm = predicted.varm
    mean = np.asarray(varm[VARM_MEAN])
    baselines = {name: np.asarray(varm[VARM_BASELINE + name]) for name in BASELINES if VARM_BASELINE + name in varm}
    sd = np.asarray(varm[VARM_SD]) if VARM_SD in varm else None
    return Prediction(
        _conditions(notes, mean, f"varm[{VARM_MEAN!r}]"), predicted.var_names, mean, np.asarray(varm[VARM_CONTROL]),
        sd, baselines, notes, predicted.var, predicted,
    )  # fmt: skip


def _of_uns(adata: AnnData, stored: Mapping[str, Any], key: str) -> Prediction:
    genes = pd.Index(_text(stored[_GENES]))
    parts = {name: np.asarray(stored[name]).T for name in (_MEAN, _CONTROL, _SD) if name in stored}
    parts |= {f"{_BASELINES}: {name}": np.asarray(part).T for name, part in stored.get(_BASELINES, {}).items()}
    conditions = _conditions(stored, parts[_MEAN], f"uns[{key!r}]['{_MEAN}']")
    wrong = [name for name, part in parts.items() if part.shape != (len(genes), len(conditions))]
    if wrong:
        raise ValueError(
            f"adata.uns[{key!r}] has {len(conditions)} conditions and {len(genes)} genes, but its {wrong[0]!r} has the "
            f"shape {parts[wrong[0]].shape[::-1]}. Predict anew."
        )
    var = adata.var if genes.isin(adata.var_names).all() or adata.raw is None else adata.raw.var
    baselines = {name: parts[f"{_BASELINES}: {name}"] for name in BASELINES if f"{_BASELINES}: {name}" in parts}
    return Prediction(
        conditions, genes, parts[_MEAN], parts[_CONTROL], parts.get(_SD), baselines, stored,
        var[~var.index.duplicated()].reindex(genes), None,
    )  # fmt: skip


def _conditions(notes: Mapping[str, Any], mean: NDArray[np.floating], where: str) -> pd.DataFrame:
    frame = pd.DataFrame(
        {name: _text(notes[name]) if name in _TEXT else np.asarray(notes[name]) for name in _OF_CONDITIONS}
    )
    n = np.shape(mean)[1]
    if len(frame) != n:
        raise ValueError(
            f"the prediction names {len(frame)} conditions, but {where} has {n} "
            f"{'columns' if where.startswith('varm') else 'rows'}: the two are of different predictions. Predict anew."
        )
    return frame


def _text(values: Any) -> NDArray[np.object_]:
    """Give names as text, whatever a file brought them back as: zarr brings numpy's own strings."""
    return np.array([str(value) for value in np.asarray(values)], dtype=object)
