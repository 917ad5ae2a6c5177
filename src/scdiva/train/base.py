"""Base of all training tasks: optimiser, schedule, random numbers and the content of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from scdiva._rng import step_generator, step_seed
from scdiva._settings import to_device
from scdiva.data.batch import CellBatch
from scdiva.models.inference import run_in_parts
from scdiva.models.layers import GeneValueEmbedding
from scdiva.train.callbacks import CHECKPOINT_KEY
from scdiva.train.config import OptimiserConfig
from scdiva.train.steps import decay_groups

Result = TypeVar("Result")

MAY_CHANGE = {
    "precision", "compile_blocks", "autotune", "log_every", "validate_every", "checkpoint_every", "checkpoint_minutes",
    "micro_batches", "accumulate",
}  # fmt: skip
"""Fields of a configuration that a resumed run may change, since the weights do not depend on them. For `accumulate`
this is true if it compensates for another number of processes."""
BETAS = (0.9, 0.95)
"""Decay rates of AdamW's moments."""
STREAM = "train/0"
"""Name of the random stream of training. Checkpoints depend on it: the 0 is the rank of the first process."""


def learning_rate_factor(step: int, config: OptimiserConfig) -> float:
    """Learning rate at a step relative to its maximum: linear warm-up, then half a cosine.

    Parameters
    ----------
    step
        Optimiser steps so far.
    config
        `warmup_steps`, `steps` and `final_learning_rate` are used.

    Returns
    -------
    `(step + 1) / warmup_steps` during the warm-up; afterwards from 1 down to `final_learning_rate` at `steps`.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    return config.final_learning_rate + (1 - config.final_learning_rate) * 0.5 * (1 + math.cos(math.pi * progress))


def network_groups(module: nn.Module, config: OptimiserConfig) -> list[dict[str, Any]]:
    """Split the trainable parameters of a module that contains a network by weight decay and learning rate.

    The learning rate of the second layer of the value MLP is divided by its width. AdamW updates each of its weights by
    as much as an entry of a gene embedding, but its output is a sum over `dim` correlated activations. With the same
    rate, the embeddings of values become about 20 times as large as those of genes.

    Parameters
    ----------
    module
        As for :func:`decay_groups`.
    config
        `learning_rate` and `weight_decay` are used.

    Returns
    -------
    Parameter groups for an optimiser.
    """
    embeddings = [m for m in module.modules() if isinstance(m, GeneValueEmbedding)]
    width = {id(m.value_out.weight): m.value_out.in_features for m in embeddings}
    groups = [
        group | {"params": [p for p in group["params"] if width.get(id(p), 1) == n], "lr": config.learning_rate / n}
        for group in decay_groups(module, config.weight_decay)
        for n in sorted({1, *width.values()})
    ]
    return [group for group in groups if group["params"]]


class Unread(NamedTuple):
    """Losses and flags of an optimiser step that are being copied to the CPU.

    Attributes
    ----------
    values
        On the CPU: whether a loss and a gradient is not finite, stop and save, the sums of all terms over the
        processes, and the losses of this process.
    copied
        Event after which `values` are complete; None: they are.
    names
        Names of the terms.
    numbers
        Numbers of the batches.
    step
        Number of optimiser steps before.
    rate
        Learning rate.
    """

    values: Tensor
    copied: torch.cuda.Event | None
    names: list[str]
    numbers: list[int]
    step: int
    rate: float


class TaskModule(pl.LightningModule):
    """Base of the training tasks; a task defines :meth:`compute_loss`.

    Masks and dropout are pure functions of `(seed, number of the batch)`: each training step has its own generator, and
    torch's global stream (which dropout layers use) is seeded for the step and restored afterwards, so the state of the
    user does not change. If the data are a function of the same number, a resumed run continues exactly. The number
    counts the batches of all processes: W processes with one batch each are equivalent to one process that accumulates
    W batches.

    Parameters
    ----------
    model
        The network.
    config
        Optimiser, logging and checkpoints.

    Attributes
    ----------
    batches_seen
        Batches (not optimiser steps) of all processes so far, over all resumed runs; saved with every checkpoint.
    micro_batches
        Parts of a batch that the network processes in turn; doubled when memory runs out, saved with every checkpoint.
    requested
        Whether this process requests that the run ends, and that a checkpoint is written.
    stopping, saving
        Whether any process requested that before the last optimiser step that was read.
    """

    all_trained = False
    """Whether every weight gets a gradient from every batch; otherwise processes must search for unused ones."""
    other_run = "To go on under another one, save the model and start a new run from it."
    """Remedy in the error for a checkpoint of another configuration."""
    reads_late: bool | None = None
    """Whether losses and flags of a step are read one step late; None: on CUDA devices."""
    less_memory = "A smaller batch_size, accumulated, is faster"
    """Advice in the warning that memory runs out."""

    def __init__(self, model: nn.Module, config: OptimiserConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.batches_seen = 0
        self.micro_batches = config.micro_batches
        self.stopping = self.saving = False
        self.requested = False, False
        # sum and number of steps of each value since the last line of the log
        self._logged: dict[str, tuple[float, int]] = {}
        self._unread: Unread | None = None
        self._rate = 0.0
        # batches since the last optimiser step, with numbers, losses and their terms: repeated if the backward pass
        # lacks memory
        self._window: list[tuple[CellBatch, int, dict[str, Tensor]]] = []

    def compute_loss(self, batch: CellBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms, by name; defined by the task.

        Parameters
        ----------
        batch
            Cells, on the device of the module.
        generator
            CPU generator of all random numbers.

        Returns
        -------
        A scalar with gradient, and scalars for the log, by the same names for every batch.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute_loss.")

    def _run_in(self, number: int) -> None:
        """Make the network process batches in this number of parts."""
        for part in self.model.modules():
            if hasattr(part, "micro_batches"):
                setattr(part, "micro_batches", number)  # noqa: B010, for mypy: a module's attributes are tensors

    def _set_residual(self, dtype: torch.dtype | None) -> None:
        setattr(self.model, "residual_dtype", dtype)  # noqa: B010, for mypy, as above

    def on_fit_start(self) -> None:
        """Set residual stream and number of parts per batch, and forget an earlier run. Called by Lightning."""
        self._window.clear()
        self._unread, self.stopping, self.saving = None, False, False
        self._run_in(self.micro_batches)
        self._set_residual(torch.bfloat16 if self.config.precision == "bf16-residual" else None)

    def release(self) -> None:
        """Restore the network after a run: no batch is kept, and batches are processed whole."""
        self._window.clear()
        self._run_in(1)
        self._set_residual(None)

    @property
    def _world_size(self) -> int:
        return 1 if self._trainer is None else self._trainer.world_size

    def training_step(self, batch: CellBatch, batch_idx: int) -> Tensor:
        """One batch; called by Lightning."""
        number = self.batches_seen + self.global_rank
        loss, parts = self._in_parts(lambda _: self.drawn_loss(batch, number, STREAM), batch.n_cells)
        if self._trainer is not None:
            terms = {name: value.detach() for name, value in parts.items()}
            self._window.append((batch, number, {"loss": loss.detach(), **terms}))
        # counted here, not in a hook: callbacks save checkpoints before the module's hook would run
        self.batches_seen += self._world_size
        return loss

    def drawn_loss(self, batch: CellBatch, number: int, stream: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms, whose random numbers are a function of seed, number and stream.

        Parameters
        ----------
        batch
            Cells, on the device of the module.
        number
            Number of the batch.
        stream
            Name of the random stream.
        """
        seed, devices = self.config.seed, [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            # torch.manual_seed would also seed GPUs that other work uses
            torch.default_generator.manual_seed(step_seed(seed, number, f"dropout/{stream}"))
            if devices:
                torch.cuda.manual_seed(step_seed(seed, number, f"dropout/{stream}"))
            return self.compute_loss(batch, step_generator(seed, number, stream))

    def _in_parts(self, run: Callable[[int], Result], n_cells: int) -> Result:
        """Run a function that processes cells; if memory runs out, in smaller parts from then on."""

        def in_parts(n: int) -> Result:
            if n != self.micro_batches:
                self.micro_batches = n
                self._run_in(n)
            return run(n)

        return run_in_parts(
            in_parts,
            n_cells,
            n_parts=self.micro_batches,
            device=self.device,
            advice=f"so is every batch from number {self.batches_seen} on, which takes one more forward pass and "
            f"changes no step beyond rounding. {self.less_memory}",
        )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward pass of a batch; called by Lightning.

        If memory runs out here, some gradients already include this batch and others do not. They are discarded, and
        all batches since the last optimiser step are repeated in smaller parts.

        Raises
        ------
        RuntimeError
            If there are several processes, which have begun to sum their gradients.
        """
        micro_batches, alone = self.micro_batches, self._world_size == 1

        def gradient(n: int) -> None:
            if n == micro_batches:
                loss.backward(*args, **kwargs)
                return
            loss.detach_()  # frees the activations
            self.zero_grad(set_to_none=True)
            for batch, number, _ in self._window:
                with self.trainer.precision_plugin.train_step_context():
                    again, _ = self.drawn_loss(batch, number, STREAM)
                (again / self.trainer.accumulate_grad_batches).backward()

        try:
            self._in_parts(gradient, max((batch.n_cells for batch, *_ in self._window), default=1) if alone else 1)
        except torch.OutOfMemoryError as error:
            if alone:
                raise
            raise RuntimeError(
                f"Out of memory in the backward pass of batch {self._window[-1][1]}, in which several processes "
                f"share. Resume with micro_batches={2 * micro_batches}: no step changes beyond rounding."
            ) from error

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the batches of the last optimiser step; the newest is the first of the next. Called by Lightning."""
        del self._window[:-1]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that loss and gradient are finite, and clip the gradient. Called by Lightning.

        One tensor with losses, terms and flags is read, the only one for which a step waits. With several processes it
        is summed first, so that each process knows whether another one has a loss that is not finite or shall stop. On
        a GPU it is read one step late, except for a line of the log: the host prepares the next batch meanwhile, and
        the optimiser itself skips a step that is not finite. Gradients are clipped here because Lightning does not clip
        those of fused optimisers in mixed precision.

        Raises
        ------
        FloatingPointError
            If a loss or gradient is not finite in any process. All processes stop, with the weights before that step.
        """
        self.read_step()
        # in the optimiser's order, in which clip_grad_norm_ would sum
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        n, names = len(self._window), list(self._window[0][2])  # the loss is first
        terms = [to_device(values[name], norm.device).to(norm) for name in names for *_, values in self._window]
        bad = ~torch.stack([norm, *terms[:n]]).isfinite()
        flags = bad[1:].any(), bad[0], *(bad.new_full((), flag) for flag in self.requested)
        shared = torch.stack([*(flag.to(norm) for flag in flags), *terms])
        losses = torch.stack(terms[:n])
        if self._world_size > 1:
            torch.distributed.all_reduce(shared)
        late = self.device.type == "cuda" if self.reads_late is None else self.reads_late
        late = late and getattr(optimizer, "_step_supports_amp_scaling", False)  # of fused optimisers
        values, copied = torch.cat([shared, losses]), None
        if late:
            optimizer.found_inf = (shared[:2].sum() > 0).to(norm)  # type: ignore[attr-defined]
            if values.is_cuda:
                pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                values = pinned.copy_(values, non_blocking=True)
                copied = torch.cuda.Event()
                copied.record()
        numbers = [number for _, number, _ in self._window]
        rate = optimizer.param_groups[0]["lr"]
        self._unread = Unread(values, copied, names, numbers, self.trainer.global_step, rate)
        if not late or (self.trainer.global_step + 1) % self.config.log_every == 0:
            self.read_step()
        if self.config.clip:
            nn.utils.clip_grads_with_norm_(trained, self.config.clip, norm)

    def read_step(self) -> None:
        """Read losses and flags of the last optimiser step, unless they were read.

        Raises
        ------
        FloatingPointError
            If a loss or gradient is not finite in any process.
        """
        if self._unread is None:
            return
        (values, copied, names, numbers, step, rate), self._unread = self._unread, None
        if copied is not None:
            copied.synchronize()
        n = len(numbers)
        bad_loss, bad_gradient, stopping, saving, *sums = values.tolist()
        sums, losses = sums[:-n], sums[-n:]
        self.stopping, self.saving = bool(stopping), bool(saving)
        for number, loss in zip(numbers, losses, strict=True):
            if not math.isfinite(loss):
                raise FloatingPointError(f"The loss is {loss} at batch {number}, optimiser step {step}.")
        if bad_loss:
            raise FloatingPointError(
                f"The loss of another process is not finite, optimiser step {step}; its message names the batch."
            )
        if bad_gradient:
            batches = ", ".join(map(str, numbers))
            raise FloatingPointError(
                f"The gradient is not finite at batch {batches}, optimiser step {step}, though each loss is."
            )
        means = {name: sum(sums[i * n : (i + 1) * n]) / (n * self._world_size) for i, name in enumerate(names)}
        self.record(means)
        if step % self.config.log_every == 0:  # a line was written, or none yet
            self._logged = {}
        for name, value in means.items():
            total, n_steps = self._logged.get(name, (0.0, 0))
            self._logged[name] = total + value, n_steps + 1
        self._rate = rate

    def record(self, means: dict[str, float]) -> None:
        """Record loss and terms of an optimiser step, means over its batches in all processes; for tasks to define."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Log the means over the optimiser steps since the last line of the log. Called by Lightning."""
        if self.trainer.should_stop:  # Lightning writes a line
            self.read_step()
        if self._unread is None and self._logged:
            # Lightning would create a tensor on the device from a number, and wait for it
            values = {f"train/{name}": torch.tensor(value) for name, value in self._line().items()}
            self.log_dict(values, batch_size=1)

    def on_train_end(self) -> None:
        """Check the last step, and log steps after the last full `log_every`. Called by Lightning."""
        self.read_step()
        step = self.trainer.global_step
        if step == self.config.steps and step % self.config.log_every:
            values = {f"train/{name}": value for name, value in self._line().items()}
            for log in self.trainer.loggers:
                log.log_metrics(values, step=step - 1)

    def _line(self) -> dict[str, float]:
        return self.logged_means() | {"learning_rate": self._rate}

    def logged_means(self) -> dict[str, float]:
        """Means of the loss and its terms over processes, batches and steps since the last line of the log."""
        return {name: total / n for name, (total, n) in self._logged.items()}

    def validation_step(self, batch: CellBatch, batch_idx: int) -> None:
        """One batch of the validation set, with the same masks each time. Called by Lightning."""
        # every process validates on all batches: the mean over processes is that of one process
        loss, parts = self.compute_loss(batch, step_generator(self.config.seed, batch_idx, "validation/0"))
        values = {"val/loss": loss.detach()} | {f"val/{name}": value.float() for name, value in parts.items()}
        self.log_dict(values, batch_size=batch.n_cells, on_step=False, on_epoch=True, sync_dist=True)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimiser."""
        return network_groups(self, self.config)

    def configure_optimizers(self) -> Any:
        """AdamW with linear warm-up and cosine decay. Called by Lightning."""
        c = self.config
        optimizer = torch.optim.AdamW(self.parameter_groups(), lr=c.learning_rate, betas=BETAS, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, c))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add task, configuration and position of the run to a checkpoint. Called by Lightning.

        Raises
        ------
        FloatingPointError
            If the last step was not finite; no checkpoint is written then.
        """
        self.read_step()
        checkpoint[CHECKPOINT_KEY] = {
            "task": type(self).__name__,
            "config": self.config.to_dict(),
            "batches_seen": self.batches_seen,
            "micro_batches": self.micro_batches,
            "logged": {name: list(sums) for name, sums in self._logged.items()},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue from a checkpoint. Called by Lightning.

        Raises
        ------
        ValueError
            If the checkpoint is of another task, or its configuration differs in a field on which the weights depend.
        """
        saved = checkpoint.get(CHECKPOINT_KEY)
        if saved is None or saved["task"] != type(self).__name__:
            task = "no scdiva task" if saved is None else saved["task"]
            raise ValueError(f"The checkpoint holds {task}, not {type(self).__name__}.")
        now, then = self.config.to_dict(), saved["config"]
        changed = sorted(k for k in now.keys() | then.keys() if k not in MAY_CHANGE and now.get(k) != then.get(k))
        if changed:
            differing = ", ".join(f"{k}: {then.get(k)} then, {now.get(k)} now" for k in changed)
            raise ValueError(
                f"A resumed run must have the configuration that it began with ({differing}). {self.other_run}"
            )
        stored, expected = checkpoint["state_dict"], self.state_dict()
        mismatched = [name for name in expected if getattr(stored.get(name), "shape", None) != expected[name].shape]
        if mismatched := [*mismatched, *(stored.keys() - expected.keys())]:
            file = getattr(self._trainer, "ckpt_path", None) or "The checkpoint"
            raise ValueError(
                f"{file} is damaged: {len(mismatched)} weights are not the model's, first {mismatched[0]!r}."
            )
        # Lightning determines the end of a step from the number of batches
        if self.config.accumulate != then["accumulate"]:
            more = (self.config.accumulate - then["accumulate"]) * checkpoint["global_step"]
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            for counts in (progress["current"], progress["total"]):
                counts.update({name: n + more for name, n in counts.items()})
        self.batches_seen = saved["batches_seen"]
        self.micro_batches = max(self.micro_batches, saved["micro_batches"])
        self._logged = {name: (total, n) for name, (total, n) in saved.get("logged", {}).items()}
