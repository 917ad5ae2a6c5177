"""Cells a CPU second that the transformers of denoising.py are trained on, and what speeds them.

    python benchmarks/denoiser_speed.py --base runs/held_out [--steps 12]

One thread, whole steps with AdamW, arms in turn, the median of each. Masked diffusion: 16 cells of up to 512 genes, as
denoising_controls.py trains `true`; all masked genes have their logits, or 64 of a cell. Queries: 24 cells, of which a
transformer reads 256 genes for up to 320 values each, with up to 256 other cells as context, as train_denoiser.py does.
Cells are packed; a row says how many tokens more a batch would have if all cells were as long as its longest.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from _record import record
from _scripts import QueryConfig, QueryModule, StudyBatches
from _timing import fast_here, report
from ablation import Batches, train
from denoising_controls import BATCH_SIZE, BLOCK_ROWS, CONTEXT, control, module_of

from scdiva.data.batch import CellBatch
from scdiva.data.order import Order
from scdiva.data.packed import PackedCells
from scdiva.data.pool import CellPool
from scdiva.data.stream import TrainingStream
from scdiva.models import load_model
from scdiva.train import PretrainingModule
from scdiva.train.base import TaskModule

READ, ASKED, AROUND = 256, 24, 256
SCORED = {
    "all masked genes scored, fp32": (CONTEXT, "fp32"),
    "64 scored, fp32": (64, "fp32"),
    "64 scored, bf16": (64, "bf16"),
}


def padding(batch: CellBatch) -> float:
    """Tokens of a padded batch over those that it holds."""
    lengths = batch.cu_seqlens.diff()
    return float(lengths.max() * len(lengths) / lengths.sum())


def modules_of(base: Path) -> Iterator[tuple[str, TaskModule, Batches, int]]:
    """Yield each arm, what it trains, on which batches, and the cells of one."""
    model = load_model(base / "model")
    cells = PackedCells(base / "prepared" / "train.h5", model.vocabulary)
    measured = torch.from_numpy(cells.measured)
    pool = CellPool([cells], [cells.study], 1, CONTEXT, BLOCK_ROWS)
    stream = TrainingStream(Order(pool, 0, BATCH_SIZE)).batch
    for name, (scored, precision) in SCORED.items():
        module = module_of("none", control("none", model, 0), model.vocabulary, 10**6, 0)
        config = replace(module.config, scored_genes=scored, precision=precision)
        yield f"masked diffusion, {name}", PretrainingModule(module.model, config), stream, BATCH_SIZE
    queried = StudyBatches(PackedCells(base / "prepared" / "train.h5", model.vocabulary), ASKED, AROUND, 0).batch
    for precision in ("fp32", "bf16"):
        config = QueryConfig(reader_genes=READ, batch_size=ASKED, context_cells=AROUND, precision=precision)
        module = QueryModule(load_model(base / "model"), config, measured)
        yield f"queries of values, {precision}", module, queried, ASKED


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    arms = {name: rest for name, *rest in modules_of(arguments.base)}
    arms = {name: arms[name] for name in fast_here(arms)}
    turns = zip(*(train(module.train(), batches) for module, batches, _ in arms.values()), strict=True)
    taken = list(itertools.islice(turns, arguments.steps + 1))[1:]  # the first compiles
    rows = []
    for (name, (_, batches, n_cells)), seconds in zip(arms.items(), zip(*taken, strict=True), strict=True):
        of_batches = [padding(batches(step)) for step in range(1, arguments.steps + 1)]
        rows.append({
            "what": name, "value": round(n_cells / median(seconds), 2), "seconds_a_step": round(median(seconds), 3),
            "tokens_if_padded": round(sum(of_batches) / len(of_batches), 2),
        })  # fmt: skip
    record("denoiser_speed", rows, steps=arguments.steps)
    report(rows)


if __name__ == "__main__":
    main()
