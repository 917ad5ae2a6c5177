"""Train a query head on a model's set encoder and state head: what cells express, given other cells of their study.

    python scripts/train_denoiser.py --model FOLDER --prepared FOLDER --out FOLDER [--steps N] [--resume] [--install]

`--model` is what `train_mini.py` wrote, `--prepared` its packed corpus: both of the same studies. With `--reader-genes`
a transformer reads so many genes of a cell for its queries of values, and is trained with the head. The run is one of
`scdiva.train.fit`: stopped by a signal it goes on bit for bit with `--resume`. OUT/head.pt is written at the end, or at
once of the last checkpoint (`--export`), and OUT/model, the model with the head; `--install` copies that into the
package; edit its card by hand. For the bundled model, with the corpus prepared by part 1 of
`train_mini.py`:

    python scripts/train_denoiser.py --model src/scdiva/checkpoints/scdiva-mini --prepared runs/mini/prepared \\
        --out runs/query_head --install

For held-out studies, as the part "denoising" of benchmarks/imputation.py requires them:

    python scripts/train_mini.py --exclude STUDY ... --steps 1 --long-steps 1 --batch-size 2 --out runs/held_out
"""

from __future__ import annotations

import argparse
import copy
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from pytorch_lightning.callbacks import Callback
from query_training import QueryConfig, QueryModule, StudyDataModule
from train_mini import BUNDLED, TRIAL_STEPS, Watch, steps_that_fit, trained_seconds

from scdiva._rng import step_generator
from scdiva.data.packed import PackedCells
from scdiva.models import ScDiVa, load_model, save_model
from scdiva.train import fit


class CpuTime(Callback):
    """CPU seconds of a run over all of its starts, kept in its checkpoints."""

    def __init__(self) -> None:
        self.before, self.begun = 0.0, time.process_time()

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.before + time.process_time() - self.begun}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.before = state_dict["seconds"]


