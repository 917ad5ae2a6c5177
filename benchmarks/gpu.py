"""Run all benchmarks that require a GPU in one call of nine minutes, goals first; each row is written immediately.

    PYTHONPATH=src python benchmarks/gpu.py [--only SECTION ...] [--commit SHA]
    PYTHONPATH=src python benchmarks/gpu.py --dry-run      # on a CPU: every line at toy sizes, nothing is measured

One NVIDIA GPU with bfloat16 (written for an H100 or H200). Needs torch, triton, numpy, scipy, pandas, h5py, safetensors
and pytorch-lightning; no anndata, no scanpy, no pytest. Pass `--commit` if git is not available.

Sections run one after another, each in a separate process with its own time limit: a section that crashes, hangs or
exceeds the limit loses only the rows that it has not written yet. After each row, its section is replaced in
results/gpu.json, and a copy is written to the folder $OUT if that is set. Missed goals are profiled. `--merge FILE`
adds the rows of a run on another machine.

Which row answers which goal, as `section: beginning of the row`:

=========================================================  ==========================================================
the kernel agrees with the float64 reference               parity: parity: cases beyond their limit
fused forward vs eager rotation + SDPA >= 1.5              sdpa: forward: eager rotation + flash over fused
fused vs compiled rotation + flash, forward >= 1.15        sdpa: forward: compiled rotation + flash over fused
the same, forward + backward >= 1.05                       sdpa: forward + backward: compiled rotation + flash over
fused vs compiled rotation + cuDNN, forward >= 0.95        sdpa: forward: compiled rotation + cuDNN over fused
the same, backward >= 0.9                                  sdpa: backward: compiled rotation + cuDNN over fused
rotation on vs off in the kernel <= 1.10                   sdpa: forward: fused over fused, no rotation
embedding >= 2,700 cells/s at L=1200                       embed: tl.embed, full cells: cells/s
embedding >= 54% of the bf16 matrix product rate           embed: tl.embed, full cells: share
the same of model.encode alone                             embed: model.encode, full cells: share
model.encode in bf16 vs float32: 1 - cosine <= 0.001       embed: model.encode: 1 - cosine from float32, largest
packed vs padded, median-900 cells >= 1.3 of 1.41          embed: tl.embed: packed over padded
training >= 45% of the bf16 matrix product rate            train: training step, full cells: share
`fit` with its loader within 5% of the step alone          fit: fit, packed cells: rate over that of the step
nothing is compiled again by the number of tokens, embed   embed: tl.embed: graphs and kernels compiled again
the same in training                                       fit: fit: graphs and kernels compiled again
the host waits for the device once a step at most          fit: fit: waits of the host for the device, a step
tuning takes 60 s at most                                  tuning: tuning attention: seconds
rows of the gene head are aligned, within 1.05             head: gene head: its loss over that of aligned rows
=========================================================  ==========================================================

Several GPUs (DDP, FSDP) are not tested. Exit code: 0 if no goal is missed and every section is completed; 2 if there is
no CUDA device; otherwise 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from _gpu import (
    Arm,
    Setting,
    attention_flops,
    bounds_of,
    ceilings,
    compiled,
    count_compilations,
    dry_setting,
    embed_flops,
    free_memory,
    host_waits,
    peak_gib,
    profiled,
    ratio,
    spread_lengths,
    synchronize,
    time_rows,
    timed,
    train_flops,
    with_profile,
)
from _record import RESULTS, commit, goal, machine, record, replaced, report
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import CellBatch, InMemoryCells
from scdiva.data.datamodule import CellDataModule
from scdiva.diffusion.loss import masked_cross_entropy
from scdiva.integration.objective import IntegrationObjective
from scdiva.kernels import autotune_attention, keep_attention_plan, rope_attention_qkv, rope_tables
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.inference import COMPILED_CELLS, CUDA_TOKENS, at_precision, embed_all, resolve_run_config
from scdiva.tokenizer import Vocabulary, load_vocabulary
from scdiva.tokenizer.serialize import score_denominator
from scdiva.train import PretrainingConfig, PretrainingModule, fit
from scdiva.train.config import FinetuneConfig
from scdiva.train.finetune import network_for, planned
from scdiva.train.finetune_module import finetune

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from carry_corpus import write_packed
from triton_cases import CASES  # the cases of the kernel's tests

AGREEMENT = 0.02
"""Maximum relative difference (norms, bfloat16) between arms of one row: they must compute one function."""
COMPILERS = 12
"""Maximum number of processes that compile and check the kernels; each takes up to 3 GiB of the device."""
TRAIN_CELLS = (96, 192)
"""Batch sizes that are tried, ascending."""
PROFILED = 3
"""Steps of `fit` whose profile is kept."""
BF16 = torch.bfloat16
Inputs = tuple[Tensor, Tensor, Tensor]
Ragged = tuple[np.ndarray, np.ndarray, np.ndarray]


# attention


def keep_plan(setting: Setting) -> None:
    """Launch the kernels in this process as they were tuned in an earlier section."""
    if setting.plan is not None and setting.cuda:
        keep_attention_plan(setting.plan, head_dim=setting.head_dim, dtype=BF16, device=setting.device)


def _judged(name: str, device: str, backend: str) -> str:
    """Error message of a case; empty if it passes."""
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


def packed_inputs(setting: Setting, lengths: list[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Random bf16 queries, keys and values `(T, 3, H, D)` with gradients, and cu_seqlens."""
    shape = (int(torch.as_tensor(lengths).sum()), 3, setting.heads, setting.head_dim)
    qkv = torch.randn(*shape, device=setting.device, dtype=BF16, requires_grad=True)
    return qkv, bounds_of(lengths, setting.device)


