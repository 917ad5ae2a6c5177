"""The runs that `faults.py` kills, and what they tell it."""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from scdiva._rng import step_generator
from scdiva.data.datamodule import CellDataModule
from scdiva.data.packing import pack_files
from scdiva.datasets import toy
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.tokenizer import Vocabulary
from scdiva.train import PretrainingConfig, PretrainingModule, fit
from scdiva.train.callbacks import CHECKPOINT, AtomicIO

EVERY = 4
"""Steps between two checkpoints of a run that is killed at any moment."""


class Board:
    """What a run tells the process that will kill it: steps done, and whether a checkpoint is being written."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 16)

    def write(self, place: int, value: int) -> None:
        struct.pack_into("q", self.memory, 8 * place, value)

    @property
    def done(self) -> int:
        return struct.unpack_from("q", self.memory, 0)[0]

    @property
    def saving(self) -> bool:
        return bool(struct.unpack_from("q", self.memory, 8)[0])


class Telling(AtomicIO):
    """Tell the board when a checkpoint is being written; with `noted`, note what it is instead of writing it."""

    def __init__(self, board: Board, noted: dict[int, str] | None = None) -> None:
        self.board, self.noted = board, noted

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if self.noted is not None:
            self.noted[checkpoint["global_step"]] = digest(checkpoint)
            return
        self.board.write(1, 1)
        super().save_checkpoint(checkpoint, path, storage_options)
        self.board.write(1, 0)


class Counting(pl.Callback):
    """Tell the board how many steps are done; at one of them, do something."""

    def __init__(self, board: Board, at: int | None = None, do: Callable[[], object] = print) -> None:
        self.board, self.at, self.do = board, at, do

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.board.write(0, trainer.global_step)
        if trainer.global_step == self.at:
            self.do()


class Dropping(PretrainingModule):
    """Pretraining with dropout, which draws from torch's global stream: the network itself has none."""

    def compute_loss(self, batch: Any, generator: torch.Generator) -> Any:
        loss, parts = super().compute_loss(batch, generator)
        return loss * torch.nn.functional.dropout(torch.ones(50), 0.2).mean(), parts


def digest(checkpoint: dict[str, Any]) -> str:
    """SHA-256 of all that a run goes on from."""
    found = hashlib.sha256()

    def add(part: Any, name: str) -> None:
        if isinstance(part, dict):
            for key in sorted(part, key=str):
                add(part[key], f"{name}/{key}")
        elif isinstance(part, (list, tuple)):
            for number, one in enumerate(part):
                add(one, f"{name}/{number}")
        elif isinstance(part, torch.Tensor):
            found.update(name.encode() + part.detach().cpu().contiguous().numpy().tobytes())
        else:
            found.update(f"{name}={part!r}".encode())

    kept = ("global_step", "state_dict", "current_model_state", "averaging_state", "optimizer_states", "lr_schedulers")
    add({key: checkpoint.get(key) for key in kept}, "")
    add(checkpoint["scdiva"]["batches_seen"], "batches")
    return found.hexdigest()


def saved(folder: Path) -> tuple[int, str] | None:
    """Step and digest of the checkpoint on the disk; a broken file raises."""
    file = folder / CHECKPOINT
    if not file.exists():
        return None
    checkpoint = torch.load(file, weights_only=True)
    return checkpoint["global_step"], digest(checkpoint)


class Toy:
    """A small run on packed parts. `wide`: a network whose checkpoint takes a while to write, after each step."""

    def __init__(self, wide: bool, folder: Path) -> None:
        self.wide, self.steps, self.every = wide, 12 if wide else 40, 1 if wide else EVERY
        cells = toy(180, 60)
        human = Vocabulary.human()
        genes = human.subset(human.match(cells.var_names).tokens)
        self.vocabulary = genes.with_entropy(np.ones(genes.n_genes))
        self.folder = folder
        folder.mkdir()
        for name, rows in (("a", slice(80)), ("b", slice(80, 140)), ("c", slice(140, None))):
            cells[rows].copy().write_h5ad(folder / f"{name}.h5ad")
        pack_files([folder / "a.h5ad", folder / "b.h5ad"], self.vocabulary, folder / "train", part_cells=25)
        pack_files(folder / "c.h5ad", self.vocabulary, folder / "validation")

    def run(self, folder: Path, board: Board, noted: dict[int, str] | None = None, **options: Any) -> PretrainingModule:
        wide = 256 if self.wide else 16
        config = ScDiVaConfig(
            n_genes=60, dim=wide, n_layers=4 if self.wide else 1, n_heads=4, ffn_dim=2 * wide, max_length=32,
            anchor_linear_dim=8, anchor_learned_dim=6, anchor_hidden=12,
        )  # fmt: skip
        training = PretrainingConfig(
            steps=self.steps, batch_size=6, accumulate=1 if self.wide else 2, warmup_steps=3, precision="fp32",
            context=32, log_every=5, validate_every=7, checkpoint_every=1 if noted is not None else self.every,
            anchor_objective="genes",
        )  # fmt: skip
        data = CellDataModule(
            self.folder / "train", validation=self.folder / "validation", vocabulary=self.vocabulary, batch_size=6,
            context=32, block_rows=8, n_blocks=2,
        )  # fmt: skip
        model = ScDiVa(config, generator=step_generator(0, 0, "weights"))
        module = Dropping(model, training, n_studies=2)
        train(module, data, folder, board, noted, **options)
        return module


class Packing:
    """Packing of three files into 23 parts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        cells = toy(1080, 300)
        human = Vocabulary.human()
        genes = human.subset(human.match(cells.var_names).tokens)
        self.vocabulary = genes.with_entropy(np.ones(genes.n_genes))
        (folder / "studies").mkdir(parents=True)
        for name, rows in (("a", slice(0, 700)), ("b", slice(700, 710)), ("c", slice(710, 1080))):
            cells[rows].copy().write_h5ad(folder / "studies" / f"{name}.h5ad")

    def run(self, out: str, workers: int) -> None:
        pack_files(self.folder / "studies", self.vocabulary, self.folder / out, workers=workers, part_cells=50)

    def files(self, out: str) -> dict[str, str]:
        """SHA-256 of every file by its name; hidden ones are no part of a corpus, and none is left at the end."""
        there = sorted((self.folder / out).glob("**/*"))
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in there if path.is_file()}


def train(
    module: PretrainingModule,
    data: CellDataModule,
    folder: Path,
    board: Board,
    noted: dict[int, str] | None,
    *,
    at: int | None = None,
    do: Callable[[], object] = print,
) -> None:
    """Train, from the checkpoint if there is one."""
    fit(
        module, data, out_dir=folder, accelerator="cpu", progress=False,
        resume_from=folder if noted is None and (folder / CHECKPOINT).exists() else None,
        callbacks=[Counting(board, at, do)], plugins=[Telling(board, noted)],
    )  # fmt: skip
