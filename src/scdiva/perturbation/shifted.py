"""Cells whose mean expression is another, as cells that differ from each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def shift_cells(
    cells: Matrix,
    change: Matrix,
    level: NDArray[np.floating],
    rng: np.random.Generator,
    start: NDArray[np.floating] | None = None,
) -> Matrix:
    r"""Change the mean of each gene by how many cells express it, then by how much they do.

    In single cells a gene's mean moves with the share p of cells in which it is found. As if counts were Poisson, that
    goes from p to :math:`1 - (1 - p)^{\mu'/\mu}` as the mean goes from :math:`\mu` to :math:`\mu'`: cells that lose or
    gain the gene are drawn at random, those that gain it get the value of one that has it, and all that have it are
    then scaled, so that the mean is met.

    Parameters
    ----------
    cells
        Log-normalised expression, `(n_cells, n_genes)`.
    change
        Of each cell, likewise; its mean over cells is that of the mean, and what it says of single cells beyond is
        added to those that express the gene.
    level
        Mean of a gene where it is expressed, `(n_genes,)`, for genes that none of these cells expresses.
    rng
        Draws the cells.
    start
        Mean that the change starts from, `(n_genes,)`; None: that of these cells. If they were drawn from more, it is
        the mean of them all: what the drawn ones miss it by is mended with the change, and a change that is smaller
        than this sampling error is still met.

    Returns
    -------
    float64 `(n_cells, n_genes)`, 0 or above. The mean of a gene is `start + change.mean(axis=0)`, or 0 where that is
    below.
    """
    n = len(cells)
    mean, shift = cells.mean(axis=0), change.mean(axis=0)
    aim = np.maximum((mean if start is None else start) + shift, 0.0)
    on = cells > 0
    n_on = on.sum(axis=0)
    share = n_on / n
    fold = np.divide(aim, mean, out=np.zeros_like(aim), where=mean > 0)
    wanted = np.where(n_on > 0, 1 - (1 - share) ** fold, np.minimum(aim / np.maximum(level, 1e-12), 1.0))
    u = rng.random(len(aim))  # all genes, so that what one draws does not depend on the others
    k = np.where(aim > 1e-9, np.clip(np.floor(wanted * n + u), 1, n), 0).astype(np.int64)
    key, donor = rng.random(cells.shape), rng.random(cells.shape)
    made = cells.copy()

    loses = np.flatnonzero(k < n_on)
    rank = _ranks(np.where(on[:, loses], key[:, loses], 2.0))
    made[:, loses] = np.where(rank < (n_on - k)[loses], 0.0, made[:, loses])

    gains = np.flatnonzero(k > n_on)
    off = ~on[:, gains]
    rank = _ranks(np.where(off, key[:, gains], 2.0))
    held = np.argsort(off, axis=0, kind="stable")  # cells that have the gene first
    row = np.take_along_axis(held, (donor[:, gains] * n_on[gains]).astype(np.int64), axis=0)
    given = np.where(n_on[gains] > 0, np.take_along_axis(cells[:, gains], row, axis=0), level[gains])
    made[:, gains] = np.where(rank < (k - n_on)[gains], given, made[:, gains])

    beyond = change - shift
    if beyond.any():
        apart = np.where(made > 0, np.maximum(made + beyond, 0.0), 0.0)
        # where all cells that have a gene would lose it, they keep it: the mean has to be met by some
        made = np.where(apart.any(axis=0), apart, made)
    now = made.mean(axis=0)
    scaled: Matrix = made * np.divide(aim, now, out=np.zeros_like(aim), where=now > 0)
    return scaled


def _ranks(keys: Matrix) -> NDArray[np.int64]:
    """Rank of each value within its column."""
    return np.argsort(np.argsort(keys, axis=0, kind="stable"), axis=0, kind="stable")
