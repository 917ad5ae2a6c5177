"""Summaries of a cell's visible genes that `[LAT]` starts from (the "latent encoder" of the paper's figure 2).

The paper draws a latent encoder and never defines it. Both forms here are sums over a set, so they see neither the
order of genes nor the other cells of a batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva.nn.layers import INIT_STD, RMSNorm, linear


def weighted_sum(table: Tensor, tokens: Tensor, weights: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum rows of a table over each cell.

    Parameters
    ----------
    table
        `(n_tokens, dim)`.
    tokens
        int64 `(T,)`, rows of the table.
    weights
        `(T,)`, the weight of each.
    cu_seqlens
        Cell boundaries `(B + 1,)`.

    Returns
    -------
    `(B, dim)`; 0 for a cell without tokens. `(T, dim)` is never formed.
    """
    return F.embedding_bag(
        tokens, table, offsets=cu_seqlens[:-1].long(), per_sample_weights=weights.to(table.dtype), mode="sum"
    )


class PooledAnchor(nn.Module):
    r"""Normalised mean of the visible genes' embeddings, weighted by their values.

    :math:`\mathrm{RMSNorm}(\sum v\,\mathrm{Emb}(g) / \sum v)`. It has no table of its own: a gene table that starts
    from the corpus SVD gives a useful cell state before the first step.

    Parameters
    ----------
    dim
        Width of the gene embedding.
    eps
        Of the norm.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, eps)

    def forward(self, table: Tensor, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, visible: Tensor) -> Tensor:
        """Summarise each cell; `visible` bool `(T,)`. Returns `(B, dim)`, 0 for a cell of which nothing is visible."""
        weights = values.masked_fill(~visible, 0.0)
        total = weighted_sum(torch.ones_like(table[:, :1]), tokens, weights, cu_seqlens)
        total = torch.where(total > 0, total, 1.0)  # nothing visible: 0 / 1, whose gradient is finite
        mean = weighted_sum(table, tokens, weights, cu_seqlens) / total
        return self.norm(mean)


class SetEncoder(nn.Module):
    r"""Light encoder of the set of visible genes, with a table of its own.

    :math:`x = \sum v\,A_g + b`, then :math:`z = x + \mathrm{MLP}(\mathrm{RMSNorm}(x))` with a two-layer SiLU MLP whose
    last layer starts at zero: before training, `z` is a linear projection of the cell.

    Parameters
    ----------
    n_tokens
        Rows of the table :math:`A`: special tokens and genes.
    dim, hidden
        Width of `z` and of the MLP.
    eps
        Of the norm.
    """

    def __init__(self, n_tokens: int, dim: int, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.table = nn.Embedding(n_tokens, dim)
        self.bias = nn.Parameter(torch.zeros(dim))
        self.norm = RMSNorm(dim, eps)
        self.hidden = linear(dim, hidden, bias=True)
        self.out = linear(hidden, dim, bias=True, std=0.0)
        nn.init.normal_(self.table.weight, std=INIT_STD)

    def forward(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, visible: Tensor) -> Tensor:
        """Encode each cell from its visible tokens; `visible` bool `(T,)`. Returns `(B, dim)`."""
        weights = values.masked_fill(~visible, 0.0)
        x = weighted_sum(self.table.weight, tokens, weights, cu_seqlens) + self.bias
        return x + self.out(F.silu(self.hidden(self.norm(x))))
