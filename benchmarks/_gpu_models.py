"""GPU sections on the paper's model: embedding, the training step, a padded nn.TransformerEncoder, `torch.compile`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from _gpu_device import (
    Arm,
    Setting,
    bounds_of,
    embed_flops,
    free_memory,
    peak_gib,
    profile,
    spread_lengths,
    synchronize,
    timed,
    train_flops,
    with_profile,
)
from _timing import goal
from torch import Tensor, nn

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import CellBatch
from scdiva.kernels import rope_tables
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.inference import at_precision
from scdiva.nn.layers import Block
from scdiva.train import PretrainingConfig, PretrainingModule

EMBED_CELLS = (64, 128, 256)
TRAIN_CELLS = (32, 64, 96, 128)
"""Cells of a batch that are tried, ascending; the first that does not fit in memory ends the row."""


def model_config(setting: Setting) -> ScDiVaConfig:
    """The paper's preset, or a toy of its kind."""
    config = ScDiVaConfig.paper()
    if setting.tiny:
        return replace(config, n_genes=100, dim=32, n_layers=2, n_heads=2, ffn_dim=48, max_length=setting.length - 1)
    return config


def build(setting: Setting) -> ScDiVa:
    """The model with random weights on the device: what is timed does not depend on them."""
    return ScDiVa(model_config(setting), generator=torch.Generator().manual_seed(0)).to(setting.device)


def compile_blocks(setting: Setting, model: ScDiVa) -> ScDiVa:
    """Compile each block in place; left as it is in a dry run."""
    if setting.cuda:
        model.compile_blocks()
    return model


def cells_of(setting: Setting, lengths: Tensor, seed: int = 0) -> CellBatch:
    """Random cells of so many genes."""
    draw = torch.Generator().manual_seed(seed)
    n, n_genes = int(lengths.sum()), model_config(setting).n_genes
    tokens = torch.randint(N_SPECIAL, N_SPECIAL + n_genes, (n,), generator=draw)
    values = torch.rand(n, generator=draw) * 3
    return CellBatch(tokens, values, bounds_of(lengths, torch.device("cpu"))).to(setting.device)


def kinds_of_cells(setting: Setting, n_cells: int) -> dict[str, Tensor]:
    """Genes of full cells and of typical ones."""
    genes = setting.length - 1
    return {
        f"L={genes:,}": torch.full((n_cells,), genes),
        f"median {3 * genes // 4:,}": spread_lengths(n_cells, genes),
    }


def rate_row(setting: Setting, what: str, n_cells: int, flops: float, time: dict) -> dict:
    """Cells/s and share of this run's matrix product rate, from the median; best beside it."""
    seconds = time["median"] / 1e3
    return {
        "what": what,
        "cells": n_cells,
        "cells_per_s": round(n_cells / seconds, 1),
        "cells_per_s_best": round(n_cells / time["best"] * 1e3, 1),
        "gflop_per_cell": round(flops / n_cells / 1e9, 1),
        "share_of_matmul": round(flops / seconds / setting.ceilings["matmul"], 4),
    }


def fits(setting: Setting, arm: Arm) -> bool:
    """Run once; False if the device's memory does not do."""
    try:
        arm()
        synchronize(setting)
    except torch.OutOfMemoryError:
        return False
    return True


