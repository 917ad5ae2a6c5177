"""Refit the linear part of a set encoder on one data set: what the corpus knows of it, and what is its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from scdiva.nn.anchor import SetEncoder, weighted_sum
from scdiva.train.adaptation import AdaptationCells, Split
from scdiva.train.linear_map import CLIP, DEVIATION_OFFSET, DISPERSION_OFFSET, fit_linear_map

N_DIRECTIONS = 20
"""Most directions of either kind."""
N_SPECTRUM = 60
"""Own directions looked at; the later half tells the level of the noise."""
N_GENES = 2000
"""Genes that own directions are made of, those of the highest dispersion."""
OWN_FULL_SHARE = 0.5
"""Share of the mean cell's total from which on a cell gets the whole bias: cells of one set differ less in depth than
those of a corpus, so that what is less than this is thin rather than small."""
BLOCK_ROWS = 2048
"""Cells projected at once."""
JUDGES = 4000, 1000
"""Most training and held-out cells that :func:`carried_variance` looks at."""
RIDGE = 0.01
"""Penalty of its regression, as a share of the mean variance of a direction."""


@dataclass(frozen=True)
class _AsCorpus:
    """Cells in memory, grouped by batch, as the corpus that :func:`fit_linear_map` reads."""

    cells: AdaptationCells
    n_tokens: int

    @property
    def study(self) -> np.ndarray:
        return self.cells.batch

    @property
    def study_names(self) -> list[str]:
        return [str(number) for number in range(self.cells.n_batches)]

    @property
    def measured(self) -> np.ndarray:
        row = np.zeros(self.n_tokens, dtype=bool)
        row[self.cells.measured] = True
        return np.tile(row, (self.cells.n_batches, 1))

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first, last = self.cells.indptr[start], self.cells.indptr[stop]
        bounds = self.cells.indptr[start : stop + 1] - first
        return bounds, self.cells.tokens[first:last], self.cells.values[first:last]


@torch.no_grad()
def refit_linear(encoder: SetEncoder, cells: AdaptationCells) -> dict[str, Any]:
    r"""Make the linear part of a set encoder one of these cells; in place.

    Two sets of at most 20 directions each, scaled to the same variance within batches:

    - of the corpus: with :math:`\Sigma` the covariance within batches of the encoder's own :math:`x`, its leading
      eigenvectors. Directions of the corpus in which these cells differ by noise alone no longer count.
    - own: the leading principal components of the cells (:func:`fit_linear_map`, batches as studies), each shrunk by
      :math:`\sqrt{(\lambda - \lambda_0) / \lambda}` with :math:`\lambda_0` the median of the later of 60 eigenvalues.
      What the corpus had no example of comes in here; of a tissue that it knows they repeat the first set.

    The bias takes off the mean of these cells, all of it from half of their mean total on.

    The first layer of the learned part is turned along, so that it reads from the new coordinates what it read from the
    old ones.

    Parameters
    ----------
    encoder
        Changed in place. Its weights must be plain, not parametrised.
    cells
        The cells.

    Returns
    -------
    `corpus_directions`, `own_directions` (their numbers) and `corpus_share`, the share of the variance of :math:`x`
    within batches that the directions of the corpus keep.
    """
    table, bias = encoder.table.weight.detach().clone(), encoder.bias.detach().clone()
    k = table.shape[1]
    own = own_directions(cells, table.shape[0], min(N_DIRECTIONS, k // 2))
    values, vectors = np.linalg.eigh(_covariance_within(project(table, cells), cells))
    n_corpus = min(N_DIRECTIONS, k - own.shape[1])
    leading = torch.from_numpy(vectors[:, ::-1][:, :n_corpus].copy()).to(table)
    parts, scales = [table @ leading], []
    if own.shape[1]:
        parts.append(own.to(table))
    for number, part in enumerate(parts):
        scales.append(float(np.sqrt(np.trace(_covariance_within(project(part, cells), cells)))))
        parts[number] = part / max(scales[-1], 1e-12)
    joined = torch.cat(parts, dim=1)
    encoder.table.weight.zero_()
    encoder.table.weight[:, : joined.shape[1]] = joined
    encoder.bias.zero_()
    encoder.bias[: joined.shape[1]] = -project(joined, cells).mean(dim=0).to(bias)
    encoder.full_total.fill_(OWN_FULL_SHARE * float(cells.values.sum(dtype=np.float64)) / cells.n_cells)
    # x̂ of two parts alike in length is longer by √2 than the part that the learned layers know
    first = cast(nn.Linear, encoder.mlp[0])
    turned = len(parts) ** 0.5 * first.weight @ leading
    first.weight.zero_()
    first.weight[:, :n_corpus] = turned
    return {
        "corpus_directions": n_corpus,
        "own_directions": own.shape[1],
        "corpus_share": float(values[::-1][:n_corpus].sum() / max(values.sum(), 1e-12)),
    }


@torch.no_grad()
def carried_variance(encoder: SetEncoder, cells: AdaptationCells, split: Split) -> float:
    """Share of the variation of held-out cells that the leading directions of their embedding carry.

    The 20 leading principal components of the training cells' states predict the standardised expression of 2,000 genes
    (ridge regression fitted on the training cells, all within batches); the share of the held-out cells' sum of squares
    that this explains. It compares embeddings of any width, and sees what neighbours and clusters are made of.

    Parameters
    ----------
    encoder
        Of a model.
    cells, split
        The cells; of many, 4,000 and 1,000 are looked at.

    Returns
    -------
    At most 1; below 0 where a prediction by the mean is better.
    """
    rows = [np.sort(part[:: -(-len(part) // most)]) for part, most in zip(split, JUDGES, strict=True)]
    known, held = (cells.subset(part) for part in rows)
    states = [_states(encoder, part) for part in (known, held)]
    genes, moments = _dense(known, encoder.table.num_embeddings, None)
    held_genes, _ = _dense(held, encoder.table.num_embeddings, moments)
    means = _batch_means(states[0], known)
    x, y = states[0] - means[known.batch], states[1] - means[held.batch]
    _, _, directions = np.linalg.svd(x, full_matrices=False)
    leading = directions[:N_DIRECTIONS].T
    x, y = x @ leading, y @ leading
    gram = x.T @ x
    penalty = RIDGE * np.trace(gram) / len(gram)
    weight = np.linalg.solve(gram + max(penalty, 1e-12) * np.eye(len(gram)), x.T @ genes)
    return float(1 - ((held_genes - y @ weight) ** 2).sum() / max((held_genes**2).sum(), 1e-12))


def _states(encoder: SetEncoder, cells: AdaptationCells) -> np.ndarray:
    device, parts = encoder.bias.device, []
    for start in range(0, cells.n_cells, BLOCK_ROWS):
        batch = cells.take(np.arange(start, min(start + BLOCK_ROWS, cells.n_cells))).to(device)
        visible = torch.ones_like(batch.tokens, dtype=torch.bool)
        parts.append(encoder(batch.tokens, batch.values, batch.cu_seqlens, visible).double().cpu())
    return torch.cat(parts).numpy()


def _dense(
    cells: AdaptationCells, n_tokens: int, moments: tuple[np.ndarray, np.ndarray, np.ndarray] | None
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Standardised expression of the genes of highest dispersion, by these moments or by the cells' own."""
    matrix = sp.csr_matrix((cells.values.copy(), cells.tokens.copy(), cells.indptr), shape=(cells.n_cells, n_tokens))
    if moments is None:
        mean = np.asarray(matrix.mean(axis=0), dtype=np.float64).ravel()
        variance = np.asarray(matrix.multiply(matrix).mean(axis=0), dtype=np.float64).ravel() - mean**2
        variance = np.maximum(variance, 0)  # rounding
        kept = np.sort(np.argsort(-variance / np.maximum(mean, DISPERSION_OFFSET), kind="stable")[:N_GENES])
        dense = matrix[:, kept].toarray().astype(np.float64)
        moments = kept, _batch_means(dense, cells), np.sqrt(variance[kept]) + DEVIATION_OFFSET
    kept, means, deviation = moments
    dense = matrix[:, kept].toarray() - means[cells.batch]
    return np.clip(dense / deviation, -CLIP, CLIP), moments


