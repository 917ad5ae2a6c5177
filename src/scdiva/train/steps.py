"""Steps of training: groups of parameters, the order of batches, and the loop for layers on cells in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scdiva._rng import step_seed
from scdiva._settings import progress_bar

WEIGHT_DECAY = 0.01
"""Weight decay of weight matrices. Biases, norms and embedding tables have no weight decay."""
CLIP = 1.0
"""Maximum norm of the gradient."""


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters of a module into those with and without weight decay.

    Parameters
    ----------
    module
        Its parameters with `requires_grad` are used; tied ones count once.
    weight_decay
        Weight decay of matrices; vectors (norms, biases) and embedding tables have none.

    Returns
    -------
    Parameter groups for an optimiser.
    """
    tables = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    trained = [p for p in module.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in tables]
    spared = [p for p in trained if p.ndim < 2 or id(p) in tables]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]


def train_steps(
    module: nn.Module, loss_of: Callable[[int], Tensor], learning_rate: Callable[[int], float], *, steps: int, desc: str
) -> tuple[int, str]:
    """Train by AdamW with a progress bar. Ctrl-C ends the training and keeps the weights.

    Parameters
    ----------
    module
        Its parameters with `requires_grad` are trained in place.
    loss_of
        Function of the step, counted from 1, that returns the loss, a scalar with gradient.
    learning_rate
        Function of the step that returns the learning rate; 0 ends the training.
    steps
        Maximum number of steps.
    desc
        Description in the progress bar.

    Returns
    -------
    Number of steps, and why training ended: `"steps"`, `"converged"` (learning rate 0) or `"interrupted"`.

    Raises
    ------
    FloatingPointError
        If a loss is NaN or infinite. The weights are those before that step.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(decay_groups(module, WEIGHT_DECAY), lr=learning_rate(1), fused=True)
    done = 0
    with progress_bar(desc=desc, unit="step", total=steps) as bar:
        try:
            for step in range(1, steps + 1):
                if not (rate := learning_rate(step)):
                    bar.total = done
                    return done, "converged"
                for group in optimizer.param_groups:
                    group["lr"] = rate
                loss = loss_of(step)
                if not bool(torch.isfinite(loss)):
                    raise FloatingPointError(
                        f"The loss is {float(loss.detach())} at step {step}: values of the cells or of the model are "
                        "out of range. Are the counts raw, and is the model whole?"
                    )
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(trained, CLIP)
                optimizer.step()
                done = step
                bar.update()
        except KeyboardInterrupt:
            return done, "interrupted"
    return done, "steps"


def shuffled(rows: np.ndarray, size: int, seed: int, *, drop_last: bool = False) -> Iterator[np.ndarray]:
    """Yield the rows of endless batches; each epoch is a permutation that depends on seed and epoch.

    Parameters
    ----------
    rows
        Rows to draw from.
    size
        Number of rows in a batch; at most `len(rows)` if `drop_last` is set.
    seed
        Seed of the order.
    drop_last
        Skip the last batch of an epoch if it is smaller.
    """
    for epoch in itertools.count():
        order = np.random.default_rng(step_seed(seed, epoch, "order")).permutation(rows)
        for start in range(0, len(order) - (size - 1 if drop_last else 0), size):
            yield order[start : start + size]
