"""GPU sections on attention alone: against eager and compiled rotation, SDPA's kernels, FlexAttention, itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from _gpu_device import (
    Arm,
    Setting,
    attention_flops,
    bounds_of,
    compiled,
    cost_goal,
    free_memory,
    ratio_goal,
    spread_lengths,
    time_rows,
    timed,
)
from _gpu_rivals import flex_arm, liger_rotation, rotate_both, sdpa, wide_tables
from torch import Tensor

from scdiva.kernels import positions, rope_attention, rope_tables

AGREEMENT = 0.02
"""Largest relative difference (norms, bfloat16) between arms of one row: they must compute one function."""
Inputs = tuple[Tensor, Tensor, Tensor]


def packed_inputs(setting: Setting, lengths: list[int] | Tensor) -> tuple[Inputs, Tensor]:
    """Random bf16 q, k, v `(T, H, D)` that want gradients, and cu_seqlens."""
    shape = (int(torch.as_tensor(lengths).sum()), setting.heads, setting.head_dim)
    q, k, v = (torch.randn(*shape, device=setting.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    return (q, k, v), bounds_of(lengths, setting.device)


def fused_arm(
    setting: Setting, inputs: Inputs, bounds: Tensor, longest: int, *, rotate: bool = True
) -> Callable[[], Tensor]:
    """Our attention; the caller vouches for the longest cell, so that no call waits for the device."""
    cos, sin = rope_tables(setting.length, setting.head_dim, device=setting.device) if rotate else (None, None)

    def run() -> Tensor:
        return rope_attention(*inputs, cos=cos, sin=sin, cu_seqlens=bounds, max_seqlen=longest, backend=setting.backend)

    return run


def sdpa_arm(
    setting: Setting, name: str, inputs: Inputs, rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
) -> Callable[[], Tensor]:
    """A kernel of SDPA on cells of full length, after a rotation if one is given."""
    shape = (-1, setting.length, setting.heads, setting.head_dim)

    def run() -> Tensor:
        q, k, v = (x.view(shape) for x in inputs)
        if rotate is not None:
            q, k = rotate(q, k)
        return sdpa(setting, name, q, k, v)

    return run


def without_grad(arms: dict[str, Callable[[], Tensor]]) -> dict[str, Arm]:
    """The arms, forward only."""

    def quiet(arm: Callable[[], Tensor]) -> Arm:
        def run() -> Tensor:
            with torch.no_grad():
                return arm()

        return run

    return {name: quiet(arm) for name, arm in arms.items()}


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

    first = result(names[0])
    worst = 0.0
    for name in names[1:]:
        try:
            other = result(name)
        except Exception:  # noqa: BLE001 an arm that cannot run gets its row from the timing
            continue
        for a, b in zip(first, other, strict=True):
            difference = float((a - b).norm() / a.norm())
            if not difference <= AGREEMENT:  # so that NaN is none
                raise AssertionError(f"{names[0]} and {name} differ by {difference:.3g}: they do not compute the same.")
            worst = max(worst, difference)
    return worst


def eager_rotation(setting: Setting) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """RoPE on `(B, L, H, D)`, operation by operation."""
    tables = wide_tables(
        *rope_tables(setting.length, setting.head_dim, device=setting.device), slice(None), torch.bfloat16
    )
    return lambda q, k: rotate_both(q, k, *tables)


def against_sdpa(setting: Setting) -> Iterator[dict]:
    """Cells of full length: rotation + SDPA, eager and compiled, and SDPA's kernels without any rotation."""
    lengths = [setting.length] * setting.cells
    inputs, bounds = packed_inputs(setting, lengths)
    grad = torch.randn_like(inputs[0])
    flops = attention_flops(lengths, setting.heads, setting.head_dim)
    eager = eager_rotation(setting)
    arms = {
        "fused": fused_arm(setting, inputs, bounds, setting.length),
        "fused, no rotation": fused_arm(setting, inputs, bounds, setting.length, rotate=False),
        "eager rotation + flash": sdpa_arm(setting, "flash", inputs, eager),
        "compiled rotation + flash": sdpa_arm(setting, "flash", inputs, compiled(setting, eager)),
        "flash, no rotation": sdpa_arm(setting, "flash", inputs),
        "cuDNN, no rotation": sdpa_arm(setting, "cudnn", inputs),
    }
    liger = liger_rotation(setting)
    if liger is not None:
        arms["liger rotation + flash"] = sdpa_arm(setting, "flash", inputs, liger)
    same = ("fused", "eager rotation + flash", "compiled rotation + flash", "liger rotation + flash")
    same = tuple(name for name in same if name in arms)

    forward = without_grad(arms)
    yield {"what": "forward: largest difference from fused", "relative": round(agree(forward, *same), 5)}
    agree(forward, "fused, no rotation", "flash, no rotation", "cuDNN, no rotation")
    times = timed(setting, forward)
    yield from time_rows(f"forward, {setting.cells} cells of {setting.length}", times, flops)
    run = forward["fused"]
    yield ratio_goal(
        setting, "forward: fused vs eager rotation + SDPA", times, "eager rotation + flash", "fused", 1.5, run
    )
    yield ratio_goal(
        setting, "forward: fused vs compiled rotation + flash", times, "compiled rotation + flash", "fused", 1.15, run
    )
    yield ratio_goal(
        setting, "forward: fused vs cuDNN without rotation", times, "cuDNN, no rotation", "fused", 0.9, run
    )
    yield cost_goal(
        setting, "forward: rotation on vs off in the kernel", times, "fused", "fused, no rotation", 1.10, run
    )

    whole = both_ways(arms, inputs, grad)
    yield {"what": "gradients: largest difference from fused", "relative": round(agree(whole, *same), 5)}
    times = timed(setting, whole)
    yield from time_rows(f"forward + backward, {setting.cells} cells of {setting.length}", times, 3.5 * flops)
    yield ratio_goal(
        setting, "forward + backward: fused vs compiled rotation + flash", times, "compiled rotation + flash", "fused",
        1.05, whole["fused"],
    )  # fmt: skip

    chosen = ("fused", "flash, no rotation", "cuDNN, no rotation")
    backward = backward_only({name: arms[name] for name in chosen}, inputs, grad)
    times = timed(setting, backward)
    yield from time_rows(f"backward, {setting.cells} cells of {setting.length}", times, 2.5 * flops)
    yield ratio_goal(
        setting, "backward: fused vs cuDNN without rotation", times, "cuDNN, no rotation", "fused", 0.7,
        backward["fused"],
    )  # fmt: skip


