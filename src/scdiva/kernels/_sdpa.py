"""Attention through `torch.nn.functional.scaled_dot_product_attention`.

Packed cells are sorted by length, and cells of equal length are processed in one call, without a mask, padding or
nested tensors. On a CPU this is the fastest of these four methods, and the result of a cell doesn't depend on the
lengths of other cells. On a GPU, each call waits for the lengths; this backend is used there if Triton can't run.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from scdiva.kernels._reference import apply_rope, positions

SHORT, IN_CACHE = 520, 2**20
"""Maximum number of tokens of a cell for plain bfloat16 products on a CPU, and maximum number of weights per product.

The fused kernel takes longer, including the backward pass: 77 ms compared with 31 ms for 16 cells of 257 tokens and 4
heads, and 114 ms compared with 65 ms for 12 cells of 513 tokens. The weights of all these cells in one product don't
fit into the cache (113 ms). Plain products store the weights for the backward pass. For longer cells these would take
too much memory, so the fused kernel is used."""


def packed(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Attend within each cell of the packed layout; see :func:`scdiva.kernels.rope_attention`."""
    if q.shape[0] == 0:
        return torch.zeros_like(q)
    if cu_seqlens.numel() == 2:  # one cell: nothing to sort
        return _one_length(q[None], k[None], v[None], cos, sin)[0]
    if cos is not None and sin is not None:
        where = positions(cu_seqlens, q.shape[0])
        q, k = apply_rope(q, cos[where], sin[where]), apply_rope(k, cos[where], sin[where])
    rows, groups = _by_length(cu_seqlens, q.shape[0])
    sizes = [length * n_cells for length, n_cells in groups]
    # split, not slices: the gradient of each slice would be as large as the whole batch
    parts = zip(*(x.index_select(0, rows).split(sizes) for x in (q, k, v)), strict=True)
    outputs = []
    for (length, n_cells), of_length in zip(groups, parts, strict=True):
        out = _attend(*(x.view(n_cells, length, *x.shape[1:]).transpose(1, 2) for x in of_length))
        outputs.append(out.transpose(1, 2).reshape(length * n_cells, *q.shape[1:]))
    back = torch.empty_like(rows)
    back[rows] = torch.arange(rows.numel(), device=rows.device)
    return torch.cat(outputs).index_select(0, back)


def _by_length(cu_seqlens: Tensor, n_tokens: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Rows of the packed layout in order of cell length, and (length, number of cells) of each run."""
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    order = torch.argsort(lengths, stable=True)
    by_length = lengths[order]
    shift = bounds[:-1][order] - (by_length.cumsum(0) - by_length)
    rows = torch.repeat_interleave(shift, by_length, output_size=n_tokens)
    rows += torch.arange(n_tokens, device=cu_seqlens.device)
    length, count = torch.unique_consecutive(by_length, return_counts=True)
    return rows, [(n, c) for n, c in zip(length.tolist(), count.tolist(), strict=True) if n > 0]


def _one_length(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Attend within cells of one length `(B, L, H, D)`."""
    if _by_head(q, k, v):
        return _one_head_at_a_time(q, k, v, cos, sin)
    length = q.shape[1]
    if cos is not None and sin is not None:
        q, k = apply_rope(q, cos[:length], sin[:length]), apply_rope(k, cos[:length], sin[:length])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _attend(q, k, v).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend within cells `(B, H, L, D)`."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= SHORT:
        n_cells = max(1, IN_CACHE // (q.shape[1] * q.shape[2] ** 2))
        parts = zip(*(x.split(n_cells) for x in (q * q.shape[3] ** -0.5, k, v)), strict=True)
        return torch.cat([(q @ k.transpose(2, 3)).softmax(dim=3) @ v for q, k, v in parts])
    return F.scaled_dot_product_attention(q, k, v)


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether plain matrix products are faster than SDPA: bfloat16 on a CPU, where SDPA gains nothing over float32."""
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return False
    return not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))


def _one_head_at_a_time(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Attend within cells of one length `(B, L, H, D)`, holding the weights of one head of one cell, `(L, L)`."""
    length, scale = q.shape[1], q.shape[-1] ** -0.5
    if cos is not None and sin is not None:
        cos, sin = cos[:length], sin[:length]
        q, k = apply_rope(q, cos * scale, sin * scale), apply_rope(k, cos, sin)
    else:
        q = q * scale
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, weights = torch.empty_like(q), q.new_empty(length, length)
    for b, h in product(range(q.shape[0]), range(q.shape[1])):
        # one buffer, which stays in the cache: allocating memory for each head takes as long as the arithmetic
        torch.mm(q[b, h], k[b, h].T, out=weights)
        torch.softmax(weights, dim=-1, out=weights)
        torch.mm(weights, v[b, h], out=out[b, h])
    return out.transpose(1, 2)
