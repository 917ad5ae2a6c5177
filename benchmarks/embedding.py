"""Embeddings of labelled datasets: `tl.embed` and `tl.adapt` compared with PCA and scVI.

    python benchmarks/embedding.py --data FOLDER [--sets NAME ...] [--arms NAME ...] [--seeds 0 1 2] [--again]

Datasets are the files of a folder with two cell types of 5 cells or more and 100 such cells; at most `--max-cells`
cells of each are used. `--group design` marks studies that choices are made on; the page shows the group "benchmark".
Mark `in_training` says that the dataset is in the training corpus of the model.

- pca20: `normalize_total` to 1e4, `log1p`, 2,000 highly variable genes, 20 components, not scaled.
- pca50: the same genes, scaled, 50 components.
- scvi: scVI with its defaults on the same genes, without batches.
- embed: `tl.embed`, nothing fitted. adapt, adapt_batch: `tl.adapt` without and with `batch_key`.

Arms with batches run where at least half of the cell types have cells of two batches. Scores: accuracy of 15 nearest
neighbours in 5-fold cross-validation; NMI and ARI of the Leiden clustering (15 neighbours) with the highest NMI over
ten resolutions; silhouette, scaled to 0..1; `average_bio` is the mean of the last three.
"""

from __future__ import annotations

import _run
import anndata as ad
import igraph
import leidenalg
import numpy as np
from sklearn.metrics import accuracy_score, adjusted_rand_score, normalized_mutual_info_score, silhouette_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

import scdiva as sd
from scdiva.models import load_model

NAME = "embedding"
ARMS = ("pca20", "pca50", "scvi", "embed", "adapt", "adapt_batch")
OURS = ("embed", "adapt", "adapt_batch")
DETERMINISTIC = ("pca20", "pca50", "embed")
RESOLUTIONS = np.arange(0.1, 2.01, 0.2).round(2)
NEIGHBORS = 15


def fit(adata: ad.AnnData, arm: str, model: str, seed: int) -> _run.Result:
    """Embedding of the cells."""
    batch_key = _run.BATCH if arm.endswith("_batch") else None
    if arm.startswith("pca"):
        embedding = _run.pca(adata, int(arm.removeprefix("pca")), scale=arm == "pca50")
    elif arm == "scvi":
        embedding = _run.fitted_scvi(adata, seed, batch_key=None).get_latent_representation()
    else:
        fitted = model if arm == "embed" else sd.tl.adapt(adata, model, batch_key=batch_key, rng=seed)
        embedding = sd.tl.embed(adata, fitted, key_added="X", copy=True).obsm["X"]
    return {"embedding": np.asarray(embedding, dtype=np.float32)}


def score(embedding: np.ndarray, labels: np.ndarray, seed: int = 0) -> dict:
    """Scores of an embedding; cells without a label, or without a finite embedding, are ignored."""
    valid = (labels != "") & np.isfinite(embedding).all(axis=1)
    embedding, labels = embedding[valid], labels[valid]
    names, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    enough = counts[codes] >= _run.MIN_CELLS_PER_TYPE
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    predicted = cross_val_predict(KNeighborsClassifier(NEIGHBORS), embedding[enough], labels[enough], cv=folds)
    clusters = max(leiden(embedding, seed), key=lambda one: normalized_mutual_info_score(labels, one))
    parts = {
        "nmi": float(normalized_mutual_info_score(labels, clusters)),
        "ari": float(adjusted_rand_score(labels, clusters)),
        "asw": float(silhouette_score(embedding, labels) + 1) / 2,
    }
    accuracy = float(accuracy_score(labels[enough], predicted))
    average = float(np.mean(list(parts.values())))
    return {"n_cells": len(labels), "n_types": len(names), "accuracy": accuracy, "average_bio": average, **parts}


def leiden(embedding: np.ndarray, seed: int) -> list[list[int]]:
    """Leiden clusters at each resolution."""
    near = NearestNeighbors(n_neighbors=NEIGHBORS + 1).fit(embedding).kneighbors(return_distance=False)[:, 1:]
    cells = np.repeat(np.arange(len(embedding)), NEIGHBORS)
    graph = igraph.Graph(n=len(embedding), edges=np.column_stack([cells, near.ravel()])).simplify()
    kind = leidenalg.RBConfigurationVertexPartition
    return [
        leidenalg.find_partition(graph, kind, resolution_parameter=one, seed=seed, n_iterations=2).membership
        for one in RESOLUTIONS
    ]


def batches_share_types(adata: ad.AnnData) -> bool:
    """Whether half of the cell types have cells of two batches; otherwise batch and type are confounded."""
    if _run.BATCH not in adata.obs:
        return False
    n_batches = (
        adata.obs[_run.BATCH].astype(str).groupby(_run.cell_types(adata.obs)).nunique().drop("", errors="ignore")
    )
    return float((n_batches > 1).mean()) >= 0.5


def main(argv: list[str] | None = None) -> int:
    parser = _run.parser_of(__doc__, (), ARMS, ("embedding",))
    parser.add_argument("--group", default="benchmark", help="name of the group of datasets")
    parser.set_defaults(max_cells=3000)
    options = parser.parse_args(argv)
    studies = set((load_model(options.model).metadata or {}).get("corpus", {}).get("studies", ()))
    for name in options.sets or _run.labelled_datasets(options.data):
        adata = _run.prepared(ad.read_h5ad(options.data / f"{name}.h5ad"), options.max_cells)
        labels = _run.cell_types(adata.obs)
        for arm in options.arms:
            if arm.endswith("_batch") and not batches_share_types(adata):
                continue
            inputs = {"group": options.group, "cells": _run.fingerprint(adata)}
            if arm in OURS and name in studies:
                inputs["in_training"] = True
            _run.measure(
                NAME, {"set": name, "arm": arm}, inputs, fit, (adata, arm, options.model),
                lambda result, seed, labels=labels: score(result["embedding"], labels, seed), options,
                deterministic=arm in DETERMINISTIC,
            )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
