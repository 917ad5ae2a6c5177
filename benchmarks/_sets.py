"""The labelled sets that embeddings are compared on, and what is done to them: one loading for all scripts."""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import numpy as np
import scipy.sparse as sp
from _judge import over_seeds

import scdiva as sd
from scdiva.metrics.annotation import labelled

SETS = ("pbmc3k_raw", "kang_pbmc_12k_1287g", "kang_ifnb_2800", "sc_mixology_cell_lines", "panc8_small_500")
BLOOD = SETS[:3]
"""The sets of a tissue that the corpus of scdiva-mini holds."""
NO_TYPE = ("unlabelled", "None", "ND", "Other", "nan")
"""Labels of cells that were given no type."""
MAX_CELLS = 6000
SCORES = ("accuracy", "macro_f1", "nmi", "ari", "asw", "average_bio")


def load_set(folder: Path, name: str) -> tuple[ad.AnnData, np.ndarray]:
    """Read a set's counts and its labels as text; cells without a label stay, scores leave them out."""
    adata = ad.read_h5ad(folder / f"{name}.h5ad")
    return adata, adata.obs["cell_type"].astype(str).to_numpy()


def thinned(adata: ad.AnnData, share: float, seed: int) -> ad.AnnData:
    """The cells sequenced less deep: of each count c, Binomial(c, share) are kept.

    Raises
    ------
    ValueError
        If the share is not in (0, 1], or a value is no integer count.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}.")
    counts = sp.csr_matrix(adata.X)
    if (counts.data != np.round(counts.data)).any() or (counts.data < 0).any():
        raise ValueError("only integer counts can be thinned.")
    kept = np.random.default_rng(seed).binomial(counts.data.astype(np.int64), share)
    less = sp.csr_matrix((kept.astype(np.float32), counts.indices.copy(), counts.indptr.copy()), shape=counts.shape)
    less.eliminate_zeros()
    return ad.AnnData(less, obs=adata.obs.copy(), var=adata.var.copy())


def typed(labels: np.ndarray) -> np.ndarray:
    """The labels, those of `NO_TYPE` left empty."""
    return np.where(np.isin(labels, NO_TYPE), "", labels)


def scored(labels: np.ndarray) -> np.ndarray:
    """Rows of the cells whose label names a type."""
    return np.flatnonzero(labelled(labels))


def scores(embedding: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    """Accuracy of nearest neighbours and agreement of clusters, of at most `MAX_CELLS` cells."""
    cells = np.random.default_rng(seed).permutation(len(labels))[:MAX_CELLS]
    knn = sd.metrics.knn_cross_validation(embedding[cells], labels[cells], rng=seed)
    bio = sd.metrics.avg_bio(embedding[cells], labels[cells], rng=seed)
    return {**knn, "average_bio": bio.pop("avg_bio"), **bio}


def row_of(name: str, arm: str, runs: list[dict[str, float]], notes: dict) -> dict:
    """Mean and standard deviation over the seeds."""
    row: dict = {"set": name, "arm": arm, "n_cells": runs[0]["n_cells"], "n_seeds": len(runs)}
    row |= {key: round(value, 1) if key.endswith("seconds") else value for key, value in notes.items()}
    for key in SCORES:
        row |= over_seeds(key, [run[key] for run in runs])
    return row
