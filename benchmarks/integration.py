"""Integration of batches compared with Harmony, Scanorama, scVI, scANVI, ComBat and PCA.

    python benchmarks/integration.py --data FOLDER [--sets kang_pbmc_12k_1287g ...] [--part unlabelled labelled]
        [--arms ours harmony20 ...] [--seeds 0 1 2] [--again]

All methods receive the same cells, at most 6,000 of a dataset, and rivals the same 2,000 highly variable genes. Rivals
that are missing are named and skipped: `pip install -c constraints.txt harmonypy scanorama scvi-tools`. BBKNN is not
included, since its result is a graph without an embedding.

- unlabelled: no method receives labels. ours (`tl.integrate`), scdiva (`tl.embed`, no batches), pca20 (20 components,
  not scaled), combat, harmony20 and scanorama (on pca20), scvi.
- labelled: half of the labels are hidden, a different half for each seed, and only hidden cells are scored. ours,
  scanvi.
"""

from __future__ import annotations

from typing import Any

import _run
import anndata as ad
import numpy as np
from scib_metrics import ilisi_knn
from scib_metrics.nearest_neighbors import NeighborsResults
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

import scdiva as sd
from scdiva.metrics.annotation import labelled

NAME = "integration"
SETS = ("kang_pbmc_12k_1287g", "sc_mixology_cell_lines", "panc8_small_500", "kang_ifnb_2800", "kang_scgen_valid_1975",
        "baron2016_mouse_pancreas", "darmanis_brain_320", "han2018_mca_stomach_intestine")  # fmt: skip
"""The labelled datasets in which half of the cell types have cells of two batches."""
PARTS = {
    "unlabelled": ("ours", "scdiva", "pca20", "combat", "harmony20", "scanorama", "scvi"),
    "labelled": ("ours", "scanvi"),
}
ARMS = PARTS["unlabelled"] + ("scanvi",)
DETERMINISTIC = ("scdiva", "pca20", "combat", "scanorama")


def hidden_half(labels: np.ndarray, seed: int) -> np.ndarray:
    """Rows of a random half of the cells that have a cell type."""
    rows = np.flatnonzero(labelled(labels))
    return np.sort(np.random.default_rng(seed).permutation(rows)[: len(rows) // 2])


def fit(adata: ad.AnnData, part: str, arm: str, model: str, seed: int) -> _run.Result:
    """Embedding of the cells by an arm, and `predicted` cell types where the arm predicts them."""
    labels = adata.obs[_run.LABELS].astype(str).to_numpy()
    training = np.where(labelled(labels), labels, _run.UNLABELLED).astype(object)
    training[hidden_half(labels, seed)] = _run.UNLABELLED
    adata.obs[_run.TRAINING_LABELS] = training.astype(str)
    if arm == "ours":
        labels_of: dict[str, Any] = {}
        if part == "labelled":
            labels_of = {"labels_key": _run.TRAINING_LABELS, "unlabeled_category": _run.UNLABELLED}
        fitted = sd.tl.integrate(adata, _run.BATCH, model=model, rng=seed, **labels_of)
        result = {"embedding": adata.obsm["X_scdiva_integrated"]}
        if part == "labelled":
            sd.tl.annotate(adata, **labels_of, model=fitted, batch_key=_run.BATCH, rng=seed)
            result["predicted"] = adata.obs["scdiva_label"].to_numpy().astype(str)
        return result
    if arm == "scanvi":
        network = _run.fitted_scanvi(adata, seed)
        predicted = np.asarray(network.predict()).astype(str)
        return {"embedding": network.get_latent_representation(), "predicted": predicted}
    if arm == "scvi":
        return {"embedding": _run.fitted_scvi(adata, seed).get_latent_representation()}
    if arm == "scdiva":
        return {"embedding": sd.tl.embed(adata, model, copy=True).obsm["X_scdiva"]}
    if arm in ("combat", "scanorama"):
        return {"embedding": {"combat": _run.combat, "scanorama": _run.scanorama}[arm](adata)}
    components = _run.pca(adata, 20, scale=False)
    return {"embedding": _run.harmony(components, adata, seed) if arm == "harmony20" else components}


def ilisi(embedding: np.ndarray, batches: np.ndarray) -> float:
    """Median inverse Simpson index of batches among 90 neighbours at perplexity 30, scaled to 0..1 (scib-metrics)."""
    distances, indices = NearestNeighbors(n_neighbors=min(90, len(embedding))).fit(embedding).kneighbors(embedding)
    return float(ilisi_knn(NeighborsResults(indices, distances), batches, perplexity=30))


def label_scores(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy and macro-F1 over the cell types in `labels`."""
    score = sd.metrics.classification(labels, predicted)
    return {key: score[key] for key in ("accuracy", "macro_f1")}


def scores(adata: ad.AnnData, part: str, result: _run.Result, seed: int) -> dict:
    """Mixing of batches and conservation of cell types; with labels, of the hidden cells only."""
    batches, labels = (adata.obs[key].astype(str).to_numpy() for key in (_run.BATCH, _run.LABELS))
    embedding = result["embedding"]
    if not np.isfinite(embedding).all():
        raise ValueError(f"{(~np.isfinite(embedding)).any(axis=1).sum()} rows of the embedding are not finite.")
    scored = np.arange(len(labels)) if part == "unlabelled" else hidden_half(labels, seed)
    bio = sd.metrics.avg_bio(embedding[scored], labels[scored], rng=seed)
    conserved = {"average_bio": bio.pop("avg_bio"), **bio}
    if part == "unlabelled":
        return {
            **sd.metrics.knn_cross_validation(embedding, labels, rng=seed), **conserved,
            "ilisi": ilisi(embedding, batches),
        }  # fmt: skip
    reference = np.setdiff1d(np.flatnonzero(labelled(labels)), scored)
    nearest = KNeighborsClassifier(15).fit(embedding[reference], labels[reference]).predict(embedding[scored])
    own_scores = label_scores(result["predicted"][scored], labels[scored])
    own_scores = {f"own_{key}": value for key, value in own_scores.items()}
    return {**conserved, **label_scores(nearest, labels[scored]), **own_scores, "n_cells": len(scored)}


def main(argv: list[str] | None = None) -> int:
    options = _run.parser_of(__doc__, SETS, ARMS, tuple(PARTS)).parse_args(argv)
    for name in options.sets:
        adata = _run.prepared(ad.read_h5ad(options.data / f"{name}.h5ad"), options.max_cells)
        for part in options.part:
            for arm in (arm for arm in PARTS[part] if arm in options.arms):
                _run.measure(
                    NAME, {"part": part, "set": name, "arm": arm}, {"cells": _run.fingerprint(adata)}, fit,
                    (adata, part, arm, options.model),
                    lambda result, seed, part=part, adata=adata: scores(adata, part, result, seed),
                    options, deterministic=arm in DETERMINISTIC,
                )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
