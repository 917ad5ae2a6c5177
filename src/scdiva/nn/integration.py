"""The last step of an integrated model: from a cell's state to one that no longer tells its batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva.nn.encoder import weighted_sum

STEP = 0.3
"""Scale of what the network adds, so that untrained it changes little."""


class IntegrationHead(nn.Module):
    r"""Map of a cell's state and of a projection of its genes to an integrated state; it is given no batch.

    .. math::

        u = \tfrac{1}{\sqrt 2}\,[\hat z,\; \hat x], \qquad x = \sum v\,A_g, \qquad
        w = \frac{u + 0.3\,\mathrm{MLP}(\sqrt{k}\,u)}{\lVert\cdot\rVert}

    with z the state of the model, x a projection fitted on the integrated cells
    (:func:`scdiva.train.integration.integrate_model`) and k the width of u. As no batch enters, a cell gets the same
    state in whatever company it comes, and cells of a batch that was never seen can be mapped.

    Parameters
    ----------
    n_tokens
        Rows of the table A: special tokens and genes.
    state_dim, own_dim
        Widths of z and x; `dim` is their sum, the width of the integrated state.
    hidden
        Width of the two hidden SiLU layers.
    """

    def __init__(self, n_tokens: int, state_dim: int, own_dim: int, hidden: int) -> None:
        super().__init__()
        self.dim = state_dim + own_dim
        self.table = nn.Embedding(n_tokens, own_dim)
        self.mlp = nn.Sequential(
            nn.Linear(self.dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, self.dim)
        )
        nn.init.zeros_(self.table.weight)

    def features(self, state: Tensor, tokens: Tensor, values: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return u, `(B, dim)`, of cells with these states `(B, state_dim)`."""
        own = weighted_sum(self.table.weight, tokens, values, cu_seqlens)
        return torch.cat([F.normalize(state, dim=1), F.normalize(own, dim=1)], dim=1) / 2**0.5

    def integrated(self, features: Tensor) -> Tensor:
        """Return w, `(B, dim)`, of u."""
        return F.normalize(features + STEP * self.mlp(features * self.dim**0.5), dim=1)

    def forward(self, state: Tensor, tokens: Tensor, values: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Map cells to integrated states `(B, dim)`; arguments as in :meth:`features`."""
        return self.integrated(self.features(state, tokens, values, cu_seqlens))
