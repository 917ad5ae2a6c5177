"""Initial linear map of the set encoder: a truncated SVD of a packed corpus, computed by row blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch

from scdiva._constants import TARGET_SUM
from scdiva._settings import one_blas_thread, progress_bar
from scdiva.models.layers import SetEncoder

DISPERSION_OFFSET = 1e-3
"""Minimum mean in the dispersion var / mean, so that rarely detected genes do not rank highest."""
DEVIATION_OFFSET = 0.05
"""Added to the standard deviation of a gene before division, so that rarely detected genes do not dominate."""
ROUNDING = 1e-10
"""Variances below this share of the squared mean are rounding errors."""
CLIP = 10.0
"""Maximum standardised value, as in scanpy's `scale(max_value=10)`."""
FULL_SHARE = 0.7
"""Share of the mean total above which a cell gets the whole bias, see :class:`scdiva.models.SetEncoder`. A larger share
better preserves the embedding of thinned cells, but removes the number of genes, which distinguishes some blood cell
types, from more cells."""
LEAST_EIGENVALUE = 1e-6
"""Eigenvalues below this share of the largest are rounding errors."""
MOST_COLUMNS = 4000
"""Size of a matrix up to which its eigenvectors are computed in one thread."""
BLOCK_ROWS = 2048
"""Cells read at once; products within a block are summed in float32, those of blocks in float64."""


class LinearMap(NamedTuple):
    """A linear embedding of cells, `x = v @ weight + bias` with `v` the log-normalised expression by token.

    Attributes
    ----------
    weight
        float32 `(n_tokens, n_dims)`, leading directions first; rows of special tokens and unused genes are 0.
    bias
        float32 `(n_dims,)`, the negative image of the corpus mean.
    explained
        float64 `(n_dims,)`, share of the standardised, study-centred variance that each direction explains.
    frequency
        float64 `(n_tokens,)`, mean share of the counts of each gene; 0 for special tokens.
    full_total
        Sum of v above which the whole bias is added.
    """

    weight: np.ndarray
    bias: np.ndarray
    explained: np.ndarray
    frequency: np.ndarray
    full_total: float


def fit_linear_map(
    cells: Any,
    n_dims: int = 128,
    *,
    n_genes: int = 8000,
    study_power: float = 0.5,
    spectral_power: float = 0.35,
    fewer: bool = False,
) -> LinearMap:
    r"""Leading principal components of a corpus, each study centred on its own mean.

    Cells are weighted by :math:`n_s^{-\mathrm{study\_power}}` with :math:`n_s` the cells of their study, so that a few
    large studies of one tissue do not dominate. Of the genes that are measured in more than half of the (weighted)
    corpus, the `n_genes` with the highest dispersion are used, divided by their standard deviation and clipped at 10.
    The directions are eigenvectors of the covariance of the genes, summed over row blocks: memory does not grow with
    the corpus, and the result does not depend on the blocks beyond rounding.

    Parameters
    ----------
    cells
        The corpus, with the attributes of :class:`~scdiva.data.PackedCells`: `n_tokens`, `study`, `study_names`,
        `measured` and `read`. Cells should be packed with a large `max_length`: truncated genes count as zero.
    n_dims
        Number of directions, k.
    n_genes
        Maximum number of genes.
    study_power
        0: all cells have the same weight; 1: all studies have.
    spectral_power
        Power of the standard deviation (relative to the first direction) by which directions are scaled, so that the
        leading directions contribute more to distances. Chosen on eight labelled studies of the corpus.
    fewer
        Return fewer directions if the cells do not span `n_dims`, instead of an error.

    Returns
    -------
    The map.

    Raises
    ------
    ValueError
        If `n_dims` is not in 1 ... the number of genes, or the cells do not span `n_dims` directions (with `fewer`: if
        no gene varies).

    Examples
    --------
    >>> import scdiva as sd
    >>> from scdiva.data import pack_files
    >>> from scdiva.train import fit_linear_map
    >>> sd.datasets.toy(60, 100).write_h5ad("study.h5ad")
    >>> packed = pack_files(["study.h5ad"], "scdiva-mini", "corpus")
    >>> fit_linear_map(packed, 5).weight.shape
    (19626, 5)
    >>> packed.close()
    """
    sizes = np.bincount(cells.study, minlength=len(cells.study_names)).astype(np.float64)
    weight = np.maximum(sizes, 1) ** -study_power
    weight *= sizes.sum() / (weight * sizes).sum()

    means = np.zeros((len(sizes), cells.n_tokens))
    squares, shares = np.zeros_like(means), np.zeros_like(means)
    total = 0.0
    for study, block in _blocks(cells, "summing up"):
        means[study] += np.asarray(block.sum(axis=0)).ravel() / sizes[study]
        squares[study] += np.asarray(block.multiply(block).sum(axis=0)).ravel() / sizes[study]
        total += weight[study] * float(block.data.sum())  # block.sum() would sort the genes of each cell
        shares[study] += np.asarray(np.expm1(block).sum(axis=0)).ravel() / (TARGET_SUM * sizes[study])
    share = (weight * sizes)[:, None] * cells.measured
    covered = share.sum(axis=0)
    mean = (share * means).sum(axis=0) / np.maximum(covered, 1e-12)
    variance = (share * (squares - means**2)).sum(axis=0) / np.maximum(covered, 1e-12)
    dispersion = np.where(covered > 0.5 * sizes.sum(), variance / np.maximum(mean, DISPERSION_OFFSET), 0.0)
    variable_genes = np.sort(np.argsort(-dispersion, kind="stable")[:n_genes])
    variable_genes = variable_genes[dispersion[variable_genes] > 0]
    if not (variance[variable_genes] > ROUNDING * np.square(mean[variable_genes])).any():
        raise identical_cells(len(cells.study), len(sizes))
    if fewer:
        n_dims = min(n_dims, len(variable_genes))
    if not 1 <= n_dims <= len(variable_genes):
        raise ValueError(
            f"n_dims must be in 1 ... {len(variable_genes)}, the genes that vary and are measured; got {n_dims}."
        )
    deviation = np.sqrt(variance[variable_genes]) + DEVIATION_OFFSET

    def standardised() -> Iterator[np.ndarray]:
        for study, block in _blocks(cells, "covariance"):
            # 0 - 0 for genes that were not measured in the study
            dense = (block[:, variable_genes].toarray() - means[study, variable_genes]) / deviation
            yield np.sqrt(weight[study]) * np.clip(dense, -CLIP, CLIP)

    directions, values, trace = leading_directions(standardised(), len(cells.study), len(variable_genes), n_dims)
    n = len(values)
    if n < n_dims and not fewer:
        raise ValueError(
            f"The {len(cells.study)} cells span {n} directions only; pass n_dims={n} or fewer, or more cells."
        )

    directions = directions * (values / values[:1]) ** (spectral_power / 2)
    table = np.zeros((cells.n_tokens, len(values)), dtype=np.float32)
    table[variable_genes] = directions / deviation[:, None]
    bias = -(mean[variable_genes] / deviation) @ directions
    frequency = (share * shares).sum(axis=0) / np.maximum(covered, 1e-12)
    full_total = FULL_SHARE * total / float((weight * sizes).sum())
    return LinearMap(table, bias.astype(np.float32), values / trace, frequency, full_total)


