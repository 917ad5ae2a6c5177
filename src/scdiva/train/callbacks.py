"""Lightning plugins and callbacks: atomic checkpoints, signals, cells per second and the progress bar."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import math
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, Checkpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO

from scdiva._files import put_whole
from scdiva._settings import logger, progress_bar

if TYPE_CHECKING:
    from tqdm import tqdm

CHECKPOINT = "last.ckpt"
"""File name of the checkpoint in the folder of a run."""
CHECKPOINT_KEY = "scdiva"
"""Entry of a checkpoint with task, configuration and batches seen; plain types only."""
_OF_CHECKPOINT = (
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    "loops",
    "global_step",
    "pytorch-lightning_version",
)
_OF_TASK = ("task", "config", "batches_seen", "micro_batches")
"""Required entries of a checkpoint, and of its entry CHECKPOINT_KEY."""


class AtomicIO(TorchCheckpointIO):
    """Write checkpoints atomically, if requested in a thread while training continues.

    Lightning writes to the system's temporary folder and moves the file, which is a copy across file systems: a kill
    would leave an incomplete file under the old name.

    Attributes
    ----------
    background
        Whether a thread writes the file after :meth:`save_checkpoint` has returned.
    """

    background = False
    _writing: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write one file. Called by Lightning in the first process.

        Parameters
        ----------
        checkpoint
            The content, which may change after the call.
        path
            The file.
        storage_options
            Ignored.

        Raises
        ------
        OSError
            If this file or the one before cannot be written. An older checkpoint does not change then.
        """
        self.finish()
        content = io.BytesIO()
        torch.save(checkpoint, content)
        step = checkpoint.get("global_step")
        if not self.background:
            self.write(content, Path(path), step)
            return
        thread = ThreadPoolExecutor(1)
        self._writing = thread.submit(self.write, content, Path(path), step)
        thread.shutdown(wait=False)  # once it has written

    def write(self, content: io.BytesIO, path: Path, step: int | None) -> None:
        """Write the content of a checkpoint; OSError if that fails."""
        try:
            put_whole(path, lambda file: file.write(content.getbuffer()))
        except OSError as error:
            before = "the one before is intact: make room and resume"
            if not path.exists():
                before = "there is none before it"
            message = f"the checkpoint of step {step} could not be written ({error.strerror}); {before}"
            raise OSError(error.errno, message, str(path)) from error

    def finish(self, *, wait: bool = True) -> None:
        """Wait until the last checkpoint is written, and raise the error of its thread. Without `wait`, only check."""
        if self._writing is not None and (wait or self._writing.done()):
            writing, self._writing = self._writing, None
            writing.result()


def find_checkpoint(path: str | Path) -> Path:
    """Find the checkpoint of a run.

    Parameters
    ----------
    path
        A checkpoint file, or the folder of a run.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint.
    """
    path = Path(path)
    file = path / CHECKPOINT if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"No checkpoint at {file}. Pass the folder of an interrupted run or a .ckpt file, or train from the start."
        )
    return file


def read_checkpoint(file: Path) -> dict[str, Any]:
    """Read the checkpoint of a scdiva training task.

    Parameters
    ----------
    file
        A checkpoint file. Only plain types are read (`weights_only`).

    Raises
    ------
    ValueError
        If the file is damaged or is not a checkpoint of a scdiva task. The message names the file.
    """
    remedy = "Remove it, or choose another folder."
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # torch raises EINVAL for a truncated file
            raise
        # the message of torch advises to run the code in the file
        raise ValueError(f"{str(file)!r} is damaged or is not a checkpoint. {remedy}") from None
    saved = content.get(CHECKPOINT_KEY) if isinstance(content, dict) else None
    if not isinstance(saved, dict):
        raise ValueError(f"{str(file)!r} is not a checkpoint of a scdiva training task. {remedy}")
    lacks = [key for key in _OF_CHECKPOINT if key not in content] + [key for key in _OF_TASK if key not in saved]
    if lacks or not isinstance(saved["batches_seen"], int):
        raise ValueError(f"{str(file)!r} is damaged: it lacks {', '.join(lacks) or 'a number of batches'}. {remedy}")
    return content


TERMINATED = 128 + signal.SIGTERM
"""Exit code after SIGTERM, as in a shell."""
IMPATIENT = 2.0
"""Seconds during which a second Ctrl-C is ignored: launchers forward the first to processes that received it."""