def embedding(setting: Setting) -> Iterator[dict]:
    """Cell states of the paper's model as `tl.embed` makes them in bf16, full and typical cells; against padding.

    The residual stream is float32 there. What it costs shows beside the whole model in bf16.
    """
    free_memory(setting)
    config = model_config(setting)
    model = compile_blocks(setting, at_precision(build(setting).eval(), "bf16"))
    narrow = compile_blocks(setting, build(setting).to(torch.bfloat16).eval())

    def arm(batch: CellBatch, model: ScDiVa = model) -> Arm:
        def run() -> Tensor:
            with torch.inference_mode():
                return model.encode(batch.tokens, batch.values, batch.cu_seqlens, backend=setting.backend)

        return run

    best: dict[str, tuple[dict, Arm]] = {}
    for n_cells in (4,) if setting.tiny else EMBED_CELLS:
        kinds = kinds_of_cells(setting, n_cells)
        arms = {name: arm(cells_of(setting, genes)) for name, genes in kinds.items()}
        if not all(fits(setting, one) for one in arms.values()):
            break
        free_memory(setting)
        times = timed(setting, arms, calls=2)
        for name, time in times.items():
            if "error" in time:
                yield {"what": f"embed, {name}, {n_cells} cells", "error": time["error"]}
                continue
            row = rate_row(setting, f"embed, {name}", n_cells, embed_flops(config, kinds[name] + 1), time)
            yield {**row, "peak_gib": round(peak_gib(setting), 2)}
            if name not in best or row["cells_per_s"] > best[name][0]["cells_per_s"]:
                best[name] = (row, arms[name])
        if not any("error" in time for time in times.values()):
            full, typical = list(times)
            genes = kinds[typical]
            speedup = times[full]["median"] / times[typical]["median"]
            bound = float((setting.length) * n_cells / (genes + 1).sum())
            packed = {"n_cells": n_cells, "bound_of_tokens": round(bound, 4)}
            row = goal("embed: packed vs padded to full length, typical cells", speedup, at_least=1.3, **packed)
            yield with_profile(setting, row, arms[typical])
    for name, genes in kinds.items():
        flops = embed_flops(config, genes + 1)
        times = timed(setting, {"all": arm(cells_of(setting, genes), narrow)}, calls=2)["all"]
        what = f"embed, {name}, residual stream in bf16 too"
        yield {"what": what, **times} if "error" in times else rate_row(setting, what, len(genes), flops, times)
    for number, (name, (row, run)) in enumerate(best.items()):
        yield with_profile(
            setting, goal(f"embed, {name}: share of bf16 matmul rate", row["share_of_matmul"], at_least=0.60), run
        )
        if number == 0:
            yield with_profile(setting, goal(f"embed, {name}: cells/s", row["cells_per_s"], at_least=3000), run)


def training(setting: Setting) -> Iterator[dict]:
    """The whole step: masks, forward, dual loss, backward, fused AdamW, under bf16 autocast with compiled blocks."""
    free_memory(setting)
    config = model_config(setting)
    model = compile_blocks(setting, build(setting).train())
    module = PretrainingModule(model, PretrainingConfig.paper())
    fused = {"fused": True} if setting.cuda else {}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, **fused)
    draw = torch.Generator().manual_seed(1)

    def arm(batch: CellBatch, masked: list[int]) -> Arm:
        def run() -> None:
            with torch.autocast(setting.device.type, dtype=torch.bfloat16):
                loss, parts = module.compute_loss(batch, draw)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            masked.append(parts["n_masked"])

        return run

    best: dict[str, tuple[float, Arm]] = {}
    for n_cells in (4,) if setting.tiny else TRAIN_CELLS:
        for name, genes in kinds_of_cells(setting, n_cells).items():
            free_memory(setting)
            masked: list = []
            run = arm(cells_of(setting, genes), masked)
            if not fits(setting, run):
                yield {"what": f"train, {name}, {n_cells} cells", "left_out": "does not fit in memory"}
                optimizer.zero_grad(set_to_none=True)
                continue
            time = timed(setting, {"step": run}, calls=2)["step"]
            if "error" in time:
                yield {"what": f"train, {name}, {n_cells} cells", "error": time["error"]}
                optimizer.zero_grad(set_to_none=True)
                continue
            n_masked = float(torch.stack(masked).float().mean())
            flops = train_flops(config, genes + 1, n_masked)
            row = rate_row(setting, f"train, {name}", n_cells, flops, time)
            yield {**row, "masked_per_cell": round(n_masked / n_cells, 1), "peak_gib": round(peak_gib(setting), 2)}
            if name not in best or row["share_of_matmul"] > best[name][0]:
                best[name] = (row["share_of_matmul"], run)
    for name, (share, run) in best.items():
        yield with_profile(setting, goal(f"train, {name}: share of bf16 matmul rate", share, at_least=0.50), run)
        yield {"what": f"train, {name}: where the time goes", "profile": profile(setting, run)}


