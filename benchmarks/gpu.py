"""Attention, training and embedding on one NVIDIA GPU with bfloat16, within nine minutes.

    PYTHONPATH=src python benchmarks/gpu.py [--only SECTION ...] [--commit SHA]
    PYTHONPATH=src python benchmarks/gpu.py --dry-run      # on a CPU, at toy sizes; nothing is recorded

Needs torch, triton, numpy, scipy, pandas, h5py, safetensors and pytorch-lightning; no AnnData, scanpy or pytest. Pass
`--commit` where there is no git.

- parity: the cases of the tests of the kernels (`tests/kernels/triton_cases.py`).
- ceilings: rates of a large bfloat16 matrix product and of a copy, of which others are shares.
- tuning: seconds to tune the attention kernels, and the gain. Later sections use the tuned kernels.
- train, fit: a training step on a batch on the device; `fit` with its data loader on packed cells.
- embed: `model.encode` on a batch on the device; `tl.embed` from ranked cells to states on the host.
- sdpa: attention compared with a rotation and SDPA (flash, cuDNN) on cells of full length. The comparison with
  FlexAttention in results/gpu.json is from the commit that its rows name.

Each section runs in its own process for a limited time: one that fails or is cut off loses only itself. Its rows in
results/gpu.json are replaced row by row, and the file is copied to the folder $OUT if that is set. A missed goal has a
profile. `--merge FILE` adds the rows of a run on another machine. Exit code: 0 if no goal is missed and all sections
are complete, 2 without a CUDA device, else 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import _record
import numpy as np
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import CellBatch
from scdiva.data.datamodule import CellDataModule
from scdiva.kernels import autotune_attention, keep_attention_plan, rope_attention_qkv, rope_tables
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.inference import COMPILED_CELLS, CUDA_TOKENS, at_precision, embed_all, resolve_run_config
from scdiva.tokenizer import Vocabulary, load_vocabulary
from scdiva.tokenizer.serialize import score_denominator
from scdiva.train import PretrainingConfig, PretrainingModule, fit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from carry_corpus import write_packed
from triton_cases import CASES

AGREEMENT = 0.02
"""Maximum relative difference (norms, bfloat16) of results that are compared."""
COMPILERS = 12
"""Maximum number of processes that compile and check the kernels; each takes up to 3 GiB of the device."""
TRAIN_CELLS = (96, 192)
"""Batch sizes of the training step, ascending."""
PROFILED = 3
"""Steps of `fit` that are profiled."""
BF16 = torch.bfloat16
Arm = Callable[[], object]
Times = dict[str, list[float] | str]
"""Milliseconds of each sample of an arm, or why it did not run."""
Ragged = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass
class Setting:
    """Device and sizes, and results of earlier sections.

    Attributes
    ----------
    device
        `cuda`, or `cpu` for a dry run.
    length
        Tokens of a full cell, `[LAT]` included.
    cells
        Cells of the input of a kernel.
    repeats, calls
        Rounds of timing; calls of an arm between two clock readings.
    matmul
        Rate of bfloat16 matrix products in this run, FLOP/s; None until it is measured.
    plan
        Tuned launch of the attention kernels; None: the default of the architecture.
    step_share
        Share of `matmul` that the training step reached on typical cells; None: not measured.
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
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        """Attention backend; SDPA in a dry run."""
        return "triton" if self.cuda else "sdpa"


def dry_setting() -> Setting:
    """Toy sizes on a CPU."""
    return Setting(torch.device("cpu"), length=33, cells=4, heads=2, head_dim=32, repeats=2, calls=1)


# timing


def synchronize(setting: Setting) -> None:
    if setting.cuda:
        torch.cuda.synchronize()


def free_memory(setting: Setting) -> None:
    """Release unused memory and reset the peak."""
    if setting.cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(setting: Setting) -> float:
    """Peak of the allocated memory since :func:`free_memory`, in GiB; 0 in a dry run."""
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if setting.cuda else 0.0


def compiled(setting: Setting, function: Callable) -> Callable:
    """`torch.compile`; traced but not compiled in a dry run."""
    return torch.compile(function) if setting.cuda else torch.compile(function, backend="eager")


