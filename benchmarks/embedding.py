"""Embeddings of labelled datasets: `tl.embed` and `tl.adapt` beside PCA and scVI.

    python benchmarks/scvi_latent.py --data FOLDER --out runs/scvi
    python benchmarks/embedding.py --data FOLDER [--corpus FOLDER] [--scvi runs/scvi] [--arms NAME ...]
        [--datasets NAME ...] [--model NAME] [--max-cells 3000] [--seed 0]

Datasets are the files of a folder that have a column `cell_type` with two types of 5 cells or more and 100 such cells;
of more than `--max-cells` cells, so many are drawn. Those of `--data` are the group "benchmark". Those of `--corpus`
are the groups "design, blood and marrow" and "design, other tissues": choices are made on these, with a model that was
trained without them (`--model`). A row says if its model was trained on its dataset.

Arms, all computed from the same cells:

- pca20: `normalize_total` to 1e4, `log1p`, 2,000 highly variable genes, not scaled, 20 components.
- pca50: the same genes, scaled, 50 components.
- scvi, scvi_batch: read from the files that `scvi_latent.py` writes.
- embed: `tl.embed`, nothing fitted.
- adapt: `tl.adapt` with its defaults.
- adapt_batch: the same with `batch_key="batch"`, where half of the types or more have cells of two batches.

Scores: accuracy of 15 nearest neighbours (5 folds), and the mean of NMI, ARI and the silhouette of the types scaled to
0 to 1. NMI and ARI are of Leiden clusters of the 15-nearest-neighbour graph, at the resolution with the highest NMI.
Differences to pca20 are paired by dataset; their intervals are bootstraps over datasets.

A row is written when it is made. A row whose embedding, types and seed are those of the last run is not scored again;
rows of other arms and datasets stay as they are. `SCDIVA_RESULTS` names another folder for the results.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import anndata as ad
import numpy as np
import torch
from _record import commit, record, replaced, rows_so_far
from _run import LEAST_TYPE, batch_column, bootstrap, cell_types, digest, labelled_datasets, read_dataset, timed
from _timing import goal, report

import scdiva as sd
from scdiva._constants import DEFAULT_MODEL
from scdiva.models import ScDiVa, load_model

ARMS = ("pca20", "pca50", "scvi", "scvi_batch", "embed", "adapt", "adapt_batch")
BASE = "pca20"
MEASURES = {"accuracy": "15-NN accuracy", "average_bio": "mean of NMI, ARI, ASW"}
BLOOD = {"PBMC", "blood", "bone marrow"}
RESOLUTIONS = np.arange(0.1, 2.01, 0.2).round(2)
LEADS = {"embed": 0.0, "adapt": 0.02, "adapt_batch": 0.02}
"""Goals: the mean lead over pca20 in both measures."""
LOWEST = {"accuracy": -0.01, "average_bio": -0.02}
"""Goals: the lowest difference to pca20 of `tl.adapt` on a dataset."""


def score(embedding: np.ndarray, labels: np.ndarray, seed: int = 0) -> dict:
    """Scores of an embedding; cells without a label, or without a finite embedding, are left out."""
    from sklearn.metrics import accuracy_score, adjusted_rand_score, normalized_mutual_info_score, silhouette_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.neighbors import KNeighborsClassifier

    embedding = np.asarray(embedding, dtype=np.float32)
    kept = (labels != "") & np.isfinite(embedding).all(axis=1)
    embedding, labels = embedding[kept], labels[kept]
    names, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    enough = counts[codes] >= LEAST_TYPE
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    found = cross_val_predict(KNeighborsClassifier(15), embedding[enough], labels[enough], cv=folds)
    clusters = max(leiden(embedding, seed), key=lambda one: normalized_mutual_info_score(labels, one))
    parts = {
        "nmi": normalized_mutual_info_score(labels, clusters),
        "ari": adjusted_rand_score(labels, clusters),
        "asw": (silhouette_score(embedding, labels) + 1) / 2,
    }
    scores = {
        "accuracy": accuracy_score(labels[enough], found),
        "average_bio": mean(map(float, parts.values())),
        **parts,
    }
    return {"n_cells": len(labels), "n_types": len(names), **{key: round(float(s), 4) for key, s in scores.items()}}


def leiden(embedding: np.ndarray, seed: int, n_neighbors: int = 15) -> list[list[int]]:
    """Leiden clusters at each resolution."""
    import igraph
    import leidenalg
    from sklearn.neighbors import NearestNeighbors

    near = NearestNeighbors(n_neighbors=n_neighbors + 1).fit(embedding).kneighbors(return_distance=False)[:, 1:]
    cells = np.repeat(np.arange(len(embedding)), n_neighbors)
    graph = igraph.Graph(n=len(embedding), edges=np.column_stack([cells, near.ravel()])).simplify()
    kind = leidenalg.RBConfigurationVertexPartition
    return [
        leidenalg.find_partition(graph, kind, resolution_parameter=one, seed=seed, n_iterations=2).membership
        for one in RESOLUTIONS
    ]


def pca(adata: ad.AnnData, n_components: int, *, scaled: bool) -> np.ndarray:
    """Principal components of 2,000 highly variable genes, as scanpy computes them."""
    import scanpy as sc

    cells = ad.AnnData(adata.X.copy(), var=adata.var[[]].copy())
    sc.pp.normalize_total(cells, target_sum=1e4)
    sc.pp.log1p(cells)
    sc.pp.highly_variable_genes(cells, n_top_genes=min(2000, cells.n_vars))
    cells = cells[:, cells.var["highly_variable"]].copy()
    if scaled:
        cells.X = cells.X.toarray() if hasattr(cells.X, "toarray") else cells.X
        sc.pp.scale(cells, max_value=10)
    sc.pp.pca(cells, n_comps=min(n_components, min(cells.shape) - 1))
    return np.asarray(cells.obsm["X_pca"])


def embedded(adata: ad.AnnData, model: ScDiVa) -> np.ndarray:
    return np.asarray(sd.tl.embed(adata, model, key_added="X", copy=True).obsm["X"])


Made = tuple[np.ndarray, dict]
"""An embedding, and notes on it for its row."""


def arms_of(adata: ad.AnnData, model: ScDiVa, seed: int, scvi: Path | None) -> dict[str, Callable[[], Made]]:
    """What computes the embedding of each arm, or reads it; `scvi` is the beginning of the files' names."""
    batch_key = batch_column(adata)

    def adapted(key: str | None) -> Made:
        return embedded(adata, sd.tl.adapt(adata, model, batch_key=key, rng=seed)), {}

    arms: dict[str, Callable[[], Made]] = {
        "pca20": lambda: (pca(adata, 20, scaled=False), {}),
        "pca50": lambda: (pca(adata, 50, scaled=True), {}),
        "embed": lambda: (embedded(adata, model), {}),
        "adapt": lambda: adapted(None),
    }
    if batch_key is not None:
        arms["adapt_batch"] = lambda: adapted(batch_key)
    for arm in ("scvi", "scvi_batch"):
        if scvi is not None and (file := scvi.with_name(f"{scvi.name}.{arm}.npz")).exists():
            arms[arm] = lambda file=file: from_file(file, adata)  # type: ignore[misc]
    return arms


