"""Majority voting: labels of clusters of similar cells, as in CellTypist."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scdiva._checks import from_extra
from scdiva._settings import torch_threads_kept

_N_NEIGHBORS = 10
_LEAST_CELLS = 10
"""Minimum number of cells with an embedding to cluster."""


def over_cluster(embedding: NDArray[np.float32], seed: int) -> NDArray[np.int64]:
    """Leiden clusters of an embedding at a high resolution, by the number of cells as in CellTypist [1]_.

    Parameters
    ----------
    embedding
        `(n_cells, dim)`; rows with NaN are not clustered.
    seed
        Seed for neighbours and clusters.

    Returns
    -------
    Number of each cell's cluster, `(n_cells,)`; -1 for cells without an embedding.

    Raises
    ------
    ImportError
        If `igraph` is not installed.
    ValueError
        If fewer than ten cells have an embedding.

    References
    ----------
    .. [1] Domínguez Conde et al., Cross-tissue immune cell analysis reveals tissue-specific features in humans, Science
       2022.
    """
    import scanpy as sc
    from anndata import AnnData

    from_extra("igraph", "leiden", "majority_voting needs igraph")
    finite = np.flatnonzero(np.isfinite(embedding).all(axis=1))
    if len(finite) < _LEAST_CELLS:
        raise ValueError(
            f"majority_voting clusters at least {_LEAST_CELLS} cells, and {len(finite)} have an embedding: pass a "
            "column of adata.obs with clusters, or leave majority_voting out."
        )
    cells = AnnData(obsm={"embedding": embedding[finite]}, shape=(len(finite), 0))
    resolution = 5.0 * (1 + np.searchsorted([5_000, 20_000, 40_000, 100_000, 200_000], len(finite), side="right"))
    state = seed % 2**32
    with torch_threads_kept():
        sc.pp.neighbors(cells, min(_N_NEIGHBORS, len(finite) - 1), use_rep="embedding", random_state=state)
    sc.tl.leiden(cells, resolution, random_state=state, flavor="igraph", n_iterations=2, directed=False)
    clusters = np.full(len(embedding), -1)
    clusters[finite] = cells.obs["leiden"].astype(int)
    return clusters


def majority_labels(labels: pd.Categorical, clusters: NDArray[np.int64]) -> pd.Categorical:
    """Most frequent label of the cells of each cluster; the first category in a tie.

    Parameters
    ----------
    labels
        Label of each cell; missing ones have no vote.
    clusters
        Number of each cell's cluster; the label of cells with -1 is missing.
    """
    votes = np.zeros((clusters.max(initial=-1) + 2, max(len(labels.categories), 1)), dtype=np.int64)
    voting = (clusters >= 0) & (labels.codes >= 0)
    np.add.at(votes, (clusters[voting], labels.codes[voting]), 1)
    winner = np.where(votes.any(axis=1), votes.argmax(axis=1), -1)  # the last row, of -1, has no vote
    return pd.Categorical.from_codes(winner[clusters], dtype=labels.dtype).remove_unused_categories()
