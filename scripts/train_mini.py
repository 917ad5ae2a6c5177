"""Train scdiva-mini, the checkpoint that comes with the package.

    python scripts/train_mini.py [--corpus FOLDER] [--out runs/mini] [--prepared runs/mini/prepared] [--resume]
        [--install]

Parts; a part whose checkpoint is complete is skipped with `--resume`:

- prepare: entropies of all genes over the corpus, a vocabulary of the genes detected in at least 20 cells, and the
  packed corpus, training and validation studies apart. Runs if the folder is missing; only this part reads AnnData.
- anchor: the set encoder. Its linear part is the corpus SVD, its learned part is trained alone.
- transformer: masked diffusion on the first genes of a cell, with the set encoder frozen as the anchor of [LAT].
- state_head: which genes cells of a state express, and how much of them.
- transformer_long: the transformer continued on nearly whole cells; gene table, set encoder and state head frozen.
- query_head: what cells express, given other cells of their study (36 minutes).

The model folder is OUT/model; `--install` copies it into the package. The card is edited by hand, apart from its table
of the corpus by tissue (`corpus.py`). Without AnnData, on a corpus that `carry_corpus.py` packed:

    PYTHONPATH=src python scripts/train_mini.py --prepared CARRIED --out runs/mini --accelerator gpu
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from corpus import by_tissue, set_table
from mini_objectives import (
    AnchorConfig,
    AnchorModule,
    QueryConfig,
    QueryModule,
    StateHeadConfig,
    StateHeadModule,
    StudyDataModule,
    start_state_head,
)

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.data.datamodule import CellDataModule
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.models import ScDiVa, ScDiVaConfig, save_model
from scdiva.models.scdiva import init_gene_embedding
from scdiva.tokenizer import Vocabulary, load_vocabulary
from scdiva.tokenizer.serialize import score_denominator
from scdiva.train import LinearMap, PretrainingConfig, PretrainingModule, TaskModule, fit, fit_linear_map

MIN_CELLS_PER_GENE = 20
MIN_GENES_PER_CELL = 200
VALIDATION = ("citefuse_eccite_pbmc_500", "breast_scdeconr_ref", "vision_metastasis_cp007_604")
"""Held-out studies: blood, a solid tissue, a cell line."""
LOG_BATCHES = {"tidytranscriptomics_pbmc_3000": ("SCP345", "SCP591")}
"""Studies that mix counts and log1p values, and the prefixes of the batches with log1p values, which are removed."""
STEPS = {"anchor": 2400, "transformer": 2500, "state_head": 1200, "transformer_long": 1800, "query_head": 12_000}
VALIDATIONS = {"anchor": 12, "transformer": 12, "state_head": 8, "transformer_long": 10}
"""Number of validations over the run of a part."""
LONG_VALIDATION = 200
"""Validation cells of the part transformer_long."""
STREAM_SCALE = 0.3
"""Scale of the last norm before transformer_long: its logits start as a correction to state head and rank prior."""
BUNDLED = Path(__file__).parents[1] / "src" / "scdiva" / "checkpoints" / "scdiva-mini"


def model_config(n_genes: int) -> ScDiVaConfig:
    """A transformer of 1 M weights apart from its tables; the cell state is the set encoder's."""
    return ScDiVaConfig.preset("mini", n_genes=n_genes)


# prepare


def clean(corpus: Path, folder: Path) -> list[Path]:
    """Files of the corpus; studies with batches of log1p values are rewritten without these batches."""
    import anndata as ad

    files = sorted(corpus.glob("*.h5ad"))
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        if file.stem in LOG_BATCHES:
            cells = ad.read_h5ad(file)
            counts = cells[~cells.obs["batch"].astype(str).str.startswith(LOG_BATCHES[file.stem])].copy()
            print(f"{file.stem}: {cells.n_obs - counts.n_obs} of {cells.n_obs} cells removed", flush=True)
            files[number] = folder / file.name
            counts.write_h5ad(files[number])
    return files


def pack_parts(files: list[Path], vocabulary: Vocabulary, folder: Path, config: ScDiVaConfig) -> None:
    """Pack training and validation studies, then write the vocabulary, whose presence marks the folder as complete."""
    validation = [file for file in files if file.stem in VALIDATION]
    if len(validation) < len(VALIDATION):
        raise SystemExit(f"The corpus lacks one of the validation studies {', '.join(VALIDATION)}.")
    for name, part in (("train", [file for file in files if file not in validation]), ("validation", validation)):
        packed = pack_files(
            part, vocabulary, folder / f"{name}.h5", max_length=config.input_length, entropy_floor=config.entropy_floor,
            min_genes=MIN_GENES_PER_CELL,
        )  # fmt: skip
        print(
            f"{name}: {packed.n_obs:,} cells, {len(part)} studies, {packed.lengths.mean():.0f} genes a cell", flush=True
        )
    vocabulary.write(folder / "vocabulary.safetensors")


def often_detected(n_cells: np.ndarray) -> np.ndarray:
    """Tokens of the genes that at least 20 cells express."""
    return np.flatnonzero(n_cells >= MIN_CELLS_PER_GENE)


