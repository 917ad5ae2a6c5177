"""Binomial thinning of counts, as in cells that are sequenced less deeply."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from scdiva._constants import TARGET_SUM
from scdiva.diffusion.masking import cell_of_token


class Counts(NamedTuple):
    """Counts of packed cells.

    Attributes
    ----------
    of_token
        float64 `(T,)`, whole numbers from 1 up.
    of_cell
        float64 `(B,)`, total of each cell, including genes that are not in the vocabulary.
    """

    of_token: Tensor
    of_cell: Tensor


def sum_by_cell(numbers: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum `(T,)` over each cell, float64 `(B,)`."""
    total = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.float64, device=numbers.device)
    return total.index_add_(0, cell_of_token(cu_seqlens, numbers.numel()), numbers.double())


def counts_of(values: Tensor, cu_seqlens: Tensor) -> Counts:
    """Counts from log-normalised expression.

    The smallest value of a cell is taken as one count.

    Parameters
    ----------
    values
        `(T,)`, above 0.
    cu_seqlens
        `(B + 1,)`.

    Returns
    -------
    Counts of each gene and each cell.
    """
    cells = cell_of_token(cu_seqlens, values.numel())
    amount = torch.expm1(values.double())
    one = torch.full((cu_seqlens.numel() - 1,), torch.inf, dtype=torch.float64, device=values.device)
    one = one.scatter_reduce(0, cells, amount, "amin")
    return Counts((amount / one[cells]).round(), TARGET_SUM / one)


def keep_counts(counts: Counts, cu_seqlens: Tensor, share: Tensor, generator: torch.Generator) -> Counts:
    """Replace each count c by Binomial(c, share) (binomial thinning; Batson, Royer & Webber 2019).

    Parameters
    ----------
    counts
        Of packed cells.
    cu_seqlens
        `(B + 1,)`.
    share
        `(T,)`, of each gene of each cell, in [0, 1].
    generator
        Random numbers.

    Returns
    -------
    Thinned counts, some of them 0. Counts of genes outside the vocabulary are reduced by the same overall share.
    """
    kept = torch.binomial(counts.of_token, share.double(), generator=generator)
    known, still = sum_by_cell(counts.of_token, cu_seqlens), sum_by_cell(kept, cu_seqlens)
    unknown = (counts.of_cell - known).clamp_min(0)
    return Counts(kept, still + unknown * still / known.clamp_min(1))


def log_normalised(counts: Counts, cu_seqlens: Tensor) -> Tensor:
    """log1p of counts per 10,000, float32 `(T,)`."""
    total = counts.of_cell.clamp_min(1)[cell_of_token(cu_seqlens, counts.of_token.numel())]
    return torch.log1p(TARGET_SUM * counts.of_token / total).float()


def chosen(numbers: Tensor, cu_seqlens: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Entries at selected positions, bool `(T,)`, of packed cells, and the new boundaries of cells."""
    lengths = sum_by_cell(kept, cu_seqlens).to(cu_seqlens.dtype)
    return numbers[kept], torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(cu_seqlens.dtype)
