"""Fine-tuning on a perturbation screen: the input of the transformer, the response head, and the training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_seed
from scdiva._settings import to_device
from scdiva.data.batch import CellBatch, InMemoryCells, from_ragged
from scdiva.data.cells import take_cells
from scdiva.diffusion import cell_of_token
from scdiva.metrics.perturbation import WMSE_ALPHA
from scdiva.models.layers import perceptron
from scdiva.models.scdiva import ScDiVa, check_input
from scdiva.train.finetune import network_for, planned
from scdiva.train.objectives import Objective

HIDDEN = 256
"""Hidden width of the response head."""
LEAST_SD = 0.05
"""Floor of the standard deviation by which the head's input is divided; hidden states have a mean square of 1."""
MAX_RANK = 64
"""Maximum number of directions of the changes."""


class ResponseHead(nn.Module):
    r"""Change of mean expression of all genes, from the hidden states of control cells with perturbed genes first.

    .. math::

        \hat\Delta = \sigma\, s \sum_p \bigl(b + u_p G\bigr), \qquad
        u_p = \mathrm{MLP}(\mathrm{RMSNorm}(([\bar h, h_p] - m) / v))

    :math:`\bar h` is the mean of a cell's hidden states, :math:`h_p` the hidden state of the perturbed gene p (a
    learned vector if p is not a gene of the vocabulary), s the strength of the perturbation, and :math:`\sigma` a fixed
    scale; b, G and the MLP are learned. m and v are the mean and the standard deviation of the input before training,
    because most of a hidden state is the same for all genes. Each half is scaled to a mean square of 1, which bounds
    the input for genes that were never perturbed. The last layer of the MLP starts at zero, so that the effects of
    several parts add up before training.

    Parameters
    ----------
    dim
        Width of the hidden states.
    n_genes
        Number of genes whose change is predicted.
    rank
        Number of rows of G.
    part_tokens
        int64 `(n_parts,)`, tokens of the genes that are perturbed in the screen; -1 for a label that is not a gene.
        Kept as a buffer.
    """

    def __init__(self, dim: int, n_genes: int, rank: int, part_tokens: Tensor) -> None:
        super().__init__()
        self.part_tokens = nn.Buffer(part_tokens)
        self.scale = nn.Buffer(torch.ones(()))
        self.mean, self.sd = nn.Buffer(torch.zeros(2 * dim)), nn.Buffer(torch.ones(2 * dim))
        self.labels = nn.Parameter(torch.randn(int((part_tokens < 0).sum()), dim))
        self.mlp = perceptron(2 * dim, HIDDEN, rank)
        self.base = nn.Parameter(torch.zeros(n_genes))
        self.basis = nn.Parameter(torch.zeros(rank, n_genes))
        last = self.mlp[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    @classmethod
    def for_changes(
        cls, dim: int, part_tokens: np.ndarray, delta: np.ndarray, n_parts: np.ndarray, strength: np.ndarray, seed: int
    ) -> ResponseHead:
        """Initialise the head: it predicts the mean change of single perturbations, and G spans the main directions.

        Parameters
        ----------
        dim, part_tokens
            Width of the hidden states, and tokens of the perturbed genes, as for :class:`ResponseHead`.
        delta
            `(n, n_genes)`, measured changes.
        n_parts, strength
            `(n,)`, number of parts of each perturbation, and their strength.
        seed
            Seed of the MLP and of the vectors of labels.
        """
        n, n_genes = delta.shape
        rank = min(n, n_genes, MAX_RANK)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(step_seed(seed, 0, "response head"))
            head = cls(dim, n_genes, rank, torch.from_numpy(np.asarray(part_tokens, dtype=np.int64)))
        wide, amount = delta.astype(np.float64), n_parts * strength
        alone = n_parts == 1 if (n_parts == 1).any() else np.ones(n, dtype=bool)
        base = amount[alone] @ wide[alone] / np.square(amount[alone]).sum()
        scale = float(np.sqrt(np.square(wide).mean())) or 1.0
        vectors = np.linalg.eigh(wide @ wide.T)[1][:, ::-1][:, :rank]
        basis = vectors.T @ wide / np.sqrt(n)  # right singular vectors, scaled by their share of the changes
        with torch.no_grad():
            for parameter, value in ((head.scale, scale), (head.base, base / scale), (head.basis, basis / scale)):
                parameter.copy_(torch.as_tensor(value))
        return head

    @torch.no_grad()
    def standardise(self, inputs: Tensor) -> None:
        """Set m and v to the mean and standard deviation of inputs, `(P, 2 * dim)`."""
        variance, mean = torch.var_mean(inputs, dim=0, correction=0)
        self.mean.copy_(mean)
        self.sd.copy_((variance + LEAST_SD**2).sqrt())

    def forward(self, inputs: Tensor, part_cells: Tensor, strength: Tensor) -> Tensor:
        """Predict the change of each cell's mean expression.

        Parameters
        ----------
        inputs
            `(P, 2 * dim)`, for each perturbed part the mean hidden state of the cell and the hidden state of the part.
        part_cells
            int64 `(P,)`, number of the cell that each part perturbs.
        strength
            `(B,)`, strength of the perturbation of each cell.

        Returns
        -------
        Change of each cell's mean expression, `(B, n_genes)`.
        """
        n = len(strength)
        wide = ((inputs - self.mean) / self.sd).unflatten(1, (2, -1))
        u = self.mlp(F.rms_norm(wide, wide.shape[-1:]).flatten(1)).to(inputs.dtype)
        summed = u.new_zeros(n, u.shape[1]).index_add(0, part_cells, u)
        number = torch.bincount(part_cells, minlength=n)[:, None]
        change: Tensor = self.scale * strength[:, None] * (number * self.base + summed @ self.basis)
        return change


def perturbed_input(
    cells: InMemoryCells, rows: np.ndarray, tokens: list[np.ndarray], context: int
) -> tuple[CellBatch, np.ndarray]:
    """Batch of cells with the perturbed genes first.

    Parameters
    ----------
    cells
        Control cells.
    rows
        Numbers of B cells.
    tokens
        Tokens of the perturbed genes of each cell.
    context
        Maximum number of genes of a cell, including the perturbed ones.

    Returns
    -------
    The batch, in which the perturbed genes of each cell precede its other genes by rank, and the ascending positions of
    the perturbed genes.
    """
    indptr, of_cell, values = take_cells((cells.indptr, cells.tokens, cells.values), rows, context)
    n_first = np.array([len(part) for part in tokens], dtype=np.int64)
    number, first = np.repeat(np.arange(len(rows)), np.diff(indptr)), np.repeat(np.arange(len(rows)), n_first)
    perturbed = np.concatenate([np.empty(0, dtype=np.int64), *tokens])
    stride = int(max(of_cell.max(initial=0), perturbed.max(initial=0))) + 1
    unperturbed = ~np.isin(number * stride + of_cell, first * stride + perturbed)
    number, of_cell, values = number[unperturbed], of_cell[unperturbed], values[unperturbed]
    start = np.searchsorted(number, np.arange(len(rows)))
    fits = np.arange(len(number)) - start[number] < context - n_first[number]
    number = np.concatenate([first, number[fits]])
    order = np.argsort(number, kind="stable")  # perturbed genes come first of each cell
    batch = from_ragged(
        np.concatenate([[0], np.bincount(number, minlength=len(rows)).cumsum()]),
        np.concatenate([perturbed, of_cell[fits]])[order],
        np.concatenate([np.zeros(len(perturbed), dtype=np.float32), values[fits]])[order],
    )
    return batch, np.flatnonzero(order < len(perturbed))


def head_inputs(
    network: ScDiVa,
    head: ResponseHead,
    cells: InMemoryCells,
    rows: np.ndarray,
    parts: np.ndarray,
    part_tokens: np.ndarray,
    context: int,
) -> tuple[Tensor, Tensor]:
    """Run a network over control cells with the perturbed genes first, and collect the input of the head.

    Parameters
    ----------
    network, head
        The model and its response head.
    cells, rows
        Control cells, and the numbers of B of them.
    parts
        bool `(B, n_parts)`, perturbed parts of each cell.
    part_tokens
        int64 `(n_parts,)`, tokens of the parts; parts without a token (-1) are the head's labels, in this order.
    context
        Maximum number of genes of a cell.

    Returns
    -------
    `inputs` and `part_cells`, as :meth:`ResponseHead.forward` takes them.
    """
    device = head.base.device
    is_gene = part_tokens >= N_SPECIAL
    label_of = np.cumsum(~is_gene) - 1
    batch, positions = perturbed_input(cells, rows, [part_tokens[row & is_gene] for row in parts], context)
    (gene_cell, _), (label_cell, label) = np.nonzero(parts & is_gene), np.nonzero(parts & ~is_gene)
    masked = torch.zeros(len(batch.tokens), dtype=torch.bool)
    masked[positions] = True
    if device.type != "cpu":  # with the boundaries on the CPU, the host does not wait and the network does not check
        check_input(network.config, *batch.packed, masked)
    tokens, values, value_mask = (to_device(x, device) for x in (batch.tokens, batch.values, masked))
    hidden = network(tokens, values, batch.cu_seqlens, value_mask=value_mask).hidden.float()

    def on_device(numbers: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(numbers), device)

    of_parts = torch.cat([hidden[on_device(positions)], head.labels[on_device(label_of[label])]])
    part_cells = on_device(np.concatenate([gene_cell, label_cell]))
    cells_of = to_device(cell_of_token(batch.cu_seqlens, len(batch.tokens)), device)
    pooled = hidden.new_zeros(len(rows), hidden.shape[1]).index_add(0, cells_of, hidden)
    pooled = pooled / to_device(batch.cu_seqlens.diff().long(), device).clamp_min(1)[:, None]
    return torch.cat([pooled[part_cells], of_parts], dim=1), part_cells


def predicted_change(
    network: ScDiVa,
    head: ResponseHead,
    cells: InMemoryCells,
    rows: np.ndarray,
    parts: np.ndarray,
    part_tokens: np.ndarray,
    strength: np.ndarray,
    context: int,
) -> Tensor:
    """Predict the change of mean expression under perturbations, one row for each control cell.

    Parameters
    ----------
    network, head, cells, rows, parts, part_tokens, context
        As for :func:`head_inputs`.
    strength
        `(B,)`, strength of the perturbation of each cell.

    Returns
    -------
    `(B, n_genes)`.
    """
    inputs, part_cells = head_inputs(network, head, cells, rows, parts, part_tokens, context)
    change: Tensor = head(inputs, part_cells, torch.from_numpy(strength.astype(np.float32)).to(inputs.device))
    return change


# --- Fine-tuning ------------------------------------------------------------------------------------------------------
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
        As for :func:`scdiva.train.finetune_module.finetune`.

    Returns
    -------
    The fine-tuned model, its response head, and the losses at every step.
    """
    from scdiva.train.finetune_module import finetune

    config = planned(fields, measured.n_items, seed, precision)
    network = network_for(model, config, seed)
    head = ResponseHead.for_changes(
        network.config.dim, measured.part_tokens, measured.delta, measured.parts.sum(axis=1), measured.strength, seed
    )
    objective = ResponseObjective(measured, head, config.context)
    objective.to(device).standardise(network.to(device).eval())
    history = finetune(network, objective, config, device=device, checkpoint_dir=checkpoint_dir)
    return network, head, history
