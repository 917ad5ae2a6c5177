"""The one loop that fits heads, and models with them, on cells held in memory. Pretraining has Lightning's instead."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from scdiva._rng import step_generator, step_seed
from scdiva._settings import progress_bar
from scdiva.data.batch import CellBatch
from scdiva.models.inference import runs_transformer
from scdiva.models.scdiva import ScDiVa
from scdiva.train.adaptation import AdaptationCells, Split
from scdiva.train.base import TaskModule, decay_groups

if TYPE_CHECKING:
    from tqdm import tqdm

FIRST_CHECK = 10
"""Least steps between two validations: of few cells an epoch is a step or two."""
WARM_CHECKS = 6
"""Most validations while the decoder alone is trained."""
WARM_RATE = 5.0
"""Factor of its learning rate then: it is linear, and starts from zero."""
TOLERANCE = 1e-4
"""Share of the loss by which a validation must be better to count as such."""
RANK = 8
"""Rank of a low-rank update."""


class Validation(NamedTuple):
    """Validation and early stopping.

    Attributes
    ----------
    loss
        Computes the loss of held-out cells.
    every
        Steps between two validations.
    patience
        Validations without a better loss after which training ends.
    start
        The loss that the first validation has to be below; if it is not finite, any is.
    """

    loss: Callable[[], float]
    every: int
    patience: int
    start: float


class Trained(NamedTuple):
    """Result of a training.

    Attributes
    ----------
    steps
        Steps done.
    stopped
        Why it ended: `"steps"`, `"patience"`, `"minutes"` or `"interrupted"`.
    best_loss
        Lowest validation loss, or that of the start; NaN without validation.
    history
        Of each validation the columns `step`, `training_loss` (mean since the one before) and `validation_loss`.
    """

    steps: int
    stopped: str
    best_loss: float
    history: dict[str, list[float]]


def train_steps(
    module: nn.Module,
    loss_of: Callable[[int], Tensor],
    learning_rate: Callable[[int], float],
    *,
    steps: int,
    groups: list[dict[str, Any]],
    clip: float = 0.0,
    ends: float = math.inf,
    validation: Validation | None = None,
    after: Callable[[int, Tensor], None] | None = None,
    bar: tqdm[Any] | None = None,
) -> Trained:
    """Train by AdamW, step by step, until there is a reason to stop.

    Parameters
    ----------
    module
        Trained in place: its parameters with `requires_grad`.
    loss_of
        Gives the loss of a step, a scalar with gradient; steps count from 1.
    learning_rate
        Gives that of a step.
    steps
        Most steps.
    groups
        Parameter groups for the optimiser, as :func:`scdiva.train.base.decay_groups` makes them.
    clip
        Largest norm of the gradient; 0 does not clip.
    ends
        Time, by `time.monotonic`, after which no step begins; the one under way is finished, and validated.
    validation
        With it, the module is left with the weights of the best validation, or those of the start if none was better.
    after
        Called with the step and its loss, without gradient, when a step is done.
    bar
        Moved on by every step.

    Raises
    ------
    FloatingPointError
        If a loss is NaN or infinite. The weights are those before that step, or with validation the best ones.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate(1))
    history: dict[str, list[float]] = {"step": [], "training_loss": [], "validation_loss": []}
    best, kept = (math.nan, []) if validation is None else (validation.start, _copies(trained))
    done, without_better, total, stopped = 0, 0, 0.0, "steps"
    try:
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            loss = loss_of(step)
            if not bool(torch.isfinite(loss)):
                raise FloatingPointError(f"The loss is {float(loss.detach())} at step {step}. Lower learning_rate.")
            optimizer.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(trained, clip)
            optimizer.step()
            done, total = step, total + float(loss.detach())
            if after is not None:
                after(step, loss.detach())
            if bar is not None:
                bar.update()
            late = time.monotonic() > ends
            if validation is not None and (step % validation.every == 0 or step == steps or late):
                found = validation.loss()
                history["step"].append(step)
                history["training_loss"].append(total / ((step - 1) % validation.every + 1))
                history["validation_loss"].append(found)
                total, without_better = 0.0, without_better + 1
                if bar is not None:
                    bar.set_postfix(validation_loss=f"{found:.4f}")
                if found < best - TOLERANCE * abs(best) or not math.isfinite(best):
                    best, kept, without_better = found, _copies(trained), 0
                if without_better >= validation.patience:
                    stopped = "patience"
            if late:
                stopped = "minutes"
            if stopped != "steps":
                break
    except KeyboardInterrupt:
        stopped = "interrupted"
    finally:
        if kept:
            _restore(trained, kept)
    return Trained(done, stopped, best, history)


