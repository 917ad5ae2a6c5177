"""Dispatcher of attention: check the input and select a backend; a fallback to SDPA on a GPU is logged."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scdiva.kernels import _reference, _sdpa
from scdiva.kernels._reference import apply_rope, positions, rope_tables
from scdiva.kernels._triton_configs import HEAD_DIMS, MIN_CAPABILITY, Plan

BACKENDS = ("auto", "triton", "sdpa", "reference")
_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Rotate queries and keys, then attend within each cell, in both directions.

    Per head, :math:`\mathrm{softmax}(\tilde Q \tilde K^\top / \sqrt{d_h})\, V` with :math:`\tilde Q, \tilde K` rotated
    by RoPE (paper, eqs. `mha` and `rope_rotation`). Values aren't rotated.

    Parameters
    ----------
    q, k, v
        Packed `(T, H, D)`, all cells one after the other.
    cos, sin
        Tables `(max_pos, D/2)` from :func:`rope_tables`; both `None` for no rotation. Positions restart with each
        cell.
    cu_seqlens
        int32 or int64 `(B + 1,)`, cell boundaries, from 0 to `T`. Empty cells are allowed.
    max_seqlen
        Upper bound of the cells' lengths. If given, it and `cu_seqlens` are not checked and must be correct; with
        Triton, the host then does not wait for the GPU. `None`: `cu_seqlens` is checked, and the longest cell is
        determined.
    backend
        `"triton"`: one fused kernel, on CUDA devices from compute capability 8.0; `"sdpa"`:
        `scaled_dot_product_attention` of rotated tensors, anywhere; `"reference"`: float32, written as in the paper;
        `"auto"`: Triton on CUDA in bfloat16 and float16, otherwise SDPA; on CUDA a message is logged if SDPA is used,
        that is, in float32 or if Triton can't run. An explicit backend that can't run raises an error.

    Returns
    -------
    Tensor of the shape and dtype of `q`.

    Raises
    ------
    ValueError
        If shapes, boundaries or tables don't fit each other, the backend is unknown, or Triton is requested with a head
        width, dtype or device that it has no kernel for.
    ImportError
        If Triton is requested and not installed.

    Examples
    --------
    >>> import torch
    >>> from scdiva.kernels import rope_attention
    >>> cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)  # two cells, end to end
    >>> q, k, v = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    >>> rope_attention(q, k, v, cu_seqlens=cu_seqlens).shape
    torch.Size([5, 2, 8])
    """
    backend = resolve_backend(backend, head_dim=q.shape[-1], dtype=q.dtype, device=q.device)
    _check_shapes(q, k, v)
    if backend == "triton":
        qkv = torch.stack([q, k, v], dim=1)
        return rope_attention_qkv(qkv, cos=cos, sin=sin, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, backend=backend)
    longest = longest_cell(cu_seqlens, q.shape[0])[0] if max_seqlen is None else max_seqlen
    _check_tables(cos, sin, longest, q.shape[-1])
    module = _reference if backend == "reference" else _sdpa
    return module.packed(q, k, v, cos, sin, cu_seqlens)