def _batch_means(values: np.ndarray, cells: AdaptationCells) -> np.ndarray:
    """Mean of each batch; of a batch without cells, of all."""
    size = np.bincount(cells.batch, minlength=cells.n_batches)
    sums = np.zeros((cells.n_batches, values.shape[1]))
    np.add.at(sums, cells.batch, values)
    return np.where(size[:, None] > 0, sums / np.maximum(size, 1)[:, None], values.mean(axis=0))


def own_directions(cells: AdaptationCells, n_tokens: int, most: int) -> Tensor:
    """Principal components above the noise, shrunk, `(n_tokens, m)`; none where the cells are too few to tell."""
    n = min(N_SPECTRUM, len(cells.measured) // 2, (cells.n_cells - cells.n_batches) // 2)
    if n < 4:
        return torch.zeros(n_tokens, 0)
    found = fit_linear_map(
        _AsCorpus(cells, n_tokens), n, n_genes=N_GENES, study_power=0.0, spectral_power=0.0, fewer=True
    )
    noise = np.median(found.explained[len(found.explained) // 2 :])
    signal = 1 - noise / found.explained[: min(most, len(found.explained) // 2)]
    kept = signal > 0
    return torch.from_numpy(found.weight[:, : len(signal)][:, kept] * np.sqrt(signal[kept]).astype(np.float32))


def centred(table: Tensor, cells: AdaptationCells) -> Tensor:
    """Centre a projection for cells of any depth, without a bias.

    Of each measured gene the mean cell's coordinates are taken off, by the gene's share of a cell's total: a cell with
    half of the total loses half of the mean, and its direction is kept.
    """
    total = float(cells.values.sum(dtype=np.float64)) / cells.n_cells
    table = table.clone()
    table[cells.measured] -= (project(table, cells).mean(dim=0) / total).to(table)
    return table


def project(table: Tensor, cells: AdaptationCells) -> Tensor:
    """Coordinates of the cells, float64 `(n_cells, k)`."""
    parts, cpu = [], table.cpu()
    for start in range(0, cells.n_cells, BLOCK_ROWS):
        batch = cells.take(np.arange(start, min(start + BLOCK_ROWS, cells.n_cells)))
        parts.append(weighted_sum(cpu, batch.tokens, batch.values, batch.cu_seqlens).double())
    return torch.cat(parts)


def _covariance_within(x: Tensor, cells: AdaptationCells) -> np.ndarray:
    """Covariance around the mean of each batch."""
    centred = x.numpy() - _batch_means(x.numpy(), cells)[cells.batch]
    found: np.ndarray = centred.T @ centred / len(centred)
    return found
