"""Embedding on one core: share of the matmul rate, bf16 against fp32, unpadded against padded cells.

    python benchmarks/embedding_speed.py [--repeats 9]

The paper preset with random weights (no time depends on their values); every arm runs on one thread, in turn with the
others, and counts by the best of its runs in CPU time.

Share of the matmul rate. `flops` counts a cell's products by formula: 2·L·d·(4·d + 3·f) for the linears of a block,
4·L²·d for its attention, 2·L·d² for the value embedding, at L = genes + 1. The matmul arm of a precision multiplies
what the linears of all blocks multiply, at the same L, with those blocks' own weights (so they come from memory as in a
forward pass), and does nothing else; its rate is those linears' FLOPs over its time. The share is (a cell's FLOPs over
the time of encoding it) over that rate.

Unpadded against padded. Cells with a median of 900 genes, cut at 1,200; two blocks of the twelve, since each costs the
same; all arms in the precision that "auto" takes here. Unpadded they go one by one, padded all together to 1,200.
`ours` is our own blocks on padded tensors with a mask (states are the same). `transformer encoder` is
`nn.TransformerEncoder` with `src_key_padding_mask`, as scGPT has it, of our width and as many weights (post-norm, ReLU,
f = 3·2048/2), in inference mode: once as it comes, where torch's fast path turns the padding into nested tensors, once
with `enable_nested_tensor=False`; the faster one counts.

Workers. The same cells by one worker and by two, in wall time, which only means something if nothing else runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import NormalDist

import numpy as np
import torch
import torch.nn.functional as F
from _judge import judge_times
from _record import record
from _timing import fast_here, goal, interleaved, report
from torch import Tensor, nn

from scdiva import settings
from scdiva._constants import LAT, N_SPECIAL
from scdiva.kernels import apply_rope, rope_tables
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.inference import at_precision, open_encoder

PRECISIONS = ("fp32", "bf16")
MEDIAN = 900
SPREAD = 0.35
"""Of the logarithm of the number of genes."""

Cell = tuple[Tensor, Tensor, Tensor]


def flops(config: ScDiVaConfig, n_genes: int) -> float:
    """Floating-point operations of embedding one cell; see the top."""
    length, d = n_genes + 1, config.dim
    return linear_flops(config, n_genes) + config.n_layers * 4 * length**2 * d + 2 * n_genes * d**2


def linear_flops(config: ScDiVaConfig, n_genes: int) -> float:
    return config.n_layers * 2 * (n_genes + 1) * config.dim * (4 * config.dim + 3 * config.ffn_dim)


def cell_of(config: ScDiVaConfig, n_genes: int, seed: int = 0) -> Cell:
    """Draw a cell as the serialiser gives it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(config.n_genes, generator=generator)[:n_genes] + N_SPECIAL
    values = torch.rand(n_genes, generator=generator) * 4
    return tokens, values, torch.tensor([0, n_genes], dtype=torch.int32)


def typical_lengths(n_cells: int, most: int) -> list[int]:
    """Evenly spaced quantiles of a log-normal number of genes, cut at `most`."""
    steps = [NormalDist().inv_cdf((i + 0.5) / n_cells) for i in range(n_cells)]
    return [min(most, round(MEDIAN / 1200 * most * float(np.exp(SPREAD * step)))) for step in steps]


def products(model: ScDiVa, n_genes: int, dtype: torch.dtype) -> partial:
    """Only the matrix products of the linear layers of all blocks."""
    layers = [part for part in model.blocks.modules() if isinstance(part, nn.Linear)]
    weights = [layer.weight.detach().to(dtype) for layer in layers]
    inputs = {w.shape[1]: torch.randn(n_genes + 1, w.shape[1]).to(dtype) for w in weights}

    def multiply() -> None:
        with torch.inference_mode():
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

    return partial(multiply)


def padded(model: ScDiVa, cells: list[Cell], length: int) -> tuple[Tensor, Tensor]:
    """Embed padded genes and put `[LAT]` in front: `(B, length + 1, dim)` and what is real, bool `(B, length + 1)`."""
    n = torch.tensor([len(cell[0]) for cell in cells])
    real = torch.arange(length + 1) <= n[:, None]
    tokens = torch.full((len(cells), length), LAT)
    values = torch.zeros(len(cells), length)
    for row, cell in enumerate(cells):
        tokens[row, : n[row]], values[row, : n[row]] = cell[0], cell[1]
    genes = model.embedding(tokens.flatten(), values.flatten(), ~real[:, 1:].flatten())
    lat = model.embedding.gene.weight[LAT].expand(len(cells), 1, -1)
    return torch.cat([lat, genes.view(len(cells), length, -1)], dim=1), real


@torch.inference_mode()
def encode_padded(model: ScDiVa, cells: list[Cell], length: int) -> Tensor:
    """Encode with our blocks on padded tensors; without an anchor."""
    x, real = padded(model, cells, length)
    cos, sin = rope_tables(length + 1, model.config.head_dim, model.config.rope_base)
    for block in model.blocks:
        attention = block.attention
        q, k, v = attention.qkv(block.attention_norm(x)).unflatten(-1, (3, attention.n_heads, -1)).unbind(2)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None])
        x = x + attention.out(heads.transpose(1, 2).flatten(2))
        x = x + block.ffn(block.ffn_norm(x))
    return model.norm(x[:, 0])


