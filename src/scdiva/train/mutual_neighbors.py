"""Cells of different batches that are each other's nearest: pairs that may be one kind of cell seen twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_CELLS = 20_000
"""Cells among which pairs are looked for, at most: the search is exact, and its time grows with their square."""


def mutual_neighbors(
    states: NDArray[Any], batches: list[NDArray[Any]], n_neighbors: int, rng: np.random.Generator
) -> sp.csr_matrix:
    """Find the pairs of cells of two batches of which each is among the other's nearest (Haghverdi et al. 2018).

    Parameters
    ----------
    states
        `(n_cells, dim)`; the distance is Euclidean.
    batches
        One array or more of batch numbers, `(n_cells,)` each: batch covariates. Cells that agree in all are of a batch.
    n_neighbors
        How many nearest cells of each other batch a cell names; all, of a batch that has fewer.
    rng
        Of more than 20,000 cells so many are drawn, and the others have no pair.

    Returns
    -------
    bool `(n_cells, n_cells)`, symmetric: whether two cells are a pair. Cells of one batch never are.
    """
    from sklearn.neighbors import NearestNeighbors

    n = len(states)
    batch = np.unique(np.stack(batches), axis=1, return_inverse=True)[1].ravel()
    drawn = np.arange(n) if n <= MOST_CELLS else np.sort(rng.permutation(n)[:MOST_CELLS])
    states, batch = states[drawn], batch[drawn]
    named = [(np.zeros(0, dtype=np.int64),) * 2]
    for number in np.unique(batch):
        inside, outside = np.flatnonzero(batch == number), np.flatnonzero(batch != number)
        if len(outside):
            k = min(n_neighbors, len(inside))
            near = (
                NearestNeighbors(n_neighbors=k).fit(states[inside]).kneighbors(states[outside], return_distance=False)
            )
            named.append((np.repeat(drawn[outside], k), drawn[inside[near.ravel()]]))
    cells, nearest = (np.concatenate(column) for column in zip(*named, strict=True))
    names = sp.csr_matrix((np.ones(len(cells), dtype=bool), (cells, nearest)), shape=(n, n))
    return names.multiply(names.T).tocsr()


def draw_partners(pairs: sp.csr_matrix, rows: NDArray[Any], generator: torch.Generator) -> Tensor:
    """Draw one partner of each cell, evenly among those that it has; int64 `(n,)`, -1 for a cell without.

    Parameters
    ----------
    pairs
        From :func:`mutual_neighbors`.
    rows
        Cells, `(n,)`.
    generator
        CPU generator.
    """
    counts = np.diff(pairs.indptr)[rows]
    places = (torch.rand(len(rows), generator=generator, dtype=torch.float64).numpy() * counts).astype(np.int64)
    partners = np.full(len(rows), -1, dtype=np.int64)
    paired = counts > 0
    partners[paired] = pairs.indices[pairs.indptr[rows[paired]] + places[paired]]
    return torch.from_numpy(partners)
