"""GPU sections on attention alone: parity, tuning, and what else there is for the same work (SDPA, FlexAttention)."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
import torch.nn.functional as F
from _gpu import (
    Arm,
    Setting,
    attention_flops,
    bounds_of,
    compiled,
    free_memory,
    ratio,
    spread_lengths,
    synchronize,
    time_rows,
    timed,
)
from _timing import goal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from scdiva.kernels import autotune_attention, keep_attention_plan, positions, rope_attention, rope_tables

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))

from triton_cases import CASES  # the cases that the tests hold the kernel to

AGREEMENT = 0.02
"""Largest relative difference (norms, bfloat16) between arms of one row: they must compute one function."""
COMPILERS = 12
"""Processes that compile and check the kernels side by side, at most; each takes up to 3 GiB of the device."""
FLEX_BLOCK = 128
Inputs = tuple[Tensor, Tensor, Tensor]
BF16 = torch.bfloat16


def keep_plan(setting: Setting) -> None:
    """Launch the kernels in this process as they were tuned in an earlier section."""
    if setting.plan is not None and setting.cuda:
        keep_attention_plan(setting.plan, head_dim=setting.head_dim, dtype=BF16, device=setting.device)


def _judged(name: str, device: str, backend: str) -> str:
    """What is wrong in a case; empty: nothing."""
    torch.set_num_threads(1)
    try:
        CASES[name](device=device, backend=backend)
    except Exception as error:  # noqa: BLE001 whatever it is, the kernel failed the case
        return f"{type(error).__name__}: {str(error)[:500]}"
    return ""


def parity(setting: Setting) -> Iterator[dict]:
    """Every case of the kernel's tests in a few processes, bf16 first; the counts are written after each case."""
    names = list(CASES) if setting.cuda else ["new memory is poisoned", "nothing is waited for", "float32, 32, rope"]
    context = multiprocessing.get_context("fork")  # this process has not touched the device
    passed = failed = 0
    workers = min(COMPILERS, max(1, (os.cpu_count() or 1) - 2)) if setting.cuda else 1
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = {pool.submit(_judged, name, setting.device.type, setting.backend): name for name in names}
        for done in as_completed(jobs):
            wrong = done.result()
            passed, failed = passed + (not wrong), failed + bool(wrong)
            if wrong:
                yield {"what": f"parity: {jobs[done]}", "failed": wrong}
            counts = {"passed": passed, "of": len(names)}
            yield goal("parity: cases beyond their limit", failed, at_most=0, counted=True, **counts)
    yield goal("parity: cases within their limit", passed, at_least=len(names), counted=True)


def packed_inputs(setting: Setting, lengths: list[int] | Tensor) -> tuple[Inputs, Tensor]:
    """Random bf16 q, k, v `(T, H, D)` that want gradients, and cu_seqlens."""
    shape = (int(torch.as_tensor(lengths).sum()), setting.heads, setting.head_dim)
    q, k, v = (torch.randn(*shape, device=setting.device, dtype=BF16, requires_grad=True) for _ in range(3))
    return (q, k, v), bounds_of(lengths, setting.device)


