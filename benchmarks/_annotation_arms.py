"""The arms of annotation.py. A job runs in a process of its own, which this file is when it is called:

    python benchmarks/_annotation_arms.py job.json

A job names the prepared cells (counts; `BATCH`, `LABELS` and `SPLIT` in obs), the part, the arm, the seeds and the
queries. The process writes what the arm says of each task's query (npz: `<seed>.<task>.predicted` and so on) and
prints, as JSON, the mean seconds of a fit, its peak resident memory and the arm's notes. Importing libraries and
reading the file are not in the seconds; they are in the memory.
"""

from __future__ import annotations

from typing import NamedTuple

import anndata as ad
import numpy as np
from _prepared import BATCH, KNOWN, LABELS, UNLABELLED
from _process import Watch, do
from _rivals import CLIP, fit_pca, log_normalised, variable_genes
from _scvi import fitted_scvi, semi_supervised
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import LinearSVC

import scdiva as sd
from scdiva.metrics.annotation import labelled

SPLIT = "split"
"""Column of obs that parts query and reference."""
NEIGHBORS = 15
Said = dict[str, np.ndarray]
"""Of each cell of the query: `predicted`, the type; `confidence`, where the arm has a probability that this is right;
`novelty`, higher where the cell is less like any type of the reference."""
Made = tuple[Said, dict]
"""With what the arm has to say of the fit; `kept` is the cost of a fit that was read, not made."""


class Task(NamedTuple):
    """A query, the rows of its reference, those of them whose type is given, and the type taken out, if any."""

    query: str
    asked: np.ndarray
    reference: np.ndarray
    known: np.ndarray
    taken_out: str | None = None


def given_labels(labels: np.ndarray, rows: np.ndarray, share: float, seed: int) -> np.ndarray:
    """A random share of the rows, at least two types among them; the same for every arm.

    Where the share holds one type alone, the next row of another type is added.
    """
    drawn = np.random.default_rng(seed).permutation(rows)
    n_told = max(round(share * len(rows)), 2)
    chosen, rest = drawn[:n_told], drawn[n_told:]
    if len(np.unique(labels[chosen])) < 2:
        other = rest[labels[rest] != labels[chosen[0]]][:1]
        chosen = np.concatenate([chosen, other])
    return np.sort(chosen)


def tasks(adata: ad.AnnData, job: dict) -> list[Task]:
    """The tasks of a job: one for each query, in the part "unknown" one for each type that is taken out.

    In that part every type that both the reference and the query have is taken out in turn: the reference loses its
    cells.

    Raises
    ------
    ValueError
        If a query holds no cell or all, or its reference has fewer than two types.
    """
    labels = adata.obs[LABELS].astype(str).to_numpy()
    typed = labelled(labels)
    found = []
    for query, values in job["queries"].items():
        asked = adata.obs[SPLIT].astype(str).isin(values).to_numpy()
        if not asked.any() or asked.all():
            raise ValueError(f"{asked.sum()} of {len(asked)} cells are of the query {query!r}.")
        rows, reference = np.flatnonzero(asked), np.flatnonzero(~asked)
        known = np.flatnonzero(~asked & typed)
        types = np.unique(labels[known])
        if len(types) < 2:
            raise ValueError(f"the reference of {query!r} has {len(types)} types: two are needed.")
        if job["part"] == "few":
            known = given_labels(labels, known, job["share"], job["seed"])
        if job["part"] != "unknown":
            found.append(Task(query, rows, reference, known))
            continue
        for name in types[np.isin(types, labels[rows])]:
            kept = labels != name
            found.append(Task(query, rows, reference[kept[reference]], known[kept[known]], str(name)))
    return found


def parts_of(adata: ad.AnnData, task: Task) -> tuple[ad.AnnData, ad.AnnData]:
    """Reference, with the given types in `KNOWN`, and query, without any types."""
    known = np.full(adata.n_obs, UNLABELLED, dtype=object)
    known[task.known] = adata.obs[LABELS].astype(str).to_numpy()[task.known]
    reference, query = adata[task.reference].copy(), adata[task.asked].copy()
    for cells in (reference, query):
        cells.obs = cells.obs[[BATCH]].copy()
    reference.obs[KNOWN] = known[task.reference].astype(str)
    return reference, query


