"""Launch the Triton kernels, as one operator that autograd and `torch.compile` know. Imported only when chosen."""

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
"""Whether Triton runs in its interpreter (`TRITON_INTERPRET=1` when this was imported): on a CPU, and slowly."""

INTERPRETED_PLAN = Plan(Tiles(64, 32, 1, 1), Tiles(32, 64, 1, 1), Tiles(64, 32, 1, 1))
"""Small tiles, so that even a short cell meets full tiles and a tail."""

_tuned: dict[tuple[int | None, int, torch.dtype], Plan] = {}


def packed(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Attend within each cell of the packed layout; see :func:`scdiva.kernels.rope_attention`."""
    return _attention(q, k, v, cos, sin, cu_seqlens, max_seqlen)[0]


def device_plan(device: torch.device, head_dim: int, dtype: torch.dtype) -> Plan:
    """How attention runs on a device: the plan that :func:`tune` kept, else the default for its architecture."""
    key = (device.index, head_dim, dtype)
    if key not in _tuned:
        if device.type != "cuda":
            return INTERPRETED_PLAN
        _tuned[key] = default_plan(head_dim, dtype.itemsize, capability(device), shared_limit(device))
    return _tuned[key]


def keep(plan: Plan, device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    """Let attention run by a plan in this process."""
    _tuned[device.index, head_dim, dtype] = plan


def shared_limit(device: torch.device) -> int:
    """Shared memory that a program may have, in bytes."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def capability(device: torch.device) -> tuple[int, int]:
    """CUDA architecture of a device; where Triton interprets, the oldest."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else MIN_CAPABILITY


def median_seconds(call: Callable[[], object]) -> float:
    """Time of a call on the device."""
    return triton.testing.do_bench(call, return_mode="median") / 1e3


def tune(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor, max_seqlen: int
) -> Plan:
    """Time the plans that fit the device on given cells, and keep the best for this process.

    The forward pass is timed alone, the two backward kernels together: each kernel's tiles with what its loop walks
    over rotated once, then, from Hopper on, the best of them rotating in the loop. A plan that the device refuses (too
    much shared memory) is left out.

    Parameters
    ----------
    q, k, v, cos, sin, cu_seqlens, max_seqlen
        As for :func:`packed`, on a CUDA device.

    Returns
    -------
    The plan kept.
    """
    head_dim, limit = q.shape[-1], shared_limit(q.device)
    plan = device_plan(q.device, head_dim, q.dtype)._replace(rotate_once=True)
    cells = q, k, v, cos, sin, cu_seqlens, max_seqlen
    out, lse = forward(*cells, plan)
    back = v, q, k, v, out, lse, cos, sin, cu_seqlens, max_seqlen  # as gradient any numbers but zeros will do

    def fastest(kernel: Kernel, tried: list[Plan]) -> tuple[float, Plan]:
        found = [(math.inf, tried[0])]
        for one in tried:
            call = partial(forward, *cells, one) if kernel == "forward" else partial(backward, *back, one)
            try:
                call()
                found.append((median_seconds(call), one))
            except (errors.OutOfResources, errors.PTXASError):
                continue
        return min(found, key=lambda entry: entry[0])

    spent: dict[Kernel, float] = {}
    for kernel in KERNELS:
        tiles = candidates(kernel, head_dim, q.element_size(), limit, capability(q.device))
        spent[kernel], plan = fastest(kernel, [plan.having(kernel, one) for one in tiles])
    in_loop, total = plan._replace(rotate_once=False), spent["forward"] + spent["dq"]
    # before Hopper it spills (ahead-of-time compilation); the backward time, that of dq, holds both kernels
    if cos is not None and (INTERPRETED or capability(q.device) >= (9, 0)):
        plan = in_loop if sum(fastest(k, [in_loop])[0] for k in ("forward", "dq")) < total else plan
    keep(plan, q.device, head_dim, q.dtype)
    return plan


def _strides(*tensors: Tensor) -> list[int]:
    return [step for x in tensors for step in x.stride()[:2]]


def _n_tiles(max_seqlen: int, block: int) -> int:
    return max(1, -(-max_seqlen // block))


def _options(tiles: Tiles) -> dict[str, Any]:
    # said, not left to Triton's default: fused multiply-adds are what was measured and tested
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}


def _precision(dtype: torch.dtype) -> str:
    """How float32 products are formed: in full, unless torch's settings allow less."""
    return "ieee" if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def _scales(head_dim: int) -> tuple[float, float]:
    """Factor of the queries before a softmax to base 2, and that of the gradient."""
    scale = 1.0 / math.sqrt(head_dim)
    return scale * math.log2(math.e), scale


def _rotated(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor, max_seqlen: int, factor: float
) -> Tensor:
    """Copy with every row rotated and multiplied by a factor."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_cells, (_, n_heads, head_dim) = cu_seqlens.numel() - 1, x.shape
    tile = 64
    tiles = _n_tiles(max_seqlen, tile)
    kernels.rotate_kernel[(tiles * n_cells * n_heads,)](
        x, y, cos, sin, cu_seqlens, *_strides(x, y), tiles, n_heads, factor,
        HALF=head_dim // 2, ROTATE=cos is not None, TILE=tile, **_options(Tiles(tile, tile, 4, 1)),
    )  # fmt: skip
    return y


def forward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor,
    max_seqlen: int, plan: Plan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the forward kernel: output `(T, H, D)`, and the log2 of each row's softmax sum, float32 `(H, T)`."""
    n_tokens, n_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((n_heads, n_tokens), dtype=torch.float32, device=q.device)
    if n_tokens == 0:
        return out, lse
    factor, _ = _scales(head_dim)
    ready = plan.rotate_once and cos is not None
    if ready:
        k = _rotated(k, cos, sin, cu_seqlens, max_seqlen, 1.0)
    tiles = _n_tiles(max_seqlen, plan.forward.block_q)
    kernels.forward_kernel[(tiles * (cu_seqlens.numel() - 1) * n_heads,)](
        q, k, v, out, lse, cos, sin, cu_seqlens, *_strides(q, k, v, out), n_tokens, tiles, n_heads, factor,
        HALF=head_dim // 2, BLOCK_Q=plan.forward.block_q, BLOCK_K=plan.forward.block_k, ROTATE=cos is not None,
        K_READY=ready or cos is None, PRECISION=_precision(q.dtype),
        **_options(plan.forward),
    )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cos: Tensor | None, sin: Tensor | None,
    cu_seqlens: Tensor, max_seqlen: int, plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the backward kernels: gradients of q, k and v, each `(T, H, D)`."""
    n_tokens, n_heads, head_dim = q.shape
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    if n_tokens == 0:
        return dq, dk, dv
    factor, scale = _scales(head_dim)
    delta = torch.empty_like(lse)
    ready = plan.rotate_once and cos is not None
    if ready:
        q = _rotated(q, cos, sin, cu_seqlens, max_seqlen, factor)
        k = _rotated(k, cos, sin, cu_seqlens, max_seqlen, 1.0)
    common = {
        "HALF": head_dim // 2, "ROTATE": cos is not None, "Q_READY": ready, "K_READY": ready or cos is None,
        "PRECISION": _precision(q.dtype),
    }  # fmt: skip
    pairs = (cu_seqlens.numel() - 1) * n_heads
    tiles = _n_tiles(max_seqlen, plan.dq.block_q)
    kernels.dq_kernel[(tiles * pairs,)](
        q, k, v, out, grad, lse, delta, dq, cos, sin, cu_seqlens, *_strides(q, k, v, out, grad, dq),
        n_tokens, tiles, n_heads, factor, scale,
        BLOCK_Q=plan.dq.block_q, BLOCK_K=plan.dq.block_k, **common, **_options(plan.dq),
    )  # fmt: skip
    tiles = _n_tiles(max_seqlen, plan.dkdv.block_k)
    kernels.dkdv_kernel[(tiles * pairs,)](
        q, k, v, grad, lse, delta, dk, dv, cos, sin, cu_seqlens, *_strides(q, k, v, grad, dk, dv),
        n_tokens, tiles, n_heads, factor,
        BLOCK_Q=plan.dkdv.block_q, BLOCK_K=plan.dkdv.block_k, **common, **_options(plan.dkdv),
    )  # fmt: skip
    return dq, dk, dv


def _even(x: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous: all that the kernels ask of a layout."""
    return x if x.stride(-1) == 1 else x.contiguous()


# One operator each way: torch.compile sees two nodes with known shapes and never looks inside.
@torch.library.custom_op(
    "scdiva::rope_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor cu_seqlens, "
    "SymInt max_seqlen) -> (Tensor, Tensor)",
)
def _attention(q, k, v, cos, sin, cu_seqlens, max_seqlen):
    plan = device_plan(q.device, q.shape[-1], q.dtype)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        return forward(_even(q), _even(k), _even(v), cos, sin, cu_seqlens, max_seqlen, plan)


@_attention.register_fake
def _(q, k, v, cos, sin, cu_seqlens, max_seqlen):
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse


@torch.library.custom_op(
    "scdiva::rope_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? cos, Tensor? sin, "
    "Tensor cu_seqlens, SymInt max_seqlen) -> (Tensor, Tensor, Tensor)",
)
def _attention_backward(grad, q, k, v, out, lse, cos, sin, cu_seqlens, max_seqlen):
    plan = device_plan(q.device, q.shape[-1], q.dtype)
    args = (_even(grad), _even(q), _even(k), _even(v), out, lse, cos, sin, cu_seqlens, max_seqlen)
    with torch.cuda.device_of(q):
        return backward(*args, plan)


@_attention_backward.register_fake
def _(grad, q, k, v, out, lse, cos, sin, cu_seqlens, max_seqlen):
    return tuple(torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, max_seqlen = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.max_seqlen = max_seqlen
    ctx.set_materialize_grads(False)  # no zeros for the sums, whose gradient nobody asks for


def _gradients(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    q, k, v, cos, sin, cu_seqlens, out, lse = ctx.saved_tensors
    gradients = _attention_backward(grad, q, k, v, out, lse, cos, sin, cu_seqlens, ctx.max_seqlen)
    return *gradients, None, None, None, None


_attention.register_autograd(_gradients, setup_context=_keep)
