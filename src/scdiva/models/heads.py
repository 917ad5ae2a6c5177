"""Heads: genes and values (paper, eq. `dual_heads`), predictions from the cell state, and fitted embeddings."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._constants import N_SPECIAL
from scdiva.models.layers import linear, perceptron, weighted_sum

N_DATASET_COMPONENTS = 50
"""Principal components of a dataset in a :class:`DatasetComponents`; unused ones are 0."""
STEP = 0.3
"""Scale of the output of the network in an :class:`IntegrationHead`, so that untrained it changes little."""


class DualHeads(nn.Module):
    r"""Linear gene head and linear value head.

    :math:`\mathrm{Linear}_{gene}(h) \in \mathbb{R}^{|V|}` without bias and :math:`\mathrm{Linear}_{val}(h) \in
    \mathbb{R}`. The gene head has no rows for special tokens, which are never predicted.

    Parameters
    ----------
    dim
        Width of the stream.
    n_genes
        Genes of the vocabulary.
    tied
        Whether the gene head shares the gene rows of the embedding table.
    """

    def __init__(self, dim: int, n_genes: int, *, tied: bool = False) -> None:
        super().__init__()
        self.gene = None if tied else linear(dim, n_genes)
        self.value = linear(dim, 1, bias=True)

    def gene_weight(self, table: Tensor) -> Tensor:
        """Weight of the gene head `(n_genes, dim)`, given the embedding table `(n_genes + N_SPECIAL, dim)`."""
        return table[N_SPECIAL:] if self.gene is None else self.gene.weight


class Expected(NamedTuple):
    """Predictions from cell states: `log_odds` that a gene is expressed, and its `values` if so, both `(B, n)`."""

    log_odds: Tensor
    values: Tensor


class StateHead(nn.Module):
    r"""Prediction of each gene from the cell state, in addition to that at each position; not in the paper.

    With z the state and n the number of genes whose values are visible,
    :math:`u = W_2\,\mathrm{SiLU}(W_1 [z / \sqrt{\overline{z^2}},\, \log(1 + n)])`; n determines how
    reliable z is. The log-odds that the cell expresses gene g are :math:`\ell_g = u \cdot d_g + b_g`, and the expected
    value of an expressed gene is :math:`u \cdot e_g + c_g`. d, b, e and c start at zero.

    In a cell with the share t of its genes masked, each with that probability, a gene that is not visible is masked
    with probability :math:`t p / (1 - p + t p)`, :math:`p = 1 / (1 + e^{-\ell})`; so the gene at a masked position has
    the logit :math:`-\log(t + e^{-\ell_g})`. A gene that nearly every cell expresses is almost certainly masked if it
    is not visible.

    Parameters
    ----------
    state_dim
        Width of the cell state.
    rank
        Width of u.
    n_genes
        Genes of the vocabulary.
    """

    def __init__(self, state_dim: int, rank: int, n_genes: int) -> None:
        super().__init__()
        self.read = nn.Sequential(nn.Linear(state_dim + 1, 2 * rank), nn.SiLU(), nn.Linear(2 * rank, rank))
        # the last column holds the biases b and c
        self.gene = nn.Parameter(torch.zeros(n_genes, rank + 1))
        self.value = nn.Parameter(torch.zeros(n_genes, rank + 1))

    def forward(self, state: Tensor, n_visible: Tensor) -> Tensor:
        """Map states `(B, state_dim)` of cells with `(B,)` visible genes to u and a column of ones, `(B, rank + 1)`."""
        log_n = torch.log1p(n_visible.to(state.dtype))[:, None]
        u = self.read(torch.cat([F.rms_norm(state, state.shape[-1:]), log_n], dim=1))
        return torch.cat([u, torch.ones_like(log_n)], dim=1)

    def log_odds(self, head_hidden: Tensor, genes: Tensor | None = None) -> Tensor:
        """Log-odds that cells `(B, rank + 1)` express each gene, or these genes, `(B, n)`."""
        return head_hidden @ (self.gene if genes is None else self.gene[genes]).T

    def values(self, head_hidden: Tensor, genes: Tensor | None = None) -> Tensor:
        """Expected log-normalised value of each gene, or these genes, if it is expressed, `(B, n)`."""
        return head_hidden @ (self.value if genes is None else self.value[genes]).T

    def expected(self, head_hidden: Tensor, genes: Tensor | None = None) -> Expected:
        """Predictions of genes, tokens `(n,)`, for cells `(B, rank + 1)`; None: of all genes."""
        columns = None if genes is None else genes - N_SPECIAL
        return Expected(self.log_odds(head_hidden, columns), self.values(head_hidden, columns))


def hidden_gene_logits(log_odds: Tensor, share: Tensor) -> Tensor:
    r"""Logits of the gene at a masked position, :math:`-\log(t + e^{-\ell})`, from the log-odds of its expression.

    Parameters
    ----------
    log_odds
        `(B, n_genes)`.
    share
        `(B,)`, share of masked genes in each cell, t.

    Returns
    -------
    Shape of `log_odds`.
    """
    return -torch.logaddexp(share.clamp_min(torch.finfo(log_odds.dtype).tiny).log()[:, None], -log_odds)


class IntegrationHead(nn.Module):
    r"""Map of the joint components of a dataset to an integrated state.

    .. math::

        u = \frac{y}{\lVert y \rVert}, \qquad w = \frac{u + 0.3\,\mathrm{MLP}(\sqrt{k}\,u)}{\lVert\cdot\rVert}

    with y the k components of a cell (:class:`DatasetComponents`). The batch is not an input, so the state of a cell
    does not depend on other cells, and cells of new batches can be mapped.

    Parameters
    ----------
    dim
        Width of y and of the integrated state.
    hidden
        Width of the two hidden SiLU layers.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.dim = dim
        self.mlp = perceptron(dim, hidden, dim)

    def forward(self, components: Tensor) -> Tensor:
        """Map components y to integrated states w, both `(..., dim)`."""
        u = F.normalize(components, dim=-1)
        return F.normalize(u + STEP * self.mlp(u * self.dim**0.5), dim=-1)


