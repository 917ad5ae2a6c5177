"""What the GPU benchmarks stand on: the device or its stand-in for a dry run, clocks, ceilings, profiles, FLOPs."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch._dynamo
from _timing import goal
from torch import Tensor
from torch.nn.attention import SDPBackend

Arm = Callable[[], object]


@dataclass
class Setting:
    """Where the benchmarks run and how large they are.

    Attributes
    ----------
    device
        `cuda`, or `cpu` for a dry run, in which every line runs but nothing is measured.
    tiny
        Toy sizes.
    length
        Tokens of a full cell, `[LAT]` included: 1,201.
    cells, few_cells
        Cells of a kernel's input, and of one for rivals that need memory by the square of the length.
    repeats, calls
        Rounds of timing; calls of an arm between two clock readings.
    ceilings
        `matmul` in FLOP/s and `copy` in bytes/s of this run, once measured.
    """

    device: torch.device
    tiny: bool = False
    length: int = 1201
    cells: int = 192
    few_cells: int = 48
    heads: int = 8
    head_dim: int = 64
    repeats: int = 7
    calls: int = 5
    ceilings: dict[str, float] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """Whether this is the real thing."""
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        """Attention backend under test; SDPA stands in for it in a dry run."""
        return "triton" if self.cuda else "sdpa"


def full_setting() -> Setting:
    """One GPU, sizes that fill it: inputs several times its L2 cache."""
    # a function that is compiled for more shapes than this runs uncompiled, and says so nowhere in the figures
    torch._dynamo.config.recompile_limit = 64
    return Setting(torch.device("cuda"))


def tiny_setting(device: str) -> Setting:
    """A dry run."""
    return Setting(
        torch.device(device), tiny=True, length=33, cells=4, few_cells=2, heads=2, head_dim=32, repeats=1, calls=1
    )


def synchronize(setting: Setting) -> None:
    """Wait for the device."""
    if setting.cuda:
        torch.cuda.synchronize()


def free_memory(setting: Setting) -> None:
    """Give back what the last section left."""
    if setting.cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(setting: Setting) -> float:
    """Peak of the memory allocated since :func:`free_memory`, in GiB; 0 in a dry run on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if setting.cuda else 0.0


def compiled(setting: Setting, function: Callable, **options: object) -> Callable:
    """`torch.compile`; traced but not compiled in a dry run."""
    if setting.cuda:
        return torch.compile(function, **options)
    return torch.compile(function, backend="eager", **options)


def sdpa_backends(setting: Setting, name: str) -> list[SDPBackend]:
    """One backend of `scaled_dot_product_attention` by name; a CPU has but one of them for certain."""
    wanted = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}[name]
    return [wanted if setting.cuda else SDPBackend.MATH]


def timed(setting: Setting, arms: dict[str, Arm], *, calls: int | None = None, repeats: int | None = None) -> dict:
    """Milliseconds of one call of each arm, by device events: `{"best", "median", "error"}` by name.

    Arms take turns and the first place goes round. Each sample spans several calls, so that the device, not the launch,
    is timed. An arm that fails has `error` instead and does not keep the others from running.
    """
    calls, repeats = calls or setting.calls, repeats or setting.repeats
    found: dict[str, dict] = {}
    for name, arm in arms.items():
        try:
            for _ in range(2):
                arm()
            synchronize(setting)
            found[name] = {"samples": []}
        except Exception as error:  # noqa: BLE001 a rival that cannot run is a result
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            free_memory(setting)
    running = [name for name in arms if "samples" in found[name]]
    for turn in range(repeats if running else 0):
        for name in running[turn % len(running) :] + running[: turn % len(running)]:
            found[name]["samples"].append(_sample(setting, arms[name], calls))
    for name in running:
        samples = found[name].pop("samples")
        found[name] = {"best": min(samples), "median": statistics.median(samples)}
    return found


def _sample(setting: Setting, arm: Arm, calls: int) -> float:
    if not setting.cuda:
        start = time.perf_counter()
        for _ in range(calls):
            arm()
        return (time.perf_counter() - start) * 1e3 / calls
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        arm()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def time_rows(what: str, times: dict, flops: float | None = None) -> list[dict]:
    """One row for each arm: its time and its TFLOP/s."""
    rows = []
    for name, time_ in times.items():
        row = {"what": f"{what}: {name}"}
        if "error" in time_:
            rows.append({**row, "error": time_["error"]})
            continue
        row |= {"ms_best": round(time_["best"], 4), "ms_median": round(time_["median"], 4)}
        if flops:
            row["tflops"] = round(flops / time_["best"] / 1e9, 1)
        rows.append(row)
    return rows


