"""Sizes, timing, profiles, counters and FLOPs for gpu.py; FLOPs and lengths for speed.py too."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
import torch._dynamo
from _record import ratio_goal
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd import DeviceType

Arm = Callable[[], object]
Times = dict[str, list[float] | str]
"""Milliseconds of each sample of an arm, or why it did not run."""


@dataclass
class Setting:
    """Device and sizes of the sections, and results of earlier sections.

    Attributes
    ----------
    device
        `cuda`; or `cpu` for a dry run, in which every line runs at toy sizes and nothing is measured.
    length
        Tokens of a full cell, `[LAT]` included: 1,201.
    cells
        Cells of a kernel's input.
    repeats, calls
        Rounds of timing; calls of an arm between two clock readings.
    matmul
        bf16 matrix products of this device in this run, FLOP/s; None until they were measured.
    plan
        Launch of the attention kernels that was tuned in this run; None: the one chosen for the architecture.
    step_share
        Share of `matmul` that the training step alone reached on typical cells; None: not measured.
    """

    device: torch.device
    length: int = 1201
    cells: int = 192
    heads: int = 8
    head_dim: int = 64
    repeats: int = 7
    calls: int = 5
    matmul: float | None = None
    plan: dict | None = field(default=None, repr=False)
    step_share: float | None = None

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU; otherwise this is a dry run."""
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        """Attention backend under test; SDPA stands in for it in a dry run."""
        return "triton" if self.cuda else "sdpa"


def dry_setting() -> Setting:
    """Toy sizes on a CPU."""
    return Setting(torch.device("cpu"), length=33, cells=4, heads=2, head_dim=32, repeats=2, calls=1)


def synchronize(setting: Setting) -> None:
    """Wait for the device."""
    if setting.cuda:
        torch.cuda.synchronize()


def free_memory(setting: Setting) -> None:
    """Release unused memory of the device and reset its peak."""
    if setting.cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(setting: Setting) -> float:
    """Peak of the memory allocated since :func:`free_memory`, in GiB; 0 in a dry run."""
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if setting.cuda else 0.0


def compiled(setting: Setting, function: Callable, *, dynamic: bool | None = None, **options: object) -> Callable:
    """`torch.compile`, with options of Inductor; traced but not compiled in a dry run."""
    if not setting.cuda:
        return torch.compile(function, backend="eager", dynamic=dynamic)
    return torch.compile(function, dynamic=dynamic, options=options or None)


def timed(setting: Setting, arms: dict[str, Arm], *, calls: int | None = None) -> Times:
    """Time arms by device events.

    Arms take turns, and the order rotates. Each sample spans several calls, so that the time of the device, not of the
    launch, is measured. If an arm fails, its entry is the error message, and the others are still timed.
    """
    times: Times = {}
    for name, arm in arms.items():
        try:
            for _ in range(2):
                arm()
            synchronize(setting)
            times[name] = []
        except Exception as error:  # noqa: BLE001 a rival that can't run is a result
            times[name] = f"{type(error).__name__}: {str(error)[:300]}"
            free_memory(setting)
    running = [name for name in arms if isinstance(times[name], list)]
    for turn in range(setting.repeats if running else 0):
        for name in running[turn % len(running) :] + running[: turn % len(running)]:
            times[name].append(_sample(setting, arms[name], calls or setting.calls))  # type: ignore[union-attr]
    return times


def _sample(setting: Setting, arm: Arm, calls: int) -> float:
    if not setting.cuda:
        start = time.perf_counter()
        for _ in range(calls):
            arm()
        return (time.perf_counter() - start) * 1e3 / calls
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(calls):
        arm()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / calls


def time_rows(what: str, times: Times, flops: float | None = None) -> list[dict]:
    """One row for each arm: its time and its TFLOP/s."""
    rows = []
    for name, samples in times.items():
        row: dict = {"what": f"{what}: {name}"}
        if isinstance(samples, str):
            rows.append({**row, "error": samples})
            continue
        row |= {"ms_best": round(min(samples), 4), "ms_median": round(statistics.median(samples), 4)}
        if flops:
            row["tflops"] = round(flops / min(samples) / 1e9, 1)
        rows.append(row)
    return rows


def ratio(setting: Setting, what: str, times: Times, above: str, below: str, arm: Arm, **bound: float) -> dict:
    """The goal on time of `above` over time of `below`, best of the samples; `arm` is profiled where it is missed."""
    one, other = times[above], times[below]
    for name, samples in ((above, one), (below, other)):
        if isinstance(samples, str):
            return {"what": what, "error": f"{name} did not run: {samples}"}
    return with_profile(setting, ratio_goal(what, one, other, **bound), arm)  # type: ignore[arg-type]