def fused_arm(
    setting: Setting, inputs: Inputs, bounds: Tensor, longest: int, *, rotate: bool = True
) -> Callable[[], Tensor]:
    """Our attention; the caller vouches for the longest cell, so that no call waits for the device."""
    cos, sin = rope_tables(setting.length, setting.head_dim, device=setting.device) if rotate else (None, None)

    def run() -> Tensor:
        return rope_attention(*inputs, cos=cos, sin=sin, cu_seqlens=bounds, max_seqlen=longest, backend=setting.backend)

    return run


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE as most code has it: in the dtype of q, tables `(tokens, 1, D)` that hold each angle twice."""

    def one(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    return one(q), one(k)


def wide_tables(setting: Setting, where: Tensor | slice) -> tuple[Tensor, ...]:
    """Tables for :func:`rotate_both` of the positions `where`."""
    tables = rope_tables(setting.length, setting.head_dim, device=setting.device)
    return tuple(torch.cat([t, t], dim=-1)[where].unsqueeze(1).to(BF16) for t in tables)


def sdpa_arm(
    setting: Setting, name: str, inputs: Inputs, rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
) -> Callable[[], Tensor]:
    """A kernel of SDPA on cells of full length, after a rotation if one is given; a CPU has but one for certain."""
    shape = (-1, setting.length, setting.heads, setting.head_dim)
    wanted = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}[name]

    def run() -> Tensor:
        q, k, v = (x.view(shape) for x in inputs)
        if rotate is not None:
            q, k = rotate(q, k)
        with sdpa_kernel(wanted if setting.cuda else SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2)

    return run


def forward_only(arms: dict[str, Callable[[], Tensor]]) -> dict[str, Arm]:
    """The arms without gradients."""
    return {name: torch.no_grad()(arm) for name, arm in arms.items()}


def both_ways(arms: dict[str, Callable[[], Tensor]], inputs: Inputs, grad: Tensor) -> dict[str, Arm]:
    """The arms, forward and backward."""

    def grown(arm: Callable[[], Tensor]) -> Arm:
        def run() -> object:
            out = arm()
            return torch.autograd.grad(out, inputs, grad.view(out.shape))

        return run

    return {name: grown(arm) for name, arm in arms.items()}


def backward_only(arms: dict[str, Callable[[], Tensor]], inputs: Inputs, grad: Tensor) -> dict[str, Arm]:
    """The arms' backward passes, after one forward pass (at the first call, so that a failure stays the arm's)."""

    def back(arm: Callable[[], Tensor]) -> Arm:
        kept: list[Tensor] = []

        def run() -> object:
            if not kept:
                kept.append(arm())
            return torch.autograd.grad(kept[0], inputs, grad.view(kept[0].shape), retain_graph=True)

        return run

    return {name: back(arm) for name, arm in arms.items()}


def agree(arms: dict[str, Arm], *names: str) -> float:
    """Largest relative difference of the named arms' results from those of the first; raises if they are two things."""

    def result(name: str) -> list[Tensor]:
        out = arms[name]()
        return [x.detach().double().flatten() for x in (out if isinstance(out, tuple) else (out,))]

    first, worst = result(names[0]), 0.0
    for name in names[1:]:
        try:
            other = result(name)
        except Exception:  # noqa: BLE001 an arm that can't run gets its row from the timing
            continue
        for a, b in zip(first, other, strict=True):
            difference = float((a - b).norm() / a.norm())
            if not difference <= AGREEMENT:  # so that NaN is none
                raise AssertionError(f"{names[0]} and {name} differ by {difference:.3g}: they do not compute the same.")
            worst = max(worst, difference)
    return worst


