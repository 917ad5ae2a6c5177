"""Annotation of a query from a labelled reference, compared with standard classifiers and scANVI; rejection.

    python benchmarks/annotation.py --data FOLDER [--sets kang_ifnb_2800 ...] [--part full few rejection]
        [--arms ours logistic ...] [--seeds 0 1 2] [--again]

All methods receive the same cells, at most 6,000 of a dataset (1,500 of each in a pair of studies), and rivals the
reference's 2,000 most variable genes, scaled. logistic_genes is a logistic regression on all log-normalised genes, and
celltypist trains CellTypist on the reference. Rivals that are missing are named and skipped:
`pip install -c constraints.txt celltypist scvi-tools`.

- full: the whole reference is labelled. Of panc8_small_500 each technology is the query in turn; pairs of studies have
  their common genes.
- few: 1% of the reference's cells keep their label, different cells for each seed.
- rejection: `tl.annotate(reject=...)` on another study, with at most 1,500 cells of each. Shares of cells called
  unknown among cell types of the reference and among cells of a removed type, with Wilson's intervals over cells and a
  bootstrap over removed types. The threshold is calibrated on held-out cells, or on held-out batches (`batches`).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import _run
import anndata as ad
import numpy as np
import pandas as pd
from _record import bootstrap, commit, record, recorded_rows, replaced
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

import scdiva as sd
from scdiva.metrics.annotation import calibration, classification, labelled

NAME = "annotation"
SETS: dict[str, tuple[str, dict[str, list[str]]]] = {
    "kang_pbmc_12k_1287g": ("batch", {"the last four donors": ["107", "1244", "1256", "1488"]}),
    "kang_ifnb_2800": ("batch", {"STIM": ["STIM"]}),
    "sc_mixology_cell_lines": ("assay", {"Drop-seq": ["Drop-seq"]}),
    "panc8_small_500": ("assay", {name: [name] for name in ("celseq", "celseq2", "fluidigmc1", "indrop", "smartseq2")}),
    "sc_mixology_cell_lines, back": ("assay", {"CEL-seq2": ["CEL-seq2"]}),
    "panc8_small_500, one technology": (
        "assay",
        {f"{first} → {second}": [second] for pair in (("smartseq2", "indrop"), ("celseq2", "fluidigmc1"))
         for first, second in (pair, pair[::-1])},
    ),
    "kang_scgen_valid_1975": ("batch", {"stimulated": ["stimulated"]}),
    **{
        " + ".join(pair): ("study", {f"{first} → {second}": [second] for first, second in (pair, pair[::-1])})
        for pair in (("kang_ifnb_2800", "pbmc3k_raw"), ("baron2016_mouse_pancreas", "mouse_pancreas_bastidasponce_739"))
    },
}  # fmt: skip
"""Column of each dataset or pair of studies that splits it, and the values of each query.