class DatasetComponents(nn.Module):
    r"""Joint principal components of a dataset's expression and of the cell state, as an embedding of single cells.

    .. math::

        w = \frac{x}{\lVert x \rVert}\,R_x + z\,R_z + o, \qquad x = \sum v\,A_g - c

    with z the state of the model and A the loadings of principal components of the dataset
    (:mod:`scdiva.embedding.dataset_pcs`). The norm of x grows with the sequencing depth of a cell; scaled to length 1,
    x describes what the cell expresses. The embedding of a cell does not depend on other cells, so later cells of the
    same tissue can be mapped.

    Parameters
    ----------
    n_tokens
        Rows of the table A: special tokens and genes.
    state_dim
        Width of z.
    dim
        Width of the embedding.
    """

    def __init__(self, n_tokens: int, state_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.table = nn.Embedding(n_tokens, N_DATASET_COMPONENTS)
        nn.init.zeros_(self.table.weight)
        self.center = nn.Parameter(torch.zeros(N_DATASET_COMPONENTS))
        self.dataset_map = nn.Parameter(torch.zeros(N_DATASET_COMPONENTS, dim))
        self.state_map = nn.Parameter(torch.zeros(state_dim, dim))
        self.offset = nn.Parameter(torch.zeros(dim))

    def forward(self, state: Tensor, tokens: Tensor, values: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Embed B cells with these states `(B, state_dim)`, given as a packed batch; `(B, dim)`."""
        x = weighted_sum(self.table.weight, tokens, values, cu_seqlens) - self.center
        return F.normalize(x, dim=1) @ self.dataset_map + state.to(x) @ self.state_map + self.offset
