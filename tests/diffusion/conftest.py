"""Denoisers small enough that every probability can be written down: cells of 3 genes out of 4."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from torch import Tensor

from scdiva._constants import MASK, N_SPECIAL

N_GENES, LENGTH = 4, 3
CELLS = list(itertools.permutations(range(N_GENES), LENGTH))


def pack(cells: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.tensor([gene + N_SPECIAL for cell in cells for gene in cell], dtype=torch.int64)
    cu_seqlens = torch.arange(0, LENGTH * len(cells) + 1, LENGTH, dtype=torch.int32)
    return tokens, torch.ones(tokens.numel(), dtype=torch.float64), cu_seqlens


def table_denoiser(table: Tensor):
    """Denoiser that looks its logits up: table (5, 5, 5, LENGTH, N_GENES), index 4 in a state means masked."""

    def denoiser(tokens, values, cu_seqlens, value_mask):
        state = torch.where(tokens == MASK, N_GENES, tokens - N_SPECIAL).view(-1, LENGTH)
        logits = table[state[:, 0], state[:, 1], state[:, 2]]
        masked = (tokens == MASK).view(-1, LENGTH)
        return logits[masked], torch.full_like(values, 0.5)

    return denoiser


def random_table(seed: int) -> Tensor:
    """A random network: its conditionals are not those of any joint distribution."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 5, 5, LENGTH, N_GENES, generator=generator, dtype=torch.float64)


def joint_and_table(seed: int) -> tuple[dict[tuple[int, ...], float], Tensor]:
    """A distribution over CELLS and the table of its exact conditionals, the optimal denoiser."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(len(CELLS), generator=generator, dtype=torch.float64) + 0.05
    joint = dict(zip(CELLS, (weights / weights.sum()).tolist(), strict=True))
    table = torch.full((5, 5, 5, LENGTH, N_GENES), -torch.inf, dtype=torch.float64)
    for state in itertools.product(range(5), repeat=LENGTH):
        fits = [cell for cell in CELLS if all(s in (N_GENES, c) for s, c in zip(state, cell, strict=True))]
        for position, gene in itertools.product(range(LENGTH), range(N_GENES)):
            mass = sum(joint[cell] for cell in fits if cell[position] == gene)
            if mass > 0:
                table[(*state, position, gene)] = torch.tensor(mass, dtype=torch.float64).log()
    return joint, table


def conditional(table: Tensor, cell: tuple[int, ...], visible: set[int], position: int) -> float:
    """log p(gene at position | genes at the shown positions), shown genes excluded; written out by hand."""
    state = tuple(cell[i] if i in visible else N_GENES for i in range(LENGTH))
    row = table[(*state, position)]
    free = [gene for gene in range(N_GENES) if gene not in {cell[i] for i in visible}]
    total = sum(float(row[gene].exp()) for gene in free)
    return float(row[cell[position]]) - float(torch.tensor(total, dtype=torch.float64).log())


def order_log_probabilities(table: Tensor, cell: tuple[int, ...]) -> list[float]:
    """log p(cell | order) for each of the 3! orders in which its genes can be revealed."""
    return [
        sum(conditional(table, cell, set(order[:k]), order[k]) for k in range(LENGTH))
        for order in itertools.permutations(range(LENGTH))
    ]


@pytest.fixture
def toy():
    """This module; a fixture because tests are no package to import from."""
    return sys.modules[__name__]
