"""Train scdiva-paper-mini, a small checkpoint of the paper's own kind: `[LAT]` from the transformer, no other state.

    python scripts/train_paper.py [--corpus FOLDER] [--out runs/paper] [--stages short full] [--resume] [--install]

1. Prepare: corpus entropies, a vocabulary of the most frequently detected genes, and the packed corpus, with the
   validation studies apart.
2. Train with the paper's objective alone (identity cross-entropy plus 10 times the squared error of masked values,
   t ~ U(0, 1)), first on the 256 top-ranked genes of each cell, which is faster, then on the top 1,200. Each stage
   starts from the weights of the one before (`sd.train.pretrain(init=...)`); `--stages` names those to train.

Gene embeddings start from the SVD of the corpus. A stage whose model exists is skipped; `--resume` continues a stopped
stage from its last checkpoint. `--install` copies the model into the package, in half precision.

    python scripts/train_paper.py --seconds SECONDS [--init FOLDER] [--install]     # continue a model by time
    python scripts/train_paper.py --init FOLDER --install                           # install it without training

A run by time starts from the weights of `--init`, by default those of the package, with a warm-up. Its data order and
masks follow from the number of cells that the model has seen in such runs, so that each sees the cells in another
order. The runs are listed in the metadata of the model (`by_time`), and the model card sums their steps and cells.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from corpus import tissue_table
from pytorch_lightning.callbacks import Callback
from train_mini import corpus_of, prepare

from scdiva.data.batch import CellBatch
from scdiva.data.datamodule import CellDataModule
from scdiva.data.packed import PackedCells
from scdiva.models import ScDiVaConfig, load_model, save_model
from scdiva.tokenizer.serialize import score_denominator
from scdiva.train import PretrainingConfig, PretrainingModule, TaskModule, fit, pretrain
from scdiva.train.base import learning_rate_factor

N_GENES = 18_000
"""Genes of the vocabulary: with half-precision weights and a tied gene head the folder stays below 12 MB."""
MODEL = {
    "anchor": "learned", "dim": 192, "n_layers": 4, "n_heads": 3, "ffn_dim": 512, "tie_gene_head": True,
}  # fmt: skip
SHARED = {
    "value_weight": 10.0, "value_mask_rate": 0.0, "anchor_objective": "none", "scored_genes": 64, "autotune": False,
    "precision": "fp32", "validate_every": 250, "checkpoint_every": 250, "final_learning_rate": 0.05,
}  # fmt: skip
"""Identity is scored at 64 masked genes of a cell, drawn at random: an unbiased estimate of the paper's loss."""
STAGES = {
    "short": {"context": 256, "batch_size": 32, "steps": 1600, "learning_rate": 1e-3, "warmup_steps": 100},
    "full": {"context": 1200, "batch_size": 16, "steps": 400, "learning_rate": 5e-4, "warmup_steps": 40},
}
"""About an hour on two cores."""
ON_GPU = {
    "context": 1200, "batch_tokens": 65_536, "learning_rate": 1e-3, "warmup_steps": 200, "scored_genes": None,
    "precision": "bf16", "steps": 100_000, "validate_every": 100_000, "checkpoint_every": 4_000,
}  # fmt: skip
"""A run by time on a GPU, with all masked genes scored, and without validation."""
ON_CPU = {
    "context": 128, "batch_tokens": 16_384, "learning_rate": 1e-3, "warmup_steps": 100, "scored_genes": 64,
    "precision": "auto", "steps": 100_000, "validate_every": 250, "checkpoint_every": 250,
}  # fmt: skip
"""Settings of a run by time on a CPU. From the same weights (macro-F1 of fine-tuned cell types, mean of three corpus
studies: 0.487), 1,336 CPU s with 128 genes per cell gave 0.570, and 2,360 CPU s with 512 genes gave 0.560."""
MEASURED = (50, 150)
"""Steps between which the rate of a run by time is first measured."""
BUNDLED = Path(__file__).parents[1] / "src" / "scdiva" / "checkpoints" / "scdiva-paper-mini"


def most_detected(n_cells: np.ndarray) -> np.ndarray:
    """Tokens of the genes that most cells express."""
    return np.sort(np.argsort(-n_cells, kind="stable")[:N_GENES])


def model_config(n_genes: int) -> ScDiVaConfig:
    return ScDiVaConfig(n_genes=n_genes, **MODEL)