@contextmanager
def profiled(setting: Setting, on_host: bool = False, top: int = 40) -> Iterator[list[str]]:
    """Profile the block, filled in at its end: time of device kernels, or of functions of the host."""
    from torch.profiler import ProfilerActivity

    lines: list[str] = []
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.cuda else [])]
    synchronize(setting)
    start_time = time.perf_counter()
    with torch.profiler.profile(activities=kinds) as watched:
        yield lines
        synchronize(setting)
    seconds, events = time.perf_counter() - start_time, watched.key_averages()
    unit = "self_device_time_total" if setting.cuda and not on_host else "self_cpu_time_total"
    busy = sum(event.self_device_time_total for event in events if event.device_type != DeviceType.CPU)
    lines += [f"device busy {busy / seconds / 1e6:.3g} of the time"] * (setting.cuda or on_host)
    spent = sorted(events, key=lambda event: -getattr(event, unit))[:top]
    lines += [f"{getattr(e, unit) / 1e3:.3g} ms in {e.count} of {e.key[:80]}" for e in spent]


def with_profile(setting: Setting, row: dict, arm: Arm) -> dict:
    """The row; where its goal was missed, with the kernels that take longest in one call."""
    if row.get("met") is not False:
        return row
    try:
        with profiled(setting) as kernels:
            arm()
    except Exception as error:  # noqa: BLE001 a figure is not lost because its profile is
        return {**row, "profile": f"{type(error).__name__}: {str(error)[:300]}"}
    return {**row, "profile": "; ".join(kernels)}


def ceilings(setting: Setting) -> Iterator[dict]:
    """Rate of a large bf16 matrix product on random numbers; rate of a copy, bytes read and written."""
    n, size = (8192, 2**31) if setting.cuda else (64, 2**12)
    a, b = (torch.randn(n, n, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randint(0, 255, (size,), device=setting.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = timed(setting, {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, calls=2 * setting.calls)
    product, copy = (statistics.median(times[name]) / 1e3 for name in ("product", "copy"))
    rate = 2 * n**3 / product
    yield {"what": f"ceiling: bf16 matrix product {n}³", "tflops": round(rate / 1e12, 2), "matmul": rate}
    yield {"what": "ceiling: copy, read + written", "tb_per_s": round(2 * size / copy / 1e12, 4)}


def count_compilations() -> Callable[[], dict[str, int]]:
    """Count new graphs of torch.compile, graph breaks, and kernels that Triton compiled or loaded.

    Returns a function that gives the counts so far.
    """
    kernels: list[object] = []
    if find_spec("triton"):
        import triton

        triton.knobs.compilation.listener = lambda **_: kernels.append(None)

    def so_far() -> dict[str, int]:
        breaks = sum(counters["graph_break"].values())
        return {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": breaks, "kernels": len(kernels)}

    return so_far


@contextmanager
def host_waits(setting: Setting) -> Iterator[Counter[str]]:
    """Count where the host waits for the device inside the block, by file and line; filled in at its end."""
    counts: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if setting.cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            if setting.cuda:
                torch.cuda.set_sync_debug_mode("default")
            waits = [one for one in caught if "synchronizing CUDA operation" in str(one.message)]
            counts.update(f"{Path(one.filename).name}:{one.lineno}" for one in waits)


def attention_flops(lengths: Sequence[int] | Tensor, heads: int, head_dim: int) -> float:
    """FLOPs of the two matrix products of attention, forward; backward is 2.5 times that (five products)."""
    return sum(4.0 * int(n) ** 2 * heads * head_dim for n in lengths)


def embed_flops(config: object, lengths: Sequence[int] | Tensor) -> float:
    """FLOPs to embed cells of so many tokens, `[LAT]` included.

    Per block and token 2 (4 d² + 3 d f) for the linear layers and 4 L d for attention, and the value embedding's d × d
    product per gene. 157 GFLOP for one cell of 1,201 tokens in the paper's model. This counts the whole
    network, although `encode` computes only keys, values and one row of the last block: the rate refers to the returned
    embeddings.
    """
    d, f, layers = config.dim, config.ffn_dim, config.n_layers  # type: ignore[attr-defined]
    linear = 2.0 * (4 * d * d + 3 * d * f)
    return sum(layers * (int(n) * linear + 4.0 * int(n) ** 2 * d) + 2.0 * d * d * (int(n) - 1) for n in lengths)


def train_flops(config: object, lengths: Sequence[int] | Tensor, n_masked: float) -> float:
    """FLOPs of a training step: three times forward, the gene head on masked positions only.

    548 GFLOP for one cell of 1,201 tokens, half of its 1,200 genes masked.
    """
    head = 2.0 * n_masked * config.dim * config.n_genes  # type: ignore[attr-defined]
    return 3.0 * (embed_flops(config, lengths) + head)


def spread_lengths(n: int, length: int, seed: int = 0) -> Tensor:
    """Genes of typical cells, median 3/4 of `length`: 900 of 1,200, cut there; padding to it is 1.41 × the tokens.

    Evenly spaced quantiles of a log-normal distribution (sigma 0.7), in random order, so that all runs have the
    same lengths.
    """
    quantile = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    lengths = (0.75 * length * torch.exp(0.7 * torch.special.ndtri(quantile))).round().clamp(1, length).long()
    return lengths[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]


def bounds_of(lengths: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """cu_seqlens, int32 `(B + 1,)`."""
    lengths = torch.as_tensor(lengths)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)
