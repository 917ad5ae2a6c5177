"""What a run shows of itself: cells a second, time left, logs."""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.callbacks.progress import ProgressBar
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger

from scdiva._extras import from_extra
from scdiva._progress import progress_bar

if TYPE_CHECKING:
    from tqdm import tqdm

RATE = "train/cells_per_second"
"""Name of the rate in the logs."""


def run_logs(out: Path, log_every: int, *, tensorboard: bool = False) -> list[Logger]:
    """Make the logs of a run, in one folder for each start: `log/version_<n>`.

    Parameters
    ----------
    out
        Folder of the run.
    log_every
        Optimiser steps from line to line.
    tensorboard
        Whether TensorBoard's events are written beside `metrics.csv`.

    Raises
    ------
    ImportError
        If nothing that writes them is installed.
    """
    table = CSVLogger(out, name="log", flush_logs_every_n_steps=max(log_every, 100))
    if not tensorboard:
        return [table]
    if importlib.util.find_spec("tensorboardX") is None:  # which Lightning takes as well
        from_extra("tensorboard", "watch", "tensorboard=True needs tensorboard")
    return [table, TensorBoardLogger(out, name="log", version=table.version)]


class Watch(Callback):
    """Measure cells a second, log them, and have the logs on the disk whenever a checkpoint is.

    The rate is of all processes together; the time of checkpoints counts, that of validation does not.

    Parameters
    ----------
    n_steps
        Optimiser steps over which the rate is taken, the last ones.
    """

    def __init__(self, n_steps: int) -> None:
        self.rate = 0.0
        self._cells = 0
        self._paused = 0.0
        self._since = 0.0
        self._marks: deque[tuple[float, int]] = deque(maxlen=n_steps + 1)
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock. Called by Lightning."""
        self._cells, self._paused, self._step = 0, 0.0, trainer.global_step
        self._marks.clear()
        self._marks.append((time.perf_counter(), 0))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch's cells. Called by Lightning."""
        n_cells = batch.n_cells
        self._cells += n_cells * trainer.world_size
        now = time.perf_counter() - self._paused
        then, cells = self._marks[0]
        self.rate = (self._cells - cells) / max(now - then, 1e-9)
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._marks.append((now, self._cells))
        pl_module.log(RATE, self.rate, batch_size=n_cells)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock. Called by Lightning."""
        self._since = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the clock go on. Called by Lightning."""
        self._paused += time.perf_counter() - self._since

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the logs: a resumed run begins at the checkpoint and logs what came after it anew. By Lightning."""
        for log in trainer.loggers:
            log.save()


class StepBar(ProgressBar):
    """One bar over the optimiser steps of the whole run, with loss, cells a second and the time left.

    Parameters
    ----------
    watch
        Measures the rate.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self._shown = True
        self._bar: tqdm[Any] | None = None

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all processes but the first."""
        self._shown = False

    def enable(self) -> None:
        """Show the bar again."""
        self._shown = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the bar. Called by Lightning."""
        total = None if trainer.max_steps < 0 else trainer.max_steps
        self._bar = progress_bar(
            desc="training", unit="step", total=total, initial=trainer.global_step, shown=self._shown
        )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar on by what was trained. Called by Lightning."""
        if self._bar is None or self._bar.disable:
            return
        if trainer.global_step > self._bar.n:
            loss = trainer.callback_metrics.get("train/loss")
            said = f"{self.watch.rate:,.0f} cells/s" + ("" if loss is None else f", loss {float(loss):.3f}")
            self._bar.set_postfix_str(said, refresh=False)
            self._bar.update(trainer.global_step - self._bar.n)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what takes time. Called by Lightning."""
        if self._bar is not None:
            self._bar.set_description_str("validating")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on. Called by Lightning."""
        if self._bar is not None:
            self._bar.set_description_str("training")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the bar, however the run ended. Called by Lightning."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