def against_sdpa(setting: Setting) -> Iterator[dict]:
    """Cells of full length: rotation + SDPA, eager and compiled, and SDPA's kernels without any rotation."""
    keep_plan(setting)
    lengths = [setting.length] * setting.cells
    inputs, bounds = packed_inputs(setting, lengths)
    grad = torch.randn_like(inputs[0])
    flops = attention_flops(lengths, setting.heads, setting.head_dim)
    said = f"{setting.cells} cells of {setting.length}"
    tables = wide_tables(setting, slice(None))

    def eager(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_both(q, k, *tables)

    arms = {
        "fused": fused_arm(setting, inputs, bounds, setting.length),
        "fused, no rotation": fused_arm(setting, inputs, bounds, setting.length, rotate=False),
        "eager rotation + flash": sdpa_arm(setting, "flash", inputs, eager),
        "compiled rotation + flash": sdpa_arm(setting, "flash", inputs, compiled(setting, eager)),
        "flash, no rotation": sdpa_arm(setting, "flash", inputs),
        "cuDNN, no rotation": sdpa_arm(setting, "cuDNN", inputs),
    }
    same = ("fused", "eager rotation + flash", "compiled rotation + flash")

    forward = forward_only(arms)
    yield {"what": "forward: largest difference from fused", "relative": round(agree(forward, *same), 5)}
    agree(forward, "fused, no rotation", "flash, no rotation", "cuDNN, no rotation")
    times = timed(setting, forward)
    yield from time_rows(f"forward, {said}", times, flops)
    for above, below, bound in (
        ("eager rotation + flash", "fused", {"at_least": 1.5}),
        ("compiled rotation + flash", "fused", {"at_least": 1.15}),
        ("cuDNN, no rotation", "fused", {"at_least": 0.9}),
        ("fused", "fused, no rotation", {"at_most": 1.10}),
    ):
        yield ratio(setting, f"forward: {above} over {below}", times, above, below, forward["fused"], **bound)

    whole = both_ways(arms, inputs, grad)
    yield {"what": "gradients: largest difference from fused", "relative": round(agree(whole, *same), 5)}
    times = timed(setting, whole)
    yield from time_rows(f"forward + backward, {said}", times, 3.5 * flops)
    above = "compiled rotation + flash"
    yield ratio(
        setting, f"forward + backward: {above} over fused", times, above, "fused", whole["fused"], at_least=1.05
    )
    backward = backward_only({name: arms[name] for name in ("fused", "cuDNN, no rotation")}, inputs, grad)
    times = timed(setting, backward)
    yield from time_rows(f"backward, {said}", times, 2.5 * flops)
    above = "cuDNN, no rotation"
    yield ratio(setting, f"backward: {above} over fused", times, above, "fused", backward["fused"], at_least=0.7)


def document_mask(bounds: Tensor, n_tokens: int) -> BlockMask:
    """Mask of packed cells for FlexAttention: a token sees its own cell.

    Made from the cells' bounds, block by block: `create_block_mask` would look at every pair of tokens, 10^11 here.
    """
    ends = bounds[1:].long()
    cell = torch.searchsorted(ends, torch.arange(n_tokens, device=bounds.device), right=True)
    n_blocks = -(-n_tokens // FLEX_BLOCK)
    edges = torch.arange(n_blocks, device=bounds.device) * FLEX_BLOCK
    lowest, highest = cell[edges], cell[(edges + FLEX_BLOCK - 1).clamp_max(n_tokens - 1)]
    touches = (lowest[:, None] <= highest[None, :]) & (lowest[None, :] <= highest[:, None])
    whole = (lowest == highest) & (edges + FLEX_BLOCK <= n_tokens)
    full = whole[:, None] & whole[None, :] & (lowest[:, None] == lowest[None, :])

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        count = blocks.sum(dim=1, dtype=torch.int32)
        order = torch.argsort(blocks.int(), dim=1, descending=True, stable=True).int()
        return count[None, None], order[None, None].contiguous()

    def same_cell(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return cell[q] == cell[kv]

    return BlockMask.from_kv_blocks(
        *listed(touches & ~full), *listed(full), BLOCK_SIZE=FLEX_BLOCK, mask_mod=same_cell,
        seq_lengths=(n_tokens, n_tokens),
    )  # fmt: skip


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask) -> Tensor:
    """What stands in for FlexAttention in a dry run: on a CPU it has no backward pass."""
    places, zero = torch.arange(q.shape[-2]), torch.zeros((), dtype=torch.long)
    seen = block_mask.mask_mod(zero, zero, places[:, None], places[None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def against_flex(setting: Setting) -> Iterator[dict]:
    """FlexAttention with a document mask on rotated Q and K, packed cells of typical and of full lengths."""
    keep_plan(setting)
    n_cells = setting.cells // 4 if setting.cuda else 2
    attend = torch.compile(flex_attention, dynamic=False) if setting.cuda else dense_attention
    rotate = compiled(setting, rotate_both)
    typical = (spread_lengths(n_cells, setting.length - 1) + 1).tolist()
    for kind, lengths in (("typical", typical), ("full", [setting.length] * n_cells)):
        free_memory(setting)
        inputs, bounds = packed_inputs(setting, lengths)
        q, k, v = inputs
        mask = document_mask(bounds, q.shape[0])
        tables = wide_tables(setting, positions(bounds, q.shape[0]))

        def flex(
            q: Tensor = q, k: Tensor = k, v: Tensor = v, mask: BlockMask = mask, tables: tuple[Tensor, ...] = tables
        ) -> Tensor:
            out = attend(*(x.transpose(0, 1).unsqueeze(0) for x in (*rotate(q, k, *tables), v)), block_mask=mask)
            return out.squeeze(0).transpose(0, 1)

        arms = {"fused": fused_arm(setting, inputs, bounds, max(lengths)), "compiled rotation + FlexAttention": flex}
        flops = attention_flops(lengths, setting.heads, setting.head_dim)
        forward, whole = forward_only(arms), both_ways(arms, inputs, torch.randn_like(q))
        agree(forward, *arms)
        for way, ways, work in (("forward", forward, flops), ("forward + backward", whole, 3.5 * flops)):
            times, said = timed(setting, ways), f"{way}, packed {kind} cells"
            yield from time_rows(f"{said} ({n_cells})", times, work)
            yield ratio(
                setting, f"{said}: rotation + FlexAttention over fused", times, "compiled rotation + FlexAttention",
                "fused", ways["fused"], at_least=1.1,
            )  # fmt: skip


def tuning(setting: Setting) -> Iterator[dict]:
    """How long the kernel's tuning takes, as training does it, and what it gains over the plan by default."""
    inputs, bounds = packed_inputs(setting, [setting.length] * setting.cells)
    fused = {"fused": fused_arm(setting, inputs, bounds, setting.length)}
    ways = {
        "forward": forward_only(fused)["fused"],
        "forward + backward": both_ways(fused, inputs, torch.randn_like(inputs[0]))["fused"],
    }
    before = timed(setting, ways)
    yield from time_rows("attention by default", before)
    begun, plan = time.perf_counter(), None
    if setting.cuda:
        sizes = {"n_heads": setting.heads, "head_dim": setting.head_dim, "length": setting.length}
        plan = autotune_attention(**sizes, dtype=BF16, device=setting.device)
    synchronize(setting)
    seconds = time.perf_counter() - begun
    yield goal("tuning attention: seconds, the kernels of the default plan compiled before", seconds, at_most=60)
    yield {"what": "tuning attention: plan, by which the sections below run", "plan": plan}
    after = timed(setting, ways)
    yield from time_rows("attention as tuned", after)
    for way in ways:
        slow, fast = before[way], after[way]
        if isinstance(slow, list) and isinstance(fast, list):
            yield {"what": f"attention, {way}: time by default over time as tuned", "value": min(slow) / min(fast)}
