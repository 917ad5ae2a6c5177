"""Fine-tuning for batch integration: gradient reversal and contrast (paper, section on batch integration)."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._rng import step_seed
from scdiva.data.batch import CellBatch
from scdiva.data.memory import InMemoryCells
from scdiva.integration.objective import reversed_gradient
from scdiva.models.layers import perceptron
from scdiva.models.scdiva import ScDiVa
from scdiva.train.finetune import Objective, finetune, network_for, planned
from scdiva.train.objectives import pair_contrast_loss, supervised_contrast_loss, thinned_at_random

HIDDEN = 128
"""Hidden width of the batch discriminators."""
TEMPERATURE = 0.1
"""Of both contrastive losses."""
CONTRAST_WEIGHT, REVERSAL_WEIGHT, REVERSAL_RISE = 1.0, 1.0, 10.0
"""Weights of the contrastive loss and of the reversed gradient at the end of its schedule, and the schedule's γ."""
MAX_TIME = 0.3
"""Without labels, a second view of a cell leaves each gene out with probability t ~ U(0, 0.3)."""


def reversal_schedule(progress: float) -> float:
    r"""Weight of the reversed gradient, :math:`2 / (1 + e^{-10 p}) - 1` (Ganin & Lempitsky 2015)."""
    return REVERSAL_WEIGHT * float(2 / (1 + np.exp(-REVERSAL_RISE * progress)) - 1)


class IntegrationObjective(Objective):
    """Gradient reversal against a batch discriminator plus a contrastive loss (paper, section on batch integration).

    With labels, the supervised contrastive loss of Khosla et al. 2020. Without, each cell is contrasted with the other
    cells of its batch, and its own second view, with genes left out at random, is the positive: negatives from other
    batches would reward the model for telling batches apart.

    Parameters
    ----------
    cells
        Training cells.
    batches
        Batch numbers from 0 by covariate, int64 `(n_cells,)` each.
    labels
        Label numbers from 0, -1 for none, int64 `(n_cells,)`; None without labels.
    state_dim, context
        Width of the cell state; genes kept of each cell, None for all.
    seed
        Of the discriminators' weights.
    """

    task = "integrate"

    def __init__(
        self,
        cells: InMemoryCells,
        batches: list[np.ndarray],
        labels: np.ndarray | None,
        *,
        state_dim: int,
        context: int | None,
        seed: int,
    ) -> None:
        super().__init__()
        self.cells, self.context, self.n_items = cells, context, cells.n_cells
        self.batches, self.labels = batches, labels
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(step_seed(seed, 0, "discriminators"))
            self.discriminators = nn.ModuleList(
                perceptron(state_dim, HIDDEN, int(batch.max()) + 1, nn.LeakyReLU(0.2)) for batch in batches
            )

    def data(self) -> Iterator[np.ndarray]:
        """Cells, batches and labels."""
        yield from (self.cells.indptr, self.cells.tokens, self.cells.values, *self.batches)
        if self.labels is not None:
            yield self.labels

    def forward(
        self, network: ScDiVa, rows: np.ndarray, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and its parts `reversal` (cross-entropy of the discriminators) and `contrast`."""
        device = next(network.parameters()).device
        taken = self.cells.take(rows, self.context)
        state = self._direction(network, taken.to(device))
        wide = reversed_gradient(state, reversal_schedule(progress)) * state.shape[1] ** 0.5
        reversal = state.new_zeros(())
        numbers = [torch.from_numpy(batch[rows]).to(device) for batch in self.batches]
        for discriminator, batch in zip(self.discriminators, numbers, strict=True):
            reversal = reversal + F.cross_entropy(discriminator(wide), batch)
        if self.labels is not None:
            contrast = supervised_contrast_loss(state, torch.from_numpy(self.labels[rows]).to(device), TEMPERATURE)
        else:
            view = thinned_at_random(taken, MAX_TIME, generator).to(device)
            positive = self._direction(network, view)
            present = torch.ones(1, len(rows), dtype=torch.bool, device=device)
            apart = torch.stack([batch[:, None] != batch for batch in numbers]).any(dim=0)
            contrast = pair_contrast_loss(state, positive[None], present, apart, TEMPERATURE)
        loss = reversal + CONTRAST_WEIGHT * contrast
        return loss, {"reversal": reversal.detach(), "contrast": contrast.detach()}

    def _direction(self, network: ScDiVa, cells: CellBatch) -> Tensor:
        """Cell states less their mean over the step, at length 1, `(B, state_dim)`.

        What all cells share would leave all cosines near 1, and the contrastive loss without a gradient.
        """
        state = network.encode(*cells.packed).float()
        return F.normalize(state - state.mean(dim=0), dim=1)


def finetune_for_integration(
    model: ScDiVa,
    cells: InMemoryCells,
    batches: list[np.ndarray],
    labels: np.ndarray | None,
    fields: dict[str, Any],
    seed: int,
    precision: str,
    device: str,
    checkpoint_dir: str | PathLike[str] | None,
) -> tuple[ScDiVa, dict[str, list[float]]]:
    """Fine-tune a copy of a model so that its cell state integrates batches.

    Parameters
    ----------
    model, cells
        The model, not changed, and the cells.
    batches, labels
        As for :class:`IntegrationObjective`.
    fields
        From :func:`finetune_config`.
    seed, precision, device, checkpoint_dir
        As for :func:`finetune`.

    Returns
    -------
    The fine-tuned model, and the losses at every step.
    """
    config = planned(fields, cells.n_cells, seed, precision)
    network = network_for(model, config, seed)
    objective = IntegrationObjective(
        cells, batches, labels, state_dim=network.state_dim, context=network.config.input_length, seed=seed
    )
    history = finetune(network, objective, config, device=device, checkpoint_dir=checkpoint_dir)
    return network, history
