"""Real and generated cells as matrices: what every score of them checks and takes first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

SAME = 1e-9
"""Difference of numbers, as a share of the largest one, up to which they are the same."""
FULL_SVD = 500
"""Cells or genes, whichever are fewer, up to which all components are found at once; beyond, only those asked for."""


def check_populations(real: Any, generated: Any, *, at_least: tuple[int, int]) -> tuple[Any, Any]:
    """Give expression of both as float64, both CSR without stored zeros or both dense.

    Refuses other genes, too few cells, and values that are negative or not finite.
    """
    from scipy.sparse import csr_array, issparse

    sparse = issparse(real) or issparse(generated)
    checked = []
    for name, given, n_least in zip(("real", "generated"), (real, generated), at_least, strict=True):
        matrix: Any = csr_array(given, dtype=np.float64, copy=True) if sparse else np.asarray(given, dtype=np.float64)
        if matrix.ndim != 2 or not matrix.shape[1]:
            raise ValueError(f"{name} has shape {matrix.shape}; it must be (n_cells, n_genes).")
        if matrix.shape[0] < n_least:
            raise ValueError(f"{name} has {matrix.shape[0]} cells; at least {n_least} are needed.")
        if sparse:
            matrix.sum_duplicates()
        values = matrix.data if sparse else matrix.ravel()
        bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(bad):
            first = int(bad[0])
            cell = np.searchsorted(matrix.indptr, first, side="right") - 1 if sparse else first // matrix.shape[1]
            gene = matrix.indices[first] if sparse else first % matrix.shape[1]
            raise ValueError(
                f"{len(bad)} values of {name} are negative or not finite (the first in cell {cell}, gene {gene}). Pass "
                "log-normalised expression, not scaled."
            )
        if sparse:
            matrix.eliminate_zeros()
        checked.append(matrix)
    if checked[0].shape[1] != checked[1].shape[1]:
        raise ValueError(
            f"real has {checked[0].shape[1]} genes and generated {checked[1].shape[1]}; both must be of the same genes "
            "in the same order."
        )
    return checked[0], checked[1]


def moments(matrix: Any) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Mean, variance with n - 1, and share of zeros of each gene; a variance that is rounding is 0."""
    from sklearn.utils.sparsefuncs import mean_variance_axis

    n = matrix.shape[0]
    if isinstance(matrix, np.ndarray):
        mean, variance, expressed = matrix.mean(axis=0), matrix.var(axis=0), np.count_nonzero(matrix, axis=0)
    else:
        mean, variance = mean_variance_axis(matrix, axis=0)
        expressed = np.bincount(matrix.indices, minlength=matrix.shape[1])
    variance = np.where(variance > (SAME * mean) ** 2, variance, 0.0)
    return mean, variance * n / (n - 1), 1 - expressed / n


def components(cells: Any, n_components: int) -> Callable[[Any], NDArray[np.float64]]:
    """Give what places cells on the principal components of these; components without variance are left out."""
    from sklearn.decomposition import PCA

    if n_components < 1:
        raise ValueError(f"n_components must be 1 or more, got {n_components}.")
    smaller = min(cells.shape)
    full = smaller <= FULL_SVD or n_components >= smaller
    pca = PCA(min(n_components, smaller), svd_solver="full" if full else "arpack", random_state=0)
    with np.errstate(invalid="ignore"):  # of equal cells, refused below, the share of variance is 0 / 0
        pca.fit(dense(cells) if full else cells)
    # along those of no variance the cells all stand at one point, and the direction is the solver's whim
    kept = pca.singular_values_ > SAME * np.sqrt((cells * cells).sum())
    if not kept.any():
        raise ValueError(f"All {cells.shape[0]} cells are equal: they have no principal components.")
    axes = pca.components_[kept].T
    return lambda others: np.asarray(others @ axes) - pca.mean_ @ axes


def pooled(a: Any, b: Any) -> Any:
    """Put the cells of both in one matrix."""
    from scipy.sparse import vstack

    return np.vstack([a, b]) if isinstance(a, np.ndarray) else vstack([a, b], format="csr")


def dense(matrix: Any) -> NDArray[np.float64]:
    """Give a CSR matrix as an array, an array as it is."""
    return matrix if isinstance(matrix, np.ndarray) else matrix.toarray()
