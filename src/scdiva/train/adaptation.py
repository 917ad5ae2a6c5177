"""Training a model on, without labels, on cells held in memory; nothing is written to disk."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from scdiva._progress import progress_bar
from scdiva._rng import step_generator, step_seed
from scdiva.data.batch import CellBatch, from_ragged
from scdiva.data.packed import take_cells
from scdiva.models.inference import read_out, runs_transformer
from scdiva.models.scdiva import ScDiVa
from scdiva.train.base import TaskModule, decay_groups

FIRST_CHECK = 10
"""Least steps between two looks at the validation cells: of few cells an epoch is a step or two."""
WARM_CHECKS = 6
"""Most such looks while the decoder alone learns."""
WARM_RATE = 5.0
"""How much faster it then learns: it is linear, and starts from nothing."""
TOLERANCE = 1e-4
"""Share of the loss by which a look must be better to count as such."""


class Split(NamedTuple):
    """Numbers of the cells that are trained on, and of those held out; both ascending."""

    training: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True)
class AdaptationCells:
    """Serialised cells in memory.

    Attributes
    ----------
    indptr, tokens, values
        As :func:`scdiva.tokenizer.serialize.serialize` returns them; no cell is empty.
    batch
        int64 `(n_cells,)`, number of the batch of each cell, from 0, ascending.
    measured
        int64, tokens that the data have a column for, ascending.
    n_batches
        Number of batches.
    """

    indptr: np.ndarray
    tokens: np.ndarray
    values: np.ndarray
    batch: np.ndarray
    measured: np.ndarray
    n_batches: int

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return len(self.batch)

    def take(self, rows: np.ndarray, max_length: int | None = None) -> CellBatch:
        """Make a batch of cells.

        Parameters
        ----------
        rows
            Numbers of the cells.
        max_length
            Genes kept of each; None keeps all.
        """
        ragged = take_cells((self.indptr, self.tokens, self.values), rows, max_length)
        return from_ragged(*ragged, self.batch[rows])

    def subset(self, rows: np.ndarray) -> AdaptationCells:
        """Return some of the cells.

        Parameters
        ----------
        rows
            Their numbers, ascending.
        """
        ragged = take_cells((self.indptr, self.tokens, self.values), rows)
        return replace(self, indptr=ragged[0], tokens=ragged[1], values=ragged[2], batch=self.batch[rows])

    def split(self, held_out: float, seed: int) -> Split:
        """Hold a share of the cells out, at least one, and leave at least one.

        Parameters
        ----------
        held_out
            Share, above 0 and below 1.
        seed
            Of the choice.
        """
        order = np.random.default_rng(step_seed(seed, 0, "split")).permutation(self.n_cells)
        n = min(max(1, round(held_out * self.n_cells)), self.n_cells - 1)
        return Split(np.sort(order[n:]), np.sort(order[:n]))


class Limits(NamedTuple):
    """When training ends: passes over the cells, looks without a better loss, seconds from the start of the call."""

    max_epochs: int
    patience: int
    seconds: float


def continue_training(
    module: TaskModule,
    cells: AdaptationCells,
    split: Split,
    limits: Limits,
    *,
    max_length: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Train a module's network on, looking at held-out cells, and leave it with the best weights seen.

    First only what is not of the network (the decoder of the objective) learns, until the validation loss no longer
    falls: that loss is the start which the network has to beat. Else any training would seem to help. Then the network
    learns too. Validation cells are corrupted in the same way at each look, so that losses can be compared.

    Parameters
    ----------
    module
        Its `model` is trained in place: the parameters that have `requires_grad`. Batch size, learning rate, warm-up,
        weight decay, clipping and seed are its `config`'s; the learning rate does not fall.
    cells
        All cells, at least two.
    split
        Which cells are trained on, and which held out.
    limits
        When to end. Training always ends with the best weights.
    max_length
        Genes of a cell that the network sees; None: all.
    progress
        Whether to show a progress bar.

    Returns
    -------
    `start_loss`, `best_loss` (validation; nats a cell), `steps`, `stopped` (`"patience"`, `"max_epochs"`, `"minutes"`
    or `"interrupted"`), and the columns `step`, `training_loss`, `validation_loss` of `history`. If no look was better
    than the start, the network is that of the start.

    Raises
    ------
    FloatingPointError
        If the loss becomes NaN or infinite.
    """
    c, begun = module.config, time.monotonic()
    held, rows = split.held_out, split.training
    per_epoch = -(-len(rows) // c.batch_size)
    rest = [p for name, p in module.named_parameters() if not name.startswith("model.")]
    history: dict[str, list[float]] = {"step": [], "training_loss": [], "validation_loss": []}
    stream = _batches(cells, rows, c.batch_size, c.seed, max_length)

    def loss_of(batch: CellBatch, seed: str, step: int) -> Tensor:
        with module._seeded(step_seed(c.seed, step, f"dropout/{seed}")):
            return module.compute_loss(batch.to(module.device), step_generator(c.seed, step, seed))[0]

    @torch.no_grad()
    def look() -> float:
        module.eval()
        parts = [held[i : i + c.batch_size] for i in range(0, len(held), c.batch_size)]
        losses = [float(loss_of(cells.take(part, max_length), "validation", i)) for i, part in enumerate(parts)]
        module.train()
        return float(np.average(losses, weights=[len(part) for part in parts]))

    def learn(
        parameters: list[nn.Parameter], most: int, patience: int, best: float, rate: float, seconds: float
    ) -> tuple[float, str]:
        """Train these parameters; leave them as they were at the best look (or the start). Why it ended comes last."""
        optimizer = torch.optim.AdamW(_groups(module, parameters, c.weight_decay), lr=rate)
        kept = [p.detach().clone() for p in parameters]
        since, every, why, total = 0, max(per_epoch, FIRST_CHECK), "max_epochs", 0.0
        try:
            for step in range(1, most + 1):
                number, batch = next(stream)
                for group in optimizer.param_groups:
                    group["lr"] = rate * min(1.0, step / max(1, c.warmup_steps))
                loss = loss_of(batch, "train", number)
                if not bool(torch.isfinite(loss)):
                    raise FloatingPointError(f"The loss is {float(loss.detach())} at step {step}. Lower learning_rate.")
                optimizer.zero_grad()
                loss.backward()
                if c.clip:
                    nn.utils.clip_grad_norm_(parameters, c.clip)
                optimizer.step()
                total += float(loss.detach())
                bar.update()
                late = time.monotonic() - begun > seconds
                if step % every and step < most and not late:
                    continue
                found = look()
                history["step"].append(number + 1)
                history["training_loss"].append(total / ((step - 1) % every + 1))
                history["validation_loss"].append(found)
                total = 0.0
                bar.set_postfix(validation_loss=f"{found:.4f}")
                if found < best - TOLERANCE * abs(best) or not math.isfinite(best):
                    best, since, kept = found, 0, [p.detach().clone() for p in parameters]
                else:
                    since += 1
                if since >= patience or late:
                    why = "minutes" if late else "patience"
                    break
        except KeyboardInterrupt:
            why = "interrupted"
        finally:
            _restore(parameters, kept)
        return best, why

    network = [p for p in module.model.parameters() if p.requires_grad]
    with progress_bar(desc="training", unit="step", shown=progress) as bar:
        module.train()
        start, why = look(), ""
        for p in network:
            p.requires_grad_(False)
        if rest:
            most = WARM_CHECKS * max(per_epoch, FIRST_CHECK)
            start, why = learn(rest, most, 2, start, WARM_RATE * c.learning_rate, limits.seconds / 3)
        for p in network:
            p.requires_grad_(True)
        best = start
        if time.monotonic() - begun > limits.seconds:
            why = "minutes"
        elif why != "interrupted":
            most = limits.max_epochs * per_epoch
            best, why = learn([*network, *rest], most, limits.patience, start, c.learning_rate, limits.seconds)
    module.eval()
    return {
        "start_loss": start,
        "best_loss": best,
        "stopped": why,
        "steps": int(history["step"][-1]) if history["step"] else 0,
        "history": history,
    }


@torch.no_grad()
def _restore(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _groups(module: nn.Module, parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of these parameters only, decayed or spared as in all training."""
    chosen = {id(p) for p in parameters}
    groups = decay_groups(module, weight_decay)
    return [group | {"params": [p for p in group["params"] if id(p) in chosen]} for group in groups]


def _batches(
    cells: AdaptationCells, rows: np.ndarray, size: int, seed: int, max_length: int | None
) -> Iterator[tuple[int, CellBatch]]:
    """Yield step and batch without end; each epoch is a permutation of its own, a function of (seed, epoch)."""
    step = 0
    for epoch in itertools.count():
        order = np.random.default_rng(step_seed(seed, epoch, "order")).permutation(rows)
        for start in range(0, len(order), size):
            yield step, cells.take(order[start : start + size], max_length)
            step += 1


@torch.no_grad()
def encoded(
    model: ScDiVa, cells: AdaptationCells, block: int = 1024, *, what: Literal["state", "lat"] = "state"
) -> Tensor:
    """Cell states, or embeddings (`"lat"`), `(n_cells, dim)`, on the CPU."""
    device, parts = next(model.parameters()).device, []
    size = 1 if runs_transformer(model) and device.type == "cpu" else block
    for start in range(0, cells.n_cells, size):
        batch = cells.take(np.arange(start, min(start + size, cells.n_cells))).to(device)
        parts.append(read_out(model, batch.packed, what).float().cpu())
    return torch.cat(parts)
