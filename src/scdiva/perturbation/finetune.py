"""Fine-tuning on a perturbation screen by the signal-weighted error of the predicted change (paper)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scdiva._device import to_device
from scdiva.data.memory import InMemoryCells
from scdiva.metrics.perturbation import WMSE_ALPHA
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.response_head import ResponseHead, head_inputs, predicted_change
from scdiva.train.finetune import Objective, finetune, network_for, planned

CELLS_OF_CONDITION = 64
"""Training examples of each condition in an epoch."""


@dataclass(frozen=True)
class MeasuredChanges:
    """Measured changes of a screen, and its control cells.

    Attributes
    ----------
    cells
        Control cells, ordered by group; `cells.batch` is the number of the group.
    parts
        bool `(n, n_parts)`, perturbed parts of each condition.
    part_tokens
        int64 `(n_parts,)`, tokens of the perturbed genes; -1 for a label that is not a gene.
    group
        int64 `(n,)`, number of the group of cells of each condition.
    strength
        float `(n,)`, strength of each perturbation, which depends on its dose.
    delta
        float32 `(n, n_genes)`, mean of the perturbed cells minus that of the group's control cells.
    control
        float32 `(n_groups, n_genes)`, mean of the control cells.
    """

    cells: InMemoryCells
    parts: np.ndarray
    part_tokens: np.ndarray
    group: np.ndarray
    strength: np.ndarray
    delta: np.ndarray
    control: np.ndarray

    @property
    def n_items(self) -> int:
        """Number of training examples in an epoch."""
        return CELLS_OF_CONDITION * len(self.group)


class ResponseObjective(Objective):
    r"""Signal-weighted mean squared error of the predicted change (paper, eqs. `wmse_weights` and `wmse`).

    :math:`\sum_j w_j (\hat\Delta_j - \Delta_j)^2`, :math:`w_j = (\bar v_j + \alpha) / \sum_k (\bar v_k + \alpha)`, with
    :math:`\bar v` the mean expression of the group's control cells. A training example is a measured condition and a
    random control cell of its group.

    Parameters
    ----------
    measured
        Measured changes of the screen.
    head
        The response head.
    context
        Maximum number of genes of a cell.
    """

    task = "perturbation"

    def __init__(self, measured: MeasuredChanges, head: ResponseHead, context: int) -> None:
        super().__init__()
        self.measured, self.head, self.context, self.n_items = measured, head, context, measured.n_items
        weights = measured.control.astype(np.float64) + WMSE_ALPHA
        self.weights = nn.Buffer(
            torch.from_numpy(weights / weights.sum(axis=1, keepdims=True)).float(), persistent=False
        )
        self.delta = nn.Buffer(torch.from_numpy(measured.delta), persistent=False)
        groups = np.arange(len(measured.control))
        self._start, self._stop = (np.searchsorted(measured.cells.batch, groups, side) for side in ("left", "right"))

    def through_blocks(self, network: ScDiVa) -> bool:
        """Return True: the head reads the transformer's output."""
        return True

    @torch.no_grad()
    def standardise(self, network: ScDiVa) -> None:
        """Standardise the input of the head, over four control cells for each condition."""
        m, inputs = self.measured, []
        for condition, group in enumerate(m.group):
            cells = np.linspace(self._start[group], self._stop[group] - 1, 4).round().astype(np.int64)
            parts = np.repeat(m.parts[condition : condition + 1], len(cells), axis=0)
            inputs.append(head_inputs(network, self.head, m.cells, cells, parts, m.part_tokens, self.context)[0])
        self.head.standardise(torch.cat(inputs))

    def data(self) -> Iterator[np.ndarray]:
        """Arrays that identify the training data."""
        m = self.measured
        yield from (m.cells.indptr, m.cells.tokens, m.cells.values, m.cells.batch)
        yield from (m.parts, m.part_tokens, m.group, m.strength, m.delta, m.control)

    def forward(
        self, network: ScDiVa, rows: np.ndarray, progress: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted mean squared error, averaged over the examples."""
        m, condition = self.measured, rows % len(self.measured.group)
        group = m.group[condition]
        drawn = torch.rand(len(rows), generator=generator, dtype=torch.float64).numpy()
        cell = self._start[group] + (drawn * (self._stop - self._start)[group]).astype(np.int64)
        change = predicted_change(
            network, self.head, m.cells, cell, m.parts[condition], m.part_tokens, m.strength[condition], self.context
        )
        device = change.device
        error = (change - self.delta[to_device(torch.from_numpy(condition), device)]).square()
        return (self.weights[to_device(torch.from_numpy(group), device)] * error).sum(dim=1).mean(), {}


def finetune_for_perturbation(
    model: ScDiVa,
    measured: MeasuredChanges,
    fields: dict[str, Any],
    seed: int,
    precision: str,
    device: str,
    checkpoint_dir: str | PathLike[str] | None,
) -> tuple[ScDiVa, ResponseHead, dict[str, list[float]]]:
    """Fine-tune a copy of a model to predict the change of mean expression under perturbations.

    Parameters
    ----------
    model, measured
        The model, which is not changed, and the measured changes of the screen.
    fields
        From :func:`scdiva.train.finetune.finetune_config`.
    seed, precision, device, checkpoint_dir
        As for :func:`scdiva.train.finetune.finetune`.

    Returns
    -------
    The fine-tuned model, its response head, and the losses at every step.
    """
    config = planned(fields, measured.n_items, seed, precision)
    network = network_for(model, config, seed)
    head = ResponseHead.for_changes(
        network.config.dim, measured.part_tokens, measured.delta, measured.parts.sum(axis=1), measured.strength, seed
    )
    objective = ResponseObjective(measured, head, config.context)
    objective.to(device).standardise(network.to(device).eval())
    history = finetune(network, objective, config, device=device, checkpoint_dir=checkpoint_dir)
    return network, head, history
