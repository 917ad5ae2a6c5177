"""Reader: a transformer that predicts counts of masked genes from visible genes and other cells of the study."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = 8
"""Attention heads over the context cells."""
KEY_DIM = 16
COMPONENTS = 30
"""Principal components of the context cells by which cells are compared."""
REGRESSIONS = 2
"""Regressions of each gene on the components, with different penalties."""
WIDTH = 64
"""Width of the tokens of visible genes."""
TOKEN_HEADS = 4
LATENTS = 16
"""Vectors that summarise the visible genes of a cell."""
GENE_DIM = 32
HIDDEN = 96
"""Width of the two hidden layers."""
EXTRA = 6
"""Features of a query apart from those of attention and regressions."""
MAX_GENES = 256
"""Maximum number of visible genes of a cell that become tokens."""
INFERENCE_GENES = 128
"""Maximum number of these tokens at inference: as accurate as 256, in less time."""
MAX_CONTEXT = 512
"""Maximum number of context cells."""
PSEUDO_COUNT = 0.2
MAX_COMPONENT = 6.0
"""Maximum size of a component of a predicted cell, in standard deviations of the context cells."""
MAX_SLOPE = 4.0
"""Maximum size of a predicted log ratio of a regression."""
LOG_SIZE = 0.7
"""Logarithm of the size of the negative binomial distribution before training."""


class Study(NamedTuple):
    """Context cells of a study, as the reader uses them; see :func:`study_of`.

    Attributes
    ----------
    mean
        `(G,)`, mean value of each visible gene.
    axes
        `(G, COMPONENTS)`: centred values times these are the components.
    share
        `(COMPONENTS,)`, share of the variance.
    components
        `(M, COMPONENTS)`, of unit variance.
    state
        `(M, code_dim)`, centred values times the gene codes, of length 1.
    counts
        `(M, Q)`, of the queried genes.
    total
        `(M,)`, counts of each cell.
    """

    mean: Tensor
    axes: Tensor
    share: Tensor
    components: Tensor
    state: Tensor
    counts: Tensor
    total: Tensor


class Cells(NamedTuple):
    """Cells whose genes are predicted; see :func:`cells_of`.

    Attributes
    ----------
    components, state
        As for :class:`Study`.
    total
        `(B,)`, counts of each cell that are given.
    codes
        `(G, code_dim)`, codes of the visible genes.
    genes
        int64 `(B, N)`, rows of `codes` that are tokens.
    values, change
        `(B, N)`, their log-normalised values, and these minus the mean of the context cells.
    is_token
        bool `(B, N)`; False: padding.
    """

    components: Tensor
    state: Tensor
    total: Tensor
    codes: Tensor
    genes: Tensor
    values: Tensor
    change: Tensor
    is_token: Tensor


def study_of(values: Tensor, codes: Tensor, counts: Tensor, total: Tensor) -> Study:
    """Principal components of the context cells, from their visible genes.

    Parameters
    ----------
    values
        `(M, G)`, log-normalised values of the visible genes.
    codes
        `(G, code_dim)`, codes of these genes.
    counts, total
        `(M, Q)`, counts of the queried genes, and `(M,)`, of all genes.
    """
    mean = values.mean(dim=0)
    centred, n = values - mean, len(values)
    variance, vectors = torch.linalg.eigh((centred @ centred.T).cpu())  # of one small matrix, GPUs are slower
    variance, vectors = variance.to(values.device), vectors.to(values.device)
    k = min(COMPONENTS, n - 1)
    variance, vectors = variance.flip(0)[:k].clamp_min(1e-6), vectors.flip(1)[:, :k]
    parts = centred.T @ (vectors / variance) * n**0.5, variance / variance.sum(), vectors * n**0.5
    axes, share, components = (F.pad(part, (0, COMPONENTS - k)) for part in parts)
    return Study(mean, axes, share, components, F.normalize(centred @ codes, dim=1), counts, total)


def cells_of(study: Study, values: Tensor, codes: Tensor, total: Tensor) -> Cells:
    """Cells whose genes are predicted, from their visible genes.

    Parameters
    ----------
    study
        The context cells.
    values, codes
        `(B, G)` and `(G, code_dim)`, as for :func:`study_of`. The genes are in random order: the first `MAX_GENES` that
        a cell expresses become tokens.
    total
        `(B,)`, counts of each cell.
    """
    centred, n_genes = values - study.mean, values.shape[1]
    position = torch.arange(n_genes, device=values.device).expand(values.shape).masked_fill(values <= 0, n_genes)
    positions, genes = position.topk(min(MAX_GENES, n_genes), dim=1, largest=False)
    is_token = positions < n_genes
    is_token[:, 0] |= ~is_token.any(dim=1)  # a cell without visible genes keeps one token, of value 0
    return Cells(
        (centred @ study.axes).clamp(-MAX_COMPONENT, MAX_COMPONENT),
        F.normalize(centred @ codes, dim=1),
        total,
        codes,
        genes,
        values.gather(1, genes),
        centred.gather(1, genes),
        is_token,
    )


def cells_of_rows(study: Study, rows: sp.csr_matrix, codes: Tensor, total: Tensor) -> Cells:
    """Cells as from :func:`cells_of`, with at most `INFERENCE_GENES` tokens, on the CPU, from sparse values."""
    rows.sort_indices()
    lengths = np.diff(rows.indptr)
    position = np.arange(max(1, min(INFERENCE_GENES, int(lengths.max(initial=0)))))
    is_token = position < lengths[:, None]
    at = np.where(is_token, rows.indptr[:-1, None] + position, 0)
    indices, data = (part if rows.nnz else np.zeros(1, part.dtype) for part in (rows.indices, rows.data))
    genes = torch.from_numpy(np.where(is_token, indices[at], 0).astype(np.int64))
    values = torch.from_numpy(np.where(is_token, data[at], 0).astype(np.float32))
    is_token[:, 0] = True  # as in cells_of

    def centred(directions: Tensor) -> Tensor:
        return torch.from_numpy(rows @ directions.numpy()) - study.mean @ directions

    return Cells(
        centred(study.axes).clamp(-MAX_COMPONENT, MAX_COMPONENT),
        F.normalize(centred(codes), dim=1),
        total,
        codes,
        genes,
        values,
        values - study.mean[genes],
        torch.from_numpy(is_token),
    )


class Reader(nn.Module):
    r"""Transformer that predicts counts of masked genes; not in the paper.

    The count of gene g in a cell of n counts has a negative binomial distribution of mean :math:`n \rho_g` and size
    :math:`r_g`. Both depend on the cell's visible genes and on M context cells, other cells of the study:

    - Each of 8 heads weights the context cells by :math:`a_{hm} = \mathrm{softmax}_m(q_h \cdot k_{hm} - d_{hm})`, with
      keys and queries from the visible genes and d a distance between principal components of the visible genes. With
      :math:`c_{mg}` the counts and :math:`n_m` their sum, the weighted rate
      :math:`\sum_m a_{hm} c_{mg} / \sum_m a_{hm} n_m` is shrunk towards the rate :math:`\rho_{0g}` of all context
      cells, more strongly for a small effective number of cells.
    - Two Poisson regressions of the gene on the principal components, one ridge step from :math:`\rho_{0g}`.
    - Up to 256 visible genes (128 without training) are tokens of gene code, value and difference from the context
      cells. 16 latent vectors attend to them and to each other, and each queried gene attends to the latent vectors.

    A linear map of the first two and two hidden layers of all three are added to :math:`\log \rho_{0g}`. Genes are a
    set: there are no positions. A gene is represented by its code, a row of the corpus SVD (:func:`gene_codes`), so
    genes share all weights. Queries are independent. The counts of a cell that is itself in the context contribute only
    to the dispersion of its genes.

    `scripts/train_reader.py` trains it.

    Parameters
    ----------
    code_dim
        Width of the gene codes.
    scale
        Factor of the widths of keys, tokens, genes and hidden layers.
    depth
        Number of transformer blocks over the latent vectors.
    """

    def __init__(self, code_dim: int, scale: int = 1, depth: int = 1) -> None:
        super().__init__()
        keys, width, gene_dim, hidden = (scale * size for size in (KEY_DIM, WIDTH, GENE_DIM, HIDDEN))
        self.state_query = nn.Linear(code_dim, HEADS * keys, bias=False)
        self.state_key = nn.Linear(code_dim, HEADS * keys, bias=False)
        with torch.no_grad():  # attention starts as similarity of states in random directions
            self.state_key.weight.copy_(self.state_query.weight)
        # torch.linspace would import sympy on the meta device, which takes half a second
        steps = [head / (HEADS - 1) for head in range(HEADS)]
        self.state_sharpness = nn.Parameter(torch.tensor([3.0 * step for step in steps]))
        self.distance_sharpness = nn.Parameter(torch.tensor([2.5 * (1 - step) for step in steps]))
        self.component_weight = nn.Parameter(torch.zeros(HEADS, COMPONENTS))
        self.prior = nn.Parameter(torch.ones(HEADS))
        self.slope = nn.Parameter(torch.tensor([[-1.0] * COMPONENTS, [-2.0] * COMPONENTS]))
        self.gene = nn.Linear(code_dim, gene_dim)
        self.token = nn.Linear(code_dim, 2 * width)
        self.token_value = nn.Linear(2, width)
        self.latent = nn.Parameter(torch.empty(LATENTS, width).normal_(std=0.3))
        self.pool = nn.MultiheadAttention(width, TOKEN_HEADS, batch_first=True)
        self.block, *more = (
            nn.TransformerEncoderLayer(
                width, TOKEN_HEADS, 2 * width, dropout=0.0, activation=F.silu, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.more_blocks = nn.Sequential(*more)
        self.gene_query = nn.Linear(gene_dim, width)
        self.latent_key_value = nn.Linear(width, 2 * width)
        self.line = nn.Parameter(torch.tensor([0.7 / HEADS] * HEADS + [0.1] * REGRESSIONS))
        self.n_features = 2 * HEADS + REGRESSIONS + EXTRA
        self.first = nn.Linear(self.n_features + gene_dim + width, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(
        self, cells: Cells, codes: Tensor, study: Study, own_row: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""Predict every queried gene in every cell.

        Parameters
        ----------
        cells
            The B cells.
        codes
            `(Q, code_dim)`, codes of the queried genes, the columns of `study.counts`.
        study
            The context cells.
        own_row
            int64 `(B,)`, row of the cell itself in the context; -1: not in it. None: no cell is in it.

        Returns
        -------
        `(B, Q)` logarithms of the rate :math:`\rho` and of the size r.
        """
        with torch.autocast(codes.device.type, enabled=False):  # differences of squares and logarithms of small rates
            features, log_pooled = self._features(cells, study, own_row)
        linear = torch.cat([features[:, :HEADS], features[:, 2 * HEADS : 2 * HEADS + REGRESSIONS]], dim=1)
        gene = self.gene(codes)
        keys, values = self.latent_key_value(self._latents(cells)).chunk(2, dim=2)
        shape = (len(keys), LATENTS, TOKEN_HEADS, -1)
        query = self.gene_query(gene).view(len(gene), TOKEN_HEADS, -1)
        near = torch.einsum("qhd,blhd->bhql", query, keys.view(shape)) / query.shape[2] ** 0.5
        widths = [self.n_features, gene.shape[1], keys.shape[2]]
        of_features, of_gene, of_latents = self.first.weight.split(widths, dim=1)
        # the values pass the first layer before the attention: once for each latent vector, not once for each query
        values = torch.einsum("blhd,ohd->bhlo", values.view(shape), of_latents.view(len(of_latents), TOKEN_HEADS, -1))
        hidden = torch.einsum("bnq,on->bqo", features, of_features) + (gene @ of_gene.T + self.first.bias)
        hidden = hidden + torch.einsum("bhql,bhlo->bqo", near.softmax(dim=3), values)
        out = self.out(F.silu(self.second(F.silu(hidden))))
        return log_pooled + torch.einsum("bnq,n->bq", linear, self.line) + out[..., 0], out[..., 1] + LOG_SIZE

    def weigh(self, cells: Cells, study: Study, own_row: Tensor | None = None) -> Tensor:
        """Attention weights of the context cells, `(B, HEADS, M)`, each row summing to 1."""
        weight = F.softplus(self.component_weight) * study.share * COMPONENTS
        one, two = cells.components, study.components
        distance = (weight @ one.square().T)[:, :, None] + (weight @ two.square().T)[:, None]
        distance = distance - 2 * (weight[:, None] * one) @ two.T
        distance = distance / (2 * weight.sum(dim=1)[:, None, None]) * self.distance_sharpness.exp()[:, None, None]
        query = F.normalize(self.state_query(cells.state).unflatten(1, (HEADS, -1)), dim=2)
        key = F.normalize(self.state_key(study.state).unflatten(1, (HEADS, -1)), dim=2)
        near = torch.einsum("bhd,mhd->bhm", query, key) * self.state_sharpness.exp()[:, None]
        near = near - distance.transpose(0, 1)
        if own_row is not None:
            is_own = own_row[:, None] == torch.arange(near.shape[2], device=own_row.device)
            near = near.masked_fill(is_own[:, None], -torch.inf)
        return near.softmax(dim=2)

    def _features(self, cells: Cells, study: Study, own_row: Tensor | None) -> tuple[Tensor, Tensor]:
        """Features of the queries from the context, `(B, n_features, Q)`, and the log rate of the context `(B, Q)`."""
        counts, total = study.counts, study.total
        own_counts = counts.new_zeros(len(cells.total), counts.shape[1])
        own_total = total.new_zeros(len(own_counts))
        if own_row is not None:
            own_counts = torch.where((own_row >= 0)[:, None], counts[own_row.clamp_min(0)], own_counts)
            own_total = torch.where(own_row >= 0, total[own_row.clamp_min(0)], own_total)
        pooled = (counts.sum(dim=0) - own_counts + PSEUDO_COUNT) / (total.sum() - own_total)[:, None]
        weights, mean_total = self.weigh(cells, study, own_row), total.mean()
        number = 1 / weights.square().sum(dim=2)  # effective number of cells
        of_gene = (weights.flatten(0, 1) @ counts).view(*number.shape, -1) * number[:, :, None]
        of_all, prior = (weights @ total) * number, F.softplus(self.prior) * mean_total
        rate = (of_gene + prior[:, None] * pooled[:, None]) / (of_all + prior)[:, :, None]
        expected = torch.log1p(of_all[:, :, None] * pooled[:, None])

        rate_of_all = (counts.sum(dim=0) + PSEUDO_COUNT) / total.sum()
        residual = counts - total[:, None] * rate_of_all
        information = total.sum() * rate_of_all
        dispersion = (residual.square().sum(dim=0) / information).clamp_min(1)
        score = study.components.T @ residual
        own_residual = own_counts - own_total[:, None] * rate_of_all
        ratios = []
        for slope in self.slope:
            variance = (slope.exp() * study.share * COMPONENTS)[:, None].clamp_min(1e-8)
            shrunk = variance / (dispersion + information * variance)
            ratio = cells.components @ (score * shrunk) - (cells.components.square() @ shrunk) * own_residual
            ratios.append(ratio.clamp(-MAX_SLOPE, MAX_SLOPE))

        log_pooled = pooled.log()
        extra = [
            log_pooled + math.log(1e4),
            log_pooled + cells.total.log()[:, None],
            (cells.total / mean_total).log()[:, None].expand_as(pooled),
            dispersion.log().expand_as(pooled),
            information.log().expand_as(pooled) / 4,
            torch.full_like(pooled, math.log(len(total) / 100)),
        ]
        parts = [(rate / pooled[:, None]).log(), expected / 2, torch.stack(ratios + extra, dim=1)]
        return torch.cat(parts, dim=1), log_pooled

    def _latents(self, cells: Cells) -> Tensor:
        """Summaries of the visible genes of each cell, `(B, LATENTS, width)`."""
        plain, scaled = self.token(cells.codes)[cells.genes].chunk(2, dim=2)
        tokens = plain + scaled * cells.change[:, :, None]
        tokens = tokens + self.token_value(torch.stack([cells.values, cells.change], dim=2))
        query = self.latent.expand(len(tokens), -1, -1)
        pooled, _ = self.pool(query, tokens, tokens, key_padding_mask=~cells.is_token, need_weights=False)
        latents: Tensor = self.more_blocks(self.block(query + pooled))
        return latents


def count_loss(counts: Tensor, log_mean: Tensor, log_size: Tensor) -> Tensor:
    """Negative log-likelihood of counts under a negative binomial distribution, by its mean and size, in nats."""
    size, log_mean = log_size.clamp(-4, 6).exp(), log_mean.clamp(-25, 15)
    log_both = torch.log(size + log_mean.exp())
    log_choose = torch.lgamma(counts + size) - torch.lgamma(size) - torch.lgamma(counts + 1)
    return -(log_choose + size * (size.log() - log_both) + counts * (log_mean - log_both))


def gene_codes(table: Tensor) -> Tensor:
    """Codes of genes from the corpus SVD, the linear part of a set encoder: its rows at length 1, float32."""
    return F.normalize(table.detach().float(), dim=1)
