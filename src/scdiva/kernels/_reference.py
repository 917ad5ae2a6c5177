"""Attention as the paper writes it: one cell at a time, float32 (float64 for float64 input), weights on request.

Every other backend is held against this one. Slow, and meant to be read.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from scdiva.kernels._rope import apply_rope


def one_cell(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend within one cell.

    Parameters
    ----------
    q, k, v
        `(L, H, D)`; position `i` of the cell is row `i`.
    cos, sin
        Rotation of each row, `(L, D/2)`, or `None`.

    Returns
    -------
    Output `(L, H, D)` and weights `(H, L, L)` (query, key), both float32 or float64.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if cos is not None and sin is not None:
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v), weights


def packed(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Attend within each cell of the packed layout; see :func:`scdiva.kernels.rope_attention`."""
    out, _ = packed_with_weights(q, k, v, cos, sin, cu_seqlens)
    return out


def packed_with_weights(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """As `packed`, with the attention weights `(H, L_b, L_b)` (query, key) of each cell."""
    outputs, weights = [], []
    bounds = cu_seqlens.tolist()
    for start, stop in pairwise(bounds):
        turn = slice(0, stop - start)
        rows = slice(start, stop)
        out, weight = one_cell(
            q[rows], k[rows], v[rows], None if cos is None else cos[turn], None if sin is None else sin[turn]
        )
        outputs.append(out)
        weights.append(weight)
    return torch.cat(outputs).to(q.dtype), weights


def padded(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None) -> Tensor:
    """Attend within each row of the padded layout; see :func:`scdiva.kernels.rope_attention`."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        real = torch.arange(q.shape[1], device=q.device) if mask is None else mask[b].nonzero().squeeze(1)
        cell, _ = one_cell(
            q[b, real], k[b, real], v[b, real], None if cos is None else cos[real], None if sin is None else sin[real]
        )
        out = out.index_put((torch.full_like(real, b), real), cell.to(q.dtype))
    return out