def from_file(file: Path, adata: ad.AnnData) -> Made:
    """The latent space that `scvi_latent.py` wrote, and how it was made.

    Raises
    ------
    ValueError
        If the file has other cells than the dataset.
    """
    with np.load(file) as saved:
        if list(saved["obs_names"]) != list(adata.obs_names):
            raise ValueError(f"{file} has other cells than the dataset: delete it and run scvi_latent.py again.")
        return saved["latent"], {key: saved[key].item() for key in saved.files if key not in ("latent", "obs_names")}


def group_of(adata: ad.AnnData) -> str:
    """The group of a study of the corpus, by its tissues."""
    tissues = set(adata.obs["tissue"].astype(str)) if "tissue" in adata.obs else set()
    return "design, blood and marrow" if tissues and tissues <= BLOOD else "design, other tissues"


def differences(rows: list[dict], group: str, arm: str, key: str) -> dict[str, float]:
    """Of each dataset of a group: the score of an arm less that of pca20."""
    at = {(row["set"], row["arm"]): row[key] for row in rows if row["group"] == group}
    return {name: at[name, arm] - at[name, BASE] for name, one in at if one == arm and (name, BASE) in at}


def goals(rows: list[dict]) -> list[dict]:
    """On the mean of the benchmark datasets and on the lowest of them, beside pca20."""
    found = []
    for arm, lead in LEADS.items():
        for key, lowest in LOWEST.items():
            apart = differences(rows, "benchmark", arm, key)
            if len(apart) < 2:
                continue
            what, over = f"{arm}: {MEASURES[key]} less that of {BASE}", f"{len(apart)} datasets"
            found.append(goal(what, mean(apart.values()), lead, interval=bootstrap(list(apart.values())), over=over))
            if arm != "embed":
                worst = min(apart, key=apart.__getitem__)
                what = f"{arm}: lowest difference to {BASE}, {MEASURES[key]}"
                found.append(goal(what, round(apart[worst], 4), lowest, dataset=worst))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark datasets")
    parser.add_argument("--corpus", type=Path, help="folder of the studies that choices are made on")
    parser.add_argument("--scvi", type=Path, help="folder of the files of scvi_latent.py")
    parser.add_argument("--datasets", nargs="+", help="names; all by default")
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--max-cells", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of mouse genes, few genes, values that are not integer: known of these datasets
    sd.settings.progress, sd.settings.threads = False, 1
    model, seed = load_model(arguments.model), arguments.seed
    trained = set((model.metadata or {}).get("corpus", {}).get("studies", ()))
    notes = {"model": arguments.model, "seed": seed, "max_cells": arguments.max_cells}
    for folder in filter(None, (arguments.data, arguments.corpus)):
        for name in arguments.datasets or labelled_datasets(folder):
            if not (folder / f"{name}.h5ad").exists():
                continue
            adata = read_dataset(folder, name, arguments.max_cells)
            labels = cell_types(adata.obs)
            place = {"group": "benchmark" if folder == arguments.data else group_of(adata), "set": name}
            arms = arms_of(adata, model, seed, arguments.scvi and arguments.scvi / name)
            for arm in (one for one in arguments.arms if one in arms):
                (embedding, made), seconds = timed(arms[arm])
                inputs = digest(np.asarray(embedding, np.float32), labels, np.array([seed]))
                rows = rows_so_far("embedding")
                last = next((row for row in rows if (row["set"], row["arm"]) == (name, arm)), {})
                if last.get("inputs") == inputs:
                    print(f"{name} {arm}: as before", flush=True)
                    continue
                known = {"in_training": True} if arm in LEADS and name in trained else {}
                row = {**place, "arm": arm, **score(embedding, labels, seed), "cpu_seconds": seconds, **made, **known,
                       "inputs": inputs, "commit": commit()}  # fmt: skip
                rows = replaced(rows, row, ("set", "arm"))
                record("embedding", [*rows, *goals(rows)], **notes)
                print(f"{name} {arm}: {row['accuracy']:.3f} / {row['average_bio']:.3f}", flush=True)
    report(goals(rows_so_far("embedding")))


if __name__ == "__main__":
    main()
