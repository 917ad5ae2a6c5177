"""Train scdiva-mini, the checkpoint that comes with the package.

    python scripts/train_mini.py [--corpus FOLDER] [--out runs/mini] [--prepared runs/mini/prepared] [--install]

In five parts (`mini_parts.py` says how each is trained), the first left out where its result is there already:

1. prepare: entropies of all genes over the corpus, a vocabulary of the genes found in at least 20 cells, and the corpus
   packed cell by cell, training and validation studies apart. Only this part reads AnnData.
2. the set encoder: its linear part from the corpus SVD, its learned part trained alone (minutes).
3. the transformer: masked diffusion with the set encoder frozen as the anchor of [LAT], on the first genes of a cell.
4. the state head alone: which genes cells of a state express, and how much of them.
5. the transformer trained on at length, given what state and ranks say; gene table, set encoder and state head frozen.

The model folder appears in OUT/model; `--install` copies it into the package. Needs torch, pytorch-lightning, numpy,
scipy, pandas, h5py and safetensors; part 1 anndata too.

On a machine that is lent for minutes, with the corpus packed by `carry_corpus.py` and carried there:

    PYTHONPATH=src python scripts/train_mini.py --prepared CARRIED --out runs/mini --time-limit 500 --accelerator gpu

`--time-limit` counts seconds from the start of the script. The steps that fit are found by a short trial on a copy of
the model, so that the learning rate comes to its end; `--steps` and its like are then upper limits. Model and
metadata are also copied to $OUT, if that is set, files above 16 MiB in pieces (`cat NAME.* > NAME` joins them).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mini_parts
import numpy as np
import pandas as pd
import torch
from pytorch_lightning.callbacks import Callback

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.data.datamodule import CellDataModule
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.models import ScDiVa, ScDiVaConfig, save_model
from scdiva.models.network import init_gene_embedding
from scdiva.tokenizer import Vocabulary, load_vocabulary
from scdiva.train import LinearMap, TaskModule, fit, fit_linear_map

MIN_CELLS_PER_GENE = 20
MIN_GENES_PER_CELL = 200
VALIDATION = ("citefuse_eccite_pbmc_500", "breast_scdeconr_ref", "vision_metastasis_cp007_604")
"""Studies held out to watch the training: blood, a solid tissue, a cell line."""
LOG_BATCHES = {"tidytranscriptomics_pbmc_3000": ("SCP345", "SCP591")}
"""Studies that join counts with logarithms, and the prefixes of the batches that hold log1p values: left out."""
STEPS = 2500
ANCHOR_STEPS = 2400
HEAD_STEPS = 1200
LONG_STEPS = 1800
LOOKS, HEAD_LOOKS, LONG_LOOKS = 12, 8, 10
"""Looks at the validation studies over a run: the points of its curve."""
LONG_VALIDATION = 200
"""Validation cells that the long part looks at."""
TRIAL_STEPS = 60
MARGIN = 0.85
"""Share of the time left that a run is planned to take: validation, checkpoints and a slower stretch take the rest."""
SHARES = {"anchor": 0.2, "transformer": 0.5, "state_head": 0.25, "transformer_long": 1.0}
"""Share of the time left that each part may take."""
PIECE = 16 << 20
"""Largest file that is copied whole, in bytes."""
STARTED = time.monotonic() - time.process_time()
"""When the script began: the imports above take seconds of their own, which are CPU time."""
BUNDLED = Path(__file__).parents[1] / "src" / "scdiva" / "checkpoints" / "scdiva-mini"


def model_config(n_genes: int) -> ScDiVaConfig:
    """A transformer of 1 M weights beside its tables; the cell state is the set encoder's. Parts 2 and 3 do without the
    state head.
    """
    return ScDiVaConfig.preset("mini", n_genes=n_genes)


def clean(corpus: Path, folder: Path) -> list[Path]:
    """The files of the corpus; a study with batches of logarithms is written anew without them."""
    import anndata as ad

    files = sorted(corpus.glob("*.h5ad"))
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        if file.stem in LOG_BATCHES:
            cells = ad.read_h5ad(file)
            counts = cells[~cells.obs["batch"].astype(str).str.startswith(LOG_BATCHES[file.stem])].copy()
            print(f"{file.stem}: {cells.n_obs - counts.n_obs} of {cells.n_obs} cells left out", flush=True)
            files[number] = folder / file.name
            counts.write_h5ad(files[number])
    return files


def prepare(corpus: Path, folder: Path, excluded: tuple[str, ...] = ()) -> None:
    """Part 1, without the excluded studies."""
    from scdiva.pp import corpus_entropy

    files = clean(corpus, folder / "clean")
    if unknown := set(excluded) - {file.stem for file in files}:
        raise SystemExit(f"{corpus} has no study {', '.join(sorted(unknown))}")
    files = [file for file in files if file.stem not in excluded]
    train = [file for file in files if file.stem not in VALIDATION]
    if len(files) - len(train) != len(VALIDATION):
        raise SystemExit(f"{corpus} lacks one of the validation studies {', '.join(VALIDATION)}")
    human = load_vocabulary("human")
    histogram = corpus_entropy(files, human)
    cells_with = histogram.counts[:, 1:].sum(axis=1)
    tokens = np.flatnonzero(cells_with >= MIN_CELLS_PER_GENE)
    vocabulary = human.with_entropy(histogram.entropy()[N_SPECIAL:]).subset(tokens[tokens >= N_SPECIAL])
    floor, length = model_config(vocabulary.n_genes).entropy_floor, model_config(vocabulary.n_genes).input_length
    for name, part in (("train", train), ("validation", [file for file in files if file not in train])):
        packed = pack_files(
            part,
            vocabulary,
            folder / f"{name}.h5",
            max_length=length,
            entropy_floor=floor,
            min_genes=MIN_GENES_PER_CELL,
        )
        print(
            f"{name}: {packed.n_obs:,} cells of {len(part)} studies, {packed.lengths.sum(dtype=np.int64):,} tokens",
            flush=True,
        )
    vocabulary.write(folder / "vocabulary.safetensors")  # last: its presence says that the folder is complete


def data(
    folder: Path,
    vocabulary: Vocabulary,
    *,
    batch_size: int,
    context: int,
    seed: int,
    validation_cells: int | None = None,
) -> CellDataModule:
    return CellDataModule(
        [folder / "train.h5"],
        validation=[folder / "validation.h5"],
        vocabulary=vocabulary,
        batch_size=batch_size,
        context=context,
        seed=seed,
        validation_cells=validation_cells,
    )


def linear_map(folder: Path, cells: PackedCells, n_dims: int) -> LinearMap:
    """The corpus SVD, kept beside the corpus."""
    file = folder / f"linear_map_{n_dims}.npz"
    if not file.exists():
        np.savez(file, **fit_linear_map(cells, n_dims)._asdict())
    with np.load(file) as saved:
        return LinearMap(**saved)


def trained_seconds(folder: Path) -> int:
    """Wall time of a run over all its starts, from the first to the last line of each log."""
    logs = folder.glob("log/version_*/metrics.csv")
    return round(sum(file.stat().st_mtime - file.parent.stat().st_mtime for file in logs))


def validation_curve(folder: Path) -> list[dict[str, float]]:
    """Steps done and validation losses there, over all starts of a run."""
    logs = sorted(folder.glob("log/version_*/metrics.csv"), key=lambda file: int(file.parent.name.split("_")[1]))
    rows = pd.concat([pd.DataFrame(), *(pd.read_csv(file) for file in logs)])
    looks = rows[rows["val/loss"].notna()].to_dict("records") if "val/loss" in rows else []
    return [
        {"step": int(look["step"]) + 1}
        | {
            name.removeprefix("val/"): round(value, 4)
            for name, value in look.items()
            if name.startswith("val/") and value == value
        }
        for look in looks
    ]


class Watch(Callback):
    """Note the time of each batch, and end the run after so many seconds, but not before so many batches."""

    def __init__(self, seconds: float, batches: int = 1) -> None:
        self.seconds, self.batches, self.stopped = seconds, batches, False
        self.times = [time.monotonic()]

    def on_train_batch_end(self, trainer: object, *_: object) -> None:
        self.times.append(time.monotonic())
        if self.times[-1] - self.times[0] > self.seconds and len(self.times) > self.batches:
            trainer.should_stop = self.stopped = True

    def pace(self) -> float:
        """Seconds of a batch, of the later half: the first ones compile, allocate and fill buffers."""
        later = self.times[len(self.times) // 2 :]
        return (later[-1] - later[0]) / (len(later) - 1)


def steps_that_fit(seconds: float, most: int, trial: Callable[[Watch], object]) -> int:
    """Steps that a run can do in some seconds, the trial's own included; at most `most`."""
    begun = time.monotonic()
    watch = Watch(seconds / 6, batches=4)
    trial(watch)
    left = seconds - (time.monotonic() - begun)
    steps = min(most, int(MARGIN * left / watch.pace()))
    if steps < 1:
        raise SystemExit(f"--time-limit leaves {left:.0f} s for steps of {watch.pace():.2f} s: raise it.")
    print(f"{steps} steps of {watch.pace() * 1e3:.0f} ms in {left:.0f} s", flush=True)
    return steps