def train(arguments: argparse.Namespace, prepared: Path) -> Path:
    """Train the stages one after the other; return the folder of the last model."""
    model = None
    for number, name in enumerate(arguments.stages):
        stage = STAGES[name]
        folder, before = arguments.out / name, model
        model = folder / "model"
        if model.exists():
            continue
        start = {"svd_start": True, "model": MODEL} if before is None else {"init": str(before)}
        pretrain(
            str(prepared / "train.h5"), str(folder), PretrainingConfig(**SHARED, **stage, seed=arguments.seed + number),
            vocabulary=str(prepared / "vocabulary.safetensors"), validation=[str(prepared / "validation.h5")],
            validation_cells=300, accelerator=arguments.accelerator, progress=False,
            resume=arguments.resume and (folder / "last.ckpt").exists(), **start,
        )  # fmt: skip
    assert model is not None
    return model


class ByTime(Callback):
    """Count cells, and set the number of steps, and so the decay of the learning rate, by the time that is left."""

    def __init__(self, end: float | None, measured: tuple[int, int]) -> None:
        self.end, (self.first, self.last), self.start_time = end, measured, 0.0
        self.n_cells = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: CellBatch, number: int
    ) -> None:
        self.n_cells += batch.n_cells
        if trainer.global_step == self.first:
            self.start_time = time.monotonic()
        if self.end is None or trainer.global_step != self.last:
            return
        a_step = (time.monotonic() - self.start_time) / (self.last - self.first)
        steps = self.last + max(1, int(0.95 * (self.end - time.monotonic()) / a_step))
        module.config = config = replace(module.config, steps=steps)
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        scheduler.lr_lambdas = [partial(learning_rate_factor, config=config)] * len(scheduler.lr_lambdas)
        trainer.fit_loop.epoch_loop.max_steps = steps
        self.last *= 2  # measured again then
        print(f"{1e3 * a_step:.1f} ms a step: {steps:,} steps", flush=True)


