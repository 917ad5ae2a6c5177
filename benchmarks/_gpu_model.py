"""GPU sections on the paper's model: `tl.embed`, the training step, the gene head."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from _gpu import (
    Arm,
    Setting,
    bounds_of,
    count_compilations,
    embed_flops,
    free_memory,
    host_waits,
    peak_gib,
    ratio,
    spread_lengths,
    synchronize,
    time_rows,
    timed,
    train_flops,
    with_profile,
)
from _gpu_attention import keep_plan
from _timing import goal
from torch import Tensor, nn

from scdiva._constants import N_SPECIAL
from scdiva._running import COMPILED_CELLS, CUDA_TOKENS, embed_all, resolve_run_config
from scdiva.data.batch import CellBatch
from scdiva.diffusion.loss import masked_cross_entropy
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.inference import at_precision
from scdiva.tokenizer import Vocabulary, load_vocabulary
from scdiva.train import PretrainingConfig, PretrainingModule

TRAIN_CELLS = (64, 96)
"""Cells of a batch that are tried, ascending; the first that doesn't fit in memory ends the row."""
BF16 = torch.bfloat16
Ragged = tuple[np.ndarray, np.ndarray, np.ndarray]


@cache
def vocabulary(setting_cuda: bool) -> Vocabulary:
    """All human genes, or a hundred of them, with entropies drawn: what is timed does not depend on them."""
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
    """The model with random weights on the device: what is timed does not depend on them."""
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
    """Cells as `tl.embed` opens them (`scdiva._running.Cells`), without AnnData: ranked ones in memory, by windows."""

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
    """`tl.embed` from ranked cells to states on the host, full and typical cells; and its model on one batch alone."""
    n_cells, config, model = (COMPILED_CELLS if setting.cuda else 24), model_config(setting), build(setting)
    run_config = resolve_run_config(None, setting.device.type, "bf16" if setting.cuda else "fp32")
    kinds = kinds_of_cells(setting, n_cells)
    sources = {kind: CellsInMemory(cells_of(setting, genes)) for kind, genes in kinds.items()}
    seconds = dict.fromkeys(kinds, np.inf)
    (full, _), (typical, genes) = kinds.items()
    bound = setting.length * n_cells / float((genes + 1).sum())
    compilations = count_compilations()

    def embed(kind: str) -> float:
        begun = time.perf_counter()
        states = embed_all(model, sources[kind], run_config)  # on the host: what was asked of the device is done
        if not np.isfinite(states).all():
            raise FloatingPointError(f"{int((~np.isfinite(states)).sum())} numbers of the states are not finite")
        return time.perf_counter() - begun

    for kind in kinds:
        yield {"what": f"tl.embed, {kind}: first call, compiling included", "seconds": round(embed(kind), 2)}
    first = compilations()
    free_memory(setting)
    for turn in range(2):  # what the first one says stands there if the second is cut off
        for kind, genes in kinds.items():
            seconds[kind], flops = min(seconds[kind], embed(kind)), embed_flops(config, genes + 1)
            about = {"calls": turn + 1, "peak_gib": peak_gib(setting)}
            yield rate_row(setting, f"tl.embed, {kind}", n_cells, flops, seconds[kind], **about)
            if setting.matmul:
                share = flops / seconds[kind] / setting.matmul
                yield goal(f"tl.embed, {kind}: share of the bf16 matrix product rate", share, at_least=0.6)
        yield goal(f"tl.embed, {full}: cells/s", n_cells / seconds[full], at_least=3000)
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
    row = goal(f"tl.embed, {full}: cells/s", n_cells / seconds[full], at_least=3000)
    yield with_profile(setting, row, lambda: embed(full))

    network = at_precision(model, run_config.precision)
    if setting.cuda:
        network.compile_blocks()
    few = {kind: genes[: CUDA_TOKENS // setting.length if setting.cuda else 4] for kind, genes in kinds.items()}
    batches = {kind: batch_of(setting, genes) for kind, genes in few.items()}

    def encode(batch: CellBatch) -> Arm:
        return torch.inference_mode()(lambda: network.encode(*batch.packed, backend=setting.backend))

    for kind, samples in timed(setting, {kind: encode(batch) for kind, batch in batches.items()}, calls=2).items():
        what, flops = f"model.encode, {kind}, one batch on the device", embed_flops(config, few[kind] + 1)
        if isinstance(samples, str):
            yield {"what": what, "error": samples}
            continue
        row = rate_row(setting, what, len(few[kind]), flops, min(samples) / 1e3)
        whole = n_cells / seconds[kind] / (len(few[kind]) / min(samples) * 1e3)
        yield {**row, "share_that_tl_embed_reaches": round(whole, 3)}


def batch_of(setting: Setting, genes: Tensor) -> CellBatch:
    """A batch of random cells on the device."""
    _, tokens, values = cells_of(setting, genes)
    bounds = bounds_of(genes, torch.device("cpu"))
    return CellBatch(torch.from_numpy(tokens).long(), torch.from_numpy(values), bounds).to(setting.device)


def module_of(setting: Setting, **options: object) -> PretrainingModule:
    """The paper's training of the paper's model."""
    return PretrainingModule(build(setting).train(), replace(PretrainingConfig.paper(), **options))


def fits(setting: Setting, arm: Arm) -> bool:
    """Run once; False if the device's memory does not do."""
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

    best: dict[str, tuple[float, Arm]] = {}
    for n_cells in TRAIN_CELLS if setting.cuda else (4,):
        for kind, genes in kinds_of_cells(setting, n_cells).items():
            free_memory(setting)
            run, what = step(batch_of(setting, genes)), f"training step, {kind}, {n_cells} cells"
            if not fits(setting, run):
                optimizer.zero_grad(set_to_none=True)
                yield {"what": what, "left_out": "does not fit in memory"}
                continue
            samples = timed(setting, {"step": run}, calls=2)["step"]
            if isinstance(samples, str):
                yield {"what": what, "error": samples}
                continue
            # times are spread evenly over (0, 1), so that half of the genes are masked
            flops = train_flops(config, genes + 1, float(genes.sum()) / 2)
            row = rate_row(setting, what, n_cells, flops, min(samples) / 1e3, peak_gib=peak_gib(setting))
            yield row
            if row.get("share_of_matmul", 0.0) > best.get(kind, (0.0, run))[0]:
                best[kind] = (row["share_of_matmul"], run)
    for kind, (share, run) in best.items():
        what = f"training step, {kind}: share of the bf16 matrix product rate"
        yield with_profile(setting, goal(what, share, at_least=0.5), run)


def gene_head(setting: Setting) -> Iterator[dict]:
    """The gene head's loss, forward and backward, beside one of as many genes rounded up to a multiple of 64."""
    n_rows, dim, n_genes = (16_384, 512, 41_818) if setting.cuda else (32, 32, 100)
    targets = torch.randint(0, n_genes, (n_rows,), device=setting.device)
    weight = torch.full((n_rows,), 1.0 / n_rows, device=setting.device)
    hidden = torch.randn(n_rows, dim, device=setting.device, dtype=BF16, requires_grad=True)
    loss: dict[str, Arm] = {}
    products: dict[str, Arm] = {}
    for number in (n_genes, -(-n_genes // 64) * 64):
        head = torch.randn(number, dim, device=setting.device, requires_grad=True)
        narrow = head.detach().to(BF16)

        def both(head: Tensor = head) -> object:
            with torch.autocast(setting.device.type, dtype=BF16):
                found = masked_cross_entropy(hidden, head, targets, weight)[0]
            return torch.autograd.grad(found, (hidden, head))

        loss[f"{number:,} genes"] = both
        products[f"{number:,} genes"] = torch.no_grad()(lambda narrow=narrow: F.linear(hidden, narrow))
    flops = 2.0 * n_rows * dim * n_genes
    yield from time_rows(f"gene head, one bf16 product of {n_rows:,} rows", timed(setting, products), flops)
    times = timed(setting, loss)
    yield from time_rows(f"gene head, masked_cross_entropy of {n_rows:,} rows, both ways", times, 3 * flops)
    ours, aligned = loss
    what = "gene head: its loss over that of aligned rows"
    yield ratio(setting, what, times, ours, aligned, loss[ours], at_most=1.05)


def padded_encoder(setting: Setting) -> Iterator[dict]:
    """`nn.TransformerEncoder` on padded cells with a mask, its FFN as narrow as scGPT's: the cells/s of others."""
    config, n_cells = model_config(setting), 64 if setting.cuda else 4
    lengths = spread_lengths(n_cells, setting.length - 1) + 1
    padding = (torch.arange(setting.length) >= lengths[:, None]).to(setting.device)
    x = torch.randn(n_cells, setting.length, config.dim, device=setting.device, dtype=BF16)
    layer = nn.TransformerEncoderLayer(config.dim, config.n_heads, config.dim, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, config.n_layers).to(setting.device, BF16)

    def embed() -> Tensor:
        with torch.inference_mode():
            return encoder.eval()(x, src_key_padding_mask=padding)

    def step() -> None:
        encoder.train()(x, src_key_padding_mask=padding).float().square().mean().backward()
        encoder.zero_grad(set_to_none=True)

    for how, samples in timed(setting, {"embed": embed, "forward + backward": step}, calls=2).items():
        row: dict = {"what": f"padded nn.TransformerEncoder, {how}, median {int(lengths.median())}"}
        if isinstance(samples, str):
            yield {**row, "error": samples}
        else:
            yield {**row, "cells": n_cells, "cells_per_s": round(n_cells / min(samples) * 1e3, 1)}