def hand_over(model: Path, metadata: Path, out: Path) -> None:
    """Copy what was made, files above `PIECE` cut into NAME.00, NAME.01, ..."""
    for file in (*sorted(model.iterdir()), metadata):
        target = out / ("model" if file.parent == model else "")
        target.mkdir(parents=True, exist_ok=True)
        content = file.read_bytes()
        if len(content) <= PIECE:
            (target / file.name).write_bytes(content)
            continue
        for number, start in enumerate(range(0, len(content), PIECE)):
            (target / f"{file.name}.{number:02d}").write_bytes(content[start : start + PIECE])


def train(arguments: argparse.Namespace, folder: Path) -> Path:
    """Parts 2 to 5."""
    vocabulary = Vocabulary.read(folder / "vocabulary.safetensors")
    config = model_config(vocabulary.n_genes)
    cells = PackedCells(folder / "train.h5", vocabulary)
    seed, out = arguments.seed, arguments.out
    model = ScDiVa(replace(config, state_head=False), generator=step_generator(seed, 0, "weights"))
    start = linear_map(folder, cells, config.anchor_linear_dim)
    init_gene_embedding(model, start.weight[N_SPECIAL:], generator=step_generator(seed, 0, "genes"))

    options = {"accelerator": arguments.accelerator, "progress": arguments.progress}
    stopped = []

    def left() -> float:
        """Seconds of the time limit that are left for training; a twentieth is kept for saving."""
        return 0.95 * arguments.time_limit - (time.monotonic() - STARTED)

    def run(
        name: str, make: Callable[..., TaskModule], steps: int, looks: int, reading: dict[str, int], **limits: int
    ) -> dict[str, Any]:
        """Train, from the last checkpoint where there is one and --resume is given; return what to record of it."""

        def module_of(steps: int) -> TaskModule:
            return make(steps=steps, look=max(TRIAL_STEPS, steps // looks), seed=seed)

        def batches() -> CellDataModule:
            return data(folder, vocabulary, **{"seed": seed, **reading})

        watches = []
        if arguments.time_limit:
            seconds = SHARES[name] * left()

            def trial(watch: Watch) -> None:
                # on a copy of its own: the model is not to be trained twice on the same cells
                copied = copy.deepcopy(module_of(TRIAL_STEPS))
                fit(copied, batches(), out_dir=out / "trial", max_steps=TRIAL_STEPS, callbacks=[watch], **options)
                shutil.rmtree(out / "trial")

            end = time.monotonic() + seconds
            steps = steps_that_fit(seconds, steps, trial)
            watches = [Watch(end - time.monotonic())]
        module, read = module_of(steps), batches()
        begun = arguments.resume and (out / name / "last.ckpt").exists()
        resume = out / name if begun else None
        trainer = fit(module, read, out_dir=out / name, resume_from=resume, callbacks=watches, **options, **limits)
        read.close()
        if any(watch.stopped for watch in watches):
            stopped.append(name)
            print(f"{name}: out of time at step {trainer.global_step} of {steps}", flush=True)
        return {
            "training": module.config.to_dict(),
            "steps": trainer.global_step,
            "cells_seen": trainer.global_step * module.config.batch_size,
            "seconds": trained_seconds(out / name),
            "validation": validation_curve(out / name),
        }

    def most(steps: int | None, default: int) -> int:
        return steps or (10**6 if arguments.time_limit else default)

    make = partial(mini_parts.anchor_module, model, start, cells)
    whole = {"batch_size": 256, "context": config.anchor_length}
    parts = {"anchor": run("anchor", make, arguments.anchor_steps, LOOKS, whole)}
    parts["anchor"]["variance_explained"] = round(float(start.explained.sum()), 4)
    if arguments.encoder_only:
        return save_model(model.cpu(), vocabulary, out / "model", metadata=parts, dtype="float16", overwrite=True)

    model.requires_grad_(True)
    model.anchor.requires_grad_(False)
    reading = {"batch_size": arguments.batch_size, "context": arguments.context}
    make = partial(mini_parts.transformer_module, model, **reading, precision=arguments.precision)
    limits = {} if arguments.stop_at is None else {"max_steps": arguments.stop_at}
    parts["transformer"] = run("transformer", make, most(arguments.steps, STEPS), LOOKS, reading, **limits)

    if arguments.stop_at is None:  # else the later parts would start from what is not done, and be kept on --resume
        model = mini_parts.with_state_head(model, cells, seed)
        make = partial(mini_parts.state_head_module, model)
        whole = {"batch_size": 256, "context": config.input_length}
        parts["state_head"] = run("state_head", make, arguments.head_steps, HEAD_LOOKS, whole)

        mini_parts.start_long(model)
        context = arguments.long_context
        make = partial(mini_parts.long_module, model, vocabulary, context=context, precision=arguments.precision)
        # another order of the cells than that of part 3
        reading = {"batch_size": 8, "context": context, "seed": seed + 1, "validation_cells": LONG_VALIDATION}
        long = run("transformer_long", make, most(arguments.long_steps, LONG_STEPS), LONG_LOOKS, reading)
        parts["transformer_long"] = {**long, "validation_cells": LONG_VALIDATION}

    metadata = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
        + (torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"),
        "torch": torch.__version__,
        "corpus": {
            "studies": cells.study_names,
            "validation_studies": list(VALIDATION),
            "n_cells": cells.n_obs,
            "n_tokens": int(cells.lengths.sum(dtype=np.int64)),
            **(json.loads(carried.read_text()) if (carried := folder / "carried.json").exists() else {}),
        },
        **({"time_limit": arguments.time_limit, "out_of_time": stopped} if arguments.time_limit else {}),
        **parts,
    }
    (out / "metadata.json").write_text(json.dumps(metadata, indent=1))
    saved = save_model(model.cpu(), vocabulary, out / "model", metadata=metadata, dtype="float16", overwrite=True)
    if os.environ.get("OUT"):
        hand_over(saved, out / "metadata.json", Path(os.environ["OUT"]))
    return saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--out", type=Path, default=Path("runs/mini"))
    parser.add_argument("--prepared", type=Path, help="folder of part 1, or that packed; default OUT/prepared")
    parser.add_argument("--exclude", nargs="+", default=(), metavar="STUDY", help="studies left out of part 1")
    parser.add_argument(
        "--encoder-only", action="store_true", help="end after part 2: all that tl.embed reads (sister_studies.py)"
    )
    parser.add_argument("--anchor-steps", type=int, default=ANCHOR_STEPS)
    parser.add_argument("--steps", type=int, help=f"of the transformer; default {STEPS}, or what the time limit allows")
    parser.add_argument("--head-steps", type=int, default=HEAD_STEPS)
    parser.add_argument(
        "--long-steps", type=int, help=f"of part 5; default {LONG_STEPS}, or what the time limit allows"
    )
    parser.add_argument("--time-limit", type=float, help="seconds from the start of the script to the saved model")
    parser.add_argument("--stop-at", type=int, help="end part 3 at this step of its schedule, without 4 and 5")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in OUT")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--long-context", type=int, default=1024)
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--install", action="store_true", help="copy the model into the package")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*are left out.*")
    if arguments.time_limit is not None and (arguments.resume or arguments.time_limit <= 0):
        parser.error(
            "--time-limit is a positive number of seconds, and a run with it can't be resumed: its steps differ"
        )
    if arguments.encoder_only and arguments.install:
        parser.error("--encoder-only leaves the transformer untrained: such a model is not installed")
    folder = arguments.prepared or arguments.out / "prepared"
    if (folder / "carried.json").exists() and not (folder / "train.h5").exists():
        from carry_corpus import unpack

        carried, folder = folder, arguments.out / "prepared"
        unpack(carried, folder)
        print(f"unpacked {carried.name} after {time.monotonic() - STARTED:.0f} s", flush=True)
    if not (folder / "vocabulary.safetensors").exists():
        prepare(arguments.corpus, folder, tuple(arguments.exclude))
    model = train(arguments, folder)
    if arguments.install:
        shutil.rmtree(BUNDLED, ignore_errors=True)
        shutil.copytree(model, BUNDLED)
        model = BUNDLED
    print(f"{model}: {sum(file.stat().st_size for file in model.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
