"""A billion weights trained by one CPU process: what a step holds when each block is run again in the backward pass.

    python benchmarks/billion.py [--cells 4] [--steps 2]

The network of docs/scaling.md (`dim` 1536, 32 layers, 24 heads, `ffn_dim` 4096, 41,818 genes) with random weights,
and the whole step: masks, forward, both losses, backward, clipping, AdamW. bfloat16 under autocast where the CPU
multiplies it, else float32. It takes some 20 GB and 64 TFLOP a step of four cells. Peaks are resident bytes of the
process above those before the model was made; the first step makes gradients and AdamW's moments, so the second one's
is what a run holds. `micro_batches=1` is run last, on a part of one cell, as it holds all that a block computes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from _memory import _status, resident_peak
from _record import record
from _timing import fast_here
from training import batch_of

from scdiva.data.batch import CellBatch
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.train import PretrainingConfig, PretrainingModule

CONFIG = {"n_genes": 41_818, "dim": 1536, "n_layers": 32, "n_heads": 24, "ffn_dim": 4096, "anchor": "learned"}
GENES, FEW = 1200, 300
"""Genes of a cell; and of the one cell that is run whole."""


def step(module: PretrainingModule, batch: CellBatch, optimizer: torch.optim.Optimizer, bf16: bool) -> float:
    """One step; its loss."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss, _ = module.compute_loss(batch, torch.Generator().manual_seed(1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=False)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # gradients stay where they are, as in a long run
    return float(loss.detach())


def measure(config: ScDiVaConfig, n_cells: int, n_steps: int, few: int = FEW) -> list[dict]:
    """Rows of both settings: bytes held by weights, gradients and moments, and by what a step adds."""
    bf16 = "bf16" in fast_here(("fp32", "bf16"))
    before = _status("VmRSS")
    model = ScDiVa(config, generator=torch.Generator().manual_seed(0)).train()
    module = PretrainingModule(model, PretrainingConfig(anchor_objective="none", micro_batches=2))
    module.on_fit_start()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, foreach=False)
    n_genes = min(GENES, config.max_length)

    def row(parts: int, batch: CellBatch, number: int) -> dict:
        module._run_in(parts)
        losses: list[float] = []
        work: Callable[[], object] = lambda: losses.append(step(module, batch, optimizer, bf16))  # noqa: E731
        began, held = time.process_time(), _status("VmRSS") - before
        peak = resident_peak(work) + held
        tokens = len(batch.tokens) + batch.n_cells
        state, size = 16 * model.n_parameters, f"{model.n_parameters / 1e9:.2f} B weights"
        return {
            "what": f"{size}, micro_batches={parts}, {tokens:,} tokens, step {number}",
            "weights_gradients_moments_gb": state / 1e9, "peak_gb": peak / 1e9, "loss": losses[0],
            "kb_per_token_above": (peak - state) / tokens / 1e3, "cpu_seconds": time.process_time() - began,
        }  # fmt: skip

    whole = batch_of(config, torch.full((n_cells,), n_genes))
    rows = [row(2, whole, number + 1) for number in range(n_steps)]
    return [*rows, row(1, batch_of(config, torch.tensor([min(few, n_genes)])), n_steps + 1)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    chosen = parser.parse_args(arguments)
    rows = measure(ScDiVaConfig(**CONFIG), chosen.cells, chosen.steps)
    for one in rows:
        print(one, flush=True)
    record("billion", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
