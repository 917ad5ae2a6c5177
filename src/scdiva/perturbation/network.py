"""What a network adds to the expected response: for one control cell, the change of all genes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from scdiva._constants import MASK
from scdiva.models.inference import Packed
from scdiva.models.scdiva import ScDiVa
from scdiva.nn.layers import INIT_STD, perceptron
from scdiva.perturbation.screen import Screen, gene_tokens, numbered_labels

CONTEXT = 256
"""Genes of a cell, perturbed ones included, that the transformer is trained on and predicts from."""


@dataclass(frozen=True)
class PerturbationSizes:
    """Widths of a :class:`PerturbationHead`.

    Attributes
    ----------
    dim, state_dim
        Of the model's stream and of its cell state.
    n_labels
        Perturbations that are no genes of the vocabulary, such as chemicals.
    n_genes
        Genes whose change is predicted.
    rank
        Directions of change.
    hidden
        Width of the two hidden layers.
    """

    dim: int
    state_dim: int
    n_labels: int
    n_genes: int
    rank: int
    hidden: int


class Perturbed(NamedTuple):
    """Packed cells with what is perturbed in front of each.

    Attributes
    ----------
    tokens, values, cu_seqlens, value_mask
        As for :meth:`scdiva.models.ScDiVa.forward`.
    position
        int64 `(B, M)`, position of each perturbed part among the tokens, -1 where a cell has fewer.
    """

    tokens: Tensor
    values: Tensor
    cu_seqlens: Tensor
    value_mask: Tensor
    position: Tensor


def perturbed(tokens: Tensor, values: Tensor, cu_seqlens: Tensor, parts: Tensor, max_length: int) -> Perturbed:
    """Put the perturbed genes of each cell in front of it, their values masked; so none is ever cut off.

    Parameters
    ----------
    tokens, values, cu_seqlens
        B packed cells.
    parts
        int64 `(B, M)`: tokens of the perturbed genes, `MASK` for a label that is no gene, -1 where a cell has fewer.
    max_length
        Genes kept of each cell, perturbed ones included; at least M.

    Returns
    -------
    The cells as the network reads them.
    """
    n_cells, device = len(parts), tokens.device
    cell = torch.repeat_interleave(torch.arange(n_cells, device=device), cu_seqlens.long().diff())
    genes = parts.masked_fill(parts == MASK, -1)
    kept = ~(genes[cell] == tokens[:, None]).any(dim=1)
    there = parts >= 0
    front = torch.arange(n_cells, device=device)[:, None].expand_as(parts)[there]
    owner = torch.cat([front, cell[kept]])
    order = torch.argsort(owner, stable=True)
    owner = owner[order]
    lengths = torch.bincount(owner, minlength=n_cells)
    starts = F.pad(lengths.cumsum(0), (1, 0))
    short = torch.arange(len(owner), device=device) - starts[owner] < max_length
    lengths = lengths.clamp_max(max_length)
    bounds = F.pad(lengths.cumsum(0), (1, 0))
    number = there.long().cumsum(dim=1) - 1
    position = torch.where(there, bounds[:-1, None] + number, -1)
    new_tokens = torch.cat([parts[there], tokens[kept]])[order][short]
    new_values = torch.cat([values.new_zeros(int(there.sum())), values[kept]])[order][short]
    hidden = torch.zeros_like(new_tokens, dtype=torch.bool)
    hidden[position[there]] = True
    return Perturbed(new_tokens, new_values, bounds.to(cu_seqlens.dtype), hidden, position)


class PerturbationHead(nn.Module):
    r"""Mark perturbed genes in the network's input, and read the change of all genes from its output.

    A perturbed gene enters with its value masked and a learned mark added, a label that is no gene as an embedding of
    its own; both stand in front of the cell's other genes. With h the final hidden states at the perturbed positions
    and z the state of the untouched cell,

    .. math::

        \hat\Delta = D\, \mathrm{MLP}\bigl[\hat z,\; \textstyle\sum_p h_p,\; \tfrac1n \sum_p h_p\bigr]

    with D `(n_genes, rank)`. The last layer of the MLP starts at zero: untrained, nothing is added.

    Parameters
    ----------
    sizes
        Widths.
    generator
        Source of the initial weights.
    """

    def __init__(self, sizes: PerturbationSizes, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.sizes = s = sizes
        self.mark = nn.Parameter(torch.zeros(s.dim))
        self.dose = nn.Parameter(torch.zeros(s.dim))
        self.labels = nn.Embedding(max(1, s.n_labels), s.dim)
        self.mlp = perceptron(s.state_dim + 2 * s.dim, s.hidden, s.rank)
        self.directions = nn.Parameter(torch.zeros(s.n_genes, s.rank))
        with torch.no_grad():
            for parameter in self.parameters():
                if generator is not None and parameter.ndim == 2:
                    std = parameter.shape[1] ** -0.5 if parameter is not self.labels.weight else INIT_STD
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            self.mlp[-1].weight.zero_()  # type: ignore[operator]
            for layer in self.mlp:
                if isinstance(layer, nn.Linear):
                    layer.bias.zero_()
            self.mark.normal_(std=INIT_STD, generator=generator)

    def prompt(self, cells: Perturbed, label: Tensor, dose: Tensor) -> Tensor:
        """Make what is added to the embedding of each position, `(T, dim)`.

        Parameters
        ----------
        cells
            With what is perturbed in front.
        label
            int64 `(B, M)`, number of the label where a part is no gene, else -1.
        dose
            `(B,)`, logarithm of the dose to base 2, in units of the median.
        """
        there = cells.position >= 0
        added = self.mark + dose[:, None, None] * self.dose + torch.zeros_like(label)[..., None]
        added = added + torch.where((label >= 0)[..., None], self.labels(label.clamp_min(0)), 0.0)
        found = added.new_zeros(len(cells.tokens), self.sizes.dim)
        return found.index_put((cells.position[there],), added[there])

    def forward(self, hidden: Tensor, state: Tensor, position: Tensor) -> Tensor:
        """Read the change of all genes.

        Parameters
        ----------
        hidden
            `(T, dim)`, final hidden states.
        state
            `(B, state_dim)`, of the untouched cells.
        position
            See :class:`Perturbed`.

        Returns
        -------
        `(B, n_genes)`, in log-normalised units.
        """
        there = (position >= 0).to(hidden.dtype)
        total = (hidden[position.clamp_min(0)] * there[..., None]).sum(dim=1)
        mean = total / there.sum(dim=1, keepdim=True).clamp_min(1)
        state = F.normalize(state.to(hidden.dtype), dim=1) * self.sizes.state_dim**0.5
        change: Tensor = self.mlp(torch.cat([state, total, mean], dim=1)) @ self.directions.T
        return change


def treatments(
    model: ScDiVa, screen: Screen, parts: Sequence[tuple[str, ...]], dose: NDArray[np.float64]
) -> tuple[Tensor, Tensor, Tensor]:
    """Give what is perturbed as :func:`perturbed` and the head take it.

    Parameters
    ----------
    model, screen
        The model, and the screen whose labels are numbered.
    parts, dose
        Of each of B cells.

    Returns
    -------
    Tokens and label numbers, int64 `(B, M)`, and `(B,)`, the logarithm of the dose to base 2, in units of the median.

    Raises
    ------
    KeyError
        If a part is neither a gene of the vocabulary nor a label of the screen.
    """
    genes, labels = gene_tokens(model, (name for names in parts for name in names)), numbered_labels(model, screen)
    token = torch.full((len(parts), max((1, *map(len, parts)))), -1)
    label = torch.full_like(token, -1)
    for row, names in enumerate(parts):
        for j, name in enumerate(names):
            token[row, j] = genes.get(name, MASK)
            label[row, j] = -1 if name in genes else labels[name]
    return token, label, torch.from_numpy(np.log2(dose / np.median(screen.conditions.dose))).float()


def change_of(
    model: ScDiVa, head: PerturbationHead, cells: Packed, parts: Tensor, labels: Tensor, dose: Tensor
) -> Tensor:
    """Run perturbed control cells through the network; see :class:`PerturbationHead`.

    Parameters
    ----------
    model, head
        The network.
    cells
        B complete control cells.
    parts, labels, dose
        See :func:`treatments`.

    Returns
    -------
    `(B, n_genes)`, on the device of the network.
    """
    device = next(head.parameters()).device
    tokens, values, cu_seqlens = (part.to(device) for part in cells)
    parts, labels, dose = parts.to(device), labels.to(device), dose.to(device)
    state = model.encode_anchor(tokens, values, cu_seqlens)
    length = max(min(CONTEXT, model.config.max_length), parts.shape[1])
    read = perturbed(tokens, values, cu_seqlens, parts, length)
    out = model(
        read.tokens,
        read.values,
        read.cu_seqlens,
        value_mask=read.value_mask,
        anchor_state=state,
        prompt=head.prompt(read, labels, dose),
    )
    found: Tensor = head(out.hidden, out.cell_state, read.position)
    return found