def prepare(
    corpus: Path, folder: Path, excluded: Sequence[str] = (),
    choose: Callable[[np.ndarray], np.ndarray] = often_detected, config_of_model: Callable | None = None,
) -> None:  # fmt: skip
    """Count gene entropies, choose the genes and pack the corpus without the excluded studies."""
    from scdiva.pp import corpus_entropy

    files = clean(corpus, folder / "clean")
    if unknown := set(excluded) - {file.stem for file in files}:
        raise SystemExit(f"{corpus} has no study {', '.join(sorted(unknown))}.")
    files = [file for file in files if file.stem not in excluded]
    human = load_vocabulary("human")
    histogram = corpus_entropy(files, human)
    n_cells = histogram.counts[:, 1:].sum(axis=1)
    n_cells[:N_SPECIAL] = 0
    vocabulary = human.with_entropy(histogram.entropy()[N_SPECIAL:]).subset(choose(n_cells))
    pack_parts(files, vocabulary, folder, (config_of_model or model_config)(vocabulary.n_genes))


def linear_map(folder: Path, cells: PackedCells, n_dims: int) -> LinearMap:
    """The corpus SVD, cached in the folder of the packed corpus."""
    file = folder / f"linear_map_{n_dims}.npz"
    if not file.exists():
        np.savez(file, **fit_linear_map(cells, n_dims)._asdict())
    with np.load(file) as saved:
        return LinearMap(**saved)


# parts


PLAIN = {"learning_rate": 1e-3, "anchor_objective": "none", "autotune": False}
"""Masked diffusion; `autotune` would take the time of many steps in a lease of minutes."""
LONG = {"batch_size": 8, "scored_genes": 32, "place_prior": True, "value_weight": 1.0}
ALONE: dict[str, Any] = {"batch_size": 256, "precision": "fp32"}
CONFIGS: dict[str, tuple[Any, float, int, dict[str, Any]]] = {
    "anchor": (AnchorConfig, 50, 16, {**ALONE, "learning_rate": 1e-3, "weight_decay": 0.01}),
    "transformer": (PretrainingConfig, np.inf, 20, PLAIN),
    "state_head": (StateHeadConfig, 20, 16, {**ALONE, "learning_rate": 3e-3, "weight_decay": 0.05}),
    "transformer_long": (PretrainingConfig, 30, 16, {**PLAIN, **LONG}),
}
"""Settings of the parts: class, maximum warm-up steps and their share of all steps, fields."""


