"""What more cells or more steps would bring the set encoder, and with it zero-shot embedding.

    python benchmarks/learning_curve.py --prepared FOLDER --data FOLDER [--cells 3000 10000 30000]
        [--steps 100 400 1600] [--seeds 0 1 2]

The set encoder is trained as `scripts/train_mini.py` trains it, its linear part from the corpus SVD of the same cells:

- over cells: on that many drawn from the corpus (30,000 stands for all there are), for the middle number of steps;
- over steps: on all cells, for that many.

Scored as in `zero_shot.py` on sets that are not in the corpus. To each measure, mean over the sets, a line in the
logarithm of the number is fitted over all seeds; what it says of ten times the most is an extrapolation, with the
standard error of the fit.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from _ablation_arms import ARMS, Arm, Cells, ThinnedViews, load_cells, stream
from _record import RESULTS, record
from _sets import SETS, load_set
from zero_shot import scores

import scdiva as sd
from scdiva._rng import step_generator
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.tokenizer import Vocabulary
from scdiva.train import AnchorConfig, AnchorModule, LinearMap, fit_linear_map

BATCH = 256
MEASURES = ("accuracy", "average_bio")
MAX_CELLS = 2000
"""Cells of a set that are scored."""
LINEAR_DIM = 128


def drawn(cells: Cells, n: int, seed: int) -> Cells:
    """Some of the cells, drawn alike from all studies; studies stay runs of rows."""
    if n >= cells.n_obs:
        return cells
    rows = np.sort(np.random.default_rng(seed).permutation(cells.n_obs)[:n])
    at = np.concatenate([np.arange(cells.indptr[row], cells.indptr[row + 1]) for row in rows])
    indptr = np.concatenate([[0], np.cumsum(cells.lengths[rows])])
    return Cells(indptr, cells.tokens[at], cells.values[at], cells.study[rows], cells.study_names, cells.measured)


def trained(
    cells: Cells, vocabulary: Vocabulary, start: LinearMap, steps: int, seed: int, arm: Arm = ARMS["set"]
) -> ScDiVa:
    """A model whose set encoder is trained alone, by default as the bundled one's."""
    config = ScDiVaConfig(
        n_genes=vocabulary.n_genes, dim=16, n_layers=1, n_heads=1, ffn_dim=16, tie_gene_head=True,
        anchor="encoder", anchor_residual=False, **{"anchor_linear_dim": LINEAR_DIM, **arm.model},
    )  # fmt: skip
    model = ScDiVa(config, generator=step_generator(seed, 0, "weights"))
    training = AnchorConfig(
        steps=steps, batch_size=BATCH, learning_rate=1e-3, warmup_steps=min(50, max(1, steps // 16)),
        weight_decay=0.01, precision="fp32", seed=seed, **arm.training,
    )  # fmt: skip
    sizes = np.bincount(cells.study, minlength=len(cells.study_names))
    module = (ThinnedViews if arm.thinning else AnchorModule)(model, training, start, sizes)
    if arm.trains_table:
        module.model.anchor.table.requires_grad_(True)
    batches = stream(cells, BATCH, config.input_length, seed)
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for step in range(steps):
        loss, _ = module.compute_loss(batches(step), step_generator(seed, step, "train/0"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.vocabulary = vocabulary
    return model.eval()


def judged(model: ScDiVa, folder: Path, seed: int, sets: tuple[str, ...] = SETS) -> dict:
    """Scores of the whole state and of its linear part, mean over the sets and of each."""
    by_set = {}
    for name in sets:
        adata, labels = load_set(folder, name)
        rows = np.sort(np.random.default_rng(0).permutation(len(labels))[:MAX_CELLS])
        state = sd.tl.embed(adata[rows].copy(), model, copy=True).obsm["X_scdiva"]
        whole = scores(state, labels[rows], seed)
        linear = scores(state[:, : model.config.anchor_linear_dim], labels[rows], seed)
        by_set[name] = {key: round(whole[key], 4) for key in MEASURES}
        by_set[name] |= {f"linear_{key}": round(linear[key], 4) for key in MEASURES}
    keys = [*MEASURES, *(f"linear_{key}" for key in MEASURES)]
    return {key: round(float(np.mean([one[key] for one in by_set.values()])), 4) for key in keys} | {"sets": by_set}


def extrapolated(numbers: list[int], values: list[float]) -> dict[str, float]:
    """Least squares of values on the logarithm; slope of a tenfold number, and what ten times the most would give."""
    x = np.log10(numbers)
    design = np.column_stack([np.ones_like(x), x])
    weight, *_ = np.linalg.lstsq(design, np.asarray(values), rcond=None)
    rest = np.asarray(values) - design @ weight
    variance = float(rest @ rest) / max(len(x) - 2, 1)
    error = np.sqrt(np.diag(variance * np.linalg.inv(design.T @ design)))
    return {
        "per_tenfold": round(float(weight[1]), 4),
        "per_tenfold_se": round(float(error[1]), 4),
        "at_ten_times": round(float(weight[0] + weight[1] * (max(x) + 1)), 4),
    }


def fits(rows: list[dict]) -> list[dict]:
    """A line through each curve, for each measure."""
    found = []
    for curve in ("cells", "steps"):
        of = [row for row in rows if row["curve"] == curve]
        if len({row[curve] for row in of}) < 2:
            continue
        for key in [*MEASURES, *(f"linear_{key}" for key in MEASURES)]:
            if curve == "steps" and key.startswith("linear_"):
                continue  # the linear part is not trained
            line = extrapolated([row[curve] for row in of], [row[key] for row in of])
            found.append({"fit": curve, "measure": key, "most": max(row[curve] for row in of), **line})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True, help="the packed corpus")
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark h5ad files")
    parser.add_argument("--cells", nargs="+", type=int, default=(3000, 10000, 30000))
    parser.add_argument("--steps", nargs="+", type=int, default=(100, 400, 1600))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--name", default="learning_curve", help="of the results file")
    arguments = parser.parse_args()

    sd.settings.progress = False
    torch.set_num_threads(1)
    vocabulary = Vocabulary.read(arguments.prepared / "vocabulary.safetensors")
    everything = load_cells(arguments.prepared / "train.h5", vocabulary)
    middle = sorted(arguments.steps)[len(arguments.steps) // 2]
    work = [("cells", min(n, everything.n_obs), middle) for n in arguments.cells]
    work += [("steps", everything.n_obs, steps) for steps in arguments.steps]
    rows: list[dict] = []
    for seed in arguments.seeds:
        done: dict[tuple[int, int], dict] = {}
        starts: dict[int, LinearMap] = {}
        for curve, n_cells, steps in work:
            if (n_cells, steps) not in done:
                begun, some = time.process_time(), drawn(everything, n_cells, seed)
                if n_cells not in starts:
                    starts[n_cells] = fit_linear_map(some, LINEAR_DIM)
                model = trained(some, vocabulary, starts[n_cells], steps, seed)
                seconds = round(time.process_time() - begun, 1)
                done[n_cells, steps] = {"cpu_seconds": seconds, **judged(model, arguments.data, seed, arguments.sets)}
            row = {"curve": curve, "cells": n_cells, "steps": steps, "seed": seed, **done[n_cells, steps]}
            rows.append(row)
            print({key: value for key, value in row.items() if key != "sets"}, flush=True)
            # after each: a long run that is cut off leaves what it has
            record(arguments.name, [*rows, *fits(rows)], batch_size=BATCH, max_cells=MAX_CELLS, sets=arguments.sets)
    print(f"written: {RESULTS.name}/{arguments.name}.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
