"""Integration of batches compared with Harmony, scVI, scANVI, ComBat and PCA.

    python benchmarks/integration.py --data FOLDER [--sets kang_pbmc_12k_1287g ...] [--part unlabelled labelled]
        [--arms ours harmony ...] [--seeds 0 1 2] [--again]

All methods receive the same cells, at most 6,000 of a dataset, and rivals the same 2,000 highly variable genes; each
fit has its own process.

- unlabelled: no method receives labels. ours (`tl.integrate`), ours_hvg (on the rivals' genes only), scdiva
  (`tl.embed`, no batches), pca, combat, harmony, scvi.
- labelled: half of the labels are hidden, a different half for each seed, and only hidden cells are scored. ours,
  scanvi.
"""

from __future__ import annotations

import anndata as ad
import numpy as np
import scanpy as sc
from _tasks import (
    BATCH,
    CLIP,
    KNOWN,
    LABELS,
    N_PCS,
    UNLABELLED,
    Found,
    fingerprint,
    fitted_scanvi,
    fitted_scvi,
    log_normalised,
    measure,
    parser_of,
    pca,
    prepared,
    variable_genes,
)  # fmt: skip
from sklearn.metrics import accuracy_score, f1_score, silhouette_score
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

import scdiva as sd
from scdiva.metrics.annotation import labelled

NAME = "integration"
SETS = ("kang_pbmc_12k_1287g", "sc_mixology_cell_lines", "panc8_small_500", "kang_ifnb_2800")
PARTS = {
    "unlabelled": ("ours", "ours_hvg", "scdiva", "pca", "combat", "harmony", "scvi"),
    "labelled": ("ours", "scanvi"),
}
ARMS = PARTS["unlabelled"] + ("scanvi",)
ALIKE = ("scdiva", "pca", "combat")
"""Arms in which nothing is random."""
LISI_NEIGHBORS, PERPLEXITY = 90, 30


