"""Launch of the Triton kernels, as operators for autograd and `torch.compile`. Imported only if Triton is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import errors

from scdiva.kernels import _triton_kernels as kernels
from scdiva.kernels._triton_configs import KERNELS, MIN_CAPABILITY, Kernel, Plan, Tiles, candidates, default_plan

INTERPRETED = not isinstance(kernels.forward_kernel, triton.runtime.JITFunction)
"""Whether Triton runs in its slow interpreter, on a CPU (`TRITON_INTERPRET=1` was set on import)."""

INTERPRETED_PLAN = Plan(Tiles(64, 32, 1, 1), Tiles(32, 64, 1, 1), Tiles(64, 32, 1, 1))
"""Small tiles, so that even a short cell has full tiles and a partial one."""

_tuned: dict[tuple[int | None, int, torch.dtype], Plan] = {}


def packed(qkv: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Attend within each cell of the packed layout; see :func:`scdiva.kernels.rope_attention_qkv`."""
    return _attention(qkv, cos, sin, cu_seqlens, max_seqlen)[0]


def device_plan(device: torch.device, head_dim: int, dtype: torch.dtype) -> Plan:
    """Launch plan of a device: the one that :func:`tune` selected, else the default for its architecture."""
    key = (device.index, head_dim, dtype)
    if key not in _tuned:
        if device.type != "cuda":
            return INTERPRETED_PLAN
        _tuned[key] = default_plan(head_dim, dtype.itemsize, capability(device), shared_limit(device))
    return _tuned[key]


