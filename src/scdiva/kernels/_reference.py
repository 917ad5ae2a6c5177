"""Attention as the paper writes it: one cell at a time, float32 (float64 for float64 input), weights on request.

Every other backend is held against this one. Slow, and meant to be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from scdiva.kernels._rope import apply_rope


def one_cell(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Attend within one cell.

    Parameters
    ----------
    q, k, v
        `(L, H, D)`; position `i` of the cell is row `i`.
    cos, sin
        Rotation of each row, `(L, D/2)`, or `None`.

    Returns
    -------
    `(L, H, D)`, float32 or float64.
    """
    weights = cell_weights(q, k, cos, sin)
    return torch.einsum("hqk,khd->qhd", weights, v.to(weights.dtype))


def cell_weights(q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Attention weights `(H, L, L)` (head, query, key) of one cell; arguments as for :func:`one_cell`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    if cos is not None and sin is not None:
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    return (torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5).softmax(dim=-1)


def packed(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Attend within each cell of the packed layout; see :func:`scdiva.kernels.rope_attention`."""
    cells = [one_cell(q[rows], k[rows], v[rows], *tables) for rows, tables in each_cell(cu_seqlens, cos, sin)]
    return torch.cat(cells).to(q.dtype)


def packed_weights(
    q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor
) -> Iterator[Tensor]:
    """Weights of each packed cell in turn; see :func:`scdiva.kernels.attention_weights`."""
    for rows, tables in each_cell(cu_seqlens, cos, sin):
        yield cell_weights(q[rows], k[rows], *tables)


def each_cell(
    cu_seqlens: Tensor, cos: Tensor | None, sin: Tensor | None
) -> Iterator[tuple[slice, tuple[Tensor | None, Tensor | None]]]:
    """Rows of each packed cell, and the rotations of its positions."""
    for start, stop in pairwise(cu_seqlens.tolist()):
        length = stop - start
        yield slice(start, stop), (None if cos is None else cos[:length], None if sin is None else sin[:length])