def _copies(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def _restore(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def shuffled(rows: np.ndarray, size: int, seed: int, *, whole: bool = False) -> Iterator[np.ndarray]:
    """Yield the rows of batch after batch without end; each epoch is a permutation, a function of seed and epoch.

    Parameters
    ----------
    rows
        What is drawn from.
    size
        Rows of a batch, at most `len(rows)` with `whole`.
    seed
        Of the order.
    whole
        Leave out the last batch of an epoch if it is smaller.
    """
    for epoch in itertools.count():
        order = np.random.default_rng(step_seed(seed, epoch, "order")).permutation(rows)
        for start in range(0, len(order) - (size - 1 if whole else 0), size):
            yield order[start : start + size]


class Limits(NamedTuple):
    """When training ends: passes over the cells, validations without a better loss, seconds from the call on."""

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
    """Fine-tune a module's network with early stopping on held-out cells; it is left with the best weights.

    First only what is not of the network (the decoder of the objective) is trained, until the validation loss no longer
    falls: that loss is the start which the network has to improve on. Else any training would seem to help. Then the
    network is trained too. Validation cells are corrupted in the same way each time, so that losses can be compared.

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
    or `"interrupted"`), and the columns `step`, `training_loss`, `validation_loss` of `history`. If no validation was
    better than the start, the network is that of the start.

    Raises
    ------
    FloatingPointError
        If the loss becomes NaN or infinite.
    """
    c, begun, held = module.config, time.monotonic(), split.held_out
    per_epoch = -(-len(split.training) // c.batch_size)
    every = max(per_epoch, FIRST_CHECK)
    batches = shuffled(split.training, c.batch_size, c.seed)
    history: dict[str, list[float]] = {"step": [], "training_loss": [], "validation_loss": []}

    def loss_of(rows: np.ndarray, number: int, stream: str) -> Tensor:
        batch: CellBatch = cells.take(rows, max_length).to(module.device)
        return module.drawn_loss(batch, number, stream)[0]

    @torch.no_grad()
    def held_out_loss() -> float:
        module.eval()
        parts = [held[start : start + c.batch_size] for start in range(0, len(held), c.batch_size)]
        losses = [float(loss_of(part, number, "validation")) for number, part in enumerate(parts)]
        module.train()
        return float(np.average(losses, weights=[len(part) for part in parts]))

    def learn(before: int, most: int, patience: int, start: float, rate: float, seconds: float) -> Trained:
        found = train_steps(
            module,
            lambda step: loss_of(next(batches), before + step - 1, "train"),
            lambda step: rate * min(1.0, step / max(1, c.warmup_steps)),
            steps=most,
            groups=decay_groups(module, c.weight_decay),
            clip=c.clip,
            ends=begun + seconds,
            validation=Validation(held_out_loss, every, patience, start),
            bar=bar,
        )
        for name, column in found.history.items():
            history[name] += [before + step for step in column] if name == "step" else column
        return found

    network = [p for p in module.model.parameters() if p.requires_grad]
    with progress_bar(desc="training", unit="step", shown=progress) as bar:
        module.train()
        warmed = Trained(0, "", held_out_loss(), {})
        if any(not name.startswith("model.") for name, _ in module.named_parameters()):
            for p in network:
                p.requires_grad_(False)
            seconds = limits.seconds / 3
            warmed = learn(0, WARM_CHECKS * every, 2, warmed.best_loss, WARM_RATE * c.learning_rate, seconds)
            for p in network:
                p.requires_grad_(True)
        found, start = warmed, warmed.best_loss
        if time.monotonic() - begun > limits.seconds:
            found = warmed._replace(stopped="minutes")
        elif warmed.stopped != "interrupted":
            most = limits.max_epochs * per_epoch
            found = learn(warmed.steps, most, limits.patience, start, c.learning_rate, limits.seconds)
    module.eval()
    return {
        "start_loss": start,
        "best_loss": found.best_loss,
        "stopped": "max_epochs" if found.stopped == "steps" else found.stopped,
        "steps": int(history["step"][-1]) if history["step"] else 0,
        "history": history,
    }


class LowRankUpdate(nn.Module):
    """`W + A B` with W kept as it is and B from zero (Hu et al. 2021, LoRA), as a parametrisation of a weight.

    Parameters
    ----------
    weight
        W, `(n, m)`.
    rank
        Columns of A; at most n and m.
    generator
        Source of A.
    """

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rank = min(rank, *weight.shape)
        down = torch.randn(weight.shape[0], rank, generator=generator) * rank**-0.5
        self.a = nn.Parameter(down.to(weight))
        self.b = nn.Parameter(weight.new_zeros(rank, weight.shape[1]))

    def forward(self, weight: Tensor) -> Tensor:
        """Add the update."""
        return weight + self.a @ self.b


def add_low_rank(module: nn.Module, rank: int, generator: torch.Generator) -> None:
    """Put a low-rank update on the weight of a layer, and freeze the weight itself; in place.

    Parameters
    ----------
    module
        With a matrix `weight`.
    rank, generator
        As for :class:`LowRankUpdate`.
    """
    weight = cast(Tensor, module.weight)
    weight.requires_grad_(False)
    parametrize.register_parametrization(module, "weight", LowRankUpdate(weight, rank, generator))


def merge_low_rank(model: nn.Module) -> None:
    """Add all low-rank updates to their weights; the model has the stock layout again. In place.

    Parameters
    ----------
    model
        Any.
    """
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def train_states(model: ScDiVa, how: Literal["lora", "full"], seed: int) -> None:
    """Train what a model's cell state comes from, and nothing else; in place.

    That is the set encoder where the state is its alone, else the transformer.

    Parameters
    ----------
    model
        Changed in place; :func:`merge_low_rank` puts it back.
    how
        `"lora"`: low-rank updates of the linear layers. `"full"`: all weights.
    seed
        Of the updates.
    """
    model.requires_grad_(False)
    through = runs_transformer(model)
    source = model if through else model.anchor
    assert source is not None
    if how == "full":
        source.requires_grad_(True)
        return
    layers = [m for m in (model.blocks if through else source).modules() if isinstance(m, nn.Linear)]
    for number, layer in enumerate(layers):
        add_low_rank(layer, RANK, step_generator(seed, number, "low rank"))