def padded_encoder(setting: Setting) -> Iterator[dict]:
    """`nn.TransformerEncoder` on padded cells with a mask, as scGPT uses it: its own FFN of 512, and one like ours."""
    config = model_config(setting)
    n_cells = 4 if setting.tiny else 64
    lengths = spread_lengths(n_cells, setting.length - 1) + 1
    padding = (torch.arange(setting.length) >= lengths[:, None]).to(setting.device)
    shape = (n_cells, setting.length, config.dim)
    x = torch.randn(shape, device=setting.device, dtype=torch.bfloat16)
    # SwiGLU has three matrices: 1.5 × its width gives two as many weights
    for what, width in (("scGPT's FFN", config.dim), ("an FFN of our size", config.ffn_dim * 3 // 2)):
        free_memory(setting)
        layer = nn.TransformerEncoderLayer(config.dim, config.n_heads, width, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, config.n_layers).to(setting.device, torch.bfloat16)

        def embed(encoder: nn.Module = encoder) -> Tensor:
            with torch.inference_mode():
                return encoder.eval()(x, src_key_padding_mask=padding)

        def step(encoder: nn.Module = encoder) -> None:
            encoder.train()(x, src_key_padding_mask=padding).float().square().mean().backward()
            encoder.zero_grad(set_to_none=True)

        for how, time in timed(setting, {"embed": embed, "forward + backward": step}, calls=2).items():
            row = {"what": f"padded nn.TransformerEncoder, {what}, {how}, median {int(lengths.median())}"}
            if "error" in time:
                yield {**row, "error": time["error"]}
            else:
                yield {**row, "cells": n_cells, "cells_per_s": round(n_cells / time["median"] * 1e3, 1)}


def one_graph(setting: Setting) -> Iterator[dict]:
    """A block under `torch.compile(fullgraph=True)`: no graph break, no graph anew for another number of tokens."""
    config = model_config(setting)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block = Block(config.dim, config.n_heads, config.ffn_dim).to(setting.device, torch.bfloat16)
    cos, sin = rope_tables(setting.length, config.head_dim, device=setting.device)
    options = {"dynamic": True, "fullgraph": True} if setting.cuda else {"dynamic": True, "backend": "eager"}
    fast = torch.compile(block, **options)
    differences = []
    for n_cells in (3,) if setting.tiny else (30, 50, 80):
        lengths = spread_lengths(n_cells, setting.length)
        bounds = bounds_of(lengths, setting.device)
        x = torch.randn(int(lengths.sum()), config.dim, device=setting.device, dtype=torch.bfloat16)
        a, b = (x.clone().requires_grad_() for _ in range(2))
        rest = (bounds, cos, sin, setting.backend, int(lengths.max()))
        seen, plain = fast(a, *rest), block(b, *rest)
        seen.float().square().sum().backward()
        plain.float().square().sum().backward()
        for one, other in ((seen.detach(), plain.detach()), (a.grad, b.grad)):
            differences.append(float((one.double() - other.double()).norm() / other.double().norm()))
    counters = torch._dynamo.utils.counters
    # reaching this line with fullgraph=True is the proof; the counter says so in a number
    yield goal("compiled block: graph breaks", float(sum(counters["graph_break"].values())), at_most=0.0, counted=True)
    graphs = counters["stats"]["unique_graphs"]
    yield {"what": "compiled block: graphs for three batches", "value": float(graphs)}
    # sorted to the end, NaN is no measurement for `goal`
    worst = max(differences, key=lambda difference: (difference != difference, difference))
    yield goal("compiled block: difference from eager, relative", worst, at_most=0.02)
