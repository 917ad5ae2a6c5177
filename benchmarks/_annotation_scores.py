"""How well types are named, how far to trust it, and whether a type that the reference lacks is noticed."""

from __future__ import annotations

import anndata as ad
import numpy as np
from _annotation_arms import Said, Task
from _judge import over_seeds as spread
from _prepared import LABELS
from sklearn.metrics import roc_auc_score

from scdiva.metrics.annotation import calibration, classification, labelled

N_BINS = 15


def ece(confidence: np.ndarray, correct: np.ndarray) -> float:
    """Expected calibration error of 15 bins."""
    return calibration(confidence, correct, n_bins=N_BINS)["ece"]


def scored(adata: ad.AnnData, part: str, todo: list[Task], found: list[Said]) -> dict:
    """The scores of a job: the mean over its queries, and beside them those of each query.

    Without a type taken out: `accuracy`, `macro_f1`, `f1` of each type (over the query's cells of types that the whole
    reference has: others nobody could name) and, where there are confidences, `ece`, and `ece_pooled`, that of all
    queries' cells together. With: `rejection`, for each type the AUROC of the novelty of its cells against the query's
    other cells of the reference's types, mean over the queries; `rejection_auroc`, mean over the types.
    """
    return _rejection(adata, todo, found) if part == "unknown" else _naming(adata, todo, found)


def _labels(adata: ad.AnnData) -> np.ndarray:
    labels = adata.obs[LABELS].astype(str).to_numpy().astype(object)
    labels[~labelled(labels)] = None
    return labels


def _shared(labels: np.ndarray, task: Task) -> np.ndarray:
    """Mark the query's cells of types that the reference has, labelled or not."""
    return np.array([name is not None and name in set(labels[task.reference]) for name in labels[task.asked]])


def _naming(adata: ad.AnnData, todo: list[Task], found: list[Said]) -> dict:
    labels = _labels(adata)
    by_query: dict[str, dict] = {}
    pooled: list[tuple[np.ndarray, np.ndarray]] = []
    for task, said in zip(todo, found, strict=True):
        keep = _shared(labels, task)
        truth, predicted = labels[task.asked][keep].astype(str), said["predicted"][keep].astype(str)
        scores = classification(truth, predicted)
        if "confidence" in said:
            pooled.append((said["confidence"][keep], predicted == truth))
            scores["ece"] = ece(*pooled[-1])
        by_query[task.query] = scores
    means = {
        key: float(np.mean([scores[key] for scores in by_query.values()]))
        for key in ("accuracy", "macro_f1", "ece")
        if all(key in scores for scores in by_query.values())
    }
    if pooled:
        means["ece_pooled"] = ece(*(np.concatenate(some) for some in zip(*pooled, strict=True)))
    f1 = _mean_of([scores.pop("f1") for scores in by_query.values()])
    n_cells = sum(scores["n_cells"] for scores in by_query.values())
    return {"n_cells": n_cells, **means, "f1": f1, "by_query": by_query}


def _rejection(adata: ad.AnnData, todo: list[Task], found: list[Said]) -> dict:
    labels = _labels(adata)
    each: list[dict] = []
    for task, said in zip(todo, found, strict=True):
        truth = labels[task.asked]
        unknown = truth == task.taken_out
        keep = unknown | _shared(labels, task)
        each.append({task.taken_out: float(roc_auc_score(unknown[keep], said["novelty"][keep]))})
    by_query = {
        query: {"rejection": _mean_of([some for task, some in zip(todo, each, strict=True) if task.query == query])}
        for query in dict.fromkeys(task.query for task in todo)
    }
    of_types = _mean_of(each)
    n_cells = sum(len(task.asked) for task in {task.query: task for task in todo}.values())
    scores = {"n_cells": n_cells, "rejection_auroc": float(np.mean(list(of_types.values()))), "rejection": of_types}
    return {**scores, "by_query": by_query}


def _mean_of(some: list[dict]) -> dict:
    """Mean of each key over the dicts that have it."""
    keys = sorted({key for entry in some for key in entry})
    return {key: float(np.mean([entry[key] for entry in some if key in entry])) for key in keys}


def over_seeds(runs: list[dict]) -> dict:
    """Mean and standard deviation of the scores, means alone of those of each type and each query."""
    row: dict = {"n_cells": runs[0]["n_cells"]}
    for key, first in runs[0].items():
        values = [run[key] for run in runs]
        if isinstance(first, float):
            row |= spread(key, values)
        elif isinstance(first, dict):
            row[key] = _mean_tree(values)
    return row


def _mean_tree(some: list) -> dict | float | int:
    if isinstance(some[0], dict):
        return {key: _mean_tree([entry[key] for entry in some]) for key in some[0]}
    return some[0] if isinstance(some[0], int) else round(float(np.mean(some)), 4)