class Keeper(Checkpoint):
    """Write checkpoints at regular intervals and at the last step; end the run on SIGTERM or Ctrl-C.

    Both happen at the end of the last batch of an optimiser step, so that no partial gradient is lost, and in all
    processes at the same step. Lightning's own signal handlers would leave the loop within a step, and communicate with
    processes that may wait for something else.

    Checkpoints are written in a thread (:class:`AtomicIO`). An error of the thread is raised after the next step.

    Parameters
    ----------
    file
        The checkpoint; None: no checkpoint is written.
    every
        Optimiser steps between two checkpoints.
    minutes
        Minutes between two checkpoints on the clock of the first process; None: by steps.
    """

    def __init__(self, file: Path | None, every: int, minutes: float | None = None) -> None:
        self.file, self.every, self.minutes = file, every, minutes
        self.signal: int | None = None
        self._since = self._saved = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install signal handlers; Lightning restores the former ones. Called by Lightning."""
        self._saved = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._received)
            signal.signal(signal.SIGINT, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT == number and time.monotonic() - self._since > IMPATIENT:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Pass a signal, or that a checkpoint is due, to the module, which informs all processes.

        Called by Lightning.
        """
        due = self.minutes is not None and time.monotonic() - self._saved >= 60 * self.minutes
        pl_module.requested = self.signal is not None, due and trainer.is_global_zero

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        """Write a checkpoint if one is due, and stop after a signal. Called by Lightning."""
        if trainer.fit_loop._should_accumulate():
            return
        step, writer = trainer.global_step, _writer(trainer)
        writer.finish(wait=False)
        # several processes decide together, before the step
        stops = bool(pl_module.stopping) if trainer.world_size > 1 else self.signal is not None
        due = step % self.every == 0 if self.minutes is None else bool(pl_module.saving)
        if self.file is not None and (stops or due or step == trainer.max_steps):
            writer.background = True
            trainer.save_checkpoint(self.file)
            writer.background = False  # for callers of trainer.save_checkpoint
            self._saved, pl_module.saving = time.monotonic(), False
        if stops and step != trainer.max_steps:
            self.signal = self.signal or signal.SIGTERM  # another process received it
            trainer.limit_val_batches = 0  # Lightning would validate before it stops
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the last checkpoint, in all processes. Called by Lightning."""
        _writer(trainer).finish()
        trainer.strategy.barrier("last checkpoint")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Wait for the last checkpoint and log its error, since the error of the run is raised. Called by Lightning."""
        try:
            _writer(trainer).finish()
        except OSError as error:
            logger.warning("%s", error)


def _writer(trainer: pl.Trainer) -> AtomicIO:
    """Return the plugin that writes checkpoints; a new one if the user passed another CheckpointIO."""
    writer = trainer.strategy.checkpoint_io
    return writer if isinstance(writer, AtomicIO) else AtomicIO()


RATE = "train/cells_per_second"
"""Name of the rate in the log."""


class ReleaseMemory(Callback):
    """Return freed memory to the operating system every ten batches, in training on a CPU.

    The batches differ in size, and the allocator of Linux keeps the gaps between their tensors: without this, a model
    of 5 million weights takes 11 GB after 300 steps of 16,000 tokens, with it 4 GB.
    """

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Release memory after every tenth batch. Called by Lightning."""
        if batch_idx % 10 == 9 and pl_module.device.type == "cpu":
            release_memory()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Release memory. Called by Lightning."""
        if pl_module.device.type == "cpu":
            release_memory()


def release_memory() -> None:
    """Return memory that was freed to the operating system, where its allocator is that of glibc (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


class Watch(Callback):
    """Log cells per second, show a progress bar, and flush the logs whenever a checkpoint is written.

    The rate counts the cells of all processes since the last validation, and includes the time of checkpoints. The bar
    counts the optimiser steps of the run and shows loss, rate and remaining time; the first process draws it.

    Parameters
    ----------
    n_steps
        Maximum number of optimiser steps over which the rate is averaged.
    progress
        Whether to show the bar.
    """

    def __init__(self, n_steps: int, *, progress: bool = False) -> None:
        self.progress = progress
        self._bar: tqdm[Any] | None = None
        self._cells = self._step = 0
        self._marks: deque[tuple[float, int]] = deque(maxlen=n_steps + 1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock and the bar. Called by Lightning."""
        self._step = trainer.global_step
        self.on_validation_end(trainer, pl_module)
        if self.progress and trainer.is_global_zero:
            n = trainer.max_steps
            self._bar = progress_bar(desc="training", unit="step", total=n, initial=self._step, shown=True)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restart the clock. Called by Lightning."""
        self._marks.clear()
        self._marks.append((time.perf_counter(), self._cells))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the rate, and update the bar after a step. Called by Lightning."""
        self._cells += batch.n_cells * trainer.world_size
        now, (then, cells) = time.perf_counter(), self._marks[0]
        rate = (self._cells - cells) / max(now - then, 1e-9)
        pl_module.log(RATE, torch.tensor(rate), batch_size=batch.n_cells)
        if trainer.global_step == self._step:
            return
        if self._bar is not None:
            loss = pl_module.logged_means().get("loss", math.nan)  # on a GPU without the last step
            self._bar.set_postfix_str(f"{rate:,.0f} cells/s, loss {loss:.3f}", refresh=False)
            self._bar.update(trainer.global_step - self._step)
        self._step = trainer.global_step
        self._marks.append((now, self._cells))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the logs up to the checkpoint, from which a resumed run continues them. Called by Lightning."""
        for log in trainer.loggers:
            log.save()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the bar. Called by Lightning."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