def fused_arm(
    setting: Setting, qkv: Tensor, bounds: Tensor, longest: int, *, rotate: bool = True
) -> Callable[[], Tensor]:
    """Fused attention; the caller passes the length of the longest cell, so that calls do not wait for the device."""
    cos, sin = rope_tables(setting.length, setting.head_dim, device=setting.device) if rotate else (None, None)

    def run() -> Tensor:
        return rope_attention_qkv(qkv, cos=cos, sin=sin, cu_seqlens=bounds, max_seqlen=longest, backend=setting.backend)

    return run


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE as commonly implemented: in the dtype of q, with tables `(tokens, 1, D)` that contain each angle twice."""

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
    """A kernel of SDPA on cells of full length, after a rotation if one is given; a CPU uses the math backend."""
    shape = (-1, setting.length, setting.heads, setting.head_dim)
    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}[name]

    def run() -> Tensor:
        q, k, v = (x.view(shape) for x in inputs)
        if rotate is not None:
            q, k = rotate(q, k)
        with sdpa_kernel(backend if setting.cuda else SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2)

    return run


def varlen_arm(
    setting: Setting, inputs: Inputs, bounds: Tensor, rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Callable[[], Tensor]:
    """torch's attention over packed cells, after a rotation."""
    shape = (-1, setting.length, setting.heads, setting.head_dim)

    def run() -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = inputs
        q, k = (x.flatten(0, 1) for x in rotate(q.view(shape), k.view(shape)))
        return varlen_attn(q, k, v, bounds, bounds, setting.length, setting.length)

    return run


def flex_arm(
    setting: Setting, inputs: Inputs, rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Callable[[], Tensor]:
    """Compiled FlexAttention on cells of full length, after a rotation."""
    from torch.nn.attention.flex_attention import flex_attention

    shape, attention = (-1, setting.length, setting.heads, setting.head_dim), compiled(setting, flex_attention)

    def run() -> Tensor:
        q, k, v = (x.view(shape) for x in inputs)
        q, k = rotate(q, k)
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    return run


def forward_only(arms: dict[str, Callable[[], Tensor]]) -> dict[str, Arm]:
    """The arms without gradients."""
    return {name: torch.no_grad()(arm) for name, arm in arms.items()}


def gradients(out: Tensor, inputs: tuple[Tensor, ...], grad: Tensor, *, again: bool = False) -> tuple[Tensor, ...]:
    """Gradients of q, k and v; of an arm with one input, the parts of its gradient."""
    grads = torch.autograd.grad(out, inputs, grad.view(out.shape), retain_graph=again)
    return grads if len(grads) > 1 else grads[0].unbind(1)


def both_ways(arms: dict[str, Callable[[], Tensor]], inputs: tuple[Tensor, ...], grad: Tensor) -> dict[str, Arm]:
    """The arms, forward and backward."""

    def with_backward(arm: Callable[[], Tensor]) -> Arm:
        def run() -> object:
            return gradients(arm(), inputs, grad)

        return run

    return {name: with_backward(arm) for name, arm in arms.items()}


def backward_only(arms: dict[str, Callable[[], Tensor]], inputs: tuple[Tensor, ...], grad: Tensor) -> dict[str, Arm]:
    """The arms' backward passes, after one forward pass (at the first call, so that a failure stays the arm's)."""

    def back(arm: Callable[[], Tensor]) -> Arm:
        outputs: list[Tensor] = []

        def run() -> object:
            if not outputs:
                outputs.append(arm())
            return gradients(outputs[0], inputs, grad, again=True)

        return run

    return {name: back(arm) for name, arm in arms.items()}


def agree(arms: dict[str, Arm], *names: str) -> float:
    """Largest relative difference of the arms' results from those of the first; an error if it exceeds AGREEMENT."""

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
            if not difference <= AGREEMENT:  # this form also rejects NaN
                raise AssertionError(f"{names[0]} and {name} differ by {difference:.3g}: they do not compute the same.")
            worst = max(worst, difference)
    return worst


def kernel_rows(setting: Setting, what: str, arm: Arm, flops: dict[str, float]) -> Iterator[dict]:
    """Device time of single kernels in one call of an arm, and their TFLOP/s; 0 where they do not run."""
    from torch.profiler import ProfilerActivity, profile

    arm()
    synchronize(setting)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.cuda else [])]) as watched:
        for _ in range(setting.calls):
            arm()
        synchronize(setting)
    for name, work in flops.items():
        spent = sum(e.self_device_time_total for e in watched.key_averages() if e.key == name)
        ms = spent / setting.calls / 1e3
        rate = {"tflops": round(work / ms / 1e9, 1)} if ms and work else {}
        yield {"what": f"{what}: {name}", "ms": round(ms, 4), **rate}


