"""Zero-shot embedding beside PCA fitted on the same cells.

    python benchmarks/zero_shot.py --data FOLDER [--sets pbmc3k_raw ...] [--seeds 0 1 2]

All arms see the same cells and are scored alike: 15-NN accuracy and macro-F1 (5 folds), NMI and ARI at the best Leiden
resolution, label silhouette. scdiva was trained on none of these cells and fits nothing; PCA is fitted on the set:
2,000 highly variable genes, scaled, 50 components. The linear part of the model's set encoder, a projection on the
corpus SVD, is scored beside the whole: what training added. Seeds shuffle the folds, the clusters and the sample of
large sets.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import anndata as ad
import numpy as np
import scanpy as sc
from _record import record

import scdiva as sd

SETS = ("pbmc3k_raw", "kang_pbmc_12k_1287g", "sc_mixology_cell_lines", "panc8_small_500")
MAX_CELLS = 6000


def pca(adata: ad.AnnData) -> np.ndarray:
    work = adata.copy()
    sc.pp.normalize_total(work, target_sum=1e4)
    sc.pp.log1p(work)
    sc.pp.highly_variable_genes(work, n_top_genes=min(2000, work.n_vars))
    work = work[:, work.var["highly_variable"]].copy()
    sc.pp.scale(work, max_value=10)
    sc.pp.pca(work, n_comps=50)
    return work.obsm["X_pca"]


def scores(embedding: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    cells = np.random.default_rng(seed).permutation(len(labels))[:MAX_CELLS]
    knn = sd.metrics.knn_cross_validation(embedding[cells], labels[cells], rng=seed)
    return {**knn, **sd.metrics.average_bio(embedding[cells], labels[cells], rng=seed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--model", default="scdiva-mini")
    arguments = parser.parse_args()

    sd.settings.progress = False
    model = sd.models.load_model(arguments.model)
    rows = []
    for name in arguments.sets:
        adata = ad.read_h5ad(arguments.data / f"{name}.h5ad")
        labels = adata.obs["cell_type"].astype(str).to_numpy()
        start = time.process_time()
        sd.tl.embed(adata, model)
        seconds = {"scdiva": time.process_time() - start}
        start = time.process_time()
        arms = {"scdiva": adata.obsm["X_scdiva"], "pca": pca(adata)}
        seconds["pca"] = time.process_time() - start
        if model.config.anchor == "encoder":
            arms["linear"] = arms["scdiva"][:, : model.config.anchor_linear_dim]
            seconds["linear"] = seconds["scdiva"]
        for arm, embedding in arms.items():
            runs = [scores(embedding, labels, seed) for seed in arguments.seeds]
            row: dict = {"set": name, "arm": arm, "n_cells": runs[0]["n_cells"], "cpu_seconds": round(seconds[arm], 1)}
            for key in ("accuracy", "macro_f1", "nmi", "ari", "asw", "average_bio"):
                values = [run[key] for run in runs]
                row[key], row[f"{key}_sd"] = round(float(np.mean(values)), 4), round(float(np.std(values)), 4)
            rows.append(row)
            print(
                f"{name:24s} {arm:7s} accuracy {row['accuracy']:.3f} F1 {row['macro_f1']:.3f} NMI {row['nmi']:.3f} "
                f"ARI {row['ari']:.3f} ASW {row['asw']:.3f} mean {row['average_bio']:.3f} ({row['cpu_seconds']} s)"
            )
    path = record("zero_shot", rows, model=arguments.model, seeds=list(arguments.seeds), max_cells=MAX_CELLS)
    print(f"written: {path.name}")


if __name__ == "__main__":
    main()
