"""Monte-Carlo bound on the log-likelihood of cells."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scdiva._constants import MASK, N_SPECIAL
from scdiva.diffusion.masking import cell_of_token, check_packed
from scdiva.diffusion.sampler import Denoiser, available_logits, checked_logits


class LogLikelihood(NamedTuple):
    """Bound on log p of each cell in nats, and the standard error of its estimate; float64 `(B,)` each."""

    bound: Tensor
    standard_error: Tensor


def _random_subsets(sizes: Tensor, cells: Tensor, cu_seqlens: Tensor, generator: torch.Generator) -> Tensor:
    """Bool `(T,)`: for each cell a uniformly random set of `sizes` of its positions."""
    keys = torch.rand(cells.numel(), generator=generator, device=generator.device, dtype=torch.float64).to(cells.device)
    order = torch.argsort(cells + keys)  # by cell, within it by key
    rank = torch.arange(cells.numel(), device=cells.device) - cu_seqlens[:-1].long()[cells]
    chosen = torch.empty_like(cells, dtype=torch.bool)
    chosen[order] = rank < sizes[cells]
    return chosen


@torch.no_grad()
def log_likelihood(
    denoiser: Denoiser,
    tokens: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    n_samples: int = 32,
    *,
    exclude_shown: bool = True,
    by_cell: bool = False,
    generator: torch.Generator,
) -> LogLikelihood:
    r"""Monte-Carlo estimate of the any-order bound on a cell's log-likelihood (gene identities, given its length).

    Revealing the positions one at a time in a random order :math:`\sigma` gives

    .. math::

        \log p(x) \ge \mathbb{E}_\sigma \sum_l \log p(x_{\sigma(l)} \mid x_{\sigma(<l)})
        = L\; \mathbb{E}_m\, \mathbb{E}_{|M| = m}\, \frac{1}{m} \sum_{i \in M} \log p(x_i \mid x_{\setminus M})

    with :math:`m` uniform in 1 ... L (Uria, Murray and Larochelle 2014; Hoogeboom et al. 2022). It equals the paper's
    bound (appendix "ELBO Derivation for Masked Discrete Diffusion") in continuous time with the number of masked genes
    drawn evenly, which removes the variance due to :math:`|M|`.

    Samples are stratified by m, with two independent samples in each of `n_samples / 2` strata, so that the standard
    error is unbiased.

    Parameters
    ----------
    denoiser
        As in :func:`sample`; called `n_samples` times on the whole batch, or with `by_cell` once on `n_samples` copies
        of it.
    tokens, values, cu_seqlens
        Packed batch of complete cells. Not changed.
    n_samples
        Samples per cell; even, at least 2.
    exclude_shown
        Whether visible genes are excluded from the softmax, as in :func:`sample`. False: softmax over all genes.
    by_cell
        Whether the denoiser, such as a state head, returns one row of logits for all masked genes of a cell.
    generator
        Random numbers.

    Returns
    -------
    Bound and standard error per cell; 0 and 0 for a cell without genes, -inf and inf or NaN for a cell that is
    impossible under the model.

    Raises
    ------
    ValueError
        If the batch is malformed or already masked, holds a gene twice in a cell while `exclude_shown`, or
        `n_samples` is odd.

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion import log_likelihood
    >>> tokens, values = torch.tensor([3, 4, 5, 3, 6]), torch.tensor([2.0, 1.5, 1.0, 3.0, 0.5])
    >>> cu_seqlens = torch.tensor([0, 3, 5])  # two cells, of 3 and of 2 genes
    >>> generator = torch.Generator().manual_seed(0)
    >>> def denoiser(tokens, values, cu_seqlens, value_mask):  # uniform over eight genes
    ...     return torch.zeros(int((tokens == 1).sum()), 8), torch.ones(len(tokens))
    ...
    >>> found = log_likelihood(denoiser, tokens, values, cu_seqlens, 4, exclude_shown=False, generator=generator)
    >>> [round(float(x), 2) for x in found[0]]  # 3 and 2 times log(1 / 8)
    [-6.24, -4.16]
    """
    check_packed(tokens, values, cu_seqlens)
    if n_samples < 2 or n_samples % 2:
        raise ValueError(f"n_samples must be even and at least 2 (pairs give the standard error), got {n_samples}.")
    if bool((tokens < N_SPECIAL).any()):
        raise ValueError("The likelihood is that of complete cells: tokens may hold genes only, no MASK, PAD or LAT.")
    device = tokens.device
    cu_seqlens = cu_seqlens.to(device)
    n_cells = cu_seqlens.numel() - 1
    cells = cell_of_token(cu_seqlens, tokens.numel())
    if exclude_shown:
        n_repeats = tokens.numel() - torch.unique(torch.stack([cells, tokens]), dim=1).shape[1]
        if n_repeats:
            raise ValueError(
                f"{n_repeats} genes occur more than once in their cell, which the model cannot draw; serialise the "
                "cells with their duplicates summed, or pass exclude_shown=False."
            )
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).double()
    draws = []
    for number in range(n_samples):
        u = torch.rand(n_cells, generator=generator, device=generator.device, dtype=torch.float64).to(device)
        # number of masked genes of each cell, in 1 ... L
        sizes = ((number // 2 + u) / (n_samples // 2) * lengths).floor().clamp_max(lengths - 1) + 1
        draws.append((sizes, _random_subsets(sizes, cells, cu_seqlens, generator)))
    bounds_per_sample = []
    n_copies = n_samples if by_cell else 1
    for first in range(0, n_samples, n_copies):
        sizes, masked = (torch.cat(part) for part in zip(*draws[first : first + n_copies], strict=True))
        bounds = F.pad(cu_seqlens.diff().repeat(n_copies).cumsum(0), (1, 0)).to(cu_seqlens.dtype)
        true = tokens.repeat(n_copies)
        copies, corrupted = cell_of_token(bounds, true.numel()), true.masked_fill(masked, MASK)
        cell_of_gene = copies[masked]
        of_rows = torch.arange(len(sizes), device=device) if by_cell else cell_of_gene
        logits = denoiser(corrupted, values.repeat(n_copies).masked_fill(masked, 0.0), bounds, masked)[0]
        if exclude_shown:
            logits = available_logits(logits, corrupted, copies, len(sizes), None, of_rows)
        else:
            logits = checked_logits(logits, len(of_rows))
        row = cell_of_gene if by_cell else torch.arange(len(cell_of_gene), device=device)
        log_p = torch.log_softmax(logits.double(), dim=1)[row, true[masked] - N_SPECIAL]
        summed = torch.zeros_like(sizes).index_add_(0, cell_of_gene, log_p)
        bounds_per_sample.append(torch.where(sizes > 0, summed * lengths.repeat(n_copies) / sizes, 0.0))
    pairs = torch.cat(bounds_per_sample).view(-1, 2, n_cells)
    error = (pairs[:, 0] - pairs[:, 1]).square().sum(dim=0).sqrt() / n_samples
    return LogLikelihood(pairs.mean(dim=(0, 1)), error)
