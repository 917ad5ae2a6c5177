"""The door: checks what came in, picks a backend, never falls back in silence."""

from __future__ import annotations

import torch
from torch import Tensor

from scdiva.kernels import _reference, _sdpa

BACKENDS = ("auto", "sdpa", "reference", "triton")


def rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Rotate queries and keys, then attend within each cell, in both directions.

    Per head, :math:`\mathrm{softmax}(\tilde Q \tilde K^\top / \sqrt{d_h})\, V` with :math:`\tilde Q, \tilde K` turned
    by RoPE (paper, eqs. `mha` and `rope_rotation`). Values aren't rotated.

    Parameters
    ----------
    q, k, v
        Packed `(T, H, D)`, all cells one after the other, together with `cu_seqlens`; or padded `(B, L, H, D)`.
    cos, sin
        Tables `(max_pos, D/2)` from :func:`rope_tables`; both `None` for no rotation. Positions restart with each
        cell; in the padded layout the position is the column.
    cu_seqlens
        int32 or int64 `(B + 1,)`, cell boundaries of the packed layout, from 0 to `T`. Empty cells are allowed.
    key_padding_mask
        bool `(B, L)` of the padded layout, `True` where a token is real; `None` if all are. Nothing attends to
        padding, and the output there is 0.
    backend
        `"auto"` (now SDPA everywhere), `"sdpa"`, `"reference"` (float32, written as in the paper). An explicit
        backend that can't run raises.

    Returns
    -------
    Tensor of the shape and dtype of `q`.

    Raises
    ------
    ValueError
        If shapes, boundaries, mask or tables don't fit each other, or the backend is unknown.
    NotImplementedError
        For `backend="triton"`, which this version doesn't hold.
    """
    if backend not in BACKENDS:
        raise ValueError(f"Unknown attention backend {backend!r}; choose one of {', '.join(map(repr, BACKENDS))}.")
    if backend == "triton":
        raise NotImplementedError("The Triton backend comes with the next release; pass backend='auto' or 'sdpa'.")
    _check_shapes(q, k, v, cu_seqlens, key_padding_mask)
    longest = _longest(cu_seqlens, q.shape[0]) if cu_seqlens is not None else q.shape[1]
    _check_tables(cos, sin, longest, q.shape[-1])

    module = _reference if backend == "reference" else _sdpa
    if cu_seqlens is not None:
        return module.packed(q, k, v, cos, sin, cu_seqlens)
    return module.padded(q, k, v, cos, sin, key_padding_mask)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None) -> None:
    if not q.shape == k.shape == v.shape:
        raise ValueError(f"q, k and v must have one shape; got {[tuple(x.shape) for x in (q, k, v)]}.")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k and v must have one floating dtype; got {[str(x.dtype) for x in (q, k, v)]}.")
    if cu_seqlens is not None:
        if mask is not None:
            raise ValueError("Packed cells have no padding: pass cu_seqlens or key_padding_mask, not both.")
        if q.dim() != 3:
            raise ValueError(f"With cu_seqlens, q, k and v must be (T, H, D); got {tuple(q.shape)}.")
        return
    if q.dim() != 4:
        raise ValueError(
            f"Without cu_seqlens, q, k and v must be (B, L, H, D); got {tuple(q.shape)}. "
            "Pass cu_seqlens for packed cells."
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != q.shape[:2]):
        raise ValueError(
            f"key_padding_mask must be bool (B, L) = {tuple(q.shape[:2])}, True for real tokens; "
            f"got {mask.dtype} {tuple(mask.shape)}."
        )


def _longest(cu_seqlens: Tensor, n_tokens: int) -> int:
    """Check the cell boundaries and return the length of the longest cell."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "cu_seqlens must be a 1-D int32 tensor of one number more than there are cells (at least one cell); "
            f"got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}."
        )
    lengths = cu_seqlens.diff()
    first, last, shortest, longest = torch.stack([cu_seqlens[0], cu_seqlens[-1], lengths.min(), lengths.max()]).tolist()
    if first != 0 or last != n_tokens or shortest < 0:
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {n_tokens}; it goes from {first} to {last}"
            + (" and falls in between." if shortest < 0 else ".")
        )
    return longest


def _check_tables(cos: Tensor | None, sin: Tensor | None, longest: int, head_dim: int) -> None:
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError("Pass both cos and sin from rope_tables, or neither for attention without rotation.")
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * cos.shape[1] != head_dim:
        raise ValueError(
            f"cos and sin must be (max_pos, {head_dim}/2) for head_dim {head_dim}; "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}."
        )
    if longest > cos.shape[0]:
        raise ValueError(
            f"The longest cell has {longest} tokens, but cos and sin hold {cos.shape[0]} positions; "
            f"make them with rope_tables(max_pos >= {longest}, ...)."
        )
