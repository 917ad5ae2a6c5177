"""Triton kernel of :func:`scdiva.kernels._attention.first_token_attention`; imported only when chosen."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_K, WARPS, STAGES = 64, 4, 3
"""Keys of a tile, warps of a program, depth of the pipeline; there is one program for each cell and head."""


@triton.jit
def first_token_kernel(
    Q, K, V, Out, Cos, Sin, Cu, q_cell, k_token, v_token, n_heads, factor,
    HALF: tl.constexpr, BLOCK_K: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Attention of one head of the first token of one cell, with an online softmax to base 2 in float32."""
    pair = tl.program_id(0)
    cell, head = pair // n_heads, pair % n_heads
    start = tl.load(Cu + cell)
    length = tl.load(Cu + cell + 1) - start
    half, column = tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    Q += cell.to(tl.int64) * q_cell + head * 2 * HALF
    K += start.to(tl.int64) * k_token + head * 2 * HALF
    V += start.to(tl.int64) * v_token + head * 2 * HALF
    q_first = tl.load(Q + half).to(tl.float32) * factor
    q_second = tl.load(Q + HALF + half).to(tl.float32) * factor

    acc = tl.zeros([2 * HALF], tl.float32)
    largest = -float("inf")
    total = 0.0
    for first_key in tl.range(0, length, BLOCK_K):
        keys = first_key + tl.arange(0, BLOCK_K)
        inside = keys < length
        at = K + keys[:, None] * k_token + half[None, :]
        first = tl.load(at, mask=inside[:, None], other=0.0)
        second = tl.load(at + HALF, mask=inside[:, None], other=0.0)
        v = tl.load(V + keys[:, None] * v_token + column[None, :], mask=inside[:, None], other=0.0)
        dtype = first.dtype
        first, second = first.to(tl.float32), second.to(tl.float32)
        if ROTATE:
            turn = keys[:, None] * HALF + half[None, :]
            cos = tl.load(Cos + turn, mask=inside[:, None], other=0.0)
            sin = tl.load(Sin + turn, mask=inside[:, None], other=0.0)
            first, second = first * cos - second * sin, second * cos + first * sin
            # rounded as the keys of the other tokens are
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        scores = tl.sum(first * q_first[None, :] + second * q_second[None, :], 1)
        scores = tl.where(inside, scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 0))
        decay = tl.exp2(largest - new)
        weights = tl.exp2(scores - new)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * v.to(tl.float32), 0)
        largest = new
    Out += pair.to(tl.int64) * (2 * HALF)
    tl.store(Out + column, (acc / total).to(Out.dtype.element_ty))


def packed(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Attend from the first token of each cell; see :func:`scdiva.kernels._attention.first_token_attention`."""
    return _first_token(q, k, v, cos, sin, cu_seqlens.to(torch.int32))


@torch.library.custom_op(
    "scdiva::first_token_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor cu_seqlens) -> Tensor",
)
def _first_token(q, k, v, cos, sin, cu_seqlens):
    n_cells, n_heads, head_dim = q.shape
    q, k, v = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if n_cells == 0:
        return out
    factor = math.log2(math.e) / math.sqrt(head_dim)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        first_token_kernel[(n_cells * n_heads,)](
            q, k, v, out, cos, sin, cu_seqlens, q.stride(0), k.stride(0), v.stride(0), n_heads, factor,
            HALF=head_dim // 2, BLOCK_K=BLOCK_K, ROTATE=cos is not None,
            num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@_first_token.register_fake
def _(q, k, v, cos, sin, cu_seqlens):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