def hidden_half(labels: np.ndarray, seed: int) -> np.ndarray:
    """Rows of a random half of the cells that have a cell type."""
    rows = np.flatnonzero(labelled(labels))
    return np.sort(np.random.default_rng(seed).permutation(rows)[: len(rows) // 2])


def fit(adata: ad.AnnData, part: str, arm: str, model: str, seed: int) -> Found:
    """Embedding of the cells by an arm, and `predicted` cell types where the arm predicts them."""
    labels = adata.obs[LABELS].astype(str).to_numpy()
    known = np.where(labelled(labels), labels, UNLABELLED).astype(object)
    known[hidden_half(labels, seed)] = UNLABELLED
    adata.obs[KNOWN] = known.astype(str)
    if arm in ("ours", "ours_hvg"):
        cells = adata if arm == "ours" else adata[:, variable_genes(adata)].copy()
        given = {} if part == "unlabelled" else {"labels_key": KNOWN, "unlabeled_category": UNLABELLED}
        fitted = sd.tl.integrate(cells, BATCH, model=model, rng=seed, **given)
        found = {"embedding": cells.obsm["X_scdiva_integrated"]}
        if given:
            sd.tl.annotate(cells, **given, model=fitted, batch_key=BATCH, rng=seed)
            found["predicted"] = cells.obs["scdiva_label"].to_numpy().astype(str)
        return found
    if arm == "scdiva":
        return {"embedding": sd.tl.embed(adata, model, copy=True).obsm["X_scdiva"]}
    if arm == "scvi":
        return {"embedding": fitted_scvi(adata, seed).get_latent_representation()}
    if arm == "scanvi":
        fitted = fitted_scanvi(adata, seed)
        predicted = np.asarray(fitted.predict()).astype(str)
        return {"embedding": fitted.get_latent_representation(), "predicted": predicted}
    if arm == "combat":
        work = log_normalised(adata)[:, variable_genes(adata)].copy()
        work.X = work.X.toarray()
        sc.pp.combat(work, BATCH)
        work.X = np.array(work.X)
        sc.pp.scale(work, max_value=CLIP)
        sc.pp.pca(work, n_comps=min(N_PCS, min(work.shape) - 1))
        return {"embedding": work.obsm["X_pca"]}
    coordinates = pca(adata, adata)[0].astype(np.float64)
    if arm == "harmony":
        import harmonypy

        fitted = harmonypy.run_harmony(coordinates, adata.obs, BATCH, random_state=seed, verbose=False)
        corrected = np.asarray(fitted.Z_corr)
        return {"embedding": corrected if corrected.shape == coordinates.shape else corrected.T}
    return {"embedding": coordinates}


def ilisi(embedding: np.ndarray, batches: np.ndarray) -> float:
    """Median inverse Simpson index of batches among 90 neighbours (Korsunsky et al. 2019), scaled to 0..1 as in scib.

    Neighbours are weighted by exp(-beta d), with beta such that the perplexity of the weights is 30.
    """
    k = min(LISI_NEIGHBORS, len(embedding))
    distances, neighbors = NearestNeighbors(n_neighbors=k).fit(embedding).kneighbors(n_neighbors=k - 1)
    away = distances - distances.min(axis=1, keepdims=True)
    scale = np.maximum(away.mean(axis=1), np.finfo(float).tiny)
    low, high = np.full(len(away), -30.0), np.full(len(away), 30.0)  # log beta, in units of the mean distance
    for _ in range(60):
        middle = (low + high) / 2
        weights = np.exp(-away * (np.exp(middle) / scale)[:, None])
        weights /= weights.sum(axis=1, keepdims=True)
        entropy = -(weights * np.log(np.maximum(weights, 1e-300))).sum(axis=1)
        broad = entropy > np.log(min(PERPLEXITY, k / 3))
        low, high = np.where(broad, middle, low), np.where(broad, high, middle)
    names, codes = np.unique(batches, return_inverse=True)
    shares = np.stack([(weights * (codes[neighbors] == code)).sum(axis=1) for code in range(len(names))], axis=1)
    return float((np.median(1 / (shares**2).sum(axis=1)) - 1) / (len(names) - 1))


def conserved(embedding: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    """NMI and ARI of Leiden clusters, scaled silhouette of the cell types, and their mean, `average_bio`."""
    found = sd.metrics.avg_bio(embedding, labels, rng=seed)
    return {"average_bio": found.pop("avg_bio"), **found}


def named(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy and macro-F1 over the cell types in `labels`."""
    macro = f1_score(labels, predicted, labels=np.unique(labels), average="macro", zero_division=0)
    return {"accuracy": float(accuracy_score(labels, predicted)), "macro_f1": float(macro)}


def scores(adata: ad.AnnData, part: str, found: Found, seed: int) -> dict:
    """Mixing of batches and conservation of cell types; with labels, of the hidden cells alone."""
    batches, labels = (adata.obs[key].astype(str).to_numpy() for key in (BATCH, LABELS))
    embedding = found["embedding"]
    if not np.isfinite(embedding).all():
        raise ValueError(f"{(~np.isfinite(embedding)).any(axis=1).sum()} rows of the embedding are not finite.")
    known = labelled(labels)
    if part == "unlabelled":
        return {
            **sd.metrics.knn_cross_validation(embedding, labels, rng=seed), **conserved(embedding, labels, seed),
            "ilisi": ilisi(embedding, batches),
            "ilisi_shuffled": ilisi(embedding, np.random.default_rng(seed).permutation(batches)),
            "batch_asw": sd.metrics.avg_batch(embedding[known], batches[known], labels[known])["asw_batch"],
            "avg_batch": 1 - float(silhouette_score(embedding, batches)),
        }  # fmt: skip
    asked = hidden_half(labels, seed)
    rest = np.setdiff1d(np.flatnonzero(known), asked)
    nearest = KNeighborsClassifier(15).fit(embedding[rest], labels[rest]).predict(embedding[asked])
    own = {f"own_{key}": value for key, value in named(found["predicted"][asked], labels[asked]).items()}
    return {**conserved(embedding[asked], labels[asked], seed), **named(nearest, labels[asked]), **own,
            "n_cells": len(asked)}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    options = parser_of(__doc__, SETS, ARMS, tuple(PARTS)).parse_args(argv)
    for name in options.sets:
        adata = prepared(ad.read_h5ad(options.data / f"{name}.h5ad"), "batch", "cell_type", options.max_cells)
        for part in options.part:
            for arm in (arm for arm in PARTS[part] if arm in options.arms):
                measure(
                    NAME, {"part": part, "set": name, "arm": arm}, {"cells": fingerprint(adata)}, fit,
                    (adata, part, arm, options.model), lambda found, seed, p=part, a=adata: scores(a, p, found, seed),
                    options, once=arm in ALIKE,
                )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
