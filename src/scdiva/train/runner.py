"""The one place that builds a Trainer."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from pytorch_lightning.loggers import CSVLogger

from scdiva._settings import multiplies_bf16
from scdiva.train.base import CHECKPOINT_KEY, TaskModule

CHECKPOINT = "last.ckpt"
"""Name of the checkpoint in a run's folder."""

# said by Lightning about choices made here on purpose
_EXPECTED_WARNINGS = (
    ".*does not have many workers.*",
    ".*GPU available but not used.*",
    ".*`IterableDataset` has `__len__` defined.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*You're resuming from a checkpoint that ended before the epoch ended.*",
    ".*isinstance.treespec, LeafSpec.*",
    ".*The dirpath has changed from.*",
    ".*Total length of `list` across ranks is zero.*",
)


class _SaveAtEnd(Callback):
    """Save the last step's checkpoint where the saver's interval misses it.

    From the same hook as the saver: what Lightning saves after the loop counts the steps differently when resumed.
    """

    def __init__(self, file: Path, every: int) -> None:
        self.file, self.every = file, every

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == trainer.max_steps and trainer.global_step % self.every:
            trainer.save_checkpoint(self.file)


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Silence Lightning's news (devices found, products recommended) inside the block; warnings still come."""
    logger = logging.getLogger("pytorch_lightning")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def resolve_precision(
    precision: Literal["auto", "fp32", "bf16"], accelerator: str = "auto"
) -> Literal["32-true", "bf16-mixed"]:
    """Turn our names of precisions into Lightning's.

    Parameters
    ----------
    precision
        `"auto"` takes bfloat16 autocast where the device multiplies bfloat16 matrices in hardware (CUDA from compute
        capability 8; CPUs with AVX512-BF16 or AMX), else float32.
    accelerator
        As for :func:`fit`.
    """
    if precision not in ("auto", "fp32", "bf16"):
        raise ValueError(f'precision must be "auto", "fp32" or "bf16", got {precision!r}.')
    if precision != "auto":
        return "bf16-mixed" if precision == "bf16" else "32-true"
    on_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if multiplies_bf16("cuda" if on_gpu else "cpu") else "32-true"


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


def fit(
    module: TaskModule,
    datamodule: pl.LightningDataModule,
    *,
    out_dir: str | Path,
    max_steps: int | None = None,
    accelerator: str = "auto",
    devices: int | str | list[int] = 1,
    resume_from: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    **trainer_options: Any,
) -> pl.Trainer:
    """Train a task.

    Everything else comes from `module.config`. In `out_dir` appear `last.ckpt` (rewritten in place, atomically, every
    `checkpoint_every` steps and at the end) and `log/version_<n>/metrics.csv`, one version per start.

    Parameters
    ----------
    module
        Trained in place.
    datamodule
        Gives :class:`~scdiva.data.batch.CellBatch`. To resume from it, it must have an attribute `start_step` that
        `train_dataloader` obeys: the number of batches to leave out.
    out_dir
        Folder of the run; made if need be.
    max_steps
        Stop after so many optimiser steps, counted over all resumed runs. None: `config.steps`. The learning rate
        follows `config.steps` in any case.
    accelerator, devices
        As for Lightning's Trainer: `"auto"`, `"cpu"`, `"gpu"`; how many, or which.
    resume_from
        Checkpoint file or run folder to continue. Data order, masks and dropout then go on as if the run had never
        stopped.
    callbacks
        Further Lightning callbacks.
    progress
        Whether to show a progress bar.
    **trainer_options
        Anything else for Lightning's Trainer, such as `strategy="ddp"`.

    Returns
    -------
    The Trainer after training; `trainer.callback_metrics` holds the last logged values.

    Raises
    ------
    ValueError
        If the checkpoint is of another run, or the datamodule cannot start in the middle.
    FileNotFoundError
        If there is no checkpoint at `resume_from`.
    FloatingPointError
        If the loss becomes NaN or infinite.
    KeyboardInterrupt
        On Ctrl-C (Lightning itself would end the whole process). `last.ckpt` is what can be resumed.

    Examples
    --------
    >>> import scdiva as sd
    >>> from scdiva.data import CellDataModule
    >>> from scdiva.models import ScDiVa, ScDiVaConfig
    >>> from scdiva.tokenizer import load_vocabulary
    >>> from scdiva.train import PretrainingConfig, PretrainingModule, fit
    >>> genes = load_vocabulary("scdiva-mini")
    >>> data = CellDataModule(sd.datasets.toy(60, 100), vocabulary=genes, batch_size=8)
    >>> model = ScDiVa(ScDiVaConfig(n_genes=genes.n_genes, dim=16, n_layers=1, n_heads=2, ffn_dim=24))
    >>> module = PretrainingModule(model, PretrainingConfig(steps=2, batch_size=8, precision="fp32"), n_studies=1)
    >>> trainer = fit(module, data, out_dir="run", accelerator="cpu", progress=False)
    >>> trainer.global_step
    2
    """
    c = module.config
    out = Path(out_dir)
    checkpoint = None if resume_from is None else find_checkpoint(resume_from)
    if not hasattr(datamodule, "start_step"):
        if checkpoint is not None:
            raise ValueError(f"{type(datamodule).__name__} has no start_step, so a run on it cannot be resumed.")
    else:
        datamodule.start_step = module.batches_seen if checkpoint is None else batches_seen(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    saver = ModelCheckpoint(
        dirpath=out,
        filename=Path(CHECKPOINT).stem,
        every_n_train_steps=c.checkpoint_every,
        save_on_train_epoch_end=False,
        enable_version_counter=False,
    )
    shown = [TQDMProgressBar()] if progress else []
    with _quiet_lightning():
        trainer = pl.Trainer(
            **{
                "max_steps": c.steps if max_steps is None else max_steps,
                "max_epochs": -1,
                "accelerator": accelerator,
                "devices": devices,
                "precision": resolve_precision(c.precision, accelerator),
                "accumulate_grad_batches": c.accumulate,
                "gradient_clip_val": c.clip or None,
                "logger": CSVLogger(out, name="log", flush_logs_every_n_steps=max(c.log_every, 100)),
                "callbacks": [saver, _SaveAtEnd(out / CHECKPOINT, c.checkpoint_every), *shown, *callbacks],
                "log_every_n_steps": c.log_every,
                # the stream of batches has no end, hence no epochs: validation is counted in batches
                "val_check_interval": c.validate_every * c.accumulate,
                "check_val_every_n_epoch": None,
                "num_sanity_val_steps": 0,
                "enable_progress_bar": progress,
                "enable_model_summary": False,
                "use_distributed_sampler": False,
                **trainer_options,
            }
        )
    # Lightning from 2.6 on can be told not to unpickle; batches_seen has read the file in that way in any case
    safe = {"weights_only": True} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
    # data loaders draw from torch's global stream, which is the user's
    with _quiet_lightning(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        for message in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        try:
            trainer.fit(module, datamodule=datamodule, ckpt_path=checkpoint and str(checkpoint), **safe)
        except SystemExit as error:
            if trainer.interrupted:
                raise KeyboardInterrupt from error
            raise
    return trainer
