"""Build Lightning's Trainer and run a training task, in one process or several."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.plugins.environments import ClusterEnvironment, SLURMEnvironment
from pytorch_lightning.plugins.io import CheckpointIO
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from scdiva._files import naming_output, output_path
from scdiva._settings import logger as messages
from scdiva._settings import multiplies_bf16
from scdiva.train.base import TaskModule
from scdiva.train.callbacks import (
    CHECKPOINT,
    CHECKPOINT_KEY,
    TERMINATED,
    AtomicIO,
    Keeper,
    ReleaseMemory,
    Watch,
    find_checkpoint,
    read_checkpoint,
)
from scdiva.train.config import check_logger

# warnings of Lightning about deliberate choices
_EXPECTED_WARNINGS = (
    ".*does not have many workers.*",
    ".*GPU available but not used.*",
    ".*You defined a `validation_step` but have no `val_dataloader`.*",
    ".*`IterableDataset` has `__len__` defined.*",
    ".*You're resuming from a checkpoint that ended before the epoch ended.*",
    ".*isinstance.treespec, LeafSpec.*",
    ".*Total length of `list` across ranks is zero.*",
)


def launched() -> tuple[int, int] | None:
    """Number of processes that a launcher started, from the environment.

    Returns
    -------
    Processes per node and nodes of torchrun or srun; None if neither started this process.

    Raises
    ------
    ValueError
        If srun's tasks are not spread evenly over its nodes.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        per_node = int(env["LOCAL_WORLD_SIZE"])
        return per_node, int(env["WORLD_SIZE"]) // per_node
    # as in Lightning, jobs of these names are interactive
    if "SLURM_NTASKS" in env and "SLURM_PROCID" in env and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        tasks, nodes = int(env["SLURM_NTASKS"]), int(env.get("SLURM_NNODES", "1"))
        if tasks % nodes:
            raise ValueError(
                f"srun started {tasks} tasks on {nodes} nodes: give each node as many (--ntasks-per-node)."
            )
        return tasks // nodes, nodes
    return None


