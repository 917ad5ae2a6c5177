"""Rotary positions, and attention as the paper writes it: one cell at a time, float32 (float64 for float64 input).

Positions are ranks of genes in their cell (paper, appendix "Component Formulations", RoPE). All other backends are
tested against this implementation, which is slow and written for readability.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor


def rope_tables(
    max_pos: int, head_dim: int, base: float = 10_000.0, *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    r"""Cosines and sines of every rotation angle.

    The angle of position :math:`p` and pair :math:`j` is :math:`p\,\omega_j` with
    :math:`\omega_j = \Theta^{-2j/d_h}` (paper, eq. `rope_rotation`; Su et al. 2024). Angles are formed in float64,
    because in float32 the angle of rank 1,200 is rounded by up to 6e-5.

    Parameters
    ----------
    max_pos
        Number of positions; positions `0 ... max_pos - 1` get a row.
    head_dim
        Width of one attention head, :math:`d_h`; even.
    base
        :math:`\Theta`; 10,000 in the paper.
    device
        Device of the tables; `None`: the CPU. They are always computed on the CPU, since not every device supports
        float64.

    Returns
    -------
    `cos` and `sin`, each float32 of shape `(max_pos, head_dim // 2)`.

    Raises
    ------
    ValueError
        If `head_dim` is odd or not positive, or `max_pos` is negative.

    Examples
    --------
    >>> import torch
    >>> from scdiva.kernels import rope_tables
    >>> cos, sin = rope_tables(10, 8)
    >>> cos.shape
    torch.Size([10, 4])
    """
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"RoPE rotates pairs of coordinates, so head_dim must be even and positive; got {head_dim}.")
    if max_pos < 0:
        raise ValueError(f"max_pos must not be negative; got {max_pos}.")
    pair = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
    omega = float(base) ** (-2.0 * pair / head_dim)
    angle = torch.outer(torch.arange(max_pos, dtype=torch.float64, device="cpu"), omega)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[j], x[j + D/2])` of the last axis.

    The paper writes the rotation for neighbouring coordinates. Here the first half of a head holds the first
    coordinate of every pair and the second half the second ("half-split"): the same map after a fixed permutation of
    the columns of W_Q and W_K, and two contiguous reads instead of a strided one.

    Parameters
    ----------
    x
        `(..., H, D)`.
    cos, sin
        `(..., D/2)` for the position of each entry of `x`, without the head axis; broadcast over heads.

    Returns
    -------
    The rotated tensor, in the dtype of `x`; computed in float32 (float64 for float64 input).

    Examples
    --------
    >>> import torch
    >>> from scdiva.kernels import apply_rope, rope_tables
    >>> cos, sin = rope_tables(5, 8)
    >>> x = torch.ones(5, 2, 8)
    >>> bool(torch.equal(apply_rope(x, cos, sin)[0], x[0]))  # the first place is not turned
    True
    """
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def positions(cu_seqlens: Tensor, n_tokens: int) -> Tensor:
    """Position of every packed token in its own cell.

    Parameters
    ----------
    cu_seqlens
        Cell boundaries `(B + 1,)`: cell `b` holds tokens `cu_seqlens[b] ... cu_seqlens[b + 1] - 1`.
    n_tokens
        `T`; passed to avoid a synchronisation with the device.

    Returns
    -------
    int64 `(T,)`, restarting at 0 with each cell.

    Examples
    --------
    >>> import torch
    >>> from scdiva.kernels import positions
    >>> positions(torch.tensor([0, 3, 5]), 5).tolist()
    [0, 1, 2, 0, 1]
    """
    bounds = cu_seqlens.long()
    starts = torch.repeat_interleave(bounds[:-1], bounds.diff(), output_size=n_tokens)
    return torch.arange(n_tokens, device=cu_seqlens.device) - starts


def cell_weights(q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Attention weights within one cell.

    Parameters
    ----------
    q, k
        `(L, H, D)`; position `i` of the cell is row `i`.
    cos, sin
        Rotation of each position, or `None`.

    Returns
    -------
    `(H, L, L)` (head, query, key), float32 or float64.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    if cos is not None and sin is not None:
        cos, sin = cos[: len(q)], sin[: len(q)]
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    return (torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5).softmax(dim=-1)


def packed_weights(
    q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor
) -> Iterator[Tensor]:
    """Weights of each packed cell in turn; see :func:`scdiva.kernels.attention_weights`."""
    for start, stop in pairwise(cu_seqlens.tolist()):
        yield cell_weights(q[start:stop], k[start:stop], cos, sin)


def packed(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Attend within each cell of the packed layout; see :func:`scdiva.kernels.rope_attention`."""
    values = v.split(cu_seqlens.diff().tolist())
    weights = packed_weights(q, k, cos, sin, cu_seqlens)
    cells = [torch.einsum("hqk,khd->qhd", w, x.to(w.dtype)) for w, x in zip(weights, values, strict=True)]
    return torch.cat(cells).to(q.dtype)
