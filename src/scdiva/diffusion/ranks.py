"""Information in the rank of a masked gene about its identity and value."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva._settings import to_device

SPREAD = 0.7
"""Standard deviation of log-normalised values around the expected ones."""
FLOOR = 1e-4
"""Probability of ranks that are not explained by the visible values of the cell."""
GRID = 64
"""Maximum number of distinct values per cell; more are grouped."""
_SLACK = 1e-5
_WHOLE = 2**24


class Ranked(NamedTuple):
    """Packed cells in which masked genes have known ranks.

    Attributes
    ----------
    tokens, values, cu_seqlens
        Packed batch. Only visible genes and values are used.
    visible
        bool `(T,)`: genes whose scores bound those of masked genes.
    denominator
        float32 `(n_tokens,)`, by which the cells were ranked.
    """

    tokens: Tensor
    values: Tensor
    cu_seqlens: Tensor
    visible: Tensor
    denominator: Tensor

    def log_prior(self, rows: Tensor, expected: Tensor, genes: Tensor | None = None) -> Tensor:
        """:func:`rank_log_prior` of these cells at positions `rows`, int64 ascending or bool `(T,)`."""
        is_predicted = torch.zeros_like(self.visible)
        is_predicted[rows.to(is_predicted.device)] = True
        batch = self.tokens, self.values, is_predicted, self.visible, self.cu_seqlens
        return rank_log_prior(*batch, expected, self.denominator, genes)


def rank_log_prior(
    tokens: Tensor,
    values: Tensor,
    asked: Tensor,
    visible: Tensor,
    cu_seqlens: Tensor,
    expected: Tensor,
    denominator: Tensor,
    genes: Tensor | None = None,
) -> Tensor:
    r"""Log-probability of the rank of a masked gene given its identity. Not in the paper.

    Genes are ordered by decreasing score :math:`v / H_g`, so the score of a masked gene lies between the scores of the
    nearest visible genes before and after it, :math:`a \ge v / H_g \ge b`. The possible values are approximated by the
    visible values :math:`x` of the cell, which occur :math:`n_x` times each:

    .. math::

        \log p(\text{rank} \mid g) = \log \sum_{x:\; b H_g \le x \le a H_g} p(x \mid g), \qquad
        p(x \mid g) \propto n_x \exp\left(-\frac{(x - \mu_g)^2}{2 \sigma^2}\right)

    with :math:`\mu_g` the expected value of the gene in this cell. The sum of this log-probability and the logits of
    the masked genes are the logits of the gene at that rank. No parameters are fitted.

    Parameters
    ----------
    tokens, values
        Packed batch, `(T,)` each. Only visible genes and values are used. If these, `asked`, `visible` and `cu_seqlens`
        are on the CPU, there is no synchronisation with the device of `expected`.
    asked
        bool `(T,)`: the masked genes that are predicted.
    visible
        bool `(T,)`: genes of which both identity and value are visible.
    cu_seqlens
        Shape `(B + 1,)`.
    expected
        `(B, n)`, :math:`\mu_g`, log-normalised.
    denominator
        float32 `(n_tokens,)`, the :math:`H_g` by which the cells were ranked
        (:func:`scdiva.tokenizer.serialize.score_denominator`).
    genes
        int64 `(n,)`, tokens of the candidate genes. None: all.

    Returns
    -------
    float32 `(N, n)`, a row for each predicted position. All 0 in a cell without visible genes.

    Raises
    ------
    ValueError
        If a predicted position is visible.

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion import rank_log_prior
    >>> tokens, values = torch.tensor([3, 4, 5, 6, 7]), torch.tensor([3.0, 2.0, 1.5, 1.0, 0.5])
    >>> cu_seqlens = torch.tensor([0, 5])  # one cell of five genes
    >>> asked = torch.tensor([False, True, False, False, False])
    >>> rank_log_prior(tokens, values, asked, ~asked, cu_seqlens, torch.full((1, 8), 1.5), torch.ones(11)).shape
    torch.Size([1, 8])
    """
    if bool((asked & visible).any()):
        raise ValueError(f"{int((asked & visible).sum())} positions are both visible and predicted.")
    device = expected.device
    of_gene = denominator[N_SPECIAL:] if genes is None else denominator[genes.to(denominator.device)]
    of_gene = to_device(of_gene.float(), device)
    rows = []
    cells = _each_cell(tokens, values.float(), asked, visible, cu_seqlens, denominator)
    for cell, (_, at, visible_values, before, ends) in enumerate(cells):
        if not len(visible_values):
            rows.append(torch.zeros(len(at), len(of_gene), dtype=torch.float32, device=device))
        elif len(at):
            # consecutive masked genes have the same visible neighbours
            runs, of_run = torch.unique(before, return_inverse=True)
            prior = _of_runs(ends[runs], ends[runs + 1], visible_values, expected[cell].float(), of_gene)
            rows.append(prior[to_device(of_run, device)])
    return torch.cat(rows) if rows else expected.new_zeros((0, len(of_gene)), dtype=torch.float32)


def _each_cell(
    tokens: Tensor, values: Tensor, hidden: Tensor, visible: Tensor, cu_seqlens: Tensor, denominator: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Positions and visible scores of each cell.

    Yields its positions, the hidden ones among them, the visible values, the number of visible positions before each
    hidden one, and the scores of the visible ones between infinity and zero.
    """
    scale = denominator.to(values.device)
    for start, stop in itertools.pairwise(cu_seqlens.tolist()):
        part = slice(start, stop)
        at, visible_at = hidden[part].nonzero().squeeze(1), visible[part].nonzero().squeeze(1)
        visible_values = values[part][visible_at]
        score = visible_values / scale[tokens[part][visible_at]]
        ends = torch.cat([score.new_tensor([torch.inf]), score, score.new_zeros(1)])
        yield part, at, visible_values, torch.searchsorted(visible_at, at), ends


