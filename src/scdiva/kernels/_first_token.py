"""Attention of the first token of each packed cell, from which the last block computes the cell state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from scdiva.kernels._attention import resolve_backend
from scdiva.kernels._reference import apply_rope, positions


def first_token_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    cu_seqlens: Tensor,
    backend: str = "auto",
) -> Tensor:
    r"""Compute attention of the first token of each cell to all tokens of the cell.

    Equal to the rows `cu_seqlens[:-1]` of :func:`scdiva.kernels.rope_attention`. RoPE does not change position 0, so
    only keys are rotated. The call does not synchronise with the device.

    Parameters
    ----------
    q
        `(B, H, D)`, queries of the first tokens.
    k, v
        Packed `(T, H, D)`.
    cos, sin
        As for :func:`scdiva.kernels.rope_attention`.
    cu_seqlens
        `(B + 1,)`, cell boundaries. Not checked; no cell may be empty.
    backend
        `"triton"`, or `"auto"` where it resolves to Triton: a fused kernel if no gradient is required. Otherwise plain
        tensor operations.

    Returns
    -------
    Tensor of the shape and dtype of `q`.
    """
    backend = resolve_backend(backend, head_dim=q.shape[-1], dtype=q.dtype, device=q.device)
    differentiated = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if backend == "triton" and not differentiated:
        from scdiva.kernels import _triton_first_token

        return _triton_first_token.packed(q, k, v, cos, sin, cu_seqlens)
    if cu_seqlens.numel() == 2:
        if cos is not None and sin is not None:
            k = apply_rope(k, cos[: len(k)], sin[: len(k)])
        return F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)).transpose(0, 1)
    return _by_segments(q, k, v, cos, sin, cu_seqlens)


def _by_segments(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Softmax over the segments of a ragged batch, in float32 (float64 for float64 input), without atomics."""
    lengths, n_tokens = cu_seqlens.long().diff(), k.shape[0]
    dtype = torch.promote_types(q.dtype, torch.float32)
    if cos is not None and sin is not None:
        where = positions(cu_seqlens, n_tokens)
        k = apply_rope(k, cos[where], sin[where])

    def of_tokens(x: Tensor) -> Tensor:
        return torch.repeat_interleave(x, lengths, dim=0, output_size=n_tokens)

    def of_cells(x: Tensor, reduce: str = "sum") -> Tensor:
        return torch.segment_reduce(x.contiguous(), reduce, lengths=lengths, axis=0, unsafe=True)

    scores = (of_tokens(q.to(dtype)) * k.to(dtype)).sum(dim=-1) * q.shape[-1] ** -0.5
    weights = (scores - of_tokens(of_cells(scores.detach(), "max"))).exp()
    heads = of_cells(weights.unsqueeze(-1) * v.to(dtype)) / of_cells(weights).unsqueeze(-1)
    return heads.to(q.dtype)