def against_math(setting: Setting) -> Iterator[dict]:
    """SDPA's plain implementation, which holds all weights: fewer cells."""
    lengths = [setting.length] * setting.few_cells
    inputs, bounds = packed_inputs(setting, lengths)
    grad = torch.randn_like(inputs[0])
    flops = attention_flops(lengths, setting.heads, setting.head_dim)
    arms = {
        "fused": fused_arm(setting, inputs, bounds, setting.length),
        "math, no rotation": sdpa_arm(setting, "math", inputs),
    }
    for what, times, work in (
        ("forward", timed(setting, without_grad(arms)), flops),
        ("backward", timed(setting, backward_only(arms, inputs, grad)), 2.5 * flops),
    ):
        yield from time_rows(f"{what}, {setting.few_cells} cells of {setting.length}", times, work)


def against_flex(setting: Setting) -> Iterator[dict]:
    """FlexAttention with a document mask on packed cells of full length and of typical lengths."""
    full = [setting.length] * setting.few_cells
    typical = (spread_lengths(setting.few_cells, setting.length - 1) + 1).tolist()
    for kind, lengths in (("full length", full), ("typical length", typical)):
        free_memory(setting)
        inputs, bounds = packed_inputs(setting, lengths)
        grad = torch.randn_like(inputs[0])
        where = positions(bounds, inputs[0].shape[0])
        tables = wide_tables(
            *rope_tables(setting.length, setting.head_dim, device=setting.device), where, torch.bfloat16
        )
        arms = {
            "fused": fused_arm(setting, inputs, bounds, max(lengths)),
            "compiled rotation + FlexAttention": flex_arm(setting, *inputs, bounds, tables),
            "FlexAttention, no rotation": flex_arm(setting, *inputs, bounds, None),
        }
        flops = attention_flops(lengths, setting.heads, setting.head_dim)
        forward, whole = without_grad(arms), both_ways(arms, inputs, grad)
        agree(forward, "fused", "compiled rotation + FlexAttention")
        for what, ways, work in (("forward", forward, flops), ("forward + backward", whole, 3.5 * flops)):
            times = timed(setting, ways)
            said = f"{what}, {len(lengths)} packed cells of {kind}"
            yield from time_rows(said, times, work)
            yield ratio_goal(
                setting, f"{said}: fused vs rotation + FlexAttention", times, "compiled rotation + FlexAttention",
                "fused", 1.1, ways["fused"],
            )  # fmt: skip


def packed_against_padded(setting: Setting) -> Iterator[dict]:
    """The same kernel on typical cells, packed, and as if all of them were padded to the full length."""
    lengths = spread_lengths(setting.cells, setting.length - 1) + 1
    full = torch.full_like(lengths, setting.length)
    flops = attention_flops(lengths, setting.heads, setting.head_dim)
    runs, ways = {}, {}
    for name, of in (("packed", lengths), ("padded", full)):
        inputs, bounds = packed_inputs(setting, of)
        runs[name] = fused_arm(setting, inputs, bounds, int(of.max()))
        ways |= both_ways({name: runs[name]}, inputs, torch.randn_like(inputs[0]))
    said = f"{setting.cells} cells of median {int(lengths.median())}"
    yield from time_rows(f"attention forward, {said}", timed(setting, without_grad(runs)), flops)
    yield from time_rows(f"attention forward + backward, {said}", timed(setting, ways), 3.5 * flops)
    bound = attention_flops([setting.length], setting.heads, setting.head_dim) * len(lengths) / flops
    yield {"what": "attention: padded over packed work", "value": round(bound, 4)}
