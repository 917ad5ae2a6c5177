"""Tile sizes of the kernels on this GPU: every candidate timed, K rotated in the loop and once into scratch.

    python benchmarks/_gpu_tuning.py PART PARTS    # compile a part of the candidates into Triton's cache, time nothing

Compiling takes ten times longer than timing, and one process compiles one kernel at a time: `warm_up` starts several.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from _gpu_device import Setting, bounds_of, full_setting, timed, tiny_setting

from scdiva.kernels import rope_tables
from scdiva.kernels._triton_configs import KERNELS, candidates


def _inputs(setting: Setting, n_cells: int) -> tuple:
    """q, k, v, cos, sin, cu_seqlens and the longest cell."""
    shape = (n_cells * setting.length, setting.heads, setting.head_dim)
    q, k, v = (torch.randn(*shape, device=setting.device, dtype=torch.bfloat16) for _ in range(3))
    tables = rope_tables(setting.length, setting.head_dim, device=setting.device)
    return q, k, v, *tables, bounds_of([setting.length] * n_cells, setting.device), setting.length


def tuning(setting: Setting) -> Iterator[dict]:
    """Time the candidates and keep the best for the sections that follow; one row for each, and one for the plan."""
    if not setting.cuda:
        for kernel in KERNELS:
            tiles = candidates(kernel, setting.head_dim, 2, 232_448)
            yield {"what": f"tuning: {kernel}", "candidates": [list(one) for one in tiles]}
        return
    from scdiva.kernels import _triton

    inputs = _inputs(setting, setting.cells)
    before = _triton.device_plan(inputs[0].device, setting.head_dim, torch.bfloat16)

    def seconds(call: object) -> float:
        found = timed(setting, {"call": call}, calls=3, repeats=5)["call"]  # type: ignore[dict-item]
        if "error" in found:
            raise RuntimeError(found["error"])
        return found["best"] / 1e3

    plan, timings = _triton.tune(seconds, *inputs)
    for kernel, tiles, once, spent in sorted(timings, key=lambda one: (one[0], one[3])):
        times = "forward" if kernel == "forward" else "backward, both kernels"
        yield {
            "what": f"tuning: {kernel}, {'rotated once' if once else 'rotated in the loop'}", **tiles._asdict(),
            "times": times, "ms": round(spent * 1e3, 4),
        }  # fmt: skip
    yield {"what": "tuning: plan by default", "plan": _plain(before)}
    yield {"what": "tuning: plan kept, which the rows below run with", "plan": _plain(plan), "same": plan == before}


def _plain(plan: object) -> dict:
    return {name: list(part) if isinstance(part, tuple) else part for name, part in plan._asdict().items()}


def start_warm_up(parts: int) -> list[subprocess.Popen]:
    """Start processes that compile all candidates; to be waited for before anything is timed."""
    command = [sys.executable, str(Path(__file__)), "PART", str(parts)]
    return [
        subprocess.Popen(
            [str(part) if word == "PART" else word for word in command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(parts)
    ]


def compile_part(setting: Setting, part: int, parts: int) -> int:
    """Launch each `parts`-th candidate once, which leaves its code in Triton's cache; return how many."""
    if not setting.cuda:
        return 0
    from triton.runtime.errors import OutOfResources

    from scdiva.kernels import _triton

    # 16 cells: sizes are divisible by 16 as those of the timed input are, which is part of what Triton compiles for
    q, k, v, cos, sin, bounds, longest = _inputs(setting, 16)
    start = _triton.device_plan(q.device, setting.head_dim, q.dtype)
    limit = _triton.shared_limit(q.device)
    jobs = [
        (kernel, start.having(kernel, tiles)._replace(rotate_once=once))
        for once in (True, False)
        for kernel in KERNELS
        for tiles in candidates(kernel, setting.head_dim, q.element_size(), limit)
    ]
    grad = torch.randn_like(q)
    out, lse = torch.randn_like(q), torch.zeros(setting.heads, q.shape[0], device=q.device)
    for kernel, plan in jobs[part::parts]:
        try:
            if kernel == "forward":
                _triton.forward(q, k, v, cos, sin, bounds, longest, plan)
            else:
                _triton.backward(grad, q, k, v, out, lse, cos, sin, bounds, longest, plan)
        except OutOfResources:
            continue
    torch.cuda.synchronize()
    return len(jobs[part::parts])


if __name__ == "__main__":
    compile_part(full_setting() if torch.cuda.is_available() else tiny_setting("cpu"), *map(int, sys.argv[1:3]))