def config_of(name: str, steps: int, **options: Any) -> Any:
    """Settings of a part."""
    kind, max_warmup, share, fields = CONFIGS[name]
    return kind(steps=steps, warmup_steps=int(min(max_warmup, max(1, steps // share))), **fields, **options)


def with_part(model: ScDiVa, part: str, seed: int) -> ScDiVa:
    """The model with a new `state_head`, `query_head` or `reader`."""
    new = ScDiVa(replace(model.config, **{part: True}), generator=step_generator(seed, 0, part.replace("_", " ")))
    missing, unexpected = new.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith(f"{part}.") for name in missing)
    return new


@torch.no_grad()
def start_long(model: ScDiVa) -> None:
    """Rescale the final norm, reset the value head, and freeze gene table, set encoder and state head."""
    model.norm.weight.mul_(STREAM_SCALE)
    model.heads.value.weight.zero_()
    model.heads.value.bias.zero_()
    model.requires_grad_(True)
    for part in (model.embedding.gene, model.anchor, model.state_head):
        part.requires_grad_(False)


# training


def trained_seconds(folder: Path) -> int:
    """Wall time of a run over all its starts, by the log files."""
    logs = folder.glob("log/version_*/metrics.csv")
    return round(sum(file.stat().st_mtime - file.parent.stat().st_mtime for file in logs))


def validation_curve(folder: Path) -> list[dict[str, float]]:
    """Validation losses by step, over all starts of a run."""
    logs = sorted(folder.glob("log/version_*/metrics.csv"), key=lambda file: int(file.parent.name.split("_")[1]))
    rows = pd.concat([pd.DataFrame({"step": [], "val/loss": []}), *map(pd.read_csv, logs)])
    rows = rows[rows["val/loss"].notna()].filter(regex="^(step|val/)")
    return [
        {"step": int(row.pop("step")) + 1} | {name[4:]: round(x, 4) for name, x in row.items() if x == x}
        for row in rows.to_dict("records")
    ]


def corpus_of(cells: PackedCells) -> dict[str, Any]:
    """Studies and size of a packed corpus."""
    n_tokens = int(cells.lengths.sum(dtype=np.int64))
    about = {"studies": cells.study_names, "validation_studies": list(VALIDATION), "n_cells": cells.n_obs}
    return {**about, "n_tokens": n_tokens, "tissues": by_tissue(cells)}


def train(arguments: argparse.Namespace, folder: Path) -> Path:
    """Train the parts in order; return the folder of the model."""
    vocabulary = Vocabulary.read(folder / "vocabulary.safetensors")
    config, seed, out = model_config(vocabulary.n_genes), arguments.seed, arguments.out
    cells = PackedCells(folder / "train.h5", vocabulary)
    model = ScDiVa(replace(config, state_head=False, query_head=False), generator=step_generator(seed, 0, "weights"))
    start = linear_map(folder, cells, config.anchor_linear_dim)
    init_gene_embedding(model, start.weight[N_SPECIAL:], generator=step_generator(seed, 0, "genes"))
    steps = {name: getattr(arguments, f"{name}_steps") for name in STEPS}
    parts: dict[str, dict[str, Any]] = {}

    def fitted(name: str, module: TaskModule, data: Any) -> dict[str, Any]:
        """Train a part, from its last checkpoint if there is one and --resume is given; return what to record."""
        resume = out / name if arguments.resume and (out / name / "last.ckpt").exists() else None
        options = {"out_dir": out / name, "accelerator": arguments.accelerator, "progress": False}
        n = fit(module, data, resume_from=resume, **options).global_step
        about = {"steps": n, "cells_seen": n * module.config.batch_size, "seconds": trained_seconds(out / name)}
        return {"training": module.config.to_dict(), **about}

    def run(name: str, make: Callable[[Any], TaskModule], reading: dict[str, int], **options: Any) -> None:
        data = CellDataModule(
            [folder / "train.h5"], validation=[folder / "validation.h5"], vocabulary=vocabulary,
            **{"seed": seed, **reading},
        )  # fmt: skip
        every = max(arguments.min_validate_every, steps[name] // VALIDATIONS[name])
        module = make(config_of(name, steps[name], validate_every=every, seed=seed, **options))
        parts[name] = {**fitted(name, module, data), "validation": validation_curve(out / name)}
        data.close()

    sizes = np.bincount(cells.study, minlength=len(cells.study_names))
    reading = {"batch_size": 256, "context": config.anchor_length}
    run("anchor", lambda config: AnchorModule(model, config, start, sizes), reading)
    parts["anchor"]["variance_explained"] = round(float(start.explained.sum()), 4)

    model.requires_grad_(True)
    model.anchor.requires_grad_(False)
    reading = {"batch_size": arguments.batch_size, "context": arguments.context}
    run("transformer", partial(PretrainingModule, model), reading, **reading, precision=arguments.precision)

    model = with_part(model, "state_head", seed)
    _, tokens, values = cells.read(0, cells.n_obs)
    start_state_head(model, tokens, values, cells.n_obs)
    run("state_head", partial(StateHeadModule, model), {"batch_size": 256, "context": config.input_length})

    start_long(model)
    denominator = score_denominator(vocabulary.entropy, model.config.entropy_floor)
    context = arguments.long_context
    # the cells come in another order than for the part transformer
    reading = {"batch_size": 8, "context": context, "seed": seed + 1, "validation_cells": LONG_VALIDATION}
    make = partial(PretrainingModule, model, denominator=denominator)
    run("transformer_long", make, reading, context=context, precision=arguments.precision)
    parts["transformer_long"]["validation_cells"] = LONG_VALIDATION

    query = QueryConfig(
        steps=steps["query_head"], batch_size=arguments.query_batch_size, seed=seed, log_every=50, checkpoint_every=500
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = QueryModule(model.train(), query, torch.from_numpy(cells.measured))
    parts["query_head"] = fitted("query_head", module, StudyDataModule(folder / "train.h5", vocabulary, query))
    model = with_part(model.cpu(), "query_head", seed)
    model.query_head.load_state_dict(module.head.cpu().state_dict())

    metadata = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
        + (torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"),
        "torch": torch.__version__,
        "corpus": corpus_of(cells),
        **parts,
    }
    (out / "metadata.json").write_text(json.dumps(metadata, indent=1))
    folder = save_model(model, vocabulary, out / "model", metadata=metadata, dtype="float16", overwrite=True)
    set_table(folder, metadata["corpus"]["tissues"])
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--out", type=Path, default=Path("runs/mini"))
    parser.add_argument("--prepared", type=Path, help="folder of the packed corpus; default OUT/prepared")
    parser.add_argument("--exclude", nargs="+", default=(), metavar="STUDY", help="studies to leave out of the corpus")
    for name, number in STEPS.items():
        parser.add_argument(f"--{name.replace('_', '-')}-steps", type=int, default=number)
    parser.add_argument("--min-validate-every", type=int, default=60, help="minimum steps between validations")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in OUT")
    parser.add_argument("--batch-size", type=int, default=32, help="batch size of the part transformer")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--long-context", type=int, default=1024)
    parser.add_argument("--query-batch-size", type=int, default=24, help="queried cells of a batch")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--install", action="store_true", help="copy the model into the package")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*are left out.*")
    folder = arguments.prepared or arguments.out / "prepared"
    if (folder / "train.npz").exists() and not (folder / "train.h5").exists():
        from carry_corpus import unpack

        carried, folder = folder, arguments.out / "prepared"
        unpack(carried, folder)
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
