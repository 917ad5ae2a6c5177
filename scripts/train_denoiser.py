"""Train a query head on a model's set encoder and state head: what cells express, given other cells of their study.

    python scripts/train_denoiser.py --model FOLDER --prepared FOLDER --out FOLDER [--steps N] [--resume] [--install]

`--model` is a folder that `train_mini.py` wrote, `--prepared` its packed corpus: both of the same studies. The run is
one of `scdiva.train.fit`: stopped by a signal, it resumes bit-exactly with `--resume`. OUT/head.pt and OUT/model, the
model with the head, are written at the end; `--install` copies the latter into the package; edit its card by hand. The
bundled model, with the corpus prepared by part 1 of `train_mini.py`:

    python scripts/train_denoiser.py --model src/scdiva/checkpoints/scdiva-mini --prepared runs/mini/prepared \\
        --out runs/query_head --steps 12000 --install

For held-out studies, as the part "denoising" of benchmarks/imputation.py requires them:

    python scripts/train_mini.py --exclude STUDY ... --steps 1 --long-steps 1 --batch-size 2 --out runs/held_out
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from query_training import QueryConfig, QueryModule, StudyDataModule
from train_mini import BUNDLED, trained_seconds

from scdiva._rng import step_generator
from scdiva.data.packed import PackedCells
from scdiva.models import ScDiVa, load_model, save_model
from scdiva.train import fit


def module_of(model: ScDiVa, config: QueryConfig, measured: torch.Tensor) -> QueryModule:
    """The module to train."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return QueryModule(model.train(), config, measured)


def export(module: QueryModule, file: Path) -> None:
    """Write the trained weights in half precision, and the configuration."""
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    weights = {name: value.half() for name, value in module.state_dict().items() if name in trained}
    torch.save({"config": module.config.to_dict(), "weights": weights}, file)


def load_head(model: ScDiVa, file: Path) -> QueryModule:
    """A module with the weights of such a file."""
    saved = torch.load(file, weights_only=True)
    measured = torch.zeros(1, model.config.n_tokens, dtype=torch.bool)
    module = module_of(model, QueryConfig(**saved["config"]), measured)
    weights = {name: value.float() for name, value in saved["weights"].items()}
    missing, unexpected = module.load_state_dict(weights, strict=False)
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    if unexpected or trained & set(missing):
        raise ValueError(f"{file} holds other weights than a query head of this model: {unexpected or missing}")
    return module.eval()


def with_head(model: ScDiVa, module: QueryModule) -> ScDiVa:
    """The model with the query head that was trained on it."""
    new = ScDiVa(replace(model.config, query_head=True), generator=step_generator(0, 0, "not kept"))
    head = {f"query_head.{name}": value for name, value in module.head.state_dict().items()}
    new.load_state_dict({**model.state_dict(), **head})
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=24, help="cells of a batch that are queried, at most")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--install", action="store_true", help="copy the model with its head into the package")
    parser.add_argument("--progress", action="store_true")
    arguments = parser.parse_args()
    model = load_model(arguments.model)
    config = QueryConfig(
        steps=arguments.steps, batch_size=arguments.batch_size, seed=arguments.seed, log_every=50, checkpoint_every=500
    )
    file = arguments.prepared / "train.h5"
    cells = PackedCells(file, model.vocabulary)
    module = module_of(model, config, torch.from_numpy(cells.measured))
    resumed = arguments.out if arguments.resume and (arguments.out / "last.ckpt").exists() else None
    data = StudyDataModule(file, vocabulary=model.vocabulary, config=config)
    fit(
        module, data, out_dir=arguments.out, resume_from=resumed, accelerator=arguments.accelerator,
        progress=arguments.progress,
    )  # fmt: skip
    export(module, arguments.out / "head.pt")
    training = {
        "training": config.to_dict(), "steps": config.steps, "cells_seen": config.steps * config.batch_size,
        "seconds": trained_seconds(arguments.out), "command": " ".join(["python", *sys.argv]),
        "studies": len(cells.study_names),
    }  # fmt: skip
    folder = save_model(
        with_head(load_model(arguments.model), module.cpu()), model.vocabulary, arguments.out / "model",
        metadata={**model.metadata, "query_head": training}, dtype="float16", overwrite=True,
    )  # fmt: skip
    if arguments.install:
        shutil.rmtree(BUNDLED)
        shutil.copytree(folder, BUNDLED)


if __name__ == "__main__":
    main()
