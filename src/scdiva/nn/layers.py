"""RMSNorm, SwiGLU, attention and the pre-norm block (paper, appendix "Model Architecture")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva.kernels import attention_weights, rope_attention

INIT_STD = 0.02
"""Standard deviation of freshly drawn weights, as in GPT-2; the paper gives none."""


def linear(n_in: int, n_out: int, *, bias: bool = False, std: float = INIT_STD) -> nn.Linear:
    """Make a linear layer with weights from N(0, std²) and zero bias."""
    layer = nn.Linear(n_in, n_out, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class RMSNorm(nn.Module):
    r"""Scale every vector to unit root mean square.

    :math:`x / \sqrt{\mathrm{Mean}(x^2) + \epsilon} \odot \gamma` (paper, eq. `rmsnorm`; Zhang & Sennrich 2019),
    accumulated in float32 whatever the dtype of `x` (paper, section 3.5).

    Parameters
    ----------
    dim
        Length of the last axis.
    eps
        :math:`\epsilon`; 1e-5 in the paper.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of `x`, any shape; the dtype is kept."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    r"""Gated feed-forward network.

    :math:`(\mathrm{SiLU}(x W_g) \odot (x W_u))\, W_d` (paper, eq. `swiglu`; Shazeer 2020), without biases.

    Parameters
    ----------
    dim, hidden
        Width of the stream and of the gate.
    out_std
        Standard deviation of the initial :math:`W_d`.
    """

    def __init__(self, dim: int, hidden: int, *, out_std: float = INIT_STD) -> None:
        super().__init__()
        self.gate = linear(dim, hidden)
        self.up = linear(dim, hidden)
        self.down = linear(hidden, dim, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., dim)` to `(..., dim)`."""
        gate, up = self.gate(x), self.up(x)
        if torch.is_grad_enabled():
            return self.down(F.silu(gate) * up)
        # in place: on a CPU, fresh memory of this width costs more than what is written to it
        return self.down(F.silu(gate, inplace=True).mul_(up))


class Attention(nn.Module):
    r"""Bidirectional multi-head attention within each cell.

    :math:`\mathrm{Concat}(\mathrm{head}_1 \ldots \mathrm{head}_H) W_O` (paper, eq. `mha`), without biases.
    :math:`W_Q, W_K, W_V` lie one after the other in `qkv.weight`, each `(dim, dim)`.

    Parameters
    ----------
    dim, n_heads
        Width of the stream; number of heads, which divides it.
    out_std
        Standard deviation of the initial :math:`W_O`.
    """

    def __init__(self, dim: int, n_heads: int, *, out_std: float = INIT_STD) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = linear(dim, 3 * dim)
        self.out = linear(dim, dim, std=out_std)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        backend: str = "auto",
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Attend over packed tokens `(T, dim)`; arguments as in :func:`scdiva.kernels.rope_attention`."""
        q, k, v = self.project(x)
        heads = rope_attention(q, k, v, cos=cos, sin=sin, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, backend=backend)
        return self.out(heads.flatten(start_dim=1))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Make queries, keys and values, each `(T, H, D)`, of packed tokens `(T, dim)`."""
        return self.qkv(x).view(x.shape[0], 3, self.n_heads, -1).unbind(dim=1)


class Block(nn.Module):
    r"""Pre-norm transformer block.

    :math:`x' = x + \mathrm{Attention}(\mathrm{RMSNorm}(x))`, then
    :math:`x' + \mathrm{FFN}(\mathrm{RMSNorm}(x'))` (paper, eqs. `prenorm_attn` and `prenorm_ffn`).

    Parameters
    ----------
    dim, n_heads, ffn_dim
        Widths of stream and gate, number of heads.
    eps
        Of both norms.
    out_std
        Standard deviation of the two weights that write to the residual stream.
    """

    def __init__(self, dim: int, n_heads: int, ffn_dim: int, *, eps: float = 1e-5, out_std: float = INIT_STD) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, eps)
        self.attention = Attention(dim, n_heads, out_std=out_std)
        self.ffn_norm = RMSNorm(dim, eps)
        self.ffn = SwiGLU(dim, ffn_dim, out_std=out_std)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        backend: str = "auto",
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Map packed tokens `(T, dim)` to `(T, dim)`; arguments as in :func:`scdiva.kernels.rope_attention`."""
        x = x + self.attention(self.attention_norm(x), cu_seqlens, cos, sin, backend, max_seqlen)
        return x + self.ffn(self.ffn_norm(x))

    def attention_weights(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        heads: Sequence[int] | None = None,
    ) -> Iterator[Tensor]:
        """Return what each cell attends to in this block, in turn; see :func:`scdiva.kernels.attention_weights`."""
        q, k, _ = self.attention.project(self.attention_norm(x))
        return attention_weights(q, k, cos=cos, sin=sin, cu_seqlens=cu_seqlens, heads=heads)