def timed(setting: Setting, arms: dict[str, Arm], calls: int | None = None) -> Times:
    """Time arms, which take turns; each sample spans several calls. An arm that fails says why."""
    found: Times = {}
    for name, arm in arms.items():
        try:
            arm()
            arm()
            synchronize(setting)
            found[name] = []
        except Exception as error:  # noqa: BLE001 a rival that cannot run is a result
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
            free_memory(setting)
    running = [name for name in arms if isinstance(found[name], list)]
    n_calls = calls or setting.calls
    for turn in range(setting.repeats if running else 0):
        for name in running[turn % len(running) :] + running[: turn % len(running)]:
            synchronize(setting)
            begun = time.perf_counter()
            for _ in range(n_calls):
                arms[name]()
            synchronize(setting)
            found[name].append((time.perf_counter() - begun) * 1e3 / n_calls)  # type: ignore[union-attr]
    return found


def time_rows(what: str, times: Times, flops: float) -> Iterator[dict]:
    """Time and TFLOP/s of each arm."""
    for name, samples in times.items():
        row: dict = {"what": f"{what}: {name}"}
        if isinstance(samples, str):
            yield {**row, "error": samples}
            continue
        best, median = min(samples), statistics.median(samples)
        yield {**row, "ms_best": round(best, 4), "ms_median": round(median, 4), "tflops": round(flops / best / 1e9, 1)}


def ratio(setting: Setting, what: str, times: Times, above: str, below: str, arm: Arm, **bound: float) -> dict:
    """The goal on the time of `above` over that of `below`; `arm` is profiled if it is missed."""
    one, other = times[above], times[below]
    for name, samples in ((above, one), (below, other)):
        if isinstance(samples, str):
            return {"what": what, "error": f"{name} did not run: {samples}"}
    return with_profile(setting, _record.ratio_goal(what, one, other, **bound), arm)  # type: ignore[arg-type]


@contextmanager
def profiled(setting: Setting, on_host: bool = False) -> Iterator[list[str]]:
    """The 40 kernels, or operations of the host, that take longest inside the block; filled in at its end."""
    from torch.profiler import ProfilerActivity

    found: list[str] = []
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.cuda else [])]
    with torch.profiler.profile(activities=kinds) as watched:
        yield found
        synchronize(setting)
    unit = "self_device_time_total" if setting.cuda and not on_host else "self_cpu_time_total"
    spent = sorted(watched.key_averages(), key=lambda event: -getattr(event, unit))[:40]
    found += [f"{getattr(e, unit) / 1e3:.3g} ms in {e.count} of {e.key[:80]}" for e in spent]


def with_profile(setting: Setting, row: dict, arm: Arm) -> dict:
    """The row; if its goal is missed, with the kernels that take longest in one call."""
    if row.get("met") is not False:
        return row
    with profiled(setting) as kernels:
        arm()
    return {**row, "profile": "; ".join(kernels)}


