"""Principal components of a dataset, and its joint embedding with a model's cell state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from scdiva._rng import step_generator
from scdiva.data.batch import LEAST_CELLS, InMemoryCells, means_by
from scdiva.data.cells import take_cells
from scdiva.models.heads import N_DATASET_COMPONENTS
from scdiva.models.inference import RunConfig, embed_all
from scdiva.models.layers import weighted_sum
from scdiva.models.scdiva import ScDiVa
from scdiva.train.linear_map import ROUNDING, fit_linear_map, identical_cells, leading_directions

N_DIRECTIONS = 20
"""Maximum number of principal components that :func:`own_directions` returns, and of dimensions of the embedding."""
N_SPECTRUM = 60
"""Number of components; the second half estimates the noise."""
N_GENES = 2000
"""Number of variable genes for the components."""
BLOCK_ROWS = 2048
"""Cells per dense block."""
STATE_WEIGHT = 0.7
"""Weight of the components of the cell state, relative to those of the dataset. Chosen on other datasets; 1.0 was
slightly better on twelve studies of the training corpus."""
N_NEIGHBORS = 15
"""Number of nearest neighbours of a neighbourhood."""
RIDGE = 0.1
"""Ridge, relative to the mean variance within neighbourhoods."""
MOST_STATES = 5000
"""Maximum number of cells whose states are computed for the joint components."""


@torch.no_grad()
def with_dataset_components(
    model: ScDiVa, cells: InMemoryCells, sample: tuple[np.ndarray, Tensor] | None = None
) -> tuple[ScDiVa, dict[str, Any]]:
    r"""Copy a model with an embedding along the directions that separate neighbourhoods of a dataset.

    1. x: 50 principal components of the log-normalised expression of 2,000 highly variable genes, minus the mean over
       cells, each cell scaled to length 1.
    2. z: 50 principal components of the cell state.
    3. y: 50 principal components of both blocks together, each scaled to unit total variance and z multiplied by 0.7.
    4. The embedding: the 20 generalised eigenvectors of largest eigenvalue of :math:`\Sigma v = \lambda W v`, where
       :math:`\Sigma` is the covariance of y, and W the covariance of the difference between a cell and the mean of its
       15 nearest neighbours in the first 20 components, times 15/16 (to correct for the variance of that mean), with a
       tenth of the mean variance of W added to the diagonal. They are scaled to :math:`v^T W v = 1`.

    All covariances are computed within batches, and neighbours are searched among all cells after the means of batches
    are subtracted. The mean that is subtracted is the mean over all cells, so that the embedding of a cell does not
    depend on its batch. There are at most as many components as cells minus batches, in each step. The steps after the
    first use at most 5,000 cells, every n-th.

    Parameters
    ----------
    model
        Not changed; its components of another dataset are replaced.
    cells
        The dataset.
    sample
        From :func:`sampled_states`; None: computed here.

    Returns
    -------
    The model, on the device of the given one, and `n_components`, `n_genes`, `ratio` (variance of each dimension, where
    the variance within neighbourhoods is 1).

    Raises
    ------
    ValueError
        If the cells are identical within batches.
    """
    n_tokens, n_batches = model.config.n_tokens, cells.n_batches
    if not _vary(cells, n_tokens):
        raise identical_cells(cells.n_cells, n_batches)
    genes = variable_genes(cells, n_tokens)
    expression = cells.matrix(n_tokens)[:, genes]
    n = _most_components(cells.n_cells - n_batches, len(genes))
    means = _batch_means(expression, cells.batch)
    blocks = _within_blocks(expression, cells.batch, means)
    loadings, _, _ = leading_directions(blocks, cells.n_cells, len(genes), n)
    center = np.bincount(cells.batch) / cells.n_cells @ means @ loadings

    rows, states = sample or sampled_states(model, cells)
    sampled, state = cells.subset(rows), states.double().numpy()
    x = sampled.matrix(n_tokens)[:, genes] @ loadings - center
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    state_loadings = _components(state, sampled.batch, N_DATASET_COMPONENTS)
    state_loadings = state_loadings * STATE_WEIGHT * _one_over_spread(state @ state_loadings, sampled.batch)
    scale = _one_over_spread(x, sampled.batch)
    joint = np.hstack([x * scale, state @ state_loadings])
    rotation = _components(joint, sampled.batch, N_DATASET_COMPONENTS)
    if not rotation.shape[1]:
        raise identical_cells(cells.n_cells, n_batches)
    directions, ratio = _between_neighborhoods(_within(joint @ rotation, sampled.batch))
    rotation = rotation @ directions

    new = ScDiVa(replace(model.config, adapted=len(ratio)), generator=step_generator(0, 0, "components"))
    prefix = "dataset_components."
    inherited = {name: value for name, value in model.state_dict().items() if not name.startswith(prefix)}
    new.load_state_dict(
        inherited | {name: value for name, value in new.state_dict().items() if name.startswith(prefix)}
    )
    if hasattr(model, "vocabulary"):
        new.vocabulary = model.vocabulary
    components, n = new.dataset_components, loadings.shape[1]
    assert components is not None
    components.table.weight[genes, :n] = torch.from_numpy(loadings).float()
    components.center[:n] = torch.from_numpy(center).float()
    components.dataset_map[:n] = torch.from_numpy(scale * rotation[:n]).float()
    components.state_map.copy_(torch.from_numpy(state_loadings @ rotation[n:]))
    components.offset.copy_(torch.from_numpy(-joint.mean(axis=0) @ rotation))
    notes = {"n_components": len(ratio), "n_genes": len(genes), "ratio": ratio.tolist()}
    return new.to(next(model.parameters()).device).eval(), notes


def sampled_states(model: ScDiVa, cells: InMemoryCells) -> tuple[np.ndarray, Tensor]:
    """Rows of at most 5,000 cells, every n-th, and their states, `(n, state_dim)`."""
    rows = every_nth(cells)
    run_config = RunConfig(None, str(next(model.parameters()).device), "fp32", "state")
    return rows, torch.from_numpy(embed_all(model, cells.subset(rows), run_config))


def every_nth(cells: InMemoryCells) -> np.ndarray:
    """Rows of at most 5,000 cells, evenly spaced."""
    return np.arange(0, cells.n_cells, -(-cells.n_cells // MOST_STATES))


def variable_genes(cells: InMemoryCells, n_tokens: int) -> np.ndarray:
    """Tokens of scanpy's 2,000 highly variable genes among those that model and dataset share, ascending.

    They are selected within batches (scanpy's `batch_key`) if each batch has at least 20 cells, else among all cells.
    """
    if len(cells.measured) <= N_GENES:
        return cells.measured
    import scanpy as sc
    from anndata import AnnData

    adata = AnnData(cells.matrix(n_tokens)[:, cells.measured].astype(np.float32, copy=False))
    batch_key = None
    if cells.n_batches > 1 and np.bincount(cells.batch).min() >= LEAST_CELLS:
        batch_key = "batch"
        adata.obs[batch_key] = cells.batch.astype(str)
    sc.pp.highly_variable_genes(adata, n_top_genes=N_GENES, batch_key=batch_key)
    return cells.measured[np.flatnonzero(adata.var["highly_variable"])]


def _vary(cells: InMemoryCells, n_tokens: int) -> bool:
    """Whether any cell differs from the first cell of its batch, beyond rounding."""
    matrix, first = cells.matrix(n_tokens), np.searchsorted(cells.batch, cells.batch)
    for start in range(0, cells.n_cells, BLOCK_ROWS):
        block = matrix[start : start + BLOCK_ROWS]
        if abs(block - matrix[first[start : start + BLOCK_ROWS]]).max() > ROUNDING**0.5 * block.max():
            return True
    return False


def _batch_means(matrix: sp.csr_matrix, batch: np.ndarray) -> np.ndarray:
    """Mean of each column in each batch, float64 `(n_batches, n_columns)`."""
    size = np.bincount(batch)
    means = np.zeros((len(size), matrix.shape[1]))
    for start in range(0, len(batch), BLOCK_ROWS):
        number = batch[start : start + BLOCK_ROWS]
        share = sp.csr_matrix((1 / size[number], (number, np.arange(len(number)))), shape=(len(size), len(number)))
        means += (share @ matrix[start : start + BLOCK_ROWS]).toarray()
    return means


def _within_blocks(matrix: sp.csr_matrix, batch: np.ndarray, means: np.ndarray) -> Iterator[np.ndarray]:
    """Dense blocks of rows, minus the means of their batches."""
    for start in range(0, len(batch), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        yield matrix[rows].toarray() - means[batch[rows]]


def _most_components(rank: int, width: int) -> int:
    return max(0, min(N_DATASET_COMPONENTS, rank, width))


def _components(x: np.ndarray, batch: np.ndarray, most: int) -> np.ndarray:
    """Compute loadings of principal components within batches, `(width, n)`."""
    n = min(most, _most_components(len(x) - len(np.unique(batch)), x.shape[1]))
    if not n:
        return np.zeros((x.shape[1], 0))
    loadings, _, _ = leading_directions(iter([_within(x, batch)]), len(x), x.shape[1], n)
    return loadings


def _between_neighborhoods(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Directions of largest total variance over variance within neighbourhoods, `(width, n)`, and these ratios.

    The columns of `y` are principal components, so their covariance is diagonal.
    """
    from scipy.linalg import eigh
    from sklearn.neighbors import NearestNeighbors

    n, k = min(N_DIRECTIONS, y.shape[1]), min(N_NEIGHBORS, len(y) - 1)
    search = NearestNeighbors(n_neighbors=k).fit(y[:, :n])
    difference = y - y[search.kneighbors(return_distance=False)].mean(axis=1)
    inside = difference.T @ difference / len(y) * k / (k + 1)
    total = np.diag(np.square(y).mean(axis=0))
    # the variance within neighbourhoods is 0 if cells equal their neighbours
    ridge = RIDGE * np.trace(inside) / len(inside) + ROUNDING * np.trace(total)
    ratio, directions = eigh(
        total, inside + ridge * np.eye(len(inside)), subset_by_index=(len(total) - n, len(total) - 1)
    )
    ratio, directions = ratio[::-1], directions[:, ::-1]
    return directions * np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(n)]), ratio