def dense(adata: ad.AnnData, genes: list[str]) -> np.ndarray:
    """Log-normalised values of these genes; a cell's total is that of all genes."""
    return log_normalised(adata)[:, genes].X.toarray()


def scaled(reference: ad.AnnData, query: ad.AnnData) -> tuple[np.ndarray, np.ndarray]:
    """Both on the reference's variable genes, its mean and standard deviation, clipped at ten."""
    genes = variable_genes(reference)
    values = [dense(cells, genes) for cells in (reference, query)]
    mean, std = values[0].mean(axis=0), values[0].std(axis=0, ddof=1)
    std[std == 0] = 1.0
    first, second = (np.clip((some - mean) / std, -CLIP, CLIP) for some in values)
    return first, second


def types_of(reference: ad.AnnData) -> tuple[np.ndarray, np.ndarray]:
    """Mark the cells of the reference whose type is given; and those types."""
    types = reference.obs[KNOWN].to_numpy().astype(str)
    known = types != UNLABELLED
    return known, types[known]


def by_probability(probability: np.ndarray, names: np.ndarray) -> Said:
    """The likeliest type; its probability as confidence, and 1 - that as novelty."""
    confidence = probability.max(axis=1)
    return {"predicted": names[probability.argmax(axis=1)], "confidence": confidence, "novelty": 1 - confidence}


def logistic(adata: ad.AnnData, task: Task, job: dict, class_weight: str | None = None) -> Made:
    """Multinomial logistic regression, sklearn's defaults, on the scaled variable genes."""
    reference, query = parts_of(adata, task)
    known, types = types_of(reference)
    first, second = scaled(reference, query)
    fitted = LogisticRegression(max_iter=1000, class_weight=class_weight).fit(first[known], types)
    return by_probability(fitted.predict_proba(second), fitted.classes_), {}


def logistic_balanced(adata: ad.AnnData, task: Task, job: dict) -> Made:
    """The same with classes weighted alike."""
    return logistic(adata, task, job, "balanced")


def svm(adata: ad.AnnData, task: Task, job: dict) -> Made:
    """Linear SVM, one type against the others; the less the best type's margin is above the next one's, the newer."""
    reference, query = parts_of(adata, task)
    known, types = types_of(reference)
    first, second = scaled(reference, query)
    # the dual always: the primal, which sklearn takes where there are more cells than genes, takes minutes
    fitted = LinearSVC(dual=True, random_state=0).fit(first[known], types)
    margin = fitted.decision_function(second)
    if margin.ndim == 1:
        margin = np.stack([-margin, margin], axis=1)
    first_two = np.sort(margin, axis=1)[:, -2:]
    return {"predicted": fitted.classes_[margin.argmax(axis=1)], "novelty": first_two[:, 0] - first_two[:, 1]}, {}


def centroid(adata: ad.AnnData, task: Task, job: dict) -> Made:
    """The type whose mean over the variable genes, log-normalised, the cell correlates with most (scmap's idea)."""
    reference, query = parts_of(adata, task)
    known, types = types_of(reference)
    genes = variable_genes(reference)
    first, second = dense(reference, genes)[known], dense(query, genes)
    names = np.unique(types)
    means = np.stack([first[types == name].mean(axis=0) for name in names])
    correlation = standardised(second) @ standardised(means).T / len(genes)
    return {"predicted": names[correlation.argmax(axis=1)], "novelty": 1 - correlation.max(axis=1)}, {}


def standardised(values: np.ndarray) -> np.ndarray:
    """Rows with mean 0 and standard deviation 1; a row of equal values becomes zeros."""
    centred = values - values.mean(axis=1, keepdims=True)
    std = centred.std(axis=1, keepdims=True)
    return centred / np.where(std == 0, 1.0, std)