def count_compilations() -> Callable[[], dict[str, int]]:
    """Count graphs of torch.compile, breaks between them, and kernels of Triton from now on."""
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
    """Count synchronisations of the host inside the block by file and line; filled in at its end."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if setting.cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if setting.cuda:
                torch.cuda.set_sync_debug_mode("default")
            waits = [one for one in caught if "synchronizing CUDA operation" in str(one.message)]
            found.update(f"{Path(one.filename).name}:{one.lineno}" for one in waits)


# attention


def ceilings(setting: Setting) -> Iterator[dict]:
    """Rates of a large bfloat16 matrix product, and of a copy (bytes read and written)."""
    n, size = (8192, 2**31) if setting.cuda else (64, 2**12)
    a, b = (torch.randn(n, n, device=setting.device, dtype=BF16) for _ in range(2))
    source = torch.randint(0, 255, (size,), device=setting.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = timed(setting, {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, calls=2 * setting.calls)
    product, copy = (statistics.median(times[name]) / 1e3 for name in ("product", "copy"))
    rate = 2 * n**3 / product
    yield {"what": f"ceiling: bf16 matrix product {n}³", "tflops": round(rate / 1e12, 2), "matmul": rate}
    yield {"what": "ceiling: copy, read + written", "tb_per_s": round(2 * size / copy / 1e12, 4)}


def failure(name: str, device: str, backend: str) -> str:
    """The error of a case; empty if there is none."""
    torch.set_num_threads(1)
    try:
        CASES[name](device=device, backend=backend)
    except Exception as error:  # noqa: BLE001 whatever it is, the kernel failed the case
        return f"{type(error).__name__}: {str(error)[:500]}"
    return ""


def parity(setting: Setting) -> Iterator[dict]:
    """All cases of the tests of the kernels, in several processes; the count is written after each case."""
    names = list(CASES) if setting.cuda else ["new memory is poisoned", "nothing is waited for", "float32, 32, rope"]
    workers = min(COMPILERS, max(1, (os.cpu_count() or 1) - 2)) if setting.cuda else 1
    failed = 0
    with ProcessPoolExecutor(workers, mp_context=FORK) as pool:  # this process has not touched the device
        jobs = {pool.submit(failure, name, setting.device.type, setting.backend): name for name in names}
        for n_done, done in enumerate(as_completed(jobs), 1):
            if done.result():
                failed += 1
                yield {"what": f"parity: {jobs[done]}", "failed": done.result()}
            counts = {"passed": n_done - failed, "of": len(names)}
            yield _record.goal("parity: cases beyond their limit", failed, at_most=0, counted=True, **counts)
    yield _record.goal("parity: cases within their limit", len(names) - failed, at_least=len(names), counted=True)


def keep_plan(setting: Setting) -> None:
    """Use the kernels as an earlier section tuned them."""
    if setting.plan is not None and setting.cuda:
        keep_attention_plan(setting.plan, head_dim=setting.head_dim, dtype=BF16, device=setting.device)


def bounds_of(lengths: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """cu_seqlens, int32 `(B + 1,)`."""
    return F.pad(torch.as_tensor(lengths).cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE in the dtype of q, with tables `(tokens, 1, D)` that hold each angle twice."""

    def one(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    return one(q), one(k)


class Inputs:
    """Random queries, keys and values of full cells, in one tensor for our kernel and in three for the others."""

    def __init__(self, setting: Setting) -> None:
        self.setting, lengths = setting, [setting.length] * setting.cells
        shape = (sum(lengths), 3, setting.heads, setting.head_dim)
        self.qkv = torch.randn(*shape, device=setting.device, dtype=BF16, requires_grad=True)
        self.parts = tuple(x.detach().contiguous().requires_grad_() for x in self.qkv.unbind(1))
        self.grad, self.bounds = torch.randn_like(self.parts[0]), bounds_of(lengths, setting.device)
        self.flops = sum(4.0 * n**2 * setting.heads * setting.head_dim for n in lengths)  # two products

    def fused(self, rotate: bool = True) -> Callable[[], Tensor]:
        """Our attention; with the length of the longest cell, so that no call waits for the device."""
        setting = self.setting
        cos, sin = rope_tables(setting.length, setting.head_dim, device=setting.device) if rotate else (None, None)
        return partial(
            rope_attention_qkv, self.qkv, cos=cos, sin=sin, cu_seqlens=self.bounds, max_seqlen=setting.length,
            backend=setting.backend,
        )  # fmt: skip

    def ways(self, arms: dict[str, Callable[[], Tensor]]) -> dict[str, dict[str, Arm]]:
        """The arms forward, and forward and backward."""

        def both(name: str, arm: Callable[[], Tensor]) -> Arm:
            def run() -> tuple[Tensor, ...]:
                out, of = arm(), (self.qkv,) if name.startswith("fused") else self.parts
                found = torch.autograd.grad(out, of, self.grad.view(out.shape))
                return found if len(found) > 1 else found[0].unbind(1)

            return run

        return {
            "forward": {name: torch.no_grad()(arm) for name, arm in arms.items()},
            "forward + backward": {name: both(name, arm) for name, arm in arms.items()},
        }


def difference(arms: dict[str, Arm]) -> float:
    """Largest relative difference of the arms that rotate from the first; an error above `AGREEMENT`."""

    def result(name: str) -> list[Tensor]:
        out = arms[name]()
        return [x.detach().double().flatten() for x in (out if isinstance(out, tuple) else (out,))]

    first, found = result(next(iter(arms))), [0.0]
    for name in (name for name in arms if "no rotation" not in name):
        with suppress(RuntimeError, NotImplementedError):  # the timing says why an arm cannot run
            found += [float((a - b).norm() / a.norm()) for a, b in zip(first, result(name), strict=True)]
    worst = float(np.max(found))
    if not worst <= AGREEMENT:  # NaN too
        raise AssertionError(f"results differ by {worst:.3g}: the arms do not compute the same.")
    return worst


def attention(setting: Setting) -> Iterator[dict]:
    """Rotation and SDPA on cells of full length."""
    keep_plan(setting)
    inputs = Inputs(setting)
    shape = (-1, setting.length, setting.heads, setting.head_dim)

    def sdpa(kind: SDPBackend, rotate: Callable | None = None) -> Tensor:
        q, k, v = (x.view(shape) for x in inputs.parts)
        if rotate is not None:
            q, k = rotate(q, k)
        with sdpa_kernel(kind if setting.cuda else SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2)

    tables = rope_tables(setting.length, setting.head_dim, device=setting.device)
    cos, sin = (torch.cat([table, table], dim=-1).unsqueeze(1).to(BF16) for table in tables)
    eager = partial(rotate_both, cos=cos, sin=sin)
    fast, flash, cudnn = compiled(setting, eager), SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    arms = {
        "fused": inputs.fused(), "fused, no rotation": inputs.fused(rotate=False),
        "eager rotation + flash": partial(sdpa, flash, eager), "compiled rotation + flash": partial(sdpa, flash, fast),
        "compiled rotation + cuDNN": partial(sdpa, cudnn, fast), "cuDNN, no rotation": partial(sdpa, cudnn),
    }  # fmt: skip
    goals = (
        ("forward", "eager rotation + flash", "fused", {"at_least": 1.5}),
        ("forward", "compiled rotation + flash", "fused", {"at_least": 1.15}),
        ("forward", "compiled rotation + cuDNN", "fused", {"at_least": 0.95}),
        ("forward", "fused", "fused, no rotation", {"at_most": 1.1}),
        ("forward + backward", "compiled rotation + flash", "fused", {"at_least": 1.05}),
        ("forward + backward", "compiled rotation + cuDNN", "fused", {"at_least": 0.9}),
    )
    for way, some in inputs.ways(arms).items():
        said = f"{way}, {setting.cells} cells of {setting.length}"
        yield {"what": f"{said}: largest difference from fused", "relative": round(difference(some), 5)}
        times = timed(setting, some)
        yield from time_rows(said, times, inputs.flops * (1.0 if way == "forward" else 3.5))
        for _, above, below, bound in (goal for goal in goals if goal[0] == way):
            yield ratio(setting, f"{way}: {above} over {below}", times, above, below, some["fused"], **bound)


def tuning(setting: Setting) -> Iterator[dict]:
    """Seconds of tuning the attention kernels as training does, and the gain compared with the default plan."""
    inputs = Inputs(setting)
    ways = {way: arms["fused"] for way, arms in inputs.ways({"fused": inputs.fused()}).items()}
    before, begun, plan = timed(setting, ways), time.perf_counter(), None
    if setting.cuda:
        sizes = {"n_heads": setting.heads, "head_dim": setting.head_dim, "length": setting.length}
        plan = autotune_attention(**sizes, dtype=BF16, device=setting.device)
    seconds = time.perf_counter() - begun
    yield _record.goal(
        "tuning attention: seconds, the kernels of the default plan compiled before", seconds, at_most=60
    )
    yield {"what": "tuning attention: plan, by which the sections below run", "plan": plan}
    for way, samples in timed(setting, ways).items():
        what = f"attention, {way}: time by default over time as tuned"
        if isinstance(samples, str) or isinstance(before[way], str):
            yield {"what": what, "error": f"{before[way]}; {samples}"}
        else:
            yield {"what": what, "value": min(before[way]) / min(samples)}


# embedding and training


@cache
def vocabulary(cuda: bool) -> Vocabulary:
    """All human genes, or a hundred of them, with random entropies."""
    genes = load_vocabulary("human")
    genes = genes if cuda else genes.subset(np.arange(N_SPECIAL, N_SPECIAL + 100))
    return genes.with_entropy(np.random.default_rng(0).uniform(0.3, 2.0, genes.n_genes))


def model_config(setting: Setting) -> ScDiVaConfig:
    """The paper's preset, or a small model of its kind."""
    config = ScDiVaConfig.paper()
    if setting.cuda:
        return config
    return replace(config, n_genes=100, dim=32, n_layers=2, n_heads=2, ffn_dim=48, max_length=setting.length - 1)


def build(setting: Setting) -> ScDiVa:
    """The model with random weights on the device."""
    return ScDiVa(model_config(setting), generator=torch.Generator().manual_seed(0)).to(setting.device)


def cells_of(setting: Setting, lengths: Tensor) -> Ragged:
    """Random cells of these numbers of genes, as the serialiser gives them: indptr, tokens and values."""
    draw, n = np.random.default_rng(0), int(lengths.sum())
    indptr = np.concatenate([[0], np.cumsum(lengths.numpy())])
    tokens = draw.integers(N_SPECIAL, N_SPECIAL + model_config(setting).n_genes, n, dtype=np.int32)
    return indptr, tokens, draw.random(n, dtype=np.float32) * 3


def batch_of(setting: Setting, genes: Tensor) -> CellBatch:
    """A batch of random cells on the device."""
    _, tokens, values = cells_of(setting, genes)
    bounds = bounds_of(genes, torch.device("cpu"))
    return CellBatch(torch.from_numpy(tokens).long(), torch.from_numpy(values), bounds).to(setting.device)


def kinds_of_cells(setting: Setting, n_cells: int) -> dict[str, Tensor]:
    """Numbers of genes of full cells, 1,200 each, and of typical cells, median 900."""
    genes = setting.length - 1
    return {"full cells": torch.full((n_cells,), genes), "typical cells": _record.spread_lengths(n_cells, genes)}


def rate_row(setting: Setting, what: str, n_cells: int, flops: float, seconds: float, **details: object) -> dict:
    """Cells per second, and the share of the matrix product rate if that was measured."""
    row = {"what": what, "cells": n_cells, "cells_per_s": round(n_cells / seconds, 1)}
    row["gflop_per_cell"] = round(flops / n_cells / 1e9, 1)
    share = {"share_of_matmul": round(flops / seconds / setting.matmul, 4)} if setting.matmul else {}
    return {**row, **share, **details}


class CellsInMemory:
    """Ranked cells as `embed_all` reads them (`models.inference.Cells`), without AnnData."""

    def __init__(self, ragged: Ragged) -> None:
        self.indptr, self.tokens, self.values = ragged
        self.n_obs = len(self.indptr) - 1

    def windows(self, n_cells: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[np.ndarray, Ragged]]:
        stop = self.n_obs if stop is None else stop
        for first in range(start, stop, n_cells):
            last = min(first + n_cells, stop)
            span = slice(self.indptr[first], self.indptr[last])
            bounds = self.indptr[first : last + 1] - self.indptr[first]
            yield np.arange(first, last), (bounds, self.tokens[span], self.values[span])


def embedding(setting: Setting) -> Iterator[dict]:
    """`model.encode` on a batch on the device, then `tl.embed`, of full and of typical cells."""
    keep_plan(setting)
    n_cells, config, model = (COMPILED_CELLS if setting.cuda else 24), model_config(setting), build(setting)
    run_config = resolve_run_config(None, setting.device.type, "bf16" if setting.cuda else "fp32")
    kinds, compilations = kinds_of_cells(setting, n_cells), count_compilations()
    (full, _), (typical, genes) = kinds.items()
    network = at_precision(model, run_config.precision)
    if setting.cuda:
        network.compile_blocks()

    def encode(batch: CellBatch) -> Arm:
        return torch.inference_mode()(lambda: network.encode(*batch.packed, backend=setting.backend))

    few = {kind: genes[: CUDA_TOKENS // setting.length if setting.cuda else 4] for kind, genes in kinds.items()}
    cells = batch_of(setting, few[typical][:4]).packed
    with torch.inference_mode():
        exact = model.read(*cells, backend="sdpa").cell_state  # float32
        cosine = F.cosine_similarity(network.encode(*cells, backend=setting.backend).float(), exact)
    yield _record.goal("model.encode: 1 - cosine from float32, largest", float((1 - cosine).max()), at_most=1e-3)
    arms = {kind: encode(batch_of(setting, genes)) for kind, genes in few.items()}
    for kind, samples in timed(setting, arms, calls=2).items():
        what, flops = f"model.encode, {kind}", _record.embed_flops(config, few[kind] + 1)
        if isinstance(samples, str):
            yield {"what": what, "error": samples}
            continue
        yield rate_row(setting, f"{what}, one batch on the device", len(few[kind]), flops, min(samples) / 1e3)
        if setting.matmul:
            share = flops / min(samples) * 1e3 / setting.matmul
            row = _record.goal(f"{what}: share of the bf16 matrix product rate", share, at_least=0.54)
            yield with_profile(setting, row, arms[kind])

    def embed(kind: str) -> float:
        begun = time.perf_counter()
        states = embed_all(model, CellsInMemory(cells_of(setting, kinds[kind])), run_config)  # on the host
        if not np.isfinite(states).all():
            raise FloatingPointError(f"{int((~np.isfinite(states)).sum())} values of the states are not finite")
        return time.perf_counter() - begun

    for kind in kinds:
        yield {"what": f"tl.embed, {kind}: first call, compiling included", "seconds": round(embed(kind), 2)}
    first, seconds = compilations(), dict.fromkeys(kinds, np.inf)
    free_memory(setting)
    for turn in range(4 if setting.cuda else 2):  # written after each turn
        for kind, genes_of in kinds.items():
            seconds[kind], flops = min(seconds[kind], embed(kind)), _record.embed_flops(config, genes_of + 1)
            about = {"calls": turn + 1, "peak_gib": peak_gib(setting)}
            yield rate_row(setting, f"tl.embed, {kind}", n_cells, flops, seconds[kind], **about)
            if setting.matmul:
                share = flops / seconds[kind] / setting.matmul
                yield _record.goal(f"tl.embed, {kind}: share of the bf16 matrix product rate", share, at_least=0.54)
        packed, bound = seconds[full] / seconds[typical], setting.length * n_cells / float((genes + 1).sum())
        yield _record.goal("tl.embed: packed over padded to full length", packed, at_least=1.3, bound=bound)
        new = sum(compilations()[name] - first[name] for name in ("graphs", "kernels"))
        yield _record.goal("tl.embed: graphs and kernels compiled again in warm calls", new, at_most=0, counted=True)
    yield _record.goal("tl.embed: graph breaks", compilations()["graph_breaks"], at_most=0, counted=True)
    with host_waits(setting) as waits:
        embed(typical)
    what = f"tl.embed, {typical}: waits of the host for the device in a call"
    yield {"what": what, "value": float(sum(waits.values())), "where": dict(waits.most_common(8))}
    row = _record.goal(f"tl.embed, {full}: cells/s", n_cells / seconds[full], at_least=2700)
    yield with_profile(setting, row, lambda: embed(full))


def module_of(setting: Setting, **options: object) -> PretrainingModule:
    """The paper's training of the paper's model."""
    return PretrainingModule(build(setting).train(), replace(PretrainingConfig.paper(), **options))


def training(setting: Setting) -> Iterator[dict]:
    """The training step on a batch on the device: masks, forward, loss, backward, fused AdamW."""
    keep_plan(setting)
    config, module = model_config(setting), module_of(setting)
    if setting.cuda:
        module.model.compile_blocks()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=setting.cuda)
    draw = torch.Generator().manual_seed(1)

    def step(batch: CellBatch) -> None:
        with torch.autocast(setting.device.type, dtype=BF16):
            loss, _ = module.compute_loss(batch, draw)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def measured(what: str, genes: Tensor) -> tuple[dict, Arm]:
        free_memory(setting)
        run = partial(step, batch_of(setting, genes))
        samples = timed(setting, {"step": run}, calls=2)["step"]
        if isinstance(samples, str):  # such as a batch that does not fit into memory
            optimizer.zero_grad(set_to_none=True)
            return {"what": what, "left_out": samples}, run
        flops = _record.train_flops(config, genes + 1, float(genes.sum()) / 2)  # half of the genes are masked
        return rate_row(setting, what, len(genes), flops, min(samples) / 1e3, peak_gib=peak_gib(setting)), run

    best: dict[str, tuple[float, Arm]] = {}
    sizes = TRAIN_CELLS if setting.cuda else (4,)
    for n_cells in sizes:
        for kind, genes in kinds_of_cells(setting, n_cells).items():
            row, run = measured(f"training step, {kind}, {n_cells} cells", genes)
            yield row
            if row.get("share_of_matmul", 0.0) > best.get(kind, (0.0, run))[0]:
                best[kind] = (row["share_of_matmul"], run)
    for kind, (share, run) in best.items():
        row = _record.goal(f"training step, {kind}: share of the bf16 matrix product rate", share, at_least=0.45)
        yield with_profile(setting, row, run) | ({"step_share": share} if kind.startswith("typical") else {})
    module.model.residual_dtype = BF16  # blocks are compiled again
    what = f"training step, full cells, {sizes[0]} cells, residual stream in bfloat16"
    yield measured(what, kinds_of_cells(setting, sizes[0])["full cells"])[0]


class Span(Callback):
    """Time and compilations between two steps of `fit`, waits of the host in the steps after them, and a profile."""

    def __init__(self, setting: Setting, steps: tuple[int, int, int], compilations: Callable) -> None:
        self.setting, self.compilations, (self.first, self.last, self.end) = setting, compilations, steps
        self.begun, self.waited = time.perf_counter(), 0
        self.bounds: list[Tensor] = []
        self._stack, self._profile = ExitStack(), ExitStack()

    def on_train_batch_start(self, trainer: object, module: object, batch: CellBatch, number: int) -> None:
        if number == self.first:
            free_memory(self.setting)
            synchronize(self.setting)
            self.before, self.started = self.compilations(), time.perf_counter()
        if number == self.last:
            synchronize(self.setting)
            self.seconds, now = time.perf_counter() - self.started, self.compilations()
            self.again = {name: n - self.before[name] for name, n in now.items()}
            self.peak = peak_gib(self.setting)
            self.waits = self._stack.enter_context(host_waits(self.setting))
        if self.first <= number < self.last:
            self.bounds.append(batch.cu_seqlens)

    def on_train_batch_end(self, trainer: object, module: object, out: object, batch: object, number: int) -> None:
        self.waited += self.last <= number < self.end
        if number + 1 == self.end:
            self._stack.close()
            self.profile = self._profile.enter_context(profiled(self.setting, on_host=True))
        elif number + 1 == self.end + PROFILED:  # before the last checkpoint
            self._profile.close()


def packed_corpus(setting: Setting, folder: Path, n_cells: int) -> Path:
    """A packed corpus of random cells of typical lengths."""
    genes = vocabulary(setting.cuda)
    indptr, tokens, values = cells_of(setting, _record.spread_lengths(n_cells, setting.length - 1))
    floor, n_tokens = model_config(setting).entropy_floor, genes.n_genes + N_SPECIAL
    content = {
        "indptr": indptr, "tokens": tokens.astype(np.uint16), "values": values, "study": np.zeros(n_cells, np.int32),
        "measured": np.ones((1, n_tokens), bool), "denominator": score_denominator(genes.entropy, floor),
    }  # fmt: skip
    attributes = {
        "scdiva_packed": 1, "fingerprint": genes.fingerprint, "n_tokens": n_tokens, "max_length": setting.length - 1,
        "entropy_floor": floor,
    }  # fmt: skip
    write_packed(folder / "train.h5", content, {"attributes": attributes, "study_names": ["drawn"]})
    return folder / "train.h5"


def fitting(setting: Setting) -> Iterator[dict]:
    """`fit` with its loader on packed cells: cells per second, compilations, and waits of the host."""
    keep_plan(setting)
    config, (first, last, end) = model_config(setting), (12, 42, 52) if setting.cuda else (2, 4, 6)
    n_cells, batch_size = (20_000, TRAIN_CELLS[0]) if setting.cuda else (64, 4)
    steps, context = end + PROFILED + 1, setting.length - 1
    module = module_of(setting, steps=steps, batch_size=batch_size, context=context, autotune=False)
    span = Span(setting, (first, last, end), count_compilations())
    with tempfile.TemporaryDirectory() as folder:
        data = CellDataModule(
            [packed_corpus(setting, Path(folder), n_cells)], vocabulary=vocabulary(setting.cuda),
            batch_size=batch_size, context=context, entropy_floor=config.entropy_floor,
        )  # fmt: skip
        accelerator = "gpu" if setting.cuda else "cpu"
        fit(module, data, out_dir=Path(folder) / "run", accelerator=accelerator, callbacks=[span], progress=False)
        data.close()
    lengths = torch.cat([bounds.cpu().diff() for bounds in span.bounds])
    flops = _record.train_flops(config, lengths + 1, float(lengths.sum()) / 2)
    before = round(span.started - span.begun, 1)
    yield {"what": "fit: seconds from the call to the first timed step", "seconds": before}
    about = {"median_genes": int(lengths.median()), "batch_size": batch_size, "peak_gib": span.peak}
    yield rate_row(setting, "fit, packed cells", len(lengths), flops, span.seconds, **about)
    if setting.matmul:
        share = flops / span.seconds / setting.matmul
        yield {"what": "fit, packed cells: share of the bf16 matrix product rate", "value": share}
        rate, profile = share / (setting.step_share or share), "; ".join(span.profile)
        yield {
            **_record.goal("fit, packed cells: rate over that of the step alone", rate, at_least=0.95),
            "profile": profile,
        }
    new = span.again["graphs"] + span.again["kernels"]
    what = f"fit: graphs and kernels compiled again over {last - first} batches of varied lengths"
    yield _record.goal(what, new, at_most=0, counted=True, **span.again)
    waits, where = sum(span.waits.values()) / span.waited, dict(span.waits.most_common(8))
    yield _record.goal("fit: waits of the host for the device, a step", waits, at_most=1, counted=True, where=where)


# sections

Section = Callable[[Setting], Iterable[dict]]
SECTIONS: dict[str, tuple[Section, float]] = {
    "parity": (parity, 60), "ceilings": (ceilings, 10), "tuning": (tuning, 55), "train": (training, 70),
    "fit": (fitting, 50), "embed": (embedding, 110), "sdpa": (attention, 40),
}  # fmt: skip
"""Functions that yield the rows of a section, and the maximum seconds of each, in the order of priority."""
LIMIT = 540.0
"""Maximum seconds of the call."""
NO_DEVICE = 2
FORK = multiprocessing.get_context("fork")
"""Sections have all imports at once and their own device: this process never uses one."""


def checks(setting: Setting) -> Iterator[dict]:
    """The machine, and sizes of the model."""
    yield {"machine": _record.machine()}
    config = ScDiVaConfig.paper()
    with torch.device("meta"):
        yield {"what": "paper's model", "parameters": ScDiVa(config).n_parameters}


def run(section: Section, setting: Setting, rows: Connection) -> None:
    """Send each row of a section, and None at the end; in its own process."""
    os.setsid()  # all processes that it starts end with it
    if not setting.cuda:
        torch.set_num_threads(1)
    try:
        for row in section(setting):
            rows.send(row)
    except Exception as error:  # noqa: BLE001 the other sections go on
        traceback.print_exc()
        rows.send({"error": f"{type(error).__name__}: {error}"[:2000]})
    rows.send(None)
    sys.stdout.flush()
    os._exit(0)  # worker processes of compilers are not waited for


def rows_of(section: Section, setting: Setting, seconds: float) -> Iterator[dict]:
    """Rows of a section that runs in its own process for at most so long, and an `error` if it did not end."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run, args=(section, setting, send))
    process.start()
    send.close()
    end = time.monotonic() + seconds
    try:
        while receive.poll(max(0.0, end - time.monotonic())):
            row = receive.recv()
            if row is None:
                return
            yield row
        yield {"error": f"cut off after its {seconds:.0f} s"}
    except EOFError:
        process.join()
        yield {"error": f"its process ended with {process.exitcode}"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()


def run_all(
    setting: Setting, names: Iterable[str], write: Callable[[list[dict], dict], object], limit: float = LIMIT
) -> tuple[list[dict], int]:
    """Run sections for at most `limit` seconds; return their rows, and how many are not complete."""
    started, rows, failed, about = time.monotonic(), [], 0, {"processor": "unknown"}
    for name, (section, seconds) in ({"checks": (checks, 30.0)} | {name: SECTIONS[name] for name in names}).items():
        begun, whole = time.monotonic(), True
        for row in rows_of(section, setting, min(seconds, limit - (begun - started))):
            if "machine" in row:
                about = row["machine"]
                if setting.cuda and "gpu" not in about:
                    return [], 1
                continue
            row = {"section": name, "what": f"section {name}", **row}
            whole = whole and not row.keys() & {"error", "failed"}
            setting.matmul, setting.plan = row.pop("matmul", setting.matmul), row.get("plan", setting.plan)
            setting.step_share = row.pop("step_share", setting.step_share)
            rows = _record.replaced(rows, row, ("section", "what"))
            _record.report([row])
            write(rows, about)
        failed += not whole
        print(f"[{name}: {time.monotonic() - begun:.0f} s{'' if whole else ', NOT COMPLETE'}]", flush=True)
    return rows, failed


def keep(rows: list[dict], about: dict, of: str, folder: Path) -> Path:
    """Write rows to `gpu.json` in a folder, each with GPU and commit, in place of earlier rows of their sections."""
    rows = [{**row, "gpu": about.get("gpu", "none"), "commit": of} for row in rows]
    measured = {row["section"] for row in rows}
    file = folder / "gpu.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = [row for row in before if row["section"] not in measured] + rows
    return _record.record("gpu", rows, folder, commit=of, machine=about)


def merge(file: Path) -> None:
    """Add the rows of a `gpu.json` from another machine to the results."""
    entry = json.loads(file.read_text())
    path = keep(entry["rows"], entry["machine"], entry["commit"], _record.RESULTS)
    merged = json.loads(path.read_text()) | {name: value for name, value in entry.items() if name != "rows"}
    path.write_text(json.dumps(merged, indent=1, allow_nan=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="sections to run, with the ceilings")
    parser.add_argument("--commit", help="commit of the code, where there is no git")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on a CPU; results go to $OUT, or nowhere")
    parser.add_argument("--merge", type=Path, help="add the rows of this gpu.json to the results; nothing is run")
    arguments = parser.parse_args()
    if arguments.merge:
        merge(arguments.merge)
        return 0
    setting = dry_setting() if arguments.dry_run else Setting(torch.device("cuda"))
    chosen = [name for name in SECTIONS if not arguments.only or name in (*arguments.only, "ceilings")]
    of, out = arguments.commit or _record.commit(), os.environ.get("OUT")
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere) if arguments.dry_run else _record.RESULTS

        def write(rows: list[dict], about: dict) -> None:
            path = keep(rows, about, of, folder)
            if out:
                shutil.copy(path, out)

        rows, failed = run_all(setting, chosen, write)
    if not rows:
        print("There is no CUDA device. Pass --dry-run to try every section on a CPU.")
        return NO_DEVICE
    print("\nGoals:")
    missed = _record.report(row for row in rows if "met" in row)
    print(f"{missed} goals missed, {failed} sections not complete.")
    return int(failed > 0 or (missed > 0 and not arguments.dry_run))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # for a call that is cut off
    sys.exit(main())