def _within(x: np.ndarray, batch: np.ndarray) -> np.ndarray:
    difference: np.ndarray = x - means_by(x, batch, int(batch.max()) + 1)[batch]
    return difference


def _one_over_spread(x: np.ndarray, batch: np.ndarray) -> float:
    """One over the root of the total variance within batches; 0 if there is none."""
    spread = np.sqrt(np.square(_within(x, batch)).sum() / len(x))
    return float(1 / spread) if spread > 1e-12 else 0.0


def own_directions(cells: InMemoryCells, n_tokens: int, most: int) -> Tensor:
    r"""Principal components within batches, above the noise and shrunk by it, centred (:func:`centred`).

    They are computed from the 2,000 genes of the highest dispersion. Each is scaled by
    :math:`\sqrt{(\lambda - \lambda_0) / \lambda}` with :math:`\lambda_0` the median of the later of 60 eigenvalues.

    Parameters
    ----------
    cells
        The dataset.
    n_tokens
        Number of rows.
    most
        Maximum number of components.

    Returns
    -------
    `(n_tokens, m)` with m at most `most`; m = 0 if there are too few cells.
    """
    n = min(N_SPECTRUM, len(cells.measured) // 2, (cells.n_cells - cells.n_batches) // 2)
    if n < 4:
        return torch.zeros(n_tokens, 0)
    corpus = _as_corpus(cells, n_tokens)
    linear_map = fit_linear_map(corpus, n, n_genes=N_GENES, study_power=0.0, spectral_power=0.0, fewer=True)
    noise = np.median(linear_map.explained[len(linear_map.explained) // 2 :])
    signal = 1 - noise / linear_map.explained[: min(most, len(linear_map.explained) // 2)]
    positive = signal > 0
    directions = torch.from_numpy(
        linear_map.weight[:, : len(signal)][:, positive] * np.sqrt(signal[positive]).astype(np.float32)
    )
    return centred(directions, cells) if positive.any() else directions


def _as_corpus(cells: InMemoryCells, n_tokens: int) -> Any:
    """Cells in the form of a packed corpus for :func:`fit_linear_map`, each batch a study."""
    measured = np.zeros((cells.n_batches, n_tokens), dtype=bool)
    measured[:, cells.measured] = True
    ragged = cells.indptr, cells.tokens, cells.values
    return SimpleNamespace(
        n_tokens=n_tokens,
        study=cells.batch,
        study_names=list(map(str, range(cells.n_batches))),
        measured=measured,
        read=lambda start, stop: take_cells(ragged, np.arange(start, stop)),
    )


def centred(table: Tensor, cells: InMemoryCells) -> Tensor:
    """Centre a projection for cells of any depth, without a bias.

    The mean cell's coordinates are subtracted in proportion to a cell's total, which preserves its direction.
    """
    total = float(cells.values.sum(dtype=np.float64)) / cells.n_cells
    table = table.clone()
    table[cells.measured] -= (project(table, cells).mean(dim=0) / total).to(table)
    return table


def project(table: Tensor, cells: InMemoryCells) -> Tensor:
    """Coordinates of the cells, float64 `(n_cells, k)`."""
    parts, cpu = [], table.cpu()
    for start in range(0, cells.n_cells, BLOCK_ROWS):
        batch = cells.take(np.arange(start, min(start + BLOCK_ROWS, cells.n_cells)))
        parts.append(weighted_sum(cpu, batch.tokens, batch.values, batch.cu_seqlens).double())
    return torch.cat(parts)
