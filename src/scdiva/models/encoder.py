"""The set encoder: a summary of a cell's visible genes that `[LAT]` starts from.

The paper's figure 2 draws a "latent encoder" and its text never defines it. Ours is a sum over a set, so it sees
neither the order of genes nor the other cells of a batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva.models.layers import INIT_STD, perceptron


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


class SetEncoder(nn.Module):
    r"""Light encoder of the set of visible genes: a linear map of the cell beside what a small network makes of it.

    .. math::

        x = \sum v\,A_g + \min\Bigl(1, \frac{\sum v}{s}\Bigr)\,b, \qquad
        y = \mathrm{MLP}(\sqrt{k}\,\hat x), \qquad
        z = \frac{[\alpha\,\hat x,\; \hat y]}{\sqrt{\alpha^2 + 1}}

    with :math:`\hat x = x / \lVert x \rVert`, so that :math:`z` has length 1 and the depth of a cell, which scales
    :math:`x`, counts for little. The bias :math:`b` takes off the corpus mean. A cell that shows fewer genes (little
    depth, a panel of genes) has less of that mean in it, and less is taken off: the whole of it would move all such
    cells the same way, away from the deeper cells of their own types. A cell whose values sum to :math:`s` (the buffer
    `full_total`, a share of the corpus' mean) or more gets all of it. With :math:`A` from a truncated SVD of the corpus
    (:func:`scdiva.train.fit_linear_map`), :math:`\hat x` is a strong zero-shot embedding before the first step; kept as
    coordinates of its own, no training can lose it.

    Parameters
    ----------
    n_tokens
        Rows of the table :math:`A`: special tokens and genes.
    linear_dim, learned_dim
        Widths of :math:`x` (k) and :math:`y`; `dim` is their sum, the width of :math:`z`.
    hidden
        Width of the two hidden SiLU layers of the MLP.
    balance
        :math:`\alpha`, weight of the linear part.
    """

    def __init__(self, n_tokens: int, linear_dim: int, learned_dim: int, hidden: int, balance: float) -> None:
        super().__init__()
        self.balance = balance
        self.table = nn.Embedding(n_tokens, linear_dim)
        self.bias = nn.Parameter(torch.zeros(linear_dim))
        self.full_total = nn.Buffer(torch.ones(1))  # s
        self.dim = linear_dim + learned_dim
        self.mlp = perceptron(linear_dim, hidden, learned_dim)
        nn.init.normal_(self.table.weight, std=INIT_STD)

    def parts(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Return both parts of each cell's state, each of length 1: `(B, linear_dim)` and `(B, learned_dim)`."""
        weights = values.masked_fill(~visible, 0.0)
        total = weighted_sum(torch.ones_like(self.table.weight[:, :1]), tokens, weights, cu_seqlens)
        bias = (total / self.full_total).clamp_max(1.0) * self.bias
        x = F.normalize(weighted_sum(self.table.weight, tokens, weights, cu_seqlens) + bias, dim=1)
        y = F.normalize(self.mlp(x * x.shape[1] ** 0.5), dim=1)
        return x, y

    def forward(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, visible: Tensor) -> Tensor:
        """Encode each cell from its visible tokens; `visible` bool `(T,)`. Returns `(B, linear_dim + learned_dim)`."""
        x, y = self.parts(tokens, values, cu_seqlens, visible)
        return torch.cat([self.balance * x, y], dim=1) / (self.balance**2 + 1) ** 0.5
