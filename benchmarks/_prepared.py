"""A set as integration.py and annotation.py take it: at most 6,000 cells, counts, batches and types."""

from __future__ import annotations

import hashlib

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

MAX_CELLS = 6000
BATCH, LABELS, KNOWN = "batch", "cell_type", "known_type"
"""Columns of obs: batches and types of the prepared cells, and the types that an arm is given."""
UNLABELLED = "unlabelled"


def prepared(
    adata: ad.AnnData, batch_key: str, labels_key: str, layer: str | None = None, max_cells: int | None = None
) -> ad.AnnData:
    """At most 6,000 cells or as many as said, counts, `BATCH` and `LABELS`, nothing else; always the same ones.

    Raises
    ------
    ValueError
        If a column is missing, a cell has no batch, there is one batch, or values are negative.
    """
    for key in (batch_key, labels_key):
        if key not in adata.obs:
            raise ValueError(f"obs has no column {key!r}; it has {', '.join(map(repr, adata.obs.columns))}.")
    if (lost := int(adata.obs[batch_key].isna().sum())) > 0:
        raise ValueError(f"{lost} cells have no batch: leave them out, adata[adata.obs[{batch_key!r}].notna()].")
    rows = np.sort(np.random.default_rng(0).permutation(adata.n_obs)[: MAX_CELLS if max_cells is None else max_cells])
    counts = sp.csr_matrix(adata.X if layer is None else adata.layers[layer], dtype=np.float32)[rows]
    if (counts.data < 0).any():
        raise ValueError("counts are needed, but there are negative values: name the layer of counts with --layer.")
    obs = pd.DataFrame(
        {
            BATCH: adata.obs[batch_key].astype(str).to_numpy()[rows],
            LABELS: adata.obs[labels_key].astype(str).to_numpy()[rows],
        },
        index=adata.obs_names[rows],
    ).astype("category")
    if obs[BATCH].nunique() < 2:
        raise ValueError(f"obs[{batch_key!r}] has one batch: there is nothing to integrate.")
    return ad.AnnData(counts, obs=obs, var=adata.var.copy())


def fingerprint(adata: ad.AnnData, keys: tuple[str, ...] = (BATCH, LABELS)) -> str:
    """Of counts, genes, and columns of obs: batches and labels."""
    digest = hashlib.sha256()
    for part in (adata.X.data, adata.X.indices, adata.X.indptr):
        digest.update(part.tobytes())
    for names in (adata.var_names, *(adata.obs[key] for key in keys)):
        digest.update("\n".join(names.astype(str)).encode())
    return digest.hexdigest()[:16]