def knn(adata: ad.AnnData, task: Task, job: dict) -> Made:
    """The 15 nearest labelled cells on the reference's PCA; votes are confidence, their mean distance novelty."""
    reference, query = parts_of(adata, task)
    known, types = types_of(reference)
    project = fit_pca(reference)
    first, second = project(reference)[known], project(query)
    fitted = KNeighborsClassifier(min(NEIGHBORS, len(types))).fit(first, types)
    said = by_probability(fitted.predict_proba(second), fitted.classes_)
    return {**said, "novelty": fitted.kneighbors(second)[0].mean(axis=1)}, {}


def scanvi(adata: ad.AnnData, task: Task, job: dict) -> Made:
    """scANVI, given batches and the reference's types, by its own classifier; reference and query are fitted.

    From an scVI of the first seed on the reference's variable genes, both with their defaults, scVI with early
    stopping.
    """
    reference, _ = parts_of(adata, task)
    cells = adata.copy()
    known = np.full(adata.n_obs, UNLABELLED, dtype=object)
    known[task.reference] = reference.obs[KNOWN]
    cells.obs[KNOWN] = known.astype(str)
    network, notes = fitted_scvi(cells, job, job["base_seed"], variable_genes(reference))
    fitted = semi_supervised(network, cells, job)
    probability = fitted.predict(soft=True).iloc[task.asked]
    said = by_probability(probability.to_numpy(), probability.columns.to_numpy().astype(str))
    return said, notes


def ours(adata: ad.AnnData, task: Task, job: dict) -> Made:
    """`tl.annotate` by the method that the arm's name says, otherwise its defaults."""
    reference, query = parts_of(adata, task)
    method = job["arm"].removeprefix("ours").removeprefix("_") or "linear"
    hidden = UNLABELLED if (reference.obs[KNOWN] == UNLABELLED).any() else None
    how = {"finetune": True} if method == "finetune" else {"method": method}
    sd.tl.annotate(
        query, KNOWN, reference, model=job["model"], batch_key=BATCH, unlabeled_category=hidden, rng=job["seed"], **how
    )
    key = "scdiva_label"
    said = {"predicted": query.obs[key].to_numpy().astype(str)}
    # a cell of which nothing can be said, NaN, is surely wrong and like no type
    for name, nothing in {"confidence": 0.0, "novelty": float(np.finfo(np.float32).max)}.items():
        said[name] = np.nan_to_num(query.obs[f"{key}_{name}"].to_numpy(), nan=nothing)
    return said, {"ece_reference": query.uns["scdiva"][key]["ece"]}


ARMS = {
    "ours": ours, "ours_knn": ours, "ours_probe": ours, "ours_finetune": ours,
    "logistic": logistic, "logistic_balanced": logistic_balanced, "svm": svm, "centroid": centroid, "knn": knn,
    "scanvi": scanvi,
}  # fmt: skip
"""An arm takes the cells, a task and the job."""
ALIKE = ("logistic", "logistic_balanced", "svm", "centroid", "knn")
"""Arms in which nothing is drawn: where the reference is the same, one fit stands for every seed."""


def run(job: dict) -> tuple[Said, dict]:
    """Do a job; gives what was said of each task's query, and the mean cost of a fit with the arm's notes."""
    adata = ad.read_h5ad(job["file"])
    found: Said = {}
    costs: list[dict] = []
    for seed in job["seeds"]:
        now = {**job, "seed": seed, "base_seed": job["seeds"][0]}
        for number, task in enumerate(tasks(adata, now)):
            watch = Watch()
            said, notes = ARMS[job["arm"]](adata, task, now)
            cost = watch.cost()
            if kept := notes.pop("kept", None):
                cost = {key: max(cost[key], kept[key]) if key == "peak_mib" else cost[key] + kept[key] for key in cost}
            costs.append({**cost, **notes})
            found |= {f"{seed}.{number}.{key}": values for key, values in said.items()}
    mean = {key: float(np.mean([cost[key] for cost in costs])) for key in costs[0]}
    mean = {key: number for key, number in mean.items() if not np.isnan(number)}  # too few labels to calibrate
    return found, {**mean, "peak_mib": max(cost["peak_mib"] for cost in costs), "fits": len(costs)}


if __name__ == "__main__":
    do(run)