def is_first_process() -> bool:
    """Whether this process is the first or only one of a run, which writes the files."""
    rank = "RANK" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_PROCID"
    return launched() is None or os.environ[rank] == "0"


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Silence messages of Lightning below warnings (devices, recommended products)."""
    lightning = logging.getLogger("pytorch_lightning")
    before = lightning.level
    lightning.setLevel(logging.WARNING)
    try:
        yield
    finally:
        lightning.setLevel(before)


def resolve_precision(precision: str, accelerator: str) -> Literal["32-true", "bf16-mixed"]:
    """Lightning's name of a precision.

    Parameters
    ----------
    precision
        `"auto"`: bfloat16 autocast if the device has bfloat16 matrix multiplication (CUDA from compute capability 8;
        CPUs with AVX512-BF16 or AMX), else float32. `"bf16-residual"` is bfloat16 autocast too.
    accelerator
        As for :func:`fit`.
    """
    on_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    in_bf16 = multiplies_bf16("cuda" if on_gpu else "cpu") if precision == "auto" else precision != "fp32"
    return "bf16-mixed" if in_bf16 else "32-true"


def make_trainer(
    accelerator: str, devices: int | str | list[int], num_nodes: int, *, plugins: Any = None, **options: Any
) -> pl.Trainer:
    """Build a Trainer.

    Parameters
    ----------
    accelerator, devices, num_nodes
        As for :func:`fit`.
    plugins
        Plugins of the caller, in addition to atomic checkpoints and Slurm jobs that are not requeued.
    **options
        For Lightning's Trainer.

    Raises
    ------
    ValueError
        If there is no such accelerator, or too few devices.
    """
    if devices == 1 and num_nodes == 1:
        devices, num_nodes = launched() or (1, 1)
    plugins = list(plugins) if isinstance(plugins, (list, tuple)) else [] if plugins is None else [plugins]
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicIO())
    by_srun = launched() and "TORCHELASTIC_RUN_ID" not in os.environ
    if by_srun and not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        plugins.append(SLURMEnvironment(auto_requeue=False))
    defaults = {
        "accelerator": accelerator,
        "devices": devices,
        "num_nodes": num_nodes,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "plugins": plugins,
    }
    try:
        with _quiet_lightning():
            return pl.Trainer(**(defaults | options))
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error


def device_gib(trainer: pl.Trainer) -> float | None:
    """Memory in GiB of the smallest GPU that a trainer uses on this node; None on a CPU."""
    devices = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
    if any(device.type != "cuda" for device in devices):
        return None
    return float(min(torch.cuda.get_device_properties(device).total_memory for device in devices) / 2**30)


def _logger(logger: Any, out: Path | None, log_every: int) -> Any:
    """Create the logger with this name in the folder of a run; return other loggers unchanged."""
    if not isinstance(logger, str):
        return logger
    if out is None:
        return False
    if logger == "tensorboard":
        return TensorBoardLogger(out, name="log", default_hp_metric=False)
    if logger == "wandb":
        return WandbLogger(name=out.name, save_dir=out, project="scdiva")
    return CSVLogger(out, name="log", flush_logs_every_n_steps=max(log_every, 100))


def fit(
    module: TaskModule,
    datamodule: pl.LightningDataModule,
    *,
    out_dir: str | Path | None,
    max_steps: int | None = None,
    accelerator: str = "auto",
    devices: int | str | list[int] = 1,
    num_nodes: int = 1,
    resume_from: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    logger: Any = "csv",
    **trainer_options: Any,
) -> pl.Trainer:
    """Train a task.

    Options of the training come from `module.config`. `out_dir` gets `last.ckpt` (replaced atomically every
    `checkpoint_every` steps or `checkpoint_minutes`, while training continues, and at the end) and
    `log/version_<n>/metrics.csv`, one version per start, for `pandas.read_csv` (columns `step`, `train/loss`,
    `val/loss`, ...); pretraining adds `validation.csv`, the scores at each share of masked genes and of each validation
    study.

    SIGTERM and Ctrl-C end the run with a checkpoint after the current optimiser step; a second Ctrl-C ends it at once.

    Parameters
    ----------
    module
        Trained in place.
    datamodule
        Yields :class:`~scdiva.data.batch.CellBatch`. Resuming requires an attribute `start_step`, the number of batches
        of all processes that `train_dataloader` skips. An attribute `lanes` is set to the number of batches of a step.
    out_dir
        Folder of the run, which is created if needed. None: no checkpoint and no log is written.
    max_steps
        Maximum number of optimiser steps over all resumed runs. None: `config.steps`. The learning rate always follows
        `config.steps`.
    accelerator
        As for Lightning's Trainer: `"auto"`, `"cpu"` or `"gpu"`.
    devices, num_nodes
        Number of devices per node, or their indices, and number of nodes. 1: the number that `torchrun` or `srun`
        started. Each of W processes takes every W-th batch, so that a step equals that of one process with W times the
        `accumulate`.
    resume_from
        Checkpoint file or run folder to continue. Data order, masks and dropout continue as without an interruption if
        `accumulate` times the number of processes has not changed. If it has, the remaining cells of the epoch are
        redistributed: none is skipped or used twice.
    callbacks
        Further Lightning callbacks, such as its `EMAWeightAveraging`.
    progress
        Whether to show a progress bar with steps, loss, cells per second and remaining time.
    logger
        Where losses and scores are logged: `"csv"`, `"tensorboard"` or `"wandb"` (project `scdiva`), in `out_dir`; or
        loggers of Lightning, or False. A line has the means over processes, batches and steps since the last one.
    **trainer_options
        Further options of Lightning's Trainer, such as `strategy="ddp"`.

    Returns
    -------
    The Trainer after training; `trainer.callback_metrics` holds the last logged values.

    Raises
    ------
    ValueError
        If the checkpoint is of another run, the datamodule cannot start in the middle, or there are no such devices.
    FileNotFoundError
        If there is no checkpoint at `resume_from`.
    ImportError
        If the package of the logger is not installed.
    FloatingPointError
        If a loss or gradient is NaN or infinite. The weights are those before that step; the message names the batch,
        whose cells `CellDataModule.cells_of_batch` lists.
    OSError
        If a checkpoint cannot be written, for instance to a full disk; the previous one is intact.
    KeyboardInterrupt
        On Ctrl-C (Lightning itself would end the process). The run can be resumed from `last.ckpt`, and the module has
        the weights of that step.
    SystemExit
        After SIGTERM, with code 143.

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
    check_logger(logger)
    if c.batch_size is None:
        raise ValueError("batch_size=None: pass a configuration of PretrainingConfig.for_devices, or use pretrain.")
    out = None if out_dir is None else output_path(out_dir, "out_dir")
    checkpoint = None if resume_from is None else find_checkpoint(resume_from)
    content = None if checkpoint is None else read_checkpoint(checkpoint)
    if not hasattr(datamodule, "start_step"):
        if content is not None:
            raise ValueError(f"{type(datamodule).__name__} has no start_step, so a run on it cannot be resumed.")
    else:
        datamodule.start_step = module.batches_seen if content is None else content[CHECKPOINT_KEY]["batches_seen"]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    keeper = Keeper(None if out is None else out / CHECKPOINT, c.checkpoint_every, c.checkpoint_minutes)
    # if some weights get no gradient, processes must find out which after each batch
    find_unused = not module.all_trained and ((devices, num_nodes) != (1, 1) or launched() is not None)
    trainer = make_trainer(
        accelerator,
        devices,
        num_nodes,
        **{
            "strategy": "ddp_find_unused_parameters_true" if find_unused else "auto",
            "max_steps": c.steps if max_steps is None else max_steps,
            "max_epochs": -1,
            "precision": resolve_precision(c.precision, accelerator),
            "accumulate_grad_batches": c.accumulate,
            "logger": _logger(logger, out, c.log_every),
            # the checkpoint comes last, so that it includes the effects of the other callbacks
            "callbacks": [Watch(c.log_every, progress=progress), ReleaseMemory(), *callbacks, keeper],
            "log_every_n_steps": c.log_every,
            # the stream of batches is endless, so there are no epochs: validation is counted in batches
            "val_check_interval": c.validate_every * c.accumulate,
            "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
            "default_root_dir": out,
            **trainer_options,
        },
    )
    # Lightning would broadcast a signal before each batch, and wait for the device; Keeper shares it once per step
    setattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)  # noqa: B010, a method for mypy
    if hasattr(datamodule, "lanes"):
        datamodule.lanes = trainer.world_size * trainer.accumulate_grad_batches
    # Lightning from 2.6 on can load without unpickling, as read_checkpoint did
    safe = {"weights_only": True} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
    # data loaders draw from torch's global stream, which belongs to the user
    with _quiet_lightning(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        for message in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        try:
            with contextlib.nullcontext() if out is None else naming_output(out):
                trainer.fit(module, datamodule=datamodule, ckpt_path=checkpoint and str(checkpoint), **safe)
        except SystemExit as error:
            if trainer.interrupted:
                raise KeyboardInterrupt from error
            raise
        except FloatingPointError as error:
            saved = keeper.file is not None and keeper.file.exists()
            checkpoint_note = f"{keeper.file} is from before" if saved else "there is no checkpoint yet"
            raise FloatingPointError(
                f"{error} The weights were left as they were, and {checkpoint_note}. Inspect the batch's cells "
                "(CellDataModule.cells_of_batch), start again with a lower learning_rate, or resume with "
                "precision='fp32', which on a GPU takes many times as long."
            ) from error
        finally:
            module.release()
    if keeper.signal is not None and trainer.global_step != trainer.max_steps:
        if keeper.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if trainer.is_global_zero:
            remedy = "No checkpoint was written."
            if out is not None:
                remedy = f"Continue with resume_from={str(out)!r}, --resume true, or the same call of scdiva.tl."
            messages.warning(
                "Stopped by SIGTERM after step %d of %d. %s", trainer.global_step, trainer.max_steps, remedy
            )
        raise SystemExit(TERMINATED)
    return trainer
