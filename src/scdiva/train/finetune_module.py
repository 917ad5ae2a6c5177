"""Fine-tuning of all weights on cells in memory: one Lightning module for the tasks of the paper.

An objective (:class:`scdiva.train.objectives.Objective`) maps a network and the indices of training examples to a loss.
It holds the examples and the new layers. :func:`finetune` trains the network and these layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from scdiva._constants import FINETUNED
from scdiva._files import output_path
from scdiva._settings import settings
from scdiva.models.inference import out_of_memory
from scdiva.models.scdiva import ScDiVa
from scdiva.train.base import Result, TaskModule, network_groups
from scdiva.train.callbacks import CHECKPOINT, CHECKPOINT_KEY
from scdiva.train.config import FinetuneConfig
from scdiva.train.finetune import LowRankLinear, default_rate, digest_of, linears, model_digest
from scdiva.train.objectives import Objective
from scdiva.train.runner import fit
from scdiva.train.steps import decay_groups, shuffled

HEAD_RATE = 10.0
"""Learning rate of new layers relative to that of the model."""


@dataclass(frozen=True)
class _Rows:
    """A batch: indices of training examples."""

    rows: np.ndarray

    @property
    def n_cells(self) -> int:
        return len(self.rows)

    def to(self, *_: Any, **__: Any) -> _Rows:
        """Return self: the objective moves its own tensors."""
        return self


class _Data(pl.LightningDataModule):
    """Endless batches of training examples; each epoch is a permutation that depends on seed and epoch."""

    def __init__(self, n_items: int, size: int, seed: int) -> None:
        super().__init__()
        self.n_items, self.size, self.seed, self.start_step = n_items, size, seed, 0

    def train_dataloader(self) -> Iterator[_Rows]:
        batches = shuffled(np.arange(self.n_items), self.size, self.seed, drop_last=True)
        return map(_Rows, itertools.islice(batches, self.start_step, None))


class FinetuneModule(TaskModule):
    """Fine-tuning of a network by the objective of a task.

    Parameters
    ----------
    model
        The network; its parameters with `requires_grad` are trained in place.
    objective
        The task's loss and new layers, trained in place.
    config
        See :class:`FinetuneConfig`.

    Attributes
    ----------
    history
        Loss and its terms at every step; saved with every checkpoint.
    """

    config: FinetuneConfig
    model: ScDiVa
    other_run = "Choose another checkpoint_dir, or pass the former arguments."
    less_memory = "A smaller context needs less memory"

    def __init__(self, model: ScDiVa, objective: Objective, config: FinetuneConfig) -> None:
        super().__init__(model, config)
        self.objective = objective
        self.history: dict[str, list[float]] = {}
        self._digests = {"model": model_digest(model), "data": digest_of(objective.data())}

    def _in_parts(self, run: Callable[[int], Result], n_cells: int) -> Result:
        """Run a step; without transformer blocks, smaller parts would not need less memory."""
        return super()._in_parts(run, n_cells if self.objective.through_blocks(self.model) else 1)

    def compute_loss(self, batch: Any, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch of training examples, from the objective."""
        progress = self.batches_seen / self.config.steps
        loss, parts = self.objective(self.model, batch.rows, progress, generator)
        return loss, parts

    def record(self, means: dict[str, float]) -> None:
        """Append the losses of a step to the history."""
        for name, value in means.items():
            self.history.setdefault(name, []).append(value)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters of the network, and those of the objective at ten times the learning rate."""
        c = self.config
        new = [group | {"lr": HEAD_RATE * c.learning_rate} for group in decay_groups(self.objective, c.weight_decay)]
        return [*network_groups(self.model, c), *new]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add digests and history to a checkpoint. Called by Lightning."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[CHECKPOINT_KEY] |= self._digests | {"objective": type(self.objective).__name__}
        checkpoint[CHECKPOINT_KEY]["history"] = {name: torch.tensor(values) for name, values in self.history.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue from a checkpoint. Called by Lightning.

        Raises
        ------
        ValueError
            If the checkpoint is of another task, configuration, model or data.
        """
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint[CHECKPOINT_KEY]
        for name, differs in (("data", "on other cells or labels"), ("model", "from a model with other weights")):
            if saved[name] != self._digests[name]:
                raise ValueError(f"The checkpoint was trained {differs}. Choose another checkpoint_dir.")
        self.history = {name: values.tolist() for name, values in saved["history"].items()}


def finetune(
    network: ScDiVa,
    objective: Objective,
    config: FinetuneConfig,
    *,
    device: str,
    checkpoint_dir: str | PathLike[str] | None = None,
) -> dict[str, list[float]]:
    """Train a network and the new layers of a task, in place.

    Parameters
    ----------
    network
        From :func:`network_for`.
    objective
        Objective of the task.
    config
        From :func:`planned`.
    device
        Torch device of the training; network and objective remain there.
    checkpoint_dir
        Folder for a checkpoint after every epoch. If it holds a checkpoint of the same run, training continues from it,
        and the result has the same bits as without an interruption. None: no checkpoints.

    Returns
    -------
    Loss and its terms at every step, by name.

    Raises
    ------
    FloatingPointError
        If a loss or gradient is NaN or infinite.
    MemoryError
        If the device lacks memory for one cell, or for one batch if the model can't process it in parts.
    ValueError
        If `checkpoint_dir` holds a checkpoint of another run.
    KeyboardInterrupt
        On Ctrl-C; with `checkpoint_dir` the same call continues.
    """
    module = FinetuneModule(network.train(), objective.train(), config)
    target = torch.device(device)
    where: dict[str, Any] = {"accelerator": "cpu"}
    if target.type != "cpu":
        where = {"accelerator": "gpu", "devices": [target.index or 0]}
    folder = None if checkpoint_dir is None else output_path(checkpoint_dir, "checkpoint_dir")
    try:
        fit(
            module,
            _Data(objective.n_items, config.batch_size, config.seed),
            out_dir=folder,
            resume_from=folder if folder is not None and (folder / CHECKPOINT).exists() else None,
            progress=settings.progress,
            limit_val_batches=0,
            **where,
        )
    except FloatingPointError as error:
        lower = min(config.learning_rate / 3, default_rate(network.config.dim))
        also = "" if checkpoint_dir is None else " and another checkpoint_dir"
        raise FloatingPointError(
            f"{str(error).partition(' The weights were left')[0]} The AnnData object was not changed. Pass a lower "
            f"learning rate, lr={lower:.1g} in place of {config.learning_rate:.2g}{also}; if that does not help, check "
            "the counts and the model."
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        remedy = 'Free memory on it, or train on another: device="cpu"'
        if objective.through_blocks(network):
            remedy += f", or pass a smaller context than {config.context} genes"
        raise MemoryError(
            f"{device} is out of memory after {module.batches_seen} of {config.steps} steps of {config.batch_size} "
            f"examples. The AnnData object was not changed. {remedy}."
        ) from error
    for layers, name, layer in linears(network, 0):
        if isinstance(layer, LowRankLinear):
            setattr(layers, name, layer.merged())
    tuned = {"task": objective.task, "training": config.to_dict()}
    network.metadata = {**(network.metadata or {}), FINETUNED: tuned}
    network.requires_grad_(True).eval().to(target)
    objective.requires_grad_(False).eval().to(target)
    return module.history