def transformer_encoder(config: ScDiVaConfig, *, nested: bool) -> nn.TransformerEncoder:
    """Make a transformer encoder of our size as scGPT uses it."""
    layer = nn.TransformerEncoderLayer(config.dim, config.n_heads, 3 * config.ffn_dim // 2, batch_first=True)
    return nn.TransformerEncoder(layer, config.n_layers, enable_nested_tensor=nested).eval()


@torch.inference_mode()
def encode_as_scgpt(model: ScDiVa, encoder: nn.TransformerEncoder, cells: list[Cell], length: int) -> Tensor:
    x, real = padded(model, cells, length)
    x = x.to(next(encoder.parameters()).dtype)
    return encoder(x, src_key_padding_mask=~real)[:, 0]


def one_by_one(encode, cells: list[Cell]) -> np.ndarray:
    return np.concatenate(list(encode(lambda cell: cell, cells)))


def arithmetic(config: ScDiVaConfig, repeats: int) -> list[dict]:
    """Rows of share, speed and exactness of each precision, at full length."""
    model = ScDiVa(config, generator=torch.Generator().manual_seed(0)).eval()
    precisions = fast_here(PRECISIONS)
    n_genes = config.max_length
    cell = cell_of(config, n_genes)
    with ExitStack() as stack:
        arms = {}
        for precision in precisions:
            encode = stack.enter_context(open_encoder(model, precision=precision, threads=1))
            arms[precision] = partial(one_by_one, encode, [cell])
        states = {name: arm()[0].astype(np.float64) for name, arm in arms.items()}
        arms["fp32 products"] = products(model, n_genes, torch.float32)
        if "bf16" in precisions:
            arms["bf16 products"] = products(model, n_genes, torch.bfloat16)
        rounds = interleaved(arms, repeats=repeats)
        best = {name: min(seconds) for name, seconds in rounds.items()}

    def share(precision: str, at_least: float) -> dict:
        rate = linear_flops(config, n_genes) / best[f"{precision} products"]
        achieved = flops(config, n_genes) / best[precision]
        return judge_times(
            f"share of matmul rate, {precision}", rounds[f"{precision} products"], rounds[precision],
            scale=flops(config, n_genes) / linear_flops(config, n_genes), at_least=at_least,
            gflops=achieved / 1e9, matmul_gflops=rate / 1e9,
        )  # fmt: skip

    def cosine(precision: str) -> float:
        a, b = states["fp32"], states[precision]
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    rows = [share("fp32", 0.75)]
    if "bf16" in precisions:
        rows += [
            share("bf16", 0.60),
            judge_times("bf16 vs fp32, speed", rounds["fp32"], rounds["bf16"], at_least=1.8),
            goal("bf16 vs fp32, cosine of the states", cosine("bf16"), at_least=0.9995, counted=True),
        ]
    return [
        *rows,
        *({"what": f"cells per CPU second at {n_genes} genes, {name}", "value": 1 / best[name]} for name in precisions),
    ]


def padding(config: ScDiVaConfig, repeats: int, n_cells: int = 8) -> list[dict]:
    """Rows of unpadded against padded cells, and of two workers against one."""
    config = replace(config, n_layers=2)
    model = ScDiVa(config, generator=torch.Generator().manual_seed(0)).eval()
    precision = settings.resolve_precision("auto", "cpu")
    model, dtype = at_precision(model, precision), torch.bfloat16 if precision == "bf16" else torch.float32
    length = config.max_length
    cells = [cell_of(config, n, seed) for seed, n in enumerate(typical_lengths(n_cells, length))]
    nested, plain = (transformer_encoder(config, nested=nested).to(dtype) for nested in (True, False))
    with open_encoder(model, threads=1) as alone, open_encoder(model, threads=2) as two:
        arms = {
            "unpadded": partial(one_by_one, alone, cells),
            "padded, ours": partial(encode_padded, model, cells, length),
            "padded, transformer encoder (nested)": partial(encode_as_scgpt, model, nested, cells, length),
            "padded, transformer encoder": partial(encode_as_scgpt, model, plain, cells, length),
        }
        rounds = interleaved(arms, repeats=repeats)
        best = {name: min(seconds) for name, seconds in rounds.items()}
        workers = {"one": partial(one_by_one, alone, cells), "two": partial(one_by_one, two, cells)}
        wall = interleaved(workers, repeats=repeats, clock=time.perf_counter)
    rivals = {name: best[name] for name in best if "encoder" in name}
    rival = min(rivals, key=rivals.__getitem__)
    median = int(np.median([len(cell[0]) for cell in cells]))
    said = {"precision": precision, "median_genes": median, "blocks": config.n_layers}
    return [
        judge_times(
            "unpadded vs padded, our blocks", rounds["padded, ours"], rounds["unpadded"], at_least=1.9, **said
        ),
        {"what": f"unpadded vs {rival}", "value": rivals[rival] / best["unpadded"], **said,
         **{f"seconds, {name}": seconds for name, seconds in best.items()}},
        {"what": "two workers vs one, wall time", "value": min(wall["one"]) / min(wall["two"])},
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args(arguments).repeats
    torch.set_num_threads(1)
    config = ScDiVaConfig.paper()
    rows = [*arithmetic(config, repeats), *padding(config, repeats)]
    record("embedding_speed", rows, repeats=repeats)
    return report(rows)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
