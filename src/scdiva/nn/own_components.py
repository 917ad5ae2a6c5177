"""The last step of an adapted model: a cell's state beside components of the cells that the model was adapted to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scdiva.nn.encoder import weighted_sum


class OwnComponents(nn.Module):
    r"""Join of a cell's state with a projection fitted to one data set, :math:`w = [z,\; \sum v\,A_g]`.

    How much the projection counts beside the state is in the scale of A. As no other cell enters, later cells of the
    same tissue get their embedding one by one.

    Parameters
    ----------
    n_tokens
        Rows of the table A: special tokens and genes.
    state_dim, own_dim
        Widths of z and of the projection.
    alone
        Whether the projection stands alone, without z.
    """

    def __init__(self, n_tokens: int, state_dim: int, own_dim: int, *, alone: bool = False) -> None:
        super().__init__()
        self.alone = alone
        self.dim = own_dim if alone else state_dim + own_dim
        self.table = nn.Embedding(n_tokens, own_dim)
        nn.init.zeros_(self.table.weight)

    def forward(self, state: Tensor, tokens: Tensor, values: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Embed B cells with these states `(B, state_dim)`, given as a packed batch; `(B, dim)`."""
        own = weighted_sum(self.table.weight, tokens, values, cu_seqlens)
        return own if self.alone else torch.cat([state.to(own), own], dim=1)