def _of_runs(above: Tensor, below: Tensor, visible_values: Tensor, expected: Tensor, denominator: Tensor) -> Tensor:
    """Log-prior of each run of masked genes between two visible scores, float32 `(runs, n_genes)`."""
    grid, number = torch.unique(visible_values, return_counts=True)
    if len(grid) > GRID:  # continuous values: groups of equal size, represented by their means
        group = torch.arange(len(visible_values), device=visible_values.device) * GRID // len(visible_values)
        number = torch.bincount(group, minlength=GRID)
        grid = torch.bincount(group, visible_values.sort().values, minlength=GRID) / number
    above, below, grid, number = (to_device(x, expected.device) for x in (above, below, grid, number))
    likely = number.log() - (grid - expected[:, None]).square() / (2 * SPREAD**2)
    # sums of integers do not depend on the order, and their differences are exact
    share = (likely.softmax(dim=1) * _WHOLE).round().int()
    n, score = len(denominator), -grid / denominator[:, None]
    # a value of the gene belongs to the runs from `first` to before `last`
    first = torch.searchsorted(-below * (1 - _SLACK), score)
    last = torch.searchsorted(-above * (1 + _SLACK), score, right=True)
    at = torch.stack([first, last]) * n + torch.arange(n, device=score.device)[:, None]
    inside = torch.zeros((len(above) + 1) * n, dtype=torch.int32, device=score.device)
    inside.index_add_(0, at.flatten(), torch.stack([share, -share]).flatten())
    inside = (
        inside.view(-1, n)[:-1].cumsum(dim=0, dtype=torch.int32).clamp_min(0)
    )  # negative if scores are not in order
    return (inside * ((1 - FLOOR) / _WHOLE) + FLOOR).log()


def values_at_ranks(
    tokens: Tensor, values: Tensor, hidden: Tensor, visible: Tensor, cu_seqlens: Tensor, denominator: Tensor
) -> Tensor:
    """Shift the values of masked genes towards the range that their ranks allow, by at most `SPREAD`.

    Parameters
    ----------
    tokens, values
        Completed packed batch, `(T,)` each. Not changed.
    hidden
        bool `(T,)`: genes with predicted values.
    visible
        bool `(T,)`: genes with observed values.
    cu_seqlens
        Shape `(B + 1,)`.
    denominator
        As for :func:`rank_log_prior`.

    Returns
    -------
    `(T,)`: values of hidden genes, shifted into or towards the range in which their scores lie between those of the
    nearest visible genes before and after them. Other values are unchanged.

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion import values_at_ranks
    >>> tokens, values = torch.tensor([3, 4, 5, 6, 7]), torch.tensor([3.0, 2.0, 1.5, 1.0, 0.5])
    >>> cu_seqlens = torch.tensor([0, 5])  # one cell of five genes
    >>> hidden = torch.tensor([False, True, False, False, False])
    >>> values_at_ranks(tokens, values, hidden, ~hidden, cu_seqlens, torch.ones(11)).shape
    torch.Size([5])
    """
    shifted, scale = values.clone(), denominator.to(values.device)
    for part, at, _, before, ends in _each_cell(tokens, values, hidden, visible, cu_seqlens, denominator):
        unit, predicted = scale[tokens[part][at]], values[part][at]
        fits = predicted.clamp(min=ends[before + 1] * unit, max=ends[before] * unit)
        shifted[part][at] = fits.clamp(predicted - SPREAD, predicted + SPREAD)
    return shifted