The other cells are the reference, or those before the arrow in the name of a query.
"""
ARMS = ("ours", "ours_knn", "ours_probe", "logistic", "logistic_balanced", "logistic_genes", "celltypist", "centroid",
        "knn", "scanvi")  # fmt: skip
DETERMINISTIC = ("logistic", "logistic_balanced", "logistic_genes", "celltypist", "centroid", "knn")
FEW = 0.01
"""Share of labelled cells in the part few."""
NEIGHBORS = 15


class Task(NamedTuple):
    """A query, the rows of its cells and of its reference, and those of the reference that keep their label."""

    name: str
    query: np.ndarray
    reference: np.ndarray
    labelled: np.ndarray


def tasks(adata: ad.AnnData, split: str, queries: dict[str, list[str]], share: float | None, seed: int) -> list[Task]:
    """A task for each query; with `share`, a random share of the reference keeps its labels, of at least two types."""
    labels = adata.obs[_run.LABELS].astype(str).to_numpy()
    tasks = []
    for name, values in queries.items():
        groups, (source, arrow, _) = adata.obs[split].astype(str), name.partition(" → ")
        in_query = groups.isin(values).to_numpy()
        in_reference = (groups == source).to_numpy() if arrow else ~in_query
        rows = np.flatnonzero(in_reference & labelled(labels))
        if share is not None:
            drawn, n = np.random.default_rng(seed).permutation(rows), max(round(share * len(rows)), 2)
            rows = drawn[:n]
            if len(np.unique(labels[rows])) < 2:
                other = drawn[n:][labels[drawn[n:]] != labels[rows[0]]]
                rows = np.concatenate([rows, other[:1]])
        tasks.append(Task(name, np.flatnonzero(in_query), np.flatnonzero(in_reference), np.sort(rows)))
    return tasks


def most_probable(probability: np.ndarray, names: np.ndarray) -> _run.Result:
    """The most probable cell type of each cell, with its probability as confidence."""
    return {"predicted": names[probability.argmax(axis=1)], "confidence": probability.max(axis=1)}


def predict(adata: ad.AnnData, task: Task, arm: str, model: str, seed: int) -> _run.Result:
    """Predicted types of the query, and the confidence where the arm has one."""
    training = np.full(adata.n_obs, _run.UNLABELLED, dtype=object)
    training[task.labelled] = adata.obs[_run.LABELS].astype(str).to_numpy()[task.labelled]
    reference, query = adata[task.reference].copy(), adata[task.query].copy()
    for cells in (reference, query):
        cells.obs = cells.obs[[_run.BATCH]].copy()
    reference.obs[_run.TRAINING_LABELS] = training[task.reference].astype(str)
    types = reference.obs[_run.TRAINING_LABELS].to_numpy().astype(str)
    has_label = types != _run.UNLABELLED
    types = types[has_label]
    if arm.startswith("ours"):
        method = arm.removeprefix("ours").removeprefix("_") or "linear"
        sd.tl.annotate(
            query, _run.TRAINING_LABELS, reference, model=model, rng=seed, batch_key=_run.BATCH, method=method,
            unlabeled_category=None if has_label.all() else _run.UNLABELLED,
        )  # fmt: skip
        confidence = np.nan_to_num(query.obs["scdiva_label_confidence"].to_numpy())
        return {"predicted": query.obs["scdiva_label"].to_numpy().astype(str), "confidence": confidence}
    if arm == "scanvi":
        cells = adata.copy()
        cells.obs[_run.TRAINING_LABELS] = training.astype(str)
        network = _run.fitted_scanvi(cells, seed, _run.variable_genes(reference))
        probability = network.predict(soft=True).iloc[task.query]
        return most_probable(probability.to_numpy(), probability.columns.to_numpy().astype(str))
    if arm == "knn":
        first, second = _run.projected_pca(reference, query)
        fitted = KNeighborsClassifier(min(NEIGHBORS, len(types))).fit(first[has_label], types)
        return most_probable(fitted.predict_proba(second), fitted.classes_)
    if arm == "centroid":  # highest correlation with the mean of a type
        genes, names = _run.variable_genes(reference), np.unique(types)
        first, second = (_run.log_normalised(cells)[:, genes].X.toarray() for cells in (reference, query))
        means = np.stack([first[has_label][types == name].mean(axis=0) for name in names])
        correlation = np.nan_to_num(np.corrcoef(second, means)[: len(second), len(second) :])
        return {"predicted": names[correlation.argmax(axis=1)]}
    if arm == "celltypist":
        import celltypist

        first, second = _run.log_normalised(reference)[has_label], _run.log_normalised(query)
        trained = celltypist.train(first, labels=types, n_jobs=1)
        table = celltypist.annotate(second, model=trained).probability_matrix
        return most_probable(table.to_numpy(), table.columns.to_numpy().astype(str))
    if arm == "logistic_genes":
        first, second = (_run.log_normalised(cells).X for cells in (reference, query))
    else:
        first, second = _run.scaled(reference, query)
    balance = "balanced" if arm == "logistic_balanced" else None
    fitted = LogisticRegression(max_iter=1000, class_weight=balance).fit(first[has_label], types)
    return most_probable(fitted.predict_proba(second), fitted.classes_)


def fit(
    adata: ad.AnnData, split: str, queries: dict[str, list[str]], share: float | None, arm: str, model: str, seed: int
) -> _run.Result:
    """The predictions for each task."""
    return {"tasks": [predict(adata, task, arm, model, seed) for task in tasks(adata, split, queries, share, seed)]}


def scores(adata: ad.AnnData, todo: list[Task], predictions: list[_run.Result]) -> dict:
    """Mean over the queries, and the scores of each query, `by_query`.

    Accuracy, macro-F1, F1 of each type and, where there are confidences, the expected calibration error, over the
    query's cells of types that the whole reference has.
    """
    labels = adata.obs[_run.LABELS].astype(str).to_numpy()
    by_query: dict[str, dict] = {}
    for task, prediction in zip(todo, predictions, strict=True):
        truth, reference = labels[task.query], labels[task.reference]
        scored = np.isin(truth, reference[labelled(reference)])
        truth, predicted = truth[scored], prediction["predicted"][scored].astype(str)
        by_query[task.name] = {"n_cells": len(task.query), **classification(truth, predicted)}
        if "confidence" in prediction:
            correct = predicted == truth
            by_query[task.name]["ece"] = calibration(prediction["confidence"][scored], correct)["ece"]
    of_type = pd.DataFrame([query.pop("f1") for query in by_query.values()]).mean()
    frame = pd.DataFrame(by_query.values())
    means = frame[[key for key in ("accuracy", "macro_f1", "ece") if key in frame]].mean().to_dict()
    return {"n_cells": int(frame["n_cells"].sum()), **means, "f1": of_type.to_dict(), "by_query": by_query}


# rejection across studies

RATES, MIN_CELLS_OF_TYPE, MAX_CELLS_OF_STUDY, KEY = (0.05, 0.01), 10, 1500, "predicted"
FILES = {"kang_ifnb": "kang_ifnb_2800", "pbmc3k": "pbmc3k_raw"}
PAIRS = ("kang_ifnb → pbmc3k", "pbmc3k → kang_ifnb, control", "panc8, others → indrop", "panc8, others → smartseq2")
TYPES = {
    "CD14 Mono": "CD14 monocyte", "CD16 Mono": "FCGR3A monocyte", "CD4 Naive T": "CD4 T", "CD4 Memory T": "CD4 T",
    "T activated": "CD4 T", "CD8 T": "CD8 T", "B": "B", "B Activated": "B", "NK": "NK", "DC": "dendritic",
    "Mk": "megakaryocyte", "pDC": "plasmacytoid dendritic", "Eryth": "erythroid", "CD14+ Mono": "CD14 monocyte",
    "FCGR3A+ Mono": "FCGR3A monocyte", "Naive CD4 T": "CD4 T", "Memory CD4 T": "CD4 T", "Platelet": "megakaryocyte",
    **{name: name.lower() for name in ("Alpha", "Beta", "Delta", "Ductal")},
}  # fmt: skip
"""Labels of pairs of studies to cell types that both have."""


def cells_of(folder: Path, name: str) -> ad.AnnData:
    """A dataset, or a pair of studies joined on common genes, with cells of types that both have."""
    names = name.split(",")[0].split(" + ")
    if len(names) == 1:
        return ad.read_h5ad(folder / f"{names[0]}.h5ad")
    parts = []
    for one in names:
        cells = _run.subsampled(ad.read_h5ad(folder / f"{one}.h5ad"), MAX_CELLS_OF_STUDY)
        types = [TYPES.get(label, label) for label in _run.cell_types(cells.obs)]
        batch = f"{one} " + cells.obs[_run.BATCH].astype(str) if _run.BATCH in cells.obs else one
        cells.obs = pd.DataFrame({_run.LABELS: types, "study": one, _run.BATCH: batch}, index=cells.obs_names)
        parts.append(cells)
    shared_types = set.intersection(*(set(cells.obs[_run.LABELS]) for cells in parts)) - {""}
    return ad.concat([cells[cells.obs[_run.LABELS].isin(shared_types)] for cells in parts], index_unique="-")


def studies(folder: Path, pair: str) -> tuple[ad.AnnData, ad.AnnData, str | None]:
    """Reference and query with `cell_type` and `type` in obs, and the batch column of the reference."""
    first, second = pair.split(" → ")
    if first.startswith("panc8"):
        cells = ad.read_h5ad(folder / "panc8_small_500.h5ad")
        cells.obs["type"] = cells.obs["cell_type"].astype(str)
        in_query = (cells.obs["assay"] == second).to_numpy()
        return *(_run.subsampled(cells[rows], MAX_CELLS_OF_STUDY) for rows in (~in_query, in_query)), "assay"
    pair_of_studies = []
    for study in (first, second):
        name, _, control = study.partition(", ")
        cells = ad.read_h5ad(folder / f"{FILES[name]}.h5ad")
        cells.obs["type"] = cells.obs["cell_type"].astype(str).map(TYPES)
        mask = cells.obs["type"].notna().to_numpy()
        if control:
            mask &= (cells.obs["condition"] == "CTRL").to_numpy()
        pair_of_studies.append(_run.subsampled(cells[mask], MAX_CELLS_OF_STUDY))
    return *pair_of_studies, "batch" if first == "kang_ifnb" else None


def annotated(
    query: ad.AnnData, reference: ad.AnnData, batch_key: str | None, model: str
) -> tuple[dict[float, np.ndarray], np.ndarray]:
    """Cells called unknown at each rate, and the most probable type of each."""
    unknown: dict[float, np.ndarray] = {}
    options: dict[str, Any] = {
        "labels_key": _run.LABELS,
        "reference": reference,
        "batch_key": batch_key,
        "model": model,
    }
    for rate in RATES:
        with warnings.catch_warnings(action="ignore"):
            annotator = sd.tl.annotate(query, **options, reject=rate, key_added=KEY, rng=0)
        unknown[rate] = (query.obs[KEY] == "unknown").to_numpy()
        options = {"model": annotator}
    types = dict(zip(reference.obs["cell_type"].astype(str), reference.obs["type"], strict=True))
    best = query.obsm[f"{KEY}_probability"].argmax(axis=1)
    return unknown, np.array([types[name] for name in annotator.names])[best]


def rejection_rows(pair: str, folder: Path, batches: bool, model: str) -> list[dict]:
    """A row for each rate; the threshold is calibrated on held-out cells or batches of the reference."""
    reference, query, batch_key = studies(folder, pair)
    batch_key = batch_key if batches else None
    query.obs = query.obs[["type"]].copy()
    truth, in_reference = query.obs["type"].to_numpy(), query.obs["type"].isin(set(reference.obs["type"])).to_numpy()
    unknown, best = annotated(query, reference, batch_key, model)
    sizes = pd.DataFrame([cells.obs["type"].value_counts() for cells in (reference, query)]).fillna(0).min()
    removed: dict[float, dict[str, float]] = {rate: {} for rate in RATES}
    for name in sorted(set(truth[in_reference])):
        if sizes[name] >= MIN_CELLS_OF_TYPE:
            others = reference[(reference.obs["type"] != name).to_numpy()].copy()
            rejected = annotated(query, others, batch_key, model)[0]
            for rate in RATES:
                removed[rate][name] = round(float(rejected[rate][truth == name].mean()), 4)
    rows = []
    for rate in RATES:
        rejected, of_types = unknown[rate][in_reference], list(removed[rate].values())
        right = (best == truth)[in_reference & unknown[rate]]
        interval = binomtest(int(rejected.sum()), len(rejected)).proportion_ci(method="wilson")
        rows.append({
            "part": "rejection", "set": pair, "arm": "batches" if batch_key else "cells", "share": rate,
            "commit": commit(), "n_cells": query.n_obs, "n_known": int(in_reference.sum()),
            "known": round(float(rejected.mean()), 4), "known_interval": [round(float(end), 4) for end in interval],
            "right": round(float(right.mean()), 4) if len(right) else None,
            "accuracy": round(float((best == truth)[in_reference].mean()), 4),
            "removed": round(float(np.mean(of_types)), 4),
            "removed_interval": [round(end, 4) for end in bootstrap(of_types)], "removed_types": removed[rate],
        })  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = _run.parser_of(__doc__, tuple(SETS), ARMS, ("full", "few", "rejection"))
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=list(PAIRS), help="of the part rejection")
    options = parser.parse_args(argv)
    parts = [part for part in options.part if part != "rejection"]
    for name in options.sets if parts else []:
        split, queries = SETS[name]
        adata = _run.prepared(cells_of(options.data, name), options.max_cells, split)
        inputs = {"cells": _run.fingerprint(adata), "queries": list(queries)}
        for part in parts:
            task = (adata, split, queries, FEW if part == "few" else None)
            for arm in options.arms:
                _run.measure(
                    NAME, {"part": part, "set": name, "arm": arm}, inputs, fit, (*task, arm, options.model),
                    lambda result, seed, task=task: scores(task[0], tasks(*task, seed), result["tasks"]), options,
                    deterministic=arm in DETERMINISTIC and part == "full",
                )  # fmt: skip
    for pair in options.pairs if "rejection" in options.part else []:
        for batches in (False, True) if not pair.startswith("pbmc3k") else (False,):
            row_key = {"part": "rejection", "set": pair, "arm": "batches" if batches else "cells"}
            if _run.has_row(NAME, row_key, options):
                continue
            with sd.settings.override(progress=False):
                for row in rejection_rows(pair, options.data, batches, options.model):
                    rows = replaced(recorded_rows(NAME), row, ("part", "set", "arm", "share"))
                    record(NAME, rows, model=options.model)
                    print(f"rejection {pair} {row['arm']}: {row['share']} {row['known']} {row['removed']}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