def against_sdpa(setting: Setting) -> Iterator[dict]:
    """Cells of full length: rotation + SDPA, eager and compiled, and SDPA's kernels without any rotation.

    The fused kernel takes queries, keys and values in one tensor, as the model's projection returns them, its rivals
    in three, so that no arm makes a copy.
    """
    keep_plan(setting)
    torch._functorch.config.donated_buffer = False  # backward passes of the compiled rotation run more than once
    lengths = [setting.length] * setting.cells
    qkv, bounds = packed_inputs(setting, lengths)
    q, k, v = inputs = tuple(x.detach().contiguous().requires_grad_() for x in qkv.unbind(1))
    grad = torch.randn_like(q)
    flops = attention_flops(lengths, setting.heads, setting.head_dim)
    size = f"{setting.cells} cells of {setting.length}"
    tables = wide_tables(setting, slice(None))

    def eager(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_both(q, k, *tables)

    fast = compiled(setting, eager)
    fused = {
        "fused": fused_arm(setting, qkv, bounds, setting.length),
        "fused, no rotation": fused_arm(setting, qkv, bounds, setting.length, rotate=False),
    }
    rivals = {
        "eager rotation + flash": sdpa_arm(setting, "flash", (q, k, v), eager),
        "compiled rotation + flash": sdpa_arm(setting, "flash", (q, k, v), fast),
        "flash, no rotation": sdpa_arm(setting, "flash", (q, k, v)),
        "compiled rotation + cuDNN": sdpa_arm(setting, "cuDNN", (q, k, v), fast),
        "cuDNN, no rotation": sdpa_arm(setting, "cuDNN", (q, k, v)),
    }
    if setting.cuda and find_spec("torch.nn.attention.varlen"):  # torch 2.10 or newer
        rivals["compiled rotation + torch varlen"] = varlen_arm(setting, (q, k, v), bounds, fast)
    if setting.cuda:  # without a backward pass on a CPU
        rivals["compiled rotation + FlexAttention"] = flex_arm(setting, (q, k, v), fast)
    rotated = ["fused", *(name for name in rivals if "no rotation" not in name)]

    forward = forward_only(fused | rivals)
    yield {"what": "forward: largest difference from fused", "relative": round(agree(forward, *rotated), 5)}
    agree(forward, "fused, no rotation", "flash, no rotation", "cuDNN, no rotation")
    times = timed(setting, forward)
    yield from time_rows(f"forward, {size}", times, flops)
    for above, below, bound in (
        ("eager rotation + flash", "fused", {"at_least": 1.5}),
        ("compiled rotation + flash", "fused", {"at_least": 1.15}),
        ("compiled rotation + cuDNN", "fused", {"at_least": 0.95}),
        ("fused", "fused, no rotation", {"at_most": 1.10}),
    ):
        yield ratio(setting, f"forward: {above} over {below}", times, above, below, forward["fused"], **bound)

    forward_backward = both_ways(fused, (qkv,), grad) | both_ways(rivals, inputs, grad)
    yield {"what": "gradients: largest difference from fused", "relative": round(agree(forward_backward, *rotated), 5)}
    times = timed(setting, forward_backward)
    yield from time_rows(f"forward + backward, {size}", times, 3.5 * flops)
    above = "compiled rotation + flash"
    yield ratio(
        setting,
        f"forward + backward: {above} over fused",
        times,
        above,
        "fused",
        forward_backward["fused"],
        at_least=1.05,
    )
    # 2 products forward; backward 3 for queries and 4 for keys and values, of which 2 are the same
    work = {"rotate_kernel": 0.0, "forward_kernel": flops, "dq_kernel": 1.5 * flops, "dkdv_kernel": 2.0 * flops}
    yield from kernel_rows(setting, f"kernel, {size}", forward_backward["fused"], work)

    backward_rivals = {
        name: rivals[name] for name in rivals if any(part in name for part in ("cuDNN", "varlen", "Flex"))
    }
    backward = backward_only({"fused": fused["fused"]}, (qkv,), grad) | backward_only(backward_rivals, inputs, grad)
    times = timed(setting, backward)
    yield from time_rows(f"backward, {size}", times, 2.5 * flops)
    above = "compiled rotation + cuDNN"
    yield ratio(setting, f"backward: {above} over fused", times, above, "fused", backward["fused"], at_least=0.9)


def tuning(setting: Setting) -> Iterator[dict]:
    """How long the kernel's tuning takes, as training does it, and what it gains over the plan by default."""
    qkv, bounds = packed_inputs(setting, [setting.length] * setting.cells)
    fused = {"fused": fused_arm(setting, qkv, bounds, setting.length)}
    ways = {
        "forward": forward_only(fused)["fused"],
        "forward + backward": both_ways(fused, (qkv,), torch.randn_like(qkv[:, 0]))["fused"],
    }
    before = timed(setting, ways)
    yield from time_rows("attention by default", before)
    start_time, plan = time.perf_counter(), None
    if setting.cuda:
        sizes = {"n_heads": setting.heads, "head_dim": setting.head_dim, "length": setting.length}
        plan = autotune_attention(**sizes, dtype=BF16, device=setting.device)
    synchronize(setting)
    seconds = time.perf_counter() - start_time
    yield goal("tuning attention: seconds, the kernels of the default plan compiled before", seconds, at_most=60)
    yield {"what": "tuning attention: plan, by which the sections below run", "plan": plan}
    after = timed(setting, ways)
    yield from time_rows("attention as tuned", after)
    for way in ways:
        slow, fast = before[way], after[way]
        if isinstance(slow, list) and isinstance(fast, list):
            yield {"what": f"attention, {way}: time by default over time as tuned", "value": min(slow) / min(fast)}


# embedding and training


@cache
def vocabulary(setting_cuda: bool) -> Vocabulary:
    """All human genes, or a hundred of them, with random entropies, which do not affect the run times."""
    genes = load_vocabulary("human")
    genes = genes if setting_cuda else genes.subset(np.arange(N_SPECIAL, N_SPECIAL + 100))
    return genes.with_entropy(np.random.default_rng(0).uniform(0.3, 2.0, genes.n_genes))


def model_config(setting: Setting) -> ScDiVaConfig:
    """The paper's preset, or a toy of its kind."""
    config = ScDiVaConfig.paper()
    if setting.cuda:
        return config
    return replace(config, n_genes=100, dim=32, n_layers=2, n_heads=2, ffn_dim=48, max_length=setting.length - 1)


def build(setting: Setting) -> ScDiVa:
    """The model on the device, with random weights, which do not affect the run times."""
    return ScDiVa(model_config(setting), generator=torch.Generator().manual_seed(0)).to(setting.device)


def cells_of(setting: Setting, lengths: Tensor, seed: int = 0) -> Ragged:
    """Random cells of so many genes: indptr, tokens and values, as the serialiser gives them."""
    draw, n = np.random.default_rng(seed), int(lengths.sum())
    indptr = np.concatenate([[0], np.cumsum(lengths.numpy())])
    tokens = draw.integers(N_SPECIAL, N_SPECIAL + model_config(setting).n_genes, n, dtype=np.int32)
    return indptr, tokens, draw.random(n, dtype=np.float32) * 3


def kinds_of_cells(setting: Setting, n_cells: int) -> dict[str, Tensor]:
    """Genes of full cells, 1,200 each, and of typical ones, median 900."""
    genes = setting.length - 1
    return {"full cells": torch.full((n_cells,), genes), "typical cells": spread_lengths(n_cells, genes)}


def rate_row(setting: Setting, what: str, n_cells: int, flops: float, seconds: float, **details: object) -> dict:
    """Cells/s, and the share of this run's matrix product rate where that was measured."""
    row = {"what": what, "cells": n_cells, "cells_per_s": round(n_cells / seconds, 1)}
    row["gflop_per_cell"] = round(flops / n_cells / 1e9, 1)
    share = {"share_of_matmul": round(flops / seconds / setting.matmul, 4)} if setting.matmul else {}
    return {**row, **share, **details}


class CellsInMemory:
    """Cells as `tl.embed` opens them (`models.inference.Cells`), without AnnData: ranked ones in memory, by windows."""

    def __init__(self, ragged: Ragged) -> None:
        self.indptr, self.tokens, self.values = ragged
        self.n_obs = len(self.indptr) - 1

    def windows(self, n_cells: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[np.ndarray, Ragged]]:
        """Give cells in order, so many at a time."""
        stop = self.n_obs if stop is None else stop
        for first in range(start, stop, n_cells):
            last = min(first + n_cells, stop)
            span = slice(self.indptr[first], self.indptr[last])
            bounds = self.indptr[first : last + 1] - self.indptr[first]
            yield np.arange(first, last), (bounds, self.tokens[span], self.values[span])


def embedding(setting: Setting) -> Iterator[dict]:
    """The model on one batch alone; then `tl.embed` from ranked cells to states on the host, full and typical cells.

    Attention runs as it was tuned in an earlier section.
    """
    keep_plan(setting)
    n_cells, config, model = (COMPILED_CELLS if setting.cuda else 24), model_config(setting), build(setting)
    run_config = resolve_run_config(None, setting.device.type, "bf16" if setting.cuda else "fp32")
    kinds = kinds_of_cells(setting, n_cells)
    (full, _), (typical, genes) = kinds.items()
    bound = setting.length * n_cells / float((genes + 1).sum())
    compilations = count_compilations()

    network = at_precision(model, run_config.precision)
    if setting.cuda:
        network.compile_blocks()
    batch_genes = {kind: genes[: CUDA_TOKENS // setting.length if setting.cuda else 4] for kind, genes in kinds.items()}
    batches = {kind: batch_of(setting, genes) for kind, genes in batch_genes.items()}

    def encode(batch: CellBatch) -> Arm:
        return torch.inference_mode()(lambda: network.encode(*batch.packed, backend=setting.backend))

    cells = batch_of(setting, batch_genes[typical][:4]).packed
    with torch.inference_mode():
        exact = model.read(*cells, backend="sdpa").cell_state  # the whole last block, in float32
        cosine = F.cosine_similarity(network.encode(*cells, backend=setting.backend).float(), exact)
    yield goal("model.encode: 1 - cosine from float32, largest", float((1 - cosine).max()), at_most=1e-3)
    arms = {kind: encode(batch) for kind, batch in batches.items()}
    rates = {}
    for kind, samples in timed(setting, arms, calls=2).items():
        what, flops = f"model.encode, {kind}, one batch on the device", embed_flops(config, batch_genes[kind] + 1)
        if isinstance(samples, str):
            yield {"what": what, "error": samples}
            continue
        rates[kind] = len(batch_genes[kind]) / min(samples) * 1e3
        yield rate_row(setting, what, len(batch_genes[kind]), flops, min(samples) / 1e3)
        if setting.matmul:
            share = flops / min(samples) * 1e3 / setting.matmul
            row = goal(f"model.encode, {kind}: share of the bf16 matrix product rate", share, at_least=0.54)
            yield with_profile(setting, row, arms[kind])

    sources = {kind: CellsInMemory(cells_of(setting, genes)) for kind, genes in kinds.items()}
    seconds = dict.fromkeys(kinds, np.inf)

    def embed(kind: str) -> float:
        start_time = time.perf_counter()
        states = embed_all(model, sources[kind], run_config)  # states are on the host, so the device has finished
        if not np.isfinite(states).all():
            raise FloatingPointError(f"{int((~np.isfinite(states)).sum())} numbers of the states are not finite")
        return time.perf_counter() - start_time

    for kind in kinds:
        yield {"what": f"tl.embed, {kind}: first call, compiling included", "seconds": round(embed(kind), 2)}
    first = compilations()
    free_memory(setting)
    for turn in range(4 if setting.cuda else 2):  # the first result remains if a later turn is interrupted
        for kind, genes in kinds.items():
            seconds[kind], flops = min(seconds[kind], embed(kind)), embed_flops(config, genes + 1)
            about = {"calls": turn + 1, "peak_gib": peak_gib(setting)}
            if kind in rates:
                about["share_of_model_encode"] = round(n_cells / seconds[kind] / rates[kind], 3)
            yield rate_row(setting, f"tl.embed, {kind}", n_cells, flops, seconds[kind], **about)
            if setting.matmul:
                share = flops / seconds[kind] / setting.matmul
                yield goal(f"tl.embed, {kind}: share of the bf16 matrix product rate", share, at_least=0.54)
        yield goal(f"tl.embed, {full}: cells/s", n_cells / seconds[full], at_least=2700)
        packed = seconds[full] / seconds[typical]
        yield goal("tl.embed: packed over padded to full length", packed, at_least=1.3, bound=bound)
        again = {name: number - first[name] for name, number in compilations().items()}
        new = again["graphs"] + again["kernels"]
        yield goal("tl.embed: graphs and kernels compiled again in warm calls", new, at_most=0, counted=True)
    yield goal("tl.embed: graph breaks", compilations()["graph_breaks"], at_most=0, counted=True)
    with host_waits(setting) as waits:
        embed(typical)
    what = f"tl.embed, {typical}: waits of the host for the device in a call"
    yield {"what": what, "value": float(sum(waits.values())), "where": dict(waits.most_common(8))}
    row = goal(f"tl.embed, {full}: cells/s", n_cells / seconds[full], at_least=2700)
    yield with_profile(setting, row, lambda: embed(full))


def batch_of(setting: Setting, genes: Tensor) -> CellBatch:
    """A batch of random cells on the device."""
    _, tokens, values = cells_of(setting, genes)
    bounds = bounds_of(genes, torch.device("cpu"))
    return CellBatch(torch.from_numpy(tokens).long(), torch.from_numpy(values), bounds).to(setting.device)


def module_of(setting: Setting, **options: object) -> PretrainingModule:
    """The paper's training of the paper's model."""
    return PretrainingModule(build(setting).train(), replace(PretrainingConfig.paper(), **options))


def fits(setting: Setting, arm: Arm) -> bool:
    """Run once; False if the device runs out of memory."""
    try:
        arm()
        synchronize(setting)
    except torch.OutOfMemoryError:
        return False
    return True


def training(setting: Setting) -> Iterator[dict]:
    """The whole step on a batch that lies on the device: masks, forward, dual loss, backward, fused AdamW."""
    keep_plan(setting)
    config, module = model_config(setting), module_of(setting)
    if setting.cuda:
        module.model.compile_blocks()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=setting.cuda)
    draw = torch.Generator().manual_seed(1)

    def step(batch: CellBatch) -> Arm:
        def run() -> None:
            with torch.autocast(setting.device.type, dtype=BF16):
                loss, _ = module.compute_loss(batch, draw)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    def measured(what: str, genes: Tensor) -> tuple[dict, Arm]:
        free_memory(setting)
        run = step(batch_of(setting, genes))
        if not fits(setting, run):
            optimizer.zero_grad(set_to_none=True)
            return {"what": what, "left_out": "does not fit in memory"}, run
        samples = timed(setting, {"step": run}, calls=2)["step"]
        if isinstance(samples, str):
            return {"what": what, "error": samples}, run
        # times are spread evenly over (0, 1), so that half of the genes are masked
        flops = train_flops(config, genes + 1, float(genes.sum()) / 2)
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
        what = f"training step, {kind}: share of the bf16 matrix product rate"
        row = with_profile(setting, goal(what, share, at_least=0.45), run)
        yield row | {"step_share": share} if kind.startswith("typical") else row

    module.model.residual_dtype = BF16  # blocks are compiled again
    what = f"training step, full cells, {sizes[0]} cells, residual stream in bfloat16"
    yield measured(what, kinds_of_cells(setting, sizes[0])["full cells"])[0]


def gene_head(setting: Setting) -> Iterator[dict]:
    """The gene head's loss, forward and backward, compared with the number of genes rounded up to a multiple of 64."""
    n_rows, dim, n_genes = (16_384, 512, 41_818) if setting.cuda else (32, 32, 100)
    targets = torch.randint(0, n_genes, (n_rows,), device=setting.device)
    weight = torch.full((n_rows,), 1.0 / n_rows, device=setting.device)
    hidden = torch.randn(n_rows, dim, device=setting.device, dtype=BF16, requires_grad=True)
    loss: dict[str, Arm] = {}
    products: dict[str, Arm] = {}
    for number in (n_genes, -(-n_genes // 64) * 64):
        head = torch.randn(number, dim, device=setting.device, requires_grad=True)
        narrow = head.detach().to(BF16)

        def forward_backward(head: Tensor = head) -> object:
            with torch.autocast(setting.device.type, dtype=BF16):
                value = masked_cross_entropy(hidden, head, targets, weight)[0]
            return torch.autograd.grad(value, (hidden, head))

        loss[f"{number:,} genes"] = forward_backward
        products[f"{number:,} genes"] = torch.no_grad()(lambda narrow=narrow: F.linear(hidden, narrow))
    if setting.cuda:
        from scdiva.kernels._triton_softmax import softmax_minus_one

        logits = torch.randn(4096, -(-n_genes // 64) * 64, device=setting.device, dtype=BF16)
        nll = torch.empty(len(logits), device=setting.device)
        softmax = partial(softmax_minus_one, logits, targets[: len(logits)], nll, n_genes, keep=True)
        yield from time_rows(
            "gene head, softmax and its gradient in place, 4,096 rows", timed(setting, {"Triton": softmax})
        )
    flops = 2.0 * n_rows * dim * n_genes
    yield from time_rows(f"gene head, one bf16 product of {n_rows:,} rows", timed(setting, products), flops)
    times = timed(setting, loss)
    yield from time_rows(f"gene head, masked_cross_entropy of {n_rows:,} rows, both ways", times, 3 * flops)
    unaligned, aligned = loss
    what = "gene head: its loss over that of aligned rows"
    yield ratio(setting, what, times, unaligned, aligned, loss[unaligned], at_most=1.05)


def float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values of `(n, width)` in float8 (e4m3), and the scale of each row `(n, 1)`."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn), scale


def float8_arm(setting: Setting, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Product in float8; the input is converted in each call, the weight once."""
    convert, (narrow, scale) = compiled(setting, float8), float8(weight)

    def run() -> Tensor:
        y, of_row = convert(x)
        return torch._scaled_mm(y, narrow.t(), scale_a=of_row, scale_b=scale.t(), out_dtype=BF16)

    return run


@torch.no_grad()
def block_products(setting: Setting) -> Iterator[dict]:
    """Matrix products of a block of the paper's model: in float8, and fused with the adjacent norm or gate.

    A fused arm is compiled with Inductor's own matrix products, which may take in the operation before or after.
    """
    config = ScDiVaConfig.paper()
    n_rows, dim, hidden = (65_536, config.dim, config.ffn_dim) if setting.cuda else (32, 32, 64)

    def weight(out: int, width: int) -> Tensor:
        return torch.randn(out, width, device=setting.device, dtype=BF16) / width**0.5

    def normed(x: Tensor, into_qkv: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, x.shape[-1:]), into_qkv)

    def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    sizes = {"QKV": (dim, 3 * dim), "output": (dim, dim), "gate and up": (dim, 2 * hidden), "down": (hidden, dim)}
    for name, (width, out) in sizes.items():
        x, matrix = torch.randn(n_rows, width, device=setting.device, dtype=BF16), weight(out, width)
        arms: dict[str, Arm] = {"bf16": partial(F.linear, x, matrix), "float8": float8_arm(setting, x, matrix)}
        times = timed(setting, arms)
        yield from time_rows(f"product, {name}, {n_rows:,} rows", times, 2.0 * n_rows * width * out)
        if isinstance(times["float8"], list):
            exact = arms["bf16"]()
            error = float((arms["float8"]() - exact).float().norm() / exact.float().norm())
            yield {"what": f"product, {name}: relative error of float8", "value": round(error, 4)}
    x = torch.randn(n_rows, dim, device=setting.device, dtype=BF16)
    triton = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON", "prologue_fusion": True}
    for name, function, weights, out in (
        ("norm and QKV", normed, (weight(3 * dim, dim),), 3 * dim),
        ("gate and up with SiLU", gated, (weight(hidden, dim), weight(hidden, dim)), 2 * hidden),
    ):
        ways = {"compiled": compiled(setting, function), "fused": compiled(setting, function, **triton)}
        arms = {way: partial(run, x, *weights) for way, run in ways.items()}
        yield {"what": f"{name}: largest difference of fused", "relative": round(agree(arms, *arms), 5)}
        yield from time_rows(f"{name}, {n_rows:,} rows", timed(setting, arms), 2.0 * n_rows * dim * out)


class Span(Callback):
    """Measure time and compilations of `fit` between two steps; then count waits of the host in the following steps."""

    def __init__(self, setting: Setting, steps: tuple[int, ...], compilations: Callable[[], dict[str, int]]) -> None:
        self.setting, self.compilations = setting, compilations
        self.first, self.last, self.end = steps
        self.start_time = time.perf_counter()
        self.bounds: list[Tensor] = []
        self.marks: list[float] = []
        self.waited = 0
        self._stack, self._profile = ExitStack(), ExitStack()

    def on_train_batch_start(self, trainer: object, module: object, batch: CellBatch, number: int) -> None:
        if number in (self.first, self.last):
            if number == self.first:
                free_memory(self.setting)
            synchronize(self.setting)
            self.marks.append(time.perf_counter())
            if number == self.first:
                self.before = self.compilations()
            else:
                self.again = {name: n - self.before[name] for name, n in self.compilations().items()}
                self.peak = peak_gib(self.setting)
                self.waits = self._stack.enter_context(host_waits(self.setting))
        if self.first <= number < self.last:
            self.bounds.append(batch.cu_seqlens)

    def on_train_batch_end(self, trainer: object, module: object, out: object, batch: object, number: int) -> None:
        self.waited += self.last <= number < self.end
        if number + 1 == self.end:
            self._stack.close()
            self.profile = self._profile.enter_context(profiled(self.setting, on_host=True))
        elif number + 1 == self.end + PROFILED:  # before the checkpoint at the end of the run
            self._profile.close()


def packed_corpus(setting: Setting, folder: Path, n_cells: int) -> Path:
    """Random cells of typical lengths as a packed corpus of one study: what training reads."""
    genes = vocabulary(setting.cuda)
    indptr, tokens, values = cells_of(setting, spread_lengths(n_cells, setting.length - 1))
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
    """`fit` with its loader on packed cells of varied lengths: cells/s, what compiles again, where the host waits."""
    keep_plan(setting)
    config, (first, last, end) = model_config(setting), (12, 42, 52) if setting.cuda else (2, 4, 6)
    n_cells, batch_size = (20_000, TRAIN_CELLS[0]) if setting.cuda else (64, 4)
    module = module_of(
        setting, steps=end + PROFILED + 1, batch_size=batch_size, context=setting.length - 1, autotune=False
    )
    span = Span(setting, (first, last, end), count_compilations())
    with tempfile.TemporaryDirectory() as folder:
        data = CellDataModule(
            [packed_corpus(setting, Path(folder), n_cells)], vocabulary=vocabulary(setting.cuda),
            batch_size=batch_size, context=setting.length - 1, entropy_floor=config.entropy_floor,
        )  # fmt: skip
        accelerator = "gpu" if setting.cuda else "cpu"
        fit(module, data, out_dir=Path(folder) / "run", accelerator=accelerator, callbacks=[span], progress=False)
        data.close()
    start_time, ended = span.marks
    lengths = torch.cat([bounds.cpu().diff() for bounds in span.bounds])
    flops = train_flops(config, lengths + 1, float(lengths.sum()) / 2)
    yield {
        "what": "fit: seconds from the call to the first timed step",
        "seconds": round(start_time - span.start_time, 1),
    }
    about = {"median_genes": int(lengths.median()), "batch_size": batch_size, "peak_gib": span.peak}
    yield rate_row(setting, "fit, packed cells", len(lengths), flops, ended - start_time, **about)
    if setting.matmul:
        share = flops / (ended - start_time) / setting.matmul
        yield {"what": "fit, packed cells: share of the bf16 matrix product rate", "value": share}
        rate, profile = share / (setting.step_share or share), "; ".join(span.profile)
        yield {**goal("fit, packed cells: rate over that of the step alone", rate, at_least=0.95), "profile": profile}
    compiled_again = span.again["graphs"] + span.again["kernels"]
    what = f"fit: graphs and kernels compiled again over {last - first} batches of varied lengths"
    yield goal(what, compiled_again, at_most=0, counted=True, **span.again)
    a_step = sum(span.waits.values()) / span.waited
    where = dict(span.waits.most_common(8))
    yield goal("fit: waits of the host for the device, a step", a_step, at_most=1, counted=True, where=where)


def finetuning(setting: Setting) -> Iterator[dict]:
    """One epoch of fine-tuning for integration on 10,000 typical cells, with a small model and the paper's."""
    n_cells, context = (10_000, FinetuneConfig.context) if setting.cuda else (64, setting.length - 1)
    lengths = spread_lengths(n_cells, setting.length - 1)
    batch, genes = np.arange(n_cells) % 4, np.arange(N_SPECIAL, N_SPECIAL + model_config(setting).n_genes)
    cells = InMemoryCells(*cells_of(setting, lengths), batch=np.sort(batch), measured=genes, n_batches=4)
    small = replace(model_config(setting), dim=192, n_layers=4, n_heads=3, ffn_dim=512)
    for name, config in {"4 blocks x 192": small, "the paper's": model_config(setting)}.items():
        model = ScDiVa(config, generator=torch.Generator().manual_seed(0))
        model.vocabulary, model.origin = vocabulary(setting.cuda), "random weights"
        precision = "bf16" if setting.cuda else "fp32"
        run = replace(planned({"epochs": 1}, n_cells, 0, precision), context=context, autotune=False)
        objective = IntegrationObjective(
            cells, [cells.batch], batch, state_dim=config.dim, context=run.context, seed=0
        )  # fmt: skip
        network = network_for(model, run, 0)
        free_memory(setting)
        start_time = time.perf_counter()
        history = finetune(network, objective, run, device=setting.device.type)
        synchronize(setting)
        seconds = time.perf_counter() - start_time
        if not np.isfinite(history["loss"]).all():
            raise FloatingPointError("the loss is not finite")
        what = f"fine-tuning, {name}: one epoch of {n_cells:,} cells, {run.context} genes each"
        about = {"steps": run.steps, "batch_size": run.batch_size, "peak_gib": peak_gib(setting)}
        yield {"what": what, "seconds": round(seconds, 2), "cells_per_s": round(n_cells / seconds, 1), **about}


# sections

Section = Callable[[Setting], Iterable[dict]]
SECTIONS: dict[str, tuple[Section, float]] = {
    "parity": (parity, 75),
    "ceilings": (ceilings, 10),
    "sdpa": (against_sdpa, 50),
    "embed": (embedding, 115),
    "tuning": (tuning, 55),
    "train": (training, 70),
    "fit": (fitting, 50),
    "head": (gene_head, 15),
    "finetune": (finetuning, 42),
    "products": (block_products, 38),
}
"""Name, function that yields its rows, and the most seconds it may take: 520 in all."""
LIMIT = 540
"""Most seconds of the whole call."""
NO_DEVICE = 2
"""Exit code without a CUDA device."""
FORK = multiprocessing.get_context("fork")
"""A section has all imports at once, and a device of its own: this process never touches one."""


def checks(setting: Setting) -> Iterator[dict]:
    """The machine, and the work by the formulas, which needs no device."""
    yield {"machine": machine()}
    config = ScDiVaConfig.paper()
    with torch.device("meta"):
        yield {"what": "paper's model", "parameters": ScDiVa(config).n_parameters}
    full, typical = config.max_length + 1, spread_lengths(1024, config.max_length)
    train = train_flops(config, [full], config.max_length / 2)
    yield {"what": "work to embed a full cell", "gflop": round(embed_flops(config, [full]) / 1e9, 1)}
    yield {"what": "work to train on one", "gflop": round(train / 1e9, 1)}
    yield {"what": "typical cells", "median": int(typical.median()), "mean": round(float(typical.double().mean()), 1)}


def run(section: Section, setting: Setting, rows: Connection) -> None:
    """Run a section in its process: send each row when it is measured, and None at the end."""
    os.setsid()  # a new session, so that child processes can be ended too
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
    os._exit(0)  # compilers' worker processes are not waited for


def rows_of(section: Section, setting: Setting, seconds: float) -> Iterator[dict]:
    """Run a section in a separate process for at most `seconds`; yield its rows, and an error if it is incomplete."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run, args=(section, setting, send))
    process.start()
    send.close()
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            alive = process.is_alive()  # checked first, so that rows sent before its end are still read
            if receive.poll(min(left, 0.5) if alive else 0):
                try:
                    row = receive.recv()
                except EOFError:
                    process.join()
                    alive = False
                else:
                    if row is None:
                        return
                    yield row
                    continue
            if not alive:
                yield {"error": f"its process ended with {process.exitcode}"}
                return
        yield {"error": f"cut off after its {seconds:.0f} s"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()


def run_all(
    setting: Setting, names: Iterable[str], write: Callable[[list[dict], dict], object], limit: float = LIMIT
) -> tuple[list[dict], int]:
    """Run sections for at most `limit` seconds in all; return their rows, and the number of incomplete sections."""
    started, rows, failed = time.monotonic(), [], 0
    about: dict = {"processor": "unknown"}  # querying it here would initialise the device
    sections = {"checks": (checks, 30.0)} | {name: SECTIONS[name] for name in names}
    for name, (section, seconds) in sections.items():
        start_time, complete = time.monotonic(), True
        for row in rows_of(section, setting, min(seconds, limit - (start_time - started))):
            if "machine" in row:
                about = row["machine"]
                if setting.cuda and "gpu" not in about:
                    return [], 1
                continue
            row = {"section": name, "what": f"section {name}", **row}
            complete = complete and not row.keys() & {"error", "failed"}
            setting.matmul, setting.plan = row.pop("matmul", setting.matmul), row.get("plan", setting.plan)
            setting.step_share = row.pop("step_share", setting.step_share)
            rows = replaced(rows, row, ("section", "what"))  # a row may be sent again with a higher count
            report([row])
            write(rows, about)
        failed += not complete
        print(f"[{name}: {time.monotonic() - start_time:.0f} s{'' if complete else ', INCOMPLETE'}]", flush=True)
    return rows, failed


def keep(rows: list[dict], about: dict, of: str, folder: Path) -> Path:
    """Write rows to `gpu.json` in a folder, each with GPU and commit; sections that were not measured again stay."""
    rows = [{**row, "gpu": about.get("gpu", "none"), "commit": of} for row in rows]
    measured = {row["section"] for row in rows}
    file = folder / "gpu.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = [row for row in before if row["section"] not in measured] + rows
    return record("gpu", rows, folder, commit=of, machine=about)


def merge(file: Path) -> None:
    """Add the rows of a `gpu.json` from another machine to the results."""
    entry = json.loads(file.read_text())
    path = keep(entry["rows"], entry["machine"], entry["commit"], RESULTS)
    merged = json.loads(path.read_text())
    merged |= {name: value for name, value in entry.items() if name != "rows"}
    path.write_text(json.dumps(merged, indent=1, allow_nan=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="sections to run, after the ceilings")
    parser.add_argument("--commit", help="commit of the code, if git is not available")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on a CPU; results go to $OUT, or nowhere")
    parser.add_argument("--merge", type=Path, help="add the rows of this gpu.json to the results; nothing is run")
    arguments = parser.parse_args()
    if arguments.merge:
        merge(arguments.merge)
        return 0
    setting = dry_setting() if arguments.dry_run else Setting(torch.device("cuda"))
    chosen = [name for name in SECTIONS if not arguments.only or name in (*arguments.only, "ceilings")]
    of, out, start_time = arguments.commit or commit(), os.environ.get("OUT"), time.monotonic()
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere) if arguments.dry_run else RESULTS

        def write(rows: list[dict], about: dict) -> None:
            path = keep(rows, about, of, folder)
            if out:
                shutil.copy(path, out)

        rows, failed = run_all(setting, chosen, write)
    if not rows:
        print("No CUDA device: run this on a machine with an NVIDIA GPU, or pass --dry-run to test it on a CPU.")
        return NO_DEVICE
    print("\nGoals:")
    missed = report(row for row in rows if "met" in row)
    print(f"{missed} goals missed, {failed} sections incomplete, {time.monotonic() - start_time:.0f} s.")
    if arguments.dry_run:
        print("This was a dry run: its numbers are not measurements.")
    return int(failed > 0 or (missed > 0 and not arguments.dry_run))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # so that a call that is cut off has said it
    sys.exit(main())
