"""What ends a run before its last step: signals, and cells that make no finite loss."""

from __future__ import annotations

import csv
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from scdiva.train.checkpoints import Saver

TERMINATED = 128 + signal.SIGTERM
"""Exit code after SIGTERM, as a shell gives it."""
IMPATIENT = 2.0
"""Seconds after which a second Ctrl-C counts as one: launchers pass the first on to those who have it already."""


class Stopper(Callback):
    """On SIGTERM or Ctrl-C end the run after the optimiser step under way, with a checkpoint; all processes together.

    Lightning's own handlers would leave the loop in the middle of a step, and talk to other processes from inside a
    signal handler, where those may be waiting for something else.

    Parameters
    ----------
    saver
        Writes the checkpoint.
    """

    def __init__(self, saver: Saver) -> None:
        self.saver = saver
        self.signal: int | None = None
        self._since = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen to signals in the place of Lightning, which puts back whoever did before. Called by Lightning."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._heard)
            signal.signal(signal.SIGINT, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT == number and time.monotonic() - self._since > IMPATIENT:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop if a signal came, at the end of an optimiser step. Called by Lightning."""
        if trainer.fit_loop._should_accumulate():
            return
        heard = self.signal is not None
        if trainer.world_size > 1:
            heard = trainer.strategy.reduce_boolean_decision(heard, all=False)
        if not heard:
            return
        self.signal = self.signal or signal.SIGTERM  # another process heard it
        if trainer.global_step != trainer.max_steps:
            self.saver.save(trainer)
            trainer.limit_val_batches = 0  # a run that is stopped would be validated first
            trainer.should_stop = True


def write_cells(folder: Path, datamodule: Any, numbers: Sequence[int]) -> Path | None:
    """Write down which cells some batches of the training stream hold.

    Parameters
    ----------
    folder
        Where `not_finite_batch_<number>.csv` is to appear, the number that of the first batch: one line a cell, with
        batch, study, file, row and, if the file is no packed corpus, the cell's name.
    datamodule
        The run's; one without a `training_stream` cannot say which cells a batch has.
    numbers
        Of the batches, counted over all processes.

    Returns
    -------
    The file, or None if nothing is known of the cells.
    """
    from scdiva.data.batch_cells import cells_of_batch

    if not numbers or not hasattr(datamodule, "training_stream"):
        return None
    file = folder / f"not_finite_batch_{numbers[0]}.csv"
    with file.open("w", newline="") as lines:
        out = csv.writer(lines)
        out.writerow(["batch", "study", "file", "row", "cell"])
        for number in numbers:
            out.writerows([number, *cell] for cell in cells_of_batch(datamodule, number))
    return file