def module_of(model: ScDiVa, config: QueryConfig, measured: torch.Tensor) -> QueryModule:
    """The module to train."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return QueryModule(model.train(), config, measured)


def export(module: QueryModule, file: Path, trained_for: dict[str, int]) -> None:
    """Write what was trained, in half precision, with its configuration, and the steps, cells and CPU seconds of it."""
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    weights = {name: value.half() for name, value in module.state_dict().items() if name in trained}
    torch.save({"config": module.config.to_dict(), "trained": trained_for, "weights": weights}, file)


def with_head(model: ScDiVa, module: QueryModule) -> ScDiVa:
    """The model with the query head that was trained on it."""
    new = ScDiVa(replace(model.config, query_head=True), generator=step_generator(0, 0, "not kept"))
    head = {f"query_head.{name}": value for name, value in module.head.state_dict().items()}
    new.load_state_dict({**model.state_dict(), **head})
    return new


def load_head(model: ScDiVa, file: Path) -> QueryModule:
    """The module with the weights of such a file."""
    config = QueryConfig(**torch.load(file, weights_only=True)["config"])
    module = module_of(model, config, torch.zeros(1, model.config.n_tokens, dtype=torch.bool))
    load_weights(module, file)
    return module.eval()


def load_weights(module: QueryModule, file: Path) -> None:
    """Put what :func:`export` wrote into a module of that architecture."""
    saved = torch.load(file, weights_only=True)
    missing, unexpected = module.load_state_dict(
        {name: value.float() for name, value in saved["weights"].items()}, strict=False
    )
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    assert not unexpected
    assert not trained & set(missing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--final-learning-rate", type=float, default=0.1, help="share of it at the end")
    parser.add_argument("--context-cells", type=int, default=256)
    parser.add_argument("--captured-rate", type=float, default=0.5)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--batch-size", type=int, default=24, help="cells of a batch that are queried, at most")
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--reader-genes", type=int)
    parser.add_argument("--reader-dim", type=int)
    parser.add_argument("--reader-layers", type=int, default=2)
    parser.add_argument("--queries", type=int, default=320, help="of a cell, at most")
    parser.add_argument("--time-limit", type=float, help="seconds to train for, with a trial that finds the steps")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw batches ahead of a GPU")
    parser.add_argument("--start", type=Path, help="head.pt of another run, whose weights this one begins with")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--export", action="store_true", help="train no further: write what the last checkpoint holds")
    parser.add_argument("--install", action="store_true", help="copy the model with its head into the package")
    parser.add_argument("--progress", action="store_true")
    arguments = parser.parse_args()
    if arguments.time_limit and arguments.resume:
        parser.error("a run with --time-limit can't be resumed: its steps differ")
    if arguments.reader_genes and arguments.install:
        parser.error("a model holds the head alone, and no transformer that reads for it")
    model = load_model(arguments.model)
    config = QueryConfig(
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        final_learning_rate=arguments.final_learning_rate,
        context_cells=arguments.context_cells,
        captured_rate=arguments.captured_rate,
        weight_decay=arguments.weight_decay,
        batch_size=arguments.batch_size,
        warmup_steps=arguments.warmup_steps,
        queries=arguments.queries,
        reader_genes=arguments.reader_genes,
        reader_dim=arguments.reader_dim,
        reader_layers=arguments.reader_layers,
        precision=arguments.precision,
        seed=arguments.seed,
        log_every=50,
        checkpoint_every=500,
    )
    file = arguments.prepared / "train.h5"
    cells = PackedCells(file, model.vocabulary)
    module = module_of(model, config, torch.from_numpy(cells.measured))
    before = {"steps": 0, "cells": 0, "cpu_seconds": 0}
    if arguments.start:
        load_weights(module, arguments.start)
        saved = torch.load(arguments.start, weights_only=True)
        before = {"cells": saved["trained"]["steps"] * saved["config"]["batch_size"], **saved["trained"]}
    checkpoint = arguments.out / "last.ckpt"
    if arguments.export:
        saved = torch.load(checkpoint, weights_only=True, map_location="cpu")
        module.load_state_dict(saved["state_dict"], strict=False)
        steps, seconds = saved["global_step"], saved["callbacks"][CpuTime.__name__]["seconds"]
    else:
        options = {"accelerator": arguments.accelerator, "progress": arguments.progress}

        def data() -> StudyDataModule:
            return StudyDataModule(file, vocabulary=model.vocabulary, config=config, workers=arguments.workers)

        def trial(watch: Watch) -> None:
            copied = copy.deepcopy(module)
            fit(copied, data(), out_dir=arguments.out / "trial", max_steps=TRIAL_STEPS, callbacks=[watch], **options)
            shutil.rmtree(arguments.out / "trial")

        watches: list[Callback] = [spent := CpuTime()]
        if arguments.time_limit:
            end = time.monotonic() + arguments.time_limit
            steps = steps_that_fit(arguments.time_limit, arguments.steps, trial)
            module.config = config = replace(config, steps=steps)
            watches.append(Watch(end - time.monotonic()))
        resumed = arguments.out if arguments.resume and checkpoint.exists() else None
        trainer = fit(module, data(), out_dir=arguments.out, resume_from=resumed, callbacks=watches, **options)
        steps, seconds = trainer.global_step, spent.state_dict()["seconds"]
    trained_for = {"steps": steps, "cells": steps * config.batch_size, "cpu_seconds": round(seconds)}
    export(module, arguments.out / "head.pt", {key: value + before[key] for key, value in trained_for.items()})
    if arguments.reader_genes:
        return
    training = {
        "training": config.to_dict(),
        "steps": steps,
        "cells_seen": steps * config.batch_size,
        "seconds": trained_seconds(arguments.out),
        "command": " ".join(["python", *sys.argv]),
        "studies": len(cells.study_names),
    }
    folder = save_model(
        with_head(load_model(arguments.model), module.cpu()),
        model.vocabulary,
        arguments.out / "model",
        metadata={**model.metadata, "query_head": training},
        dtype="float16",
        overwrite=True,
    )
    if arguments.install:
        shutil.rmtree(BUNDLED)
        shutil.copytree(folder, BUNDLED)


if __name__ == "__main__":
    main()