def keep(plan: Plan, device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    """Use a launch plan for attention in this process."""
    _tuned[device.index, head_dim, dtype] = plan


def shared_limit(device: torch.device) -> int:
    """Maximum shared memory of a program, in bytes."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; in the interpreter, the lowest that is supported."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else MIN_CAPABILITY


def median_seconds(call: Callable[[], object]) -> float:
    """Time of a call on the device."""
    return triton.testing.do_bench(call, return_mode="median") / 1e3


def tune(qkv: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor, max_seqlen: int) -> Plan:
    """Time the plans that fit the device on given cells, and keep the best for this process.

    The forward pass is timed alone, the two backward kernels together. Plans that fail on the device (too much shared
    memory) are skipped.

    Parameters
    ----------
    qkv, cos, sin, cu_seqlens, max_seqlen
        As for :func:`packed`, on a CUDA device.

    Returns
    -------
    The plan kept.
    """
    head_dim, limit = qkv.shape[-1], shared_limit(qkv.device)
    plan = device_plan(qkv.device, head_dim, qkv.dtype)
    cells = cos, sin, cu_seqlens, max_seqlen
    out, lse, keys = forward(qkv, *cells, plan)
    back = qkv[:, 2], qkv, keys, out, lse, *cells  # any gradient that is not zero is suitable

    def seconds(kernel: Kernel, tried: Plan) -> float:
        call = partial(forward, qkv, *cells, tried) if kernel == "forward" else partial(backward, *back, tried)
        try:
            call()
            return median_seconds(call)
        except (errors.OutOfResources, errors.PTXASError):
            return math.inf

    for kernel in KERNELS:
        tiles = candidates(kernel, head_dim, qkv.element_size(), limit, capability(qkv.device))
        plan = min((plan.having(kernel, one) for one in tiles), key=partial(seconds, kernel))
    keep(plan, qkv.device, head_dim, qkv.dtype)
    return plan


def _strides(*tensors: Tensor) -> list[int]:
    return [step for x in tensors for step in x.stride()[:2]]


def _n_tiles(max_seqlen: int, block: int) -> int:
    return max(1, -(-max_seqlen // block))


def _options(tiles: Tiles) -> dict[str, Any]:
    # set explicitly, because measurements and tests used fused multiply-adds
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}


def _precision(dtype: torch.dtype) -> str:
    """Precision of float32 products: full, unless torch's settings allow a lower one."""
    return "ieee" if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def _scales(head_dim: int) -> tuple[float, float]:
    """Factor of the queries before a softmax to base 2, and that of the gradient."""
    scale = 1.0 / math.sqrt(head_dim)
    return scale * math.log2(math.e), scale


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Copy rows, each rotated by its position."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_cells, (_, n_heads, head_dim) = cu_seqlens.numel() - 1, x.shape
    tile = 64
    tiles = _n_tiles(max_seqlen, tile)
    kernels.rotate_kernel[(tiles * n_cells * n_heads,)](
        x, y, cos, sin, cu_seqlens, *_strides(x, y), tiles, n_heads,
        HALF=head_dim // 2, TILE=tile, **_options(Tiles(tile, tile, 4, 1)),
    )  # fmt: skip
    return y


def forward(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor, max_seqlen: int, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel.

    Returns
    -------
    Output `(T, H, D)`, the log2 of each row's softmax sum, float32 `(H, T)`, and the rotated keys `(T, H, D)`, empty
    without rotation.
    """
    n_tokens, _, n_heads, head_dim = qkv.shape
    out, lse, keys = _empty_outputs(qkv, rotate=cos is not None)
    if n_tokens == 0:
        return out, lse, keys
    q, k, v = qkv.unbind(1)
    if cos is not None and sin is not None:
        k = keys = _rotated(k, cos, sin, cu_seqlens, max_seqlen)
    factor, _ = _scales(head_dim)
    tiles = _n_tiles(max_seqlen, plan.forward.block_q)
    kernels.forward_kernel[(tiles * (cu_seqlens.numel() - 1) * n_heads,)](
        q, k, v, out, lse, cos, sin, cu_seqlens, *_strides(q, k, v, out), n_tokens, tiles, n_heads, factor,
        HALF=head_dim // 2, BLOCK_Q=plan.forward.block_q, BLOCK_K=plan.forward.block_k, ROTATE=cos is not None,
        PRECISION=_precision(q.dtype), **_options(plan.forward),
    )  # fmt: skip
    return out, lse, keys


def _empty_outputs(qkv: Tensor, *, rotate: bool) -> tuple[Tensor, Tensor, Tensor]:
    n_tokens, _, n_heads, head_dim = qkv.shape
    lse = qkv.new_empty((n_heads, n_tokens), dtype=torch.float32)
    keys = qkv.new_empty((n_tokens if rotate else 0, n_heads, head_dim))
    return qkv.new_empty((n_tokens, n_heads, head_dim)), lse, keys


def backward(
    grad: Tensor, qkv: Tensor, keys: Tensor, out: Tensor, lse: Tensor, cos: Tensor | None, sin: Tensor | None,
    cu_seqlens: Tensor, max_seqlen: int, plan: Plan,
) -> Tensor:  # fmt: skip
    """Run the backward kernels on what :func:`forward` returned: the gradient of qkv, `(T, 3, H, D)`."""
    n_tokens, _, n_heads, head_dim = qkv.shape
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    if n_tokens == 0:
        return dqkv
    (q, k, v), (dq, dk, dv) = qkv.unbind(1), dqkv.unbind(1)
    k = k if cos is None else keys
    rotated, sums = torch.empty_like(out), lse.new_empty((*lse.shape, 2))  # written by one kernel, read by the other
    factor, scale = _scales(head_dim)
    common = {"HALF": head_dim // 2, "ROTATE": cos is not None, "PRECISION": _precision(q.dtype)}
    pairs = (cu_seqlens.numel() - 1) * n_heads
    tiles = _n_tiles(max_seqlen, plan.dq.block_q)
    kernels.dq_kernel[(tiles * pairs,)](
        q, k, v, out, grad, lse, sums, rotated, dq, cos, sin, cu_seqlens,
        *_strides(q, k, v, out, grad, rotated, dq), n_tokens, tiles, n_heads, factor, scale,
        BLOCK_Q=plan.dq.block_q, BLOCK_K=plan.dq.block_k, **common, **_options(plan.dq),
    )  # fmt: skip
    tiles = _n_tiles(max_seqlen, plan.dkdv.block_k)
    kernels.dkdv_kernel[(tiles * pairs,)](
        rotated, k, v, grad, sums, dk, dv, cos, sin, cu_seqlens, *_strides(rotated, k, v, grad, dk, dv),
        n_tokens, tiles, n_heads,
        BLOCK_Q=plan.dkdv.block_q, BLOCK_K=plan.dkdv.block_k, **common, **_options(plan.dkdv),
    )  # fmt: skip
    return dqkv


def _even(x: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous, the only requirement of the kernels on the layout."""
    return x if x.stride(-1) == 1 else x.contiguous()


# Forward and backward are one operator each, which torch.compile does not trace. Queries, keys and values are one
# tensor, so that their gradients need not be concatenated.
@torch.library.custom_op(
    "scdiva::rope_attention",
    mutates_args=(),
    schema="(Tensor qkv, Tensor? cos, Tensor? sin, Tensor cu_seqlens, SymInt max_seqlen) -> (Tensor, Tensor, Tensor)",
)
def _attention(qkv, cos, sin, cu_seqlens, max_seqlen):
    plan = device_plan(qkv.device, qkv.shape[-1], qkv.dtype)
    with torch.cuda.device_of(qkv):  # Triton launches on the current device
        return forward(_even(qkv), cos, sin, cu_seqlens, max_seqlen, plan)


@_attention.register_fake
def _(qkv, cos, sin, cu_seqlens, max_seqlen):
    return _empty_outputs(qkv, rotate=cos is not None)


@torch.library.custom_op(
    "scdiva::rope_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor qkv, Tensor keys, Tensor out, Tensor lse, Tensor? cos, Tensor? sin, "
    "Tensor cu_seqlens, SymInt max_seqlen) -> Tensor",
)
def _attention_backward(grad, qkv, keys, out, lse, cos, sin, cu_seqlens, max_seqlen):
    plan = device_plan(qkv.device, qkv.shape[-1], qkv.dtype)
    with torch.cuda.device_of(qkv):
        return backward(_even(grad), _even(qkv), keys, out, lse, cos, sin, cu_seqlens, max_seqlen, plan)


@_attention_backward.register_fake
def _(grad, qkv, keys, out, lse, cos, sin, cu_seqlens, max_seqlen):
    return torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    qkv, cos, sin, cu_seqlens, ctx.max_seqlen = inputs
    out, lse, keys = output
    ctx.save_for_backward(qkv, keys, out, lse, cos, sin, cu_seqlens)
    ctx.set_materialize_grads(False)  # no zeros for the gradients of the sums and the keys, which are not used


def _gradients(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    return _attention_backward(grad, *ctx.saved_tensors, ctx.max_seqlen), None, None, None, None


_attention.register_autograd(_gradients, setup_context=_keep)