def fit_and_record(
    module: TaskModule, data: pl.LightningDataModule, out: Path, *, end: float | None, measured: tuple[int, int],
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train until `end` (a value of `time.monotonic`; None: a fixed number of steps) and return a record of the run."""
    start_time, by_time = time.monotonic(), ByTime(end, measured)
    trainer = fit(module, data, out_dir=out, callbacks=[by_time], progress=False, **options)
    n_threads = torch.get_num_threads()
    cores = "one CPU core" if n_threads == 1 else f"{n_threads} CPU cores"
    return {
        "steps": trainer.global_step, "cells": by_time.n_cells, "seconds": round(time.monotonic() - start_time),
        "device": torch.cuda.get_device_name() if trainer.strategy.root_device.type == "cuda" else cores,
        "training": module.config.to_dict(),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }  # fmt: skip


def train_by_time(arguments: argparse.Namespace, prepared: Path) -> Path:
    """Continue a model for a number of seconds; return the folder of the new one."""
    end, folder = time.monotonic() + arguments.seconds, arguments.out / "gpu"
    if folder.exists():
        raise SystemExit(f"{folder} holds an earlier run. Pass another --out.")
    toy = {"batch_tokens": 2048, "context": 64, "warmup_steps": 1, "precision": "fp32"} if arguments.toy else {}
    model = load_model(arguments.init or BUNDLED, device="cpu")
    before = model.metadata or {}
    runs = before.get("by_time", [])
    seed = arguments.seed + sum(run["cells"] for run in runs)
    on_gpu = arguments.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    config = PretrainingConfig(**{**SHARED, **(ON_GPU if on_gpu else ON_CPU), **toy}, seed=seed)
    data = CellDataModule(
        [prepared / "train.h5"], validation=[prepared / "validation.h5"], vocabulary=model.vocabulary,
        batch_tokens=config.batch_tokens, context=config.context, validation_cells=300, seed=config.seed,
        entropy_floor=model.config.entropy_floor,
    )  # fmt: skip
    data.setup()
    denominator = score_denominator(model.vocabulary.entropy, model.config.entropy_floor)
    module = PretrainingModule(model.train(), config, data.n_studies, None, denominator)
    run = fit_and_record(
        module, data, folder, end=end, measured=(1, 3) if arguments.toy else MEASURED, accelerator=arguments.accelerator
    )
    data.close()
    metadata = {**before, "corpus": corpus_of(PackedCells(prepared / "train.h5")), "by_time": [*runs, run]}
    return save_model(module.model.cpu(), model.vocabulary, folder / "model", metadata=metadata, dtype="float16")


def install(arguments: argparse.Namespace, prepared: Path, trained: Path) -> Path:
    """Copy a trained model into the package in half precision, with a record of its training."""
    model = load_model(trained)
    metadata = model.metadata or {}
    if "by_time" not in metadata:
        metadata = {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "corpus": corpus_of(PackedCells(prepared / "train.h5")),
            "stages": {name: {**STAGES[name], **_trained(arguments.out / name)} for name in arguments.stages},
            "shared": SHARED,
        }
    text = card(metadata, model.n_parameters, model.config.n_genes)
    return save_model(model, model.vocabulary, BUNDLED, card=text, metadata=metadata, dtype="float16", overwrite=True)


def card(metadata: dict[str, Any], n_parameters: int, n_genes: int) -> str:
    """Model card, from what the training recorded."""
    corpus, runs, time_spent = metadata["corpus"], metadata.get("by_time", []), "about one CPU hour"
    lines = [
        f"| {name} | {stage['context']:,} | {stage['steps_done']:,} of {stage['steps']:,} x {stage['batch_size']} "
        f"| {stage['steps_done'] * stage['batch_size']:,} | {stage['validation']['val/perplexity']:,.0f} |"
        for name, stage in sorted(metadata.get("stages", {}).items(), key=lambda item: item[1]["context"])
    ]
    if runs:
        steps, cells, seconds = (sum(run[name] for run in runs) for name in ("steps", "cells", "seconds"))
        last, contexts = runs[-1]["training"], dict.fromkeys(f"{run['training']['context']:,}" for run in runs)
        metrics = runs[-1]["metrics"]
        perplexity = f"{np.exp(metrics['train/identity_per_token']):,.0f} (training cells)"
        if "val/perplexity" in metrics:
            perplexity = f"{metrics['val/perplexity']:,.0f}"
        devices = ", ".join(dict.fromkeys(run["device"] for run in runs))
        time_spent += f" and {seconds / 60:.0f} minutes on {devices}"
        lines.append(
            f"| {len(runs)} by time | {', then '.join(contexts)} | {steps:,} x up to {last['batch_tokens']:,} tokens "
            f"| {cells:,} | {perplexity} |"
        )
    return Path(__file__).with_name("paper_card.md").read_text(encoding="utf-8").format(
        time_spent=time_spent, n_parameters=n_parameters, n_genes=n_genes, n_studies=len(corpus["studies"]),
        validation=", ".join(corpus["validation_studies"]), lines="\n".join(lines),
        **{**metadata, **corpus, "tissues": tissue_table(corpus["tissues"]) + "\n" if "tissues" in corpus else ""},
    )  # fmt: skip


def _trained(folder: Path) -> dict[str, Any]:
    """Optimiser steps of a stage, and its last validation."""
    metadata = json.loads((folder / "model" / "config.json").read_text())["metadata"]
    validation = {name: round(value, 4) for name, value in metadata["metrics"].items()}
    return {"steps_done": metadata["steps"], "validation": validation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=["short", "full"])
    parser.add_argument("--resume", action="store_true", help="continue a stopped stage from its last checkpoint")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--prepared", type=Path, help="prepared corpus; default: OUT/prepared")
    parser.add_argument("--seconds", type=float, help="continue a model for so long instead of the stages")
    parser.add_argument("--init", type=Path, help="model folder that --seconds continues; default: that of the package")
    parser.add_argument("--toy", action="store_true", help="with --seconds: small batches, to try it on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--install", action="store_true", help="copy the model into the package")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*are left out.*")
    prepared, start_time = arguments.prepared or arguments.out / "prepared", time.process_time()
    if arguments.init and arguments.seconds is None and not arguments.install:
        parser.error("--init requires --seconds or --install")
    trains = arguments.seconds is not None or arguments.init is None
    if trains and not (prepared / "vocabulary.safetensors").exists():
        prepare(arguments.corpus, prepared, choose=most_detected, config_of_model=model_config)
    if arguments.seconds is not None:
        model = train_by_time(arguments, prepared)
    else:
        model = arguments.init or train(arguments, prepared)
    print(f"{model}: {time.process_time() - start_time:.0f} CPU s in this call", flush=True)
    if arguments.install:
        model = install(arguments, prepared, model)
        print(f"{model}: {sum(file.stat().st_size for file in model.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
