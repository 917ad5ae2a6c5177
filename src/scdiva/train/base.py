"""What all training tasks share: optimiser, schedule, randomness, what a checkpoint remembers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from scdiva._rng import step_generator, step_seed
from scdiva.data.batch import CellBatch
from scdiva.train.config import OptimiserConfig

CHECKPOINT_KEY = "scdiva"
"""Entry of a checkpoint that holds ours: task, configuration, batches seen; plain types only."""
MAY_CHANGE = {"precision", "compile_blocks", "autotune", "log_every", "validate_every", "checkpoint_every"}
"""Fields of a configuration that a resumed run may set anew: they do not enter the path of the weights by design."""


def learning_rate_factor(step: int, config: OptimiserConfig) -> float:
    """Share of the highest learning rate in force at a step: linear warm-up, then half a cosine.

    Parameters
    ----------
    step
        Optimiser steps done so far.
    config
        `warmup_steps`, `steps` and `final_learning_rate` are read.

    Returns
    -------
    `(step + 1) / warmup_steps` during the warm-up; afterwards from 1 down to `final_learning_rate` at `steps`.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    return config.final_learning_rate + (1 - config.final_learning_rate) * 0.5 * (1 + math.cos(math.pi * progress))


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split a module's trainable parameters into decayed and spared ones.

    Parameters
    ----------
    module
        Its parameters with `requires_grad` are taken, each once, however often it is tied.
    weight_decay
        For matrices; vectors (norms, biases) and embedding tables get 0.

    Returns
    -------
    Parameter groups for an optimiser.
    """
    tables = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    trained = [p for p in module.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in tables]
    spared = [p for p in trained if p.ndim < 2 or id(p) in tables]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]


class TaskModule(pl.LightningModule):
    """Base of the training tasks; a task writes :meth:`compute_loss` and nothing else.

    Masks and dropout are pure functions of `(seed, batches seen)`: each training step draws from a generator of its
    own, and torch's global stream (which dropout layers read) is seeded for the step and put back afterwards, so the
    user's state stays untouched. With data that is a function of `(seed, step)` too, a resumed run continues exactly.

    Parameters
    ----------
    model
        The network that is trained.
    config
        Optimiser and bookkeeping.

    Attributes
    ----------
    batches_seen
        Batches (not optimiser steps) trained on so far, over all resumed runs; saved with every checkpoint.
    """

    def __init__(self, model: nn.Module, config: OptimiserConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.batches_seen = 0

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its parts, by name; to be written by the task.

        Parameters
        ----------
        batch
            Cells, on the module's device.
        generator
            CPU generator to draw everything random from.

        Returns
        -------
        A scalar with gradient, and scalars for the log.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute_loss.")

    @contextlib.contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Seed torch's global streams inside the block only."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            # not torch.manual_seed: it would seed the GPUs that other work runs on too
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
            yield

    def training_step(self, batch: CellBatch, batch_idx: int) -> Tensor:
        """One batch; called by Lightning."""
        stream = f"train/{self.global_rank}"
        with self._seeded(step_seed(self.config.seed, self.batches_seen, f"dropout/{stream}")):
            loss, parts = self.compute_loss(batch, step_generator(self.config.seed, self.batches_seen, stream))
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError(
                f"The loss is {float(loss)} at batch {self.batches_seen}. Lower learning_rate, or train with "
                'precision="fp32"; the last checkpoint is from before.'
            )
        self._log("train", loss, parts, batch.n_cells)
        # counted here, not in a hook: callbacks save checkpoints before the module's hook would run
        self.batches_seen += 1
        return loss

    def validation_step(self, batch: CellBatch, batch_idx: int) -> None:
        """One batch of the fixed validation set; it is corrupted in the same way each time. Called by Lightning."""
        stream = f"validation/{self.global_rank}"
        loss, parts = self.compute_loss(batch, step_generator(self.config.seed, batch_idx, stream))
        self._log("val", loss, parts, batch.n_cells)

    def _log(self, stage: str, loss: Tensor, parts: dict[str, Tensor], n_cells: int) -> None:
        values = {f"{stage}/loss": loss.detach()} | {f"{stage}/{name}": value.float() for name, value in parts.items()}
        whole = stage == "val"
        self.log_dict(values, batch_size=n_cells, on_step=not whole, on_epoch=whole, sync_dist=whole)
        if stage == "train" and self.trainer.optimizers:
            self.log("train/learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"], batch_size=n_cells)

    def configure_optimizers(self) -> Any:
        """AdamW with linear warm-up and cosine, stepped once per optimiser step. Called by Lightning."""
        c = self.config
        optimizer = torch.optim.AdamW(
            decay_groups(self, c.weight_decay),
            lr=c.learning_rate,
            betas=(c.beta1, c.beta2),
            weight_decay=0.0,
            fused=self.device.type == "cuda" or None,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, c))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a resumed run must know. Called by Lightning."""
        checkpoint[CHECKPOINT_KEY] = {
            "task": type(self).__name__,
            "config": self.config.to_dict(),
            "batches_seen": self.batches_seen,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up a run, or refuse if it was another one. Called by Lightning.

        Raises
        ------
        ValueError
            If the checkpoint is of another task, or its configuration differs in a field that the path of the weights
            depends on.
        """
        saved = checkpoint.get(CHECKPOINT_KEY)
        if saved is None or saved["task"] != type(self).__name__:
            task = "no scdiva task" if saved is None else saved["task"]
            raise ValueError(f"The checkpoint holds {task}, not {type(self).__name__}.")
        now, then = self.config.to_dict(), saved["config"]
        changed = sorted(k for k in now.keys() | then.keys() if k not in MAY_CHANGE and now.get(k) != then.get(k))
        if changed:
            said = ", ".join(f"{k}: {then.get(k)} then, {now.get(k)} now" for k in changed)
            raise ValueError(
                f"A resumed run must have the configuration that it began with ({said}). To go on under another one, "
                "save the model and start a new run from it."
            )
        self.batches_seen = saved["batches_seen"]
