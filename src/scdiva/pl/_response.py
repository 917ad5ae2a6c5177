"""Which predicted condition is drawn, by which methods, in which colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from scdiva._checks import nearest
from scdiva._constants import OBS_CONDITION
from scdiva.data.conditions import perturbation_parts
from scdiva.data.predictions import OURS, REFERENCES, Prediction, Responses

if TYPE_CHECKING:
    from anndata import AnnData

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


def find_condition(predicted: Prediction, name: str) -> int:
    """Give the number of a condition, by its name, or by its perturbation where that is predicted once."""
    conditions = predicted.conditions
    found = conditions.index[conditions["condition"] == name]
    if not len(found):
        parts = parts_of(predicted, name)
        found = conditions.index[[parts_of(predicted, label) == parts for label in conditions["perturbation"]]]
    if len(found) == 1:
        return int(found[0])
    names = conditions["condition"].tolist()
    if len(found):
        raise KeyError(f"{name!r} is predicted {len(found)} times: name one, {', '.join(names[i] for i in found)}.")
    near = nearest(name, names, 5, 0.3) or names[:5]
    raise KeyError(f"{name!r} is none of the {len(names)} predicted conditions; among them are {', '.join(near)}.")


def parts_of(predicted: Prediction, label: str) -> tuple[str, ...]:
    """Split the label of a perturbation as the prediction did."""
    return perturbation_parts(label, str(predicted.notes["control"]), str(predicted.notes["separator"]))


def predicted_cells(predicted: Prediction, condition: str) -> AnnData | None:
    """Give the predicted cells of a condition; None where there are none of any, but their means alone."""
    if predicted.cells is None:
        return None
    if OBS_CONDITION not in predicted.cells.obs:
        raise KeyError(f"predicted.obs has no {OBS_CONDITION!r}: give what scdiva.tl.predict_perturbation returned.")
    chosen = np.flatnonzero(predicted.cells.obs[OBS_CONDITION].astype(str) == condition)
    if not len(chosen):
        raise ValueError(f"these cells are a part of a prediction, with none of {condition!r}: give the whole of it.")
    return predicted.cells[chosen]


def reference_mean(responses: Responses, at: int, reference: Literal["control", "mean"]) -> NDArray[np.float64]:
    """Give the mean expression from which changes of a condition are counted, (n_genes,)."""
    if reference not in REFERENCES:
        raise ValueError(f"reference must be 'control' or 'mean', got {reference!r}.")
    mean = responses.reference(at, reference)
    if mean is None:
        raise ValueError(
            "reference='mean' counts changes from the mean over the perturbations of training, and this prediction has "
            "none: take reference='control'."
        )
    return mean


def strongest_first(change: NDArray[np.float64], score: NDArray[np.float64] | None) -> NDArray[np.intp]:
    """Order genes by the size of their score; by that of their change where there is none."""
    return np.argsort(-np.abs(change if score is None else score), kind="stable")


def methods_of(responses: Responses, conditions: Sequence[int], methods: Sequence[str] | None) -> list[str]:
    """Choose the methods drawn, ours first; refuse those that do not predict every condition."""
    everywhere = [name for name in responses.means if all(name in responses.methods(at) for at in conditions)]
    if methods is None:
        return [name for name in everywhere if name != "no_change"]
    if isinstance(methods, str) or not len(methods) or set(methods) - set(everywhere):
        raise KeyError(
            f"methods={methods!r} must be a list of some of {', '.join(everywhere)}: these predict all of "
            f"{len(conditions)} observed conditions."
        )
    return [name for name in everywhere if name in methods]


def written_name(method: str) -> str:
    """Give the name of a method as it is written in pictures."""
    return method.replace("_", " ")
