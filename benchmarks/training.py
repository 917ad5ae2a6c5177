"""A training step on one core: its share of the matmul rate, which the plan of docs/scaling.md is made from.

    python benchmarks/training.py [--repeats 5]

The paper preset with random weights (no time depends on their values), the whole step: masks, forward, both losses,
backward, AdamW. Two cells of 1,200 genes a batch, one thread, every arm in turn with the others, the best of its runs
in CPU time; float32, and where the CPU multiplies it in hardware bfloat16 under autocast, then also for the last two
rows. `train_flops` counts three times the products of a forward pass and
the gene head on the masked genes. The matmul arm of a precision multiplies two square matrices and does nothing else,
as the rate of a GPU is taken. The share is (FLOPs of the step over its time) over that rate.

Typical cells: four of a median of 900 genes, cut at 1,200. AdamW is done once for two cells here, and once for 96 or
more in a run on a GPU; the row without it says what it takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
from _gpu import spread_lengths, train_flops
from _record import record
from _timing import fast_here, interleaved, report
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import CellBatch
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.train import PretrainingConfig, PretrainingModule

SIDE = 2048
"""Of the square matrices."""
FULL, TYPICAL = 2, 4
"""Cells of a batch."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def batch_of(config: ScDiVaConfig, lengths: Tensor) -> CellBatch:
    """Random cells of so many genes."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(N_SPECIAL, N_SPECIAL + config.n_genes, (int(lengths.sum()),), generator=draw)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return CellBatch(tokens, torch.rand(len(tokens), generator=draw) * 3, bounds)


def step(
    module: PretrainingModule,
    batch: CellBatch,
    optimizer: torch.optim.Optimizer | None,
    precision: str,
    masked: list[int],
) -> None:
    """Do one step, or without an optimizer all of it but its last part; the masks are the same in each call."""
    draw = torch.Generator().manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss, parts = module.compute_loss(batch, draw)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    module.zero_grad(set_to_none=True)
    masked.append(int(parts["n_masked"]))


def measure(config: ScDiVaConfig, repeats: int, side: int = SIDE) -> list[dict]:
    """Rows of each precision: share, cells a CPU second, both rates."""
    model = ScDiVa(config, generator=torch.Generator().manual_seed(0)).train()
    module = PretrainingModule(model, PretrainingConfig.paper())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    most = config.max_length
    lengths = {"full": torch.full((FULL,), most), "typical": spread_lengths(TYPICAL, most)}
    batches = {name: batch_of(config, genes) for name, genes in lengths.items()}
    masked: dict[str, list[int]] = {"full": [], "typical": []}
    arms: dict[str, Callable[[], object]] = {}
    precisions = fast_here(DTYPES)
    for name in precisions:
        matrix = torch.randn(side, side).to(DTYPES[name])
        arms[f"{name} product"] = partial(torch.matmul, matrix, matrix)
        arms[name] = partial(step, module, batches["full"], optimizer, name, masked["full"])
    fastest = precisions[-1]
    arms["typical"] = partial(step, module, batches["typical"], optimizer, fastest, masked["typical"])
    arms["no AdamW"] = partial(step, module, batches["full"], None, fastest, masked["full"])
    best = {name: min(seconds) for name, seconds in interleaved(arms, repeats=repeats).items()}

    def row(what: str, arm: str, kind: str, precision: str) -> dict:
        flops = train_flops(config, lengths[kind] + 1, masked[kind][0])
        rate = 2 * side**3 / best[f"{precision} product"]
        n = len(lengths[kind])
        return {
            "what": what,
            "value": flops / best[arm] / rate,
            "cells_per_cpu_second": n / best[arm],
            "gflop_per_cell": flops / n / 1e9,
            "genes_per_cell": float(lengths[kind].float().mean()),
            "gflops": flops / best[arm] / 1e9,
            "matmul_gflops": rate / 1e9,
        }

    share = "training, share of matmul rate"
    return [
        *(row(f"{share}, {name}", name, "full", name) for name in precisions),
        row(f"{share}, {fastest}, typical cells", "typical", "typical", fastest),
        row(f"{share}, {fastest}, without AdamW", "no AdamW", "full", fastest),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args(arguments).repeats
    torch.set_num_threads(1)
    rows = measure(ScDiVaConfig.paper(), repeats)
    record("training", rows, repeats=repeats)
    return report(rows)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
