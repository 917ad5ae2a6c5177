"""Checkpoints: when they are written, and how, so that one is always whole."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO

CHECKPOINT = "last.ckpt"
"""Name of the checkpoint in a run's folder."""
CHECKPOINT_KEY = "scdiva"
"""Entry of a checkpoint that holds ours: task, configuration, batches seen; plain types only."""


class AtomicIO(TorchCheckpointIO):
    """Write a checkpoint beside the old one and put it in its place once it is on the disk.

    Lightning writes into the system's temporary folder and moves the file, which across file systems is a copy, and a
    kill then leaves half of one under the old name.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write one file; called by Lightning on the first process only.

        Parameters
        ----------
        checkpoint
            Its content.
        path
            Its name. What is unfinished stands in the same folder under this name and `.part`; if a kill leaves one
            there, the next checkpoint overwrites it.
        storage_options
            Not used.

        Raises
        ------
        OSError
            If it cannot be written. An older file of this name is untouched then.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        torch.save(checkpoint, content)
        beside = path.with_name(f"{path.name}.part")
        try:
            with beside.open("wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:  # the new name too has to be on the disk, else a power cut brings the old one back
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            beside.unlink(missing_ok=True)
            before = "the one before is intact: make room and resume" if path.exists() else "there is none before it"
            raise OSError(
                error.errno,
                f"the checkpoint of step {checkpoint.get('global_step')} could not be written ({error.strerror}); "
                f"{before}",
                str(path),
            ) from error


class Saver(Checkpoint):
    """Write the checkpoint every so many optimiser steps, at the last one, and when asked to.

    Always from the hook after a batch that ended an optimiser step, so that a resumed run counts as the first one did,
    and holds no half-summed gradient.

    Parameters
    ----------
    file
        Where to.
    every
        Optimiser steps between two checkpoints.
    """

    def __init__(self, file: Path, every: int) -> None:
        self.file, self.every = file, every
        self.saved = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take what a run starts from as saved. Called by Lightning."""
        self.saved = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Write a checkpoint if one is due. Called by Lightning."""
        if trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps:
            self.save(trainer)

    def save(self, trainer: pl.Trainer) -> None:
        """Write a checkpoint now, unless this step has one; to be called by all processes of a run.

        Parameters
        ----------
        trainer
            The run's.
        """
        if trainer.global_step != self.saved:
            trainer.save_checkpoint(self.file)
            self.saved = trainer.global_step


def find_checkpoint(path: str | Path) -> Path:
    """Find the checkpoint of a run.

    Parameters
    ----------
    path
        A checkpoint file, or the folder of a run.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    path = Path(path)
    file = path / CHECKPOINT if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"No checkpoint at {file}. Give a run's out_dir or a .ckpt file, or start without one.")
    return file


def batches_seen(checkpoint: str | Path) -> int:
    """Read how many batches a checkpoint's run had trained on.

    Parameters
    ----------
    checkpoint
        A checkpoint file. Only plain types are read (`weights_only`).

    Raises
    ------
    ValueError
        If the file is no checkpoint of a scdiva task.
    """
    content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or CHECKPOINT_KEY not in content:
        raise ValueError(f"{checkpoint} is no checkpoint of a scdiva training task.")
    return int(content[CHECKPOINT_KEY]["batches_seen"])