def ratio_goal(setting: Setting, what: str, times: dict, slow: str, fast: str, bound: float, arm: Arm) -> dict:
    """Row for `time of slow / time of fast >= bound`, best of all samples; `arm` is profiled if it is missed."""
    return _ratio(setting, what, times, slow, fast, arm, at_least=bound)


def cost_goal(setting: Setting, what: str, times: dict, dear: str, cheap: str, bound: float, arm: Arm) -> dict:
    """Row for `time of dear / time of cheap <= bound`."""
    return _ratio(setting, what, times, dear, cheap, arm, at_most=bound)


def _ratio(setting: Setting, what: str, times: dict, above: str, below: str, arm: Arm, **bound: float) -> dict:
    for name in (above, below):
        if "error" in times[name]:
            return {"what": what, "error": f"{name} did not run: {times[name]['error']}"}
    value = times[above]["best"] / times[below]["best"]
    medians = round(times[above]["median"] / times[below]["median"], 4)
    return with_profile(setting, goal(what, value, ratio_of_medians=medians, **bound), arm)


def with_profile(setting: Setting, row: dict, arm: Arm) -> dict:
    """The row, with what the device did in one call of the arm if its goal was missed."""
    return row if row["met"] is not False else {**row, "profile": profile(setting, arm)}


def profile(setting: Setting, arm: Arm, top: int = 12) -> list[dict]:
    """The kernels of one call that take longest: name, calls, milliseconds in all."""
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.cuda else [])]
    synchronize(setting)
    try:
        with torch.profiler.profile(activities=kinds) as watched:
            arm()
            synchronize(setting)
    except Exception as error:  # noqa: BLE001 a figure is not lost because its profile is
        return [{"left_out": f"{type(error).__name__}: {str(error)[:300]}"}]
    unit = "self_device_time_total" if setting.cuda else "self_cpu_time_total"
    spent = sorted(watched.key_averages(), key=lambda event: -getattr(event, unit))[:top]
    return [{"kernel": e.key[:120], "calls": e.count, "ms": round(getattr(e, unit) / 1e3, 3)} for e in spent]


def measure_ceilings(setting: Setting) -> list[dict]:
    """Rate of a large bf16 matrix product on random numbers; rate of a copy, bytes read and written."""
    n, size = (8192, 2**31) if not setting.tiny else (64, 2**12)
    a, b = (torch.randn(n, n, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randint(0, 255, (size,), device=setting.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = timed(setting, {"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)}, calls=2 * setting.calls)
    setting.ceilings = {
        "matmul": 2 * n**3 / times["matmul"]["median"] * 1e3,
        "copy": 2 * size / times["copy"]["median"] * 1e3,
    }
    return [
        {"what": f"ceiling: bf16 matrix product {n}³", "tflops": round(setting.ceilings["matmul"] / 1e12, 2)},
        {"what": "ceiling: copy, read + written", "tb_per_s": round(setting.ceilings["copy"] / 1e12, 4)},
    ]


def attention_flops(lengths: Sequence[int] | Tensor, heads: int, head_dim: int) -> float:
    """FLOPs of the two matrix products of attention, forward; backward is 2.5 times that (five products)."""
    return sum(4.0 * int(n) ** 2 * heads * head_dim for n in lengths)


def embed_flops(config: object, lengths: Sequence[int] | Tensor) -> float:
    """FLOPs to embed cells of so many tokens, `[LAT]` included.

    Per block and token 2 (4 d² + 3 d f) for the linear layers and 4 L d for attention, and the value embedding's d × d
    product per gene. 157 GFLOP for one cell of 1,201 tokens in the paper's model.
    """
    d, f, layers = config.dim, config.ffn_dim, config.n_layers
    linear = 2.0 * (4 * d * d + 3 * d * f)
    return sum(layers * (int(n) * linear + 4.0 * int(n) ** 2 * d) + 2.0 * d * d * (int(n) - 1) for n in lengths)


def train_flops(config: object, lengths: Sequence[int] | Tensor, n_masked: float) -> float:
    """FLOPs of a training step: three times forward, the gene head on masked positions only.

    548 GFLOP for one cell of 1,201 tokens, half of its 1,200 genes masked.
    """
    return 3.0 * (embed_flops(config, lengths) + 2.0 * n_masked * config.dim * config.n_genes)


def spread_lengths(n: int, length: int, seed: int = 0) -> Tensor:
    """Genes of typical cells, median 3/4 of `length`: 900 of 1,200, cut there; padding to it is 1.41 × the tokens.

    Evenly spaced quantiles of a log-normal distribution (sigma 0.7), in random order: no draw makes one run easier than
    another.
    """
    quantile = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    lengths = (0.75 * length * torch.exp(0.7 * torch.special.ndtri(quantile))).round().clamp(1, length).long()
    return lengths[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]


def bounds_of(lengths: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """cu_seqlens, int32 `(B + 1,)`."""
    lengths = torch.as_tensor(lengths)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)
