"""What enters the network: who a gene is, how much of it there is, and (optionally) how corrupted the cell is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva.nn.layers import INIT_STD, linear


class GeneValueEmbedding(nn.Module):
    r"""Sum of the embedding of the gene and that of its value.

    :math:`\mathrm{Emb}_{id}(g) + W_2\,\mathrm{SiLU}(W_1 v + b_1) + b_2` (paper, eqs. `joint_embedding`, `mlp_val`).
    A hidden value enters as the learned vector `hidden_value` in place of the MLP's output (paper, algorithm 1,
    line 9), not as 0, which would mean "measured and absent".

    Parameters
    ----------
    n_tokens
        Rows of the table: special tokens and genes.
    dim
        Width of the embedding and of the value MLP.
    """

    def __init__(self, n_tokens: int, dim: int) -> None:
        super().__init__()
        self.gene = nn.Embedding(n_tokens, dim)
        # W1 sees one number of size ~1, so its weights are of size 1 and its units bend at different values;
        # W2 brings the sum of `dim` such units back to the size of a gene's embedding
        self.value_in = linear(1, dim, bias=True, std=1.0)
        self.value_out = linear(dim, dim, bias=True, std=INIT_STD / dim**0.5)
        self.hidden_value = nn.Parameter(torch.empty(dim))
        nn.init.normal_(self.gene.weight, std=INIT_STD)
        nn.init.normal_(self.value_in.bias)
        nn.init.normal_(self.hidden_value, std=INIT_STD)

    def forward(self, tokens: Tensor, values: Tensor, value_mask: Tensor) -> Tensor:
        """Embed packed tokens.

        Parameters
        ----------
        tokens
            int64 `(T,)`.
        values
            Log-normalised expression `(T,)`; what stands where `value_mask` is set is never read.
        value_mask
            bool `(T,)`, `True` where the value is hidden.

        Returns
        -------
        `(T, dim)`.
        """
        shown = values.to(self.value_in.weight.dtype).masked_fill(value_mask, 0.0).unsqueeze(-1)
        value = self.value_out(F.silu(self.value_in(shown)))
        return self.gene(tokens) + torch.where(value_mask.unsqueeze(-1), self.hidden_value, value)


class TimeEmbedding(nn.Module):
    r"""Embedding of the diffusion time, for models conditioned on it.

    Sines and cosines of :math:`1000\,t` at geometric frequencies (Vaswani et al. 2017; Ho et al. 2020), then a
    two-layer SiLU MLP whose last layer starts at zero, so that switching it on changes nothing at first. The paper's
    architecture has no such input; the optimal denoiser of an absorbing process doesn't need it (Ou et al. 2024).

    Parameters
    ----------
    dim
        Width; even.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.hidden = linear(dim, dim, bias=True)
        self.out = linear(dim, dim, bias=True, std=0.0)

    def forward(self, time: Tensor) -> Tensor:
        """Embed times `(B,)` in [0, 1] as `(B, dim)`."""
        weight = self.hidden.weight
        pair = torch.arange(self.dim // 2, device=weight.device)
        angle = 1000.0 * time.to(torch.float32).unsqueeze(-1) * 10_000.0 ** (-2.0 * pair / self.dim)
        return self.out(F.silu(self.hidden(torch.cat([angle.sin(), angle.cos()], dim=-1).to(weight.dtype))))
