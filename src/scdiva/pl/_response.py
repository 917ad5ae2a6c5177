"""Which predicted condition is drawn, by which methods, in which colours."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from scdiva._constants import OBS_CONDITION, PERTURBATION, UNS
from scdiva.data.conditions import perturbation_parts, predicted_conditions
from scdiva.data.observed import OURS, Responses

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


def find_condition(predicted: AnnData, name: str) -> int:
    """Give the column of a condition in `varm`, by its name, or by its perturbation where that is predicted once."""
    conditions = predicted_conditions(predicted)
    found = conditions.index[conditions["condition"] == name]
    if not len(found):
        parts = parts_of(predicted, name)
        found = conditions.index[[parts_of(predicted, label) == parts for label in conditions["perturbation"]]]
    if len(found) == 1:
        return int(found[0])
    names = conditions["condition"].tolist()
    if len(found):
        raise KeyError(f"{name!r} is predicted {len(found)} times: name one, {', '.join(names[i] for i in found)}.")
    near = difflib.get_close_matches(name, names, 5, 0.3) or names[:5]
    raise KeyError(f"{name!r} is none of the {len(names)} predicted conditions; among them are {', '.join(near)}.")


def parts_of(predicted: AnnData, label: str) -> tuple[str, ...]:
    """Split the label of a perturbation as the prediction did."""
    ours = predicted.uns[UNS][PERTURBATION]
    return perturbation_parts(label, str(ours["control"]), str(ours["separator"]))


def predicted_cells(predicted: AnnData, condition: str) -> NDArray[np.intp]:
    """Give the numbers of the predicted cells of a condition."""
    if OBS_CONDITION not in predicted.obs:
        raise KeyError(f"predicted.obs has no {OBS_CONDITION!r}: give what scdiva.tl.predict_perturbation returned.")
    chosen = np.flatnonzero(predicted.obs[OBS_CONDITION].astype(str) == condition)
    if not len(chosen):
        raise ValueError(f"these cells are a part of a prediction, with none of {condition!r}: give the whole of it.")
    return chosen


def reference_mean(responses: Responses, at: int, reference: Literal["control", "mean"]) -> NDArray[np.float64]:
    """Give the mean expression from which changes of a condition are counted, (n_genes,)."""
    if reference not in responses.references:
        raise ValueError(f"reference must be 'control' or 'mean', got {reference!r}.")
    mean = responses.references[reference][at]
    if mean is None:
        raise ValueError(
            "reference='mean' counts changes from the mean over the perturbations of training, and this prediction has "
            "none: take reference='control'."
        )
    return mean


def strongest_first(change: NDArray[np.float64], score: NDArray[np.float64] | None) -> NDArray[np.intp]:
    """Order genes by the size of their score; by that of their change where there is none."""
    return np.argsort(-np.abs(change if score is None else score), kind="stable")


def gene_names(adata: AnnData, gene_symbols: str | None, *, called: str = "predicted") -> NDArray[Any]:
    """Give the names of genes as they are written; `called` is what the user calls these data."""
    if gene_symbols is None:
        return np.asarray(adata.var_names)
    if gene_symbols not in adata.var:
        columns = ", ".join(map(str, adata.var.columns)) or "none"
        raise KeyError(f"gene_symbols={gene_symbols!r} is no column of {called}.var, which has {columns}")
    return np.array([*map(str, adata.var[gene_symbols])], dtype=object)


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