def rope_attention_qkv(
    qkv: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """:func:`rope_attention` of queries, keys and values in one tensor, as a projection returns them.

    The fused kernel reads them in place and writes one gradient. :func:`rope_attention` copies them into one tensor
    first.

    Parameters
    ----------
    qkv
        Packed `(T, 3, H, D)`, all cells one after the other.
    cos, sin, cu_seqlens, max_seqlen, backend
        As for :func:`rope_attention`.

    Returns
    -------
    `(T, H, D)`, of the dtype of `qkv`.

    Raises
    ------
    ValueError, ImportError
        As :func:`rope_attention`.

    Examples
    --------
    >>> import torch
    >>> from scdiva.kernels import rope_attention_qkv
    >>> cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)  # two cells, end to end
    >>> qkv = torch.randn(5, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    >>> rope_attention_qkv(qkv, cu_seqlens=cu_seqlens).shape
    torch.Size([5, 2, 8])
    """
    if qkv.dim() != 4 or qkv.shape[1] != 3 or not qkv.is_floating_point():
        raise ValueError(f"qkv must be packed, (T, 3, H, D), of a floating dtype; got {tuple(qkv.shape)} {qkv.dtype}.")
    backend = resolve_backend(backend, head_dim=qkv.shape[-1], dtype=qkv.dtype, device=qkv.device)
    if backend != "triton":
        return rope_attention(
            *qkv.unbind(1), cos=cos, sin=sin, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, backend=backend
        )
    from scdiva.kernels import _triton

    longest = longest_cell(cu_seqlens, qkv.shape[0])[0] if max_seqlen is None else max_seqlen
    _check_tables(cos, sin, longest, qkv.shape[-1])
    return _triton.packed(qkv, cos, sin, cu_seqlens.to(torch.int32), longest)


def attention_weights(
    q: Tensor, k: Tensor, *, cos: Tensor | None = None, sin: Tensor | None = None, cu_seqlens: Tensor
) -> Iterator[Tensor]:
    r"""Attention weights, one cell at a time.

    :math:`\mathrm{softmax}(\tilde Q \tilde K^\top / \sqrt{d_h})` (paper, eq. `mha`), the matrices that
    :func:`rope_attention` never forms. Only those of the current cell are in memory: summing them over cells takes
    `(H, L, L)` numbers, independent of the number of cells.

    Parameters
    ----------
    q, k
        Packed `(T, H, D)`.
    cos, sin, cu_seqlens
        As for :func:`rope_attention`.

    Yields
    ------
    float32 `(H, L_b, L_b)` (head, query, key) of each cell in turn; rows sum to 1.

    Raises
    ------
    ValueError
        If shapes, boundaries or tables don't fit each other.

    Examples
    --------
    >>> import torch
    >>> from scdiva.kernels import attention_weights
    >>> cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)  # two cells, end to end
    >>> q, k, v = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    >>> [weights.shape for weights in attention_weights(q, k, cu_seqlens=cu_seqlens)]
    [torch.Size([2, 3, 3]), torch.Size([2, 2, 2])]
    """
    _check_shapes(q, k)
    _check_tables(cos, sin, longest_cell(cu_seqlens, q.shape[0])[0], q.shape[-1])
    return _reference.packed_weights(q, k, cos, sin, cu_seqlens)


def autotune_attention(
    *, n_heads: int, head_dim: int, length: int, dtype: torch.dtype, device: torch.device | str, n_tokens: int = 65_536
) -> dict[str, Any]:
    """Time the fused kernel's launch configurations on this device, and keep the fastest for this process.

    Without tuning, the default configurations for the device's architecture are used. Tuning compiles some 25 kernels,
    which takes less than a minute the first time (Triton caches them on disk). The fastest configuration may differ
    between runs, and configurations sum in different orders: for bit-identical results, pass the plan of the first run
    to :func:`keep_attention_plan`.

    Parameters
    ----------
    n_heads, head_dim
        Number of heads, and width of each: 32, 64 or 128.
    length
        Tokens of a cell.
    dtype
        bfloat16, float16 or float32.
    device
        A CUDA device.
    n_tokens
        Tokens of the random batch that is timed.

    Returns
    -------
    The selected plan: tile sizes, warps and stages of each kernel, as plain types.

    Raises
    ------
    ValueError, ImportError
        As :func:`rope_attention` for `backend="triton"`.
    """
    cells = max(1, n_tokens // length)
    draw = torch.Generator(device).manual_seed(0)
    shape = (cells * length, 3, n_heads, head_dim)
    qkv = torch.randn(shape, generator=draw, device=device, dtype=dtype)
    resolve_backend("triton", head_dim=head_dim, dtype=dtype, device=qkv.device)
    from scdiva.kernels import _triton

    cos, sin = rope_tables(length, head_dim, device=qkv.device)
    bounds = torch.arange(0, (cells + 1) * length, length, dtype=torch.int32, device=qkv.device)
    plan = _triton.tune(qkv, cos, sin, bounds, length)
    logging.getLogger("scdiva").info("attention runs with %s on %s", plan, qkv.device)
    return plan.to_dict()


def keep_attention_plan(
    plan: Mapping[str, Any], *, head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Use a plan from :func:`autotune_attention` for the fused kernel in this process.

    Parameters
    ----------
    plan
        Result of :func:`autotune_attention` on a device of the same kind.
    head_dim, dtype, device
        As passed to :func:`autotune_attention`.

    Raises
    ------
    ValueError, ImportError
        As :func:`rope_attention` for `backend="triton"`.
    """
    device = torch.empty(0, device=device).device  # "cuda" does not name a specific device
    resolve_backend("triton", head_dim=head_dim, dtype=dtype, device=device)
    from scdiva.kernels import _triton

    _triton.keep(Plan.from_dict(plan), device, head_dim, dtype)


def resolve_backend(backend: str, *, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """Resolve `"auto"` to a backend for some tensors; check that an explicit backend can run.

    :func:`rope_attention` calls this function. Compiled code must call it beforehand, because a device can't be queried
    while a graph is traced.

    Parameters
    ----------
    backend
        As for :func:`rope_attention`.
    head_dim, dtype, device
        Head dimension, data type and device of the queries.

    Returns
    -------
    `"triton"`, `"sdpa"` or `"reference"`.

    Raises
    ------
    ValueError, ImportError
        As :func:`rope_attention` does for a backend.

    Examples
    --------
    >>> import torch
    >>> from scdiva.kernels import resolve_backend
    >>> resolve_backend("auto", head_dim=64, dtype=torch.float32, device=torch.device("cpu"))
    'sdpa'
    """
    if backend not in BACKENDS:
        raise ValueError(f"Unknown attention backend {backend!r}; choose one of {', '.join(map(repr, BACKENDS))}.")
    if backend not in ("triton", "auto"):
        return backend
    if backend == "auto" and device.type != "cuda":
        return "sdpa"
    obstacle = ""
    if head_dim not in HEAD_DIMS:
        obstacle = f"its heads have {', '.join(map(str, HEAD_DIMS))} numbers (dim / n_heads), not {head_dim}"
    elif dtype not in _TRITON_DTYPES:
        obstacle = f"it takes bfloat16, float16 or float32, not {dtype}"
    elif backend == "auto" and dtype == torch.float32:
        obstacle = "products in full float32 leave the tensor cores idle and spill registers; it is made for bfloat16"
    # a device can't be queried while a graph is traced; the operator itself raises an error if Triton can't run
    elif backend == "auto" or not torch.compiler.is_compiling():
        obstacle = _triton_obstacle(device.type, device.index)
    if not obstacle:
        return "triton"
    if backend == "auto":
        _log_once(obstacle)
        return "sdpa"
    kind = ImportError if "installed" in obstacle else ValueError
    raise kind(f"backend='triton' can't run: {obstacle}. Pass backend='auto' or 'sdpa' to do without.")


@functools.cache
def _triton_obstacle(device_type: str, index: int | None) -> str:
    """Reason why Triton can't run on a device; "" if it can."""
    if importlib.util.find_spec("triton") is None:
        return 'Triton is not installed (pip install "scdiva[gpu]")'
    from scdiva.kernels import _triton

    if _triton.INTERPRETED:
        return ""
    if device_type != "cuda":
        return f"it needs a CUDA device, and the tensors are on {device_type!r}"
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        return f"it needs compute capability {MIN_CAPABILITY}, and {torch.cuda.get_device_name(index)} has {capability}"
    return ""


@functools.cache
def _log_once(reason: str) -> None:
    logging.getLogger("scdiva").warning("attention runs through SDPA, not through the fused kernel: %s", reason)


def _check_shapes(q: Tensor, *others: Tensor) -> None:
    same = all(x.shape == q.shape and x.dtype == q.dtype for x in others)
    if not same or q.dim() != 3 or not q.is_floating_point():
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, *others))
        raise ValueError(f"q, k and v must be packed, (T, H, D), of one shape and one floating dtype; got {shapes}.")


def longest_cell(cu_seqlens: Tensor, n_tokens: int, *also: Tensor) -> tuple[int, ...]:
    """Check cell boundaries `(B + 1,)`; return the length of the longest cell, and the numbers in `also`.

    All are copied in one tensor, so that the host waits for the GPU once.

    Raises
    ------
    ValueError
        If they are not integers, have no cell, or don't ascend from 0 to the number of tokens.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "cu_seqlens must be a 1-D int32 tensor of one number more than there are cells (at least one cell); "
            f"got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}."
        )
    lengths = cu_seqlens.diff()
    ends = [cu_seqlens[0], cu_seqlens[-1], lengths.min(), lengths.max()]
    first, last, shortest, *numbers = torch.stack([*ends, *also]).tolist()
    if first != 0 or last != n_tokens or shortest < 0:
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {n_tokens}; it goes from {first} to {last}"
            + (" and falls in between." if shortest < 0 else ".")
        )
    return tuple(numbers)


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