def identical_cells(n_cells: int, n_batches: int) -> ValueError:
    """Error for cells without variation within batches or studies."""
    apart = f"within each of {n_batches} batches or studies " if n_batches > 1 else ""
    return ValueError(
        f"no gene varies: the {n_cells} cells are {apart}identical in the genes that are read, and "
        "principal components need cells that differ. Look for copies of cells: "
        "pd.DataFrame(adata.X.toarray()).duplicated().sum() (of dense X, adata.X)."
    )


@torch.no_grad()
def set_linear_map(encoder: SetEncoder, linear_map: LinearMap) -> None:
    """Copy a linear map to a set encoder.

    Parameters
    ----------
    encoder
        Changed in place.
    linear_map
        Linear map of the same vocabulary and width.

    Raises
    ------
    ValueError
        If the shapes differ.
    """
    if linear_map.weight.shape != tuple(encoder.table.weight.shape):
        raise ValueError(
            f"The linear map is {linear_map.weight.shape} (tokens, dimensions); the set encoder's table is "
            f"{tuple(encoder.table.weight.shape)}. Fit it on the model's vocabulary with "
            f"n_dims={encoder.table.embedding_dim}."
        )
    encoder.table.weight.copy_(torch.from_numpy(linear_map.weight))
    encoder.bias.copy_(torch.from_numpy(linear_map.bias))
    encoder.full_total.fill_(float(linear_map.full_total))


def leading_directions(
    blocks: Iterator[np.ndarray], n_rows: int, n_columns: int, k: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Leading right singular vectors of a matrix in row blocks, float64 `(n_columns, at most k)`.

    They are computed from the products of columns, or of rows if there are fewer rows than columns. The largest entry
    of each vector is positive.

    Returns
    -------
    The vectors, their squared singular values in descending order, and the sum of squares of the matrix.
    """
    from scipy.linalg import eigh

    if n_rows < n_columns:
        rows = np.concatenate(list(blocks))
        products = rows @ rows.T
    else:
        products = np.zeros((n_columns, n_columns))
        for block in blocks:
            single = block.astype(np.float32)
            products += single.T @ single
    n = len(products)
    with one_blas_thread(n <= MOST_COLUMNS):
        values, vectors = eigh(products, subset_by_index=(max(0, n - k), n - 1))
    values, vectors = values[::-1], vectors[:, ::-1]
    nonzero = values > LEAST_EIGENVALUE * values[0]
    values, vectors = values[nonzero], vectors[:, nonzero]
    if n_rows < n_columns:
        vectors = rows.T @ vectors / np.sqrt(values)
    signs = np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(len(values))])
    return vectors * signs, values, float(np.trace(products))


def _blocks(cells: Any, desc: str) -> Iterator[tuple[int, sp.csr_matrix]]:
    """Yield row blocks of one study each, `(rows, n_tokens)`, with a progress bar."""
    bounds = np.flatnonzero(np.diff(cells.study, prepend=-1, append=-1))
    with progress_bar(desc=desc, unit="cell", total=len(cells.study)) as bar:
        for start, end in itertools.pairwise(bounds.tolist()):
            for lo in range(start, end, BLOCK_ROWS):
                hi = min(lo + BLOCK_ROWS, end)
                indptr, tokens, values = cells.read(lo, hi)
                # float64, so that the moments do not depend on the block boundaries
                parts = values.astype(np.float64), tokens, indptr
                # copied because scipy sorts the arrays of a matrix, and cells in memory must keep their order
                yield int(cells.study[start]), sp.csr_matrix(parts, shape=(hi - lo, cells.n_tokens), copy=True)
                bar.update(hi - lo)
