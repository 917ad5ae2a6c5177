"""Annotation of a query from a labelled reference, compared with standard classifiers and scANVI; rejection.

    python benchmarks/annotation.py --data FOLDER [--sets kang_ifnb_2800 ...] [--part full few unknown rejection]
        [--arms ours logistic ...] [--seeds 0 1 2] [--again]

All methods receive the same cells, at most 6,000 of a dataset, and rivals the reference's 2,000 most variable genes.

- full: the whole reference is labelled. Of panc8_small_500 each technology is the query in turn.
- few: 1, 5, 10 and 20% of the reference's cells keep their label, different cells for each seed.
- unknown: each cell type in turn is removed from the reference; AUROC of the novelty of its cells in the query.
- rejection: `tl.annotate(reject=...)` on another study, with at most 1,500 cells of each. Shares of cells called
  unknown among cell types of the reference and among cells of a removed type, with Wilson's intervals over cells and a
  bootstrap over removed types. The threshold is calibrated on held-out cells, or on held-out batches (`batches`).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
from _record import commit, record, replaced, rows_so_far
from _tasks import (
    BATCH,
    KNOWN,
    LABELS,
    UNLABELLED,
    Found,
    fingerprint,
    fitted_scanvi,
    log_normalised,
    measure,
    parser_of,
    pca,
    prepared,
    scaled,
    variable_genes,
)  # fmt: skip
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import LinearSVC

import scdiva as sd
from scdiva.metrics.annotation import calibration, classification, labelled

NAME = "annotation"
SPLIT = "split"
SETS: dict[str, tuple[str, dict[str, list[str]]]] = {
    "kang_pbmc_12k_1287g": ("batch", {"the last four donors": ["107", "1244", "1256", "1488"]}),
    "kang_ifnb_2800": ("batch", {"STIM": ["STIM"]}),
    "sc_mixology_cell_lines": ("assay", {"Drop-seq": ["Drop-seq"]}),
    "panc8_small_500": (
        "assay",
        {name: [name] for name in ("celseq", "celseq2", "fluidigmc1", "indrop", "smartseq2")},
    ),
}
"""Column of each dataset that splits it, and the values of each query; the other cells are the reference."""
ARMS = ("ours", "ours_knn", "ours_probe", "ours_finetune", "logistic", "logistic_balanced", "svm", "centroid", "knn",
        "scanvi")  # fmt: skip
ALIKE = ("logistic", "logistic_balanced", "svm", "centroid", "knn")
"""Arms in which nothing is random."""
SHARES = (0.01, 0.05, 0.1, 0.2)
N_BINS, NEIGHBORS = 15, 15


class Task(NamedTuple):
    """A query, the rows of its reference, those that keep their label, and the removed cell type, if any."""

    query: str
    asked: np.ndarray
    reference: np.ndarray
    known: np.ndarray
    removed: str | None = None


def given_labels(labels: np.ndarray, rows: np.ndarray, share: float, seed: int) -> np.ndarray:
    """A random share of the rows with at least two cell types; the same for every arm."""
    drawn = np.random.default_rng(seed).permutation(rows)
    n = max(round(share * len(rows)), 2)
    chosen = drawn[:n]
    if len(np.unique(labels[chosen])) < 2:
        other = drawn[n:][labels[drawn[n:]] != labels[chosen[0]]]
        chosen = np.concatenate([chosen, other[:1]])
    return np.sort(chosen)


def tasks(adata: ad.AnnData, part: str, queries: dict[str, list[str]], share: float | None, seed: int) -> list[Task]:
    """A task for each query; in the part "unknown" one for each cell type of both, removed from the reference."""
    labels = adata.obs[LABELS].astype(str).to_numpy()
    typed, found = labelled(labels), []
    for query, values in queries.items():
        asked = adata.obs[SPLIT].astype(str).isin(values).to_numpy()
        rows, reference, known = np.flatnonzero(asked), np.flatnonzero(~asked), np.flatnonzero(~asked & typed)
        types = np.unique(labels[known])
        if share is not None:
            known = given_labels(labels, known, share, seed)
        if part != "unknown":
            found.append(Task(query, rows, reference, known))
            continue
        for name in types[np.isin(types, labels[rows])]:
            kept = labels != name
            found.append(Task(query, rows, reference[kept[reference]], known[kept[known]], str(name)))
    return found


def by_probability(probability: np.ndarray, names: np.ndarray) -> Found:
    """The most probable cell type, its probability as confidence, and 1 - confidence as novelty."""
    confidence = probability.max(axis=1)
    return {"predicted": names[probability.argmax(axis=1)], "confidence": confidence, "novelty": 1 - confidence}


def predict(adata: ad.AnnData, task: Task, arm: str, model: str, seed: int) -> Found:
    """Predicted types of the query, confidence where the arm has one, and novelty (higher: less like any type)."""
    known = np.full(adata.n_obs, UNLABELLED, dtype=object)
    known[task.known] = adata.obs[LABELS].astype(str).to_numpy()[task.known]
    reference, query = adata[task.reference].copy(), adata[task.asked].copy()
    for cells in (reference, query):
        cells.obs = cells.obs[[BATCH]].copy()
    reference.obs[KNOWN] = known[task.reference].astype(str)
    types = reference.obs[KNOWN].to_numpy().astype(str)
    given = types != UNLABELLED
    types = types[given]
    if arm.startswith("ours"):
        how: dict[str, Any]
        method = arm.removeprefix("ours").removeprefix("_") or "linear"
        how = {"finetune": True} if method == "finetune" else {"method": method}
        hidden = None if given.all() else UNLABELLED
        how |= {"batch_key": BATCH, "unlabeled_category": hidden}
        sd.tl.annotate(query, KNOWN, reference, model=model, rng=seed, **how)
        key = "scdiva_label"
        return {
            "predicted": query.obs[key].to_numpy().astype(str),
            "confidence": np.nan_to_num(query.obs[f"{key}_confidence"].to_numpy(), nan=0.0),
            "novelty": np.nan_to_num(query.obs[f"{key}_novelty"].to_numpy(), nan=float(np.finfo(np.float32).max)),
        }
    if arm == "scanvi":
        cells = adata.copy()
        cells.obs[KNOWN] = known.astype(str)
        probability = fitted_scanvi(cells, seed, variable_genes(reference)).predict(soft=True).iloc[task.asked]
        return by_probability(probability.to_numpy(), probability.columns.to_numpy().astype(str))
    if arm == "knn":
        first, second = pca(reference, query)
        fitted = KNeighborsClassifier(min(NEIGHBORS, len(types))).fit(first[given], types)
        found = by_probability(fitted.predict_proba(second), fitted.classes_)
        return {**found, "novelty": fitted.kneighbors(second)[0].mean(axis=1)}
    if arm == "centroid":
        genes, names = variable_genes(reference), np.unique(types)
        first, second = (log_normalised(cells)[:, genes].X.toarray() for cells in (reference, query))
        means = np.stack([first[given][types == name].mean(axis=0) for name in names])
        correlation = np.nan_to_num(np.corrcoef(second, means)[: len(second), len(second) :])
        return {"predicted": names[correlation.argmax(axis=1)], "novelty": 1 - correlation.max(axis=1)}
    first, second = scaled(reference, query)
    if arm == "svm":
        svm = LinearSVC(dual=True, random_state=0).fit(first[given], types)
        margin = svm.decision_function(second)
        margin = np.stack([-margin, margin], axis=1) if margin.ndim == 1 else margin
        best = np.sort(margin, axis=1)[:, -2:]
        return {"predicted": svm.classes_[margin.argmax(axis=1)], "novelty": best[:, 0] - best[:, 1]}
    weight = "balanced" if arm == "logistic_balanced" else None
    logistic = LogisticRegression(max_iter=1000, class_weight=weight).fit(first[given], types)
    return by_probability(logistic.predict_proba(second), logistic.classes_)


def fit(
    adata: ad.AnnData, part: str, queries: dict[str, list[str]], share: float | None, arm: str, model: str, seed: int
) -> Found:
    """The predictions for each task."""
    return {"tasks": [predict(adata, task, arm, model, seed) for task in tasks(adata, part, queries, share, seed)]}


def scores(adata: ad.AnnData, todo: list[Task], found: list[Found]) -> dict:
    """The mean over the queries, and the scores of each query, `by_query`.

    Without a removed type: accuracy, macro-F1, F1 of each type and, where there are confidences, the expected
    calibration error, over the query's cells of types that the whole reference has. With one: `rejection`, of each type
    the AUROC of the novelty of its cells against the query's cells of the reference's types.
    """
    labels = adata.obs[LABELS].astype(str).to_numpy().astype(object)
    labels[~labelled(labels.astype(str))] = None
    each: dict[str, list[dict]] = {}
    for task, said in zip(todo, found, strict=True):
        truth, there = labels[task.asked], {name for name in labels[task.reference] if name is not None}
        keep = np.array([name in there for name in truth])
        if task.removed is not None:
            unknown = truth == task.removed
            keep |= unknown
            one = {"rejection": {task.removed: float(roc_auc_score(unknown[keep], said["novelty"][keep]))}}
        else:
            names, predicted = truth[keep].astype(str), said["predicted"][keep].astype(str)
            one = classification(names, predicted)
            if "confidence" in said:
                one["ece"] = calibration(said["confidence"][keep], predicted == names, n_bins=N_BINS)["ece"]
        each.setdefault(task.query, []).append({"n_cells": len(task.asked), **one})
    by_query = {query: {key: value for one in some for key, value in one.items()} for query, some in each.items()}
    for query, some in each.items():
        if "rejection" in by_query[query]:
            by_query[query]["rejection"] = {key: value for one in some for key, value in one["rejection"].items()}
    row: dict = {"n_cells": sum(one["n_cells"] for one in by_query.values())}
    for key in ("accuracy", "macro_f1", "ece"):
        values = [one[key] for one in by_query.values() if key in one]
        if len(values) == len(by_query):
            row[key] = float(np.mean(values))
    for key in ("f1", "rejection"):
        if of := [one.pop(key) for one in by_query.values() if key in one]:
            types = sorted({name for one in of for name in one})
            row[key] = {name: float(np.mean([one[name] for one in of if name in one])) for name in types}
    if "rejection" in row:
        row["rejection_auroc"] = float(np.mean(list(row["rejection"].values())))
    return {**row, "by_query": by_query}


# rejection across studies

RATES, LEAST, DRAWS, MOST, KEY = (0.05, 0.01), 10, 2000, 1500, "predicted"
PAIRS = ("kang_ifnb → pbmc3k", "pbmc3k → kang_ifnb, control", "panc8, others → indrop", "panc8, others → smartseq2")
KANG = {
    "CD14 Mono": "CD14 monocyte", "CD16 Mono": "FCGR3A monocyte", "CD4 Naive T": "CD4 T", "CD4 Memory T": "CD4 T",
    "T activated": "CD4 T", "CD8 T": "CD8 T", "B": "B", "B Activated": "B", "NK": "NK", "DC": "dendritic",
    "Mk": "megakaryocyte", "pDC": "plasmacytoid dendritic", "Eryth": "erythroid",
}  # fmt: skip
PBMC3K = {
    "CD14+ Mono": "CD14 monocyte", "FCGR3A+ Mono": "FCGR3A monocyte", "Naive CD4 T": "CD4 T", "Memory CD4 T": "CD4 T",
    "CD8 T": "CD8 T", "B": "B", "NK": "NK", "DC": "dendritic", "Platelet": "megakaryocyte",
}  # fmt: skip
"""Labels of each study to cell types that both have; cells with other labels are removed."""


def studies(folder: Path, pair: str) -> tuple[ad.AnnData, ad.AnnData, str | None]:
    """Reference and query with `cell_type` and `type` in obs, and the batch column of the reference."""

    def drawn(adata: ad.AnnData) -> ad.AnnData:
        return adata[np.sort(np.random.default_rng(0).permutation(adata.n_obs)[:MOST])].copy()

    first, second = pair.split(" → ")
    if first.startswith("panc8"):
        cells = ad.read_h5ad(folder / "panc8_small_500.h5ad")
        cells.obs["type"] = cells.obs["cell_type"].astype(str)
        asked = (cells.obs["assay"] == second).to_numpy()
        return drawn(cells[~asked]), drawn(cells[asked]), "assay"
    found = []
    for study in (first, second.removesuffix(", control")):
        file, types = {"kang_ifnb": ("kang_ifnb_2800", KANG), "pbmc3k": ("pbmc3k_raw", PBMC3K)}[study]
        cells = ad.read_h5ad(folder / f"{file}.h5ad")
        cells.obs["type"] = cells.obs["cell_type"].astype(str).map(types)
        kept = cells.obs["type"].notna().to_numpy()
        if second.endswith(", control") and study != first:
            kept &= (cells.obs["condition"] == "CTRL").to_numpy()
        found.append(drawn(cells[kept]))
    return found[0], found[1], "batch" if first == "kang_ifnb" else None


def annotated(
    query: ad.AnnData, reference: ad.AnnData, batch_key: str | None, model: str
) -> tuple[dict[float, np.ndarray], np.ndarray]:
    """Cells called unknown at each rate, and the most probable type of each."""
    unknown, fitted = {}, {"labels_key": "cell_type", "reference": reference, "batch_key": batch_key, "model": model}
    for rate in RATES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            annotator = sd.tl.annotate(query, **fitted, reject=rate, key_added=KEY, rng=0)
        unknown[rate] = (query.obs[KEY] == "unknown").to_numpy()
        fitted = {"model": annotator}
    types = dict(zip(reference.obs["cell_type"].astype(str), reference.obs["type"], strict=True))
    best = query.obsm[f"{KEY}_probability"].argmax(axis=1)
    return unknown, np.array([types[name] for name in annotator.names])[best]


def rejection_rows(pair: str, folder: Path, batches: bool, model: str) -> list[dict]:
    """A row for each rate; the threshold is calibrated on held-out cells or batches of the reference."""
    reference, query, batch_key = studies(folder, pair)
    batch_key = batch_key if batches else None
    query.obs = query.obs[["type"]].copy()
    truth, known = query.obs["type"].to_numpy(), query.obs["type"].isin(set(reference.obs["type"])).to_numpy()
    unknown, best = annotated(query, reference, batch_key, model)
    counts = [cells.obs["type"].value_counts() for cells in (reference, query)]
    removed: dict[float, dict[str, float]] = {rate: {} for rate in RATES}
    for name in sorted(set(truth[known])):
        if min(count[name] for count in counts) >= LEAST:
            others = reference[(reference.obs["type"] != name).to_numpy()].copy()
            called = annotated(query, others, batch_key, model)[0]
            for rate in RATES:
                removed[rate][name] = round(float(called[rate][truth == name].mean()), 4)
    rows = []
    for rate in RATES:
        called, each = unknown[rate][known], np.array(list(removed[rate].values()))
        right = (best == truth)[known & unknown[rate]]
        low, high = binomtest(int(called.sum()), len(called)).proportion_ci(method="wilson")
        drawn = each[np.random.default_rng(0).integers(len(each), size=(DRAWS, len(each)))].mean(axis=1)
        rows.append({
            "part": "rejection", "set": pair, "arm": "batches" if batch_key else "cells", "share": rate,
            "commit": commit(), "n_cells": query.n_obs, "n_known": int(known.sum()),
            "known": round(float(called.mean()), 4), "known_interval": [round(float(low), 4), round(float(high), 4)],
            "right": round(float(right.mean()), 4) if len(right) else None,
            "accuracy": round(float((best == truth)[known].mean()), 4), "removed": round(float(each.mean()), 4),
            "removed_interval": [round(float(end), 4) for end in np.quantile(drawn, [0.025, 0.975])],
            "removed_types": removed[rate],
        })  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, tuple(SETS), ARMS, ("full", "few", "unknown", "rejection"))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="of labels, in the part few")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=list(PAIRS), help="of the part rejection")
    options = parser.parse_args(argv)
    for name in options.sets:
        split, queries = SETS[name]
        whole = ad.read_h5ad(options.data / f"{name}.h5ad")
        adata = prepared(whole, "batch", "cell_type", options.max_cells)
        adata.obs[SPLIT] = whole.obs[split].astype(str).loc[adata.obs_names].to_numpy()
        same = {"cells": fingerprint(adata), "queries": list(queries)}
        for part in (part for part in options.part if part != "rejection"):
            for arm in options.arms if part != "unknown" else [arm for arm in options.arms if arm != "scanvi"]:
                for share in options.shares if part == "few" else [None]:
                    place = {"part": part, "set": name, "arm": arm} | ({} if share is None else {"share": share})

                    def score(found: Found, seed: int, given=(adata, part, queries, share)) -> dict:
                        return scores(given[0], tasks(*given, seed), found["tasks"])

                    given = (adata, part, queries, share, arm, options.model)
                    once = arm in ALIKE and part != "few"
                    measure(NAME, place, same, fit, given, score, options, once=once)
    for pair in options.pairs if "rejection" in options.part else []:
        for batches in (False, True) if not pair.startswith("pbmc3k") else (False,):
            with sd.settings.override(progress=False):
                for row in rejection_rows(pair, options.data, batches, options.model):
                    rows = replaced(rows_so_far(NAME), row, ("part", "set", "arm", "share"))
                    record(NAME, rows, model=options.model)
                    shown = {key: row[key] for key in ("share", "known", "removed")}
                    print(f"rejection {pair} {row['arm']}: {shown}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
