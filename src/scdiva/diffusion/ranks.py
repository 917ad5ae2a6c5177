"""What the rank of a masked gene implies about which gene it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva._device import to_device

SPREAD = 0.7
"""Standard deviation of a gene's log-normalised value around what is expected of it in a cell."""
FLOOR = 1e-4
"""Probability of a rank that no visible value explains: values between those seen, and rounding."""
GRID = 64
"""Most distinct values that a cell's visible ones are counted as."""
_SLACK = 1e-5
_WHOLE = 2**24


class Ranked(NamedTuple):
    """Cells with masked genes whose ranks are known.

    Attributes
    ----------
    tokens, values, cu_seqlens
        Packed batch. Only visible genes and values are read.
    visible
        bool `(T,)`: genes by whose scores the others are judged.
    denominator
        float32 `(n_tokens,)`, by which the cells were ranked.
    """

    tokens: Tensor
    values: Tensor
    cu_seqlens: Tensor
    visible: Tensor
    denominator: Tensor

    def log_prior(self, rows: Tensor, expected: Tensor, genes: Tensor | None = None) -> Tensor:
        """Give :func:`rank_log_prior` of these cells at positions `rows`, int64 ascending or bool `(T,)`."""
        asked = torch.zeros_like(self.visible)
        asked[rows.to(asked.device)] = True
        known = self.tokens, self.values, asked, self.visible, self.cu_seqlens
        return rank_log_prior(*known, expected, self.denominator, genes)


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
    r"""Log-probability of the rank of a masked gene, were it this gene. Ours, not the paper's.

    A cell's genes stand by falling score :math:`v / H_g`, so the score of a masked gene lies between those of the
    nearest visible genes before and behind it, :math:`a \ge v / H_g \ge b`. With a cell's visible values :math:`x`,
    each counted :math:`n_x` times, standing for the values there can be (of counts there are few: log1p of 1, 2, 3 ...
    over the depth),

    .. math::

        \log p(\text{rank} \mid g) = \log \sum_{x:\; b H_g \le x \le a H_g} p(x \mid g), \qquad
        p(x \mid g) \propto n_x \exp\left(-\frac{(x - \mu_g)^2}{2 \sigma^2}\right)

    with :math:`\mu_g` the value expected of the gene in this cell. Added to the logits of which genes are masked at
    all, it makes them the logits of the gene at that rank. Nothing is fitted.

    Parameters
    ----------
    tokens, values
        Packed batch, `(T,)` each. Only visible genes and values are read. On the CPU, with `asked`, `visible` and
        `cu_seqlens`, no device on which `expected` is has to be waited for.
    asked
        bool `(T,)`: the masked genes that are predicted.
    visible
        bool `(T,)`: genes of which both identity and value are visible; none is asked about.
    cu_seqlens
        Shape `(B + 1,)`.
    expected
        `(B, n)`, :math:`\mu_g`, log-normalised, of the genes asked for.
    denominator
        float32 `(n_tokens,)`, the :math:`H_g` by which the cells were ranked
        (:func:`scdiva.tokenizer.serialize.score_denominator`).
    genes
        int64 `(n,)`, tokens that may be masked there; None: all.

    Returns
    -------
    float32 `(N, n)`, a row for each position asked about, in their order. All 0 in a cell of which nothing is
    visible.

    Raises
    ------
    ValueError
        If a position asked about is visible.

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
        raise ValueError(f"{int((asked & visible).sum())} positions are visible and asked about.")
    device = expected.device
    of_gene = denominator[N_SPECIAL:] if genes is None else denominator[genes.to(denominator.device)]
    of_gene = to_device(of_gene.float(), device)
    rows = []
    cells = _each_cell(tokens, values.float(), asked, visible, cu_seqlens, denominator)
    for cell, (_, at, shown, before, ends) in enumerate(cells):
        if not len(shown):
            rows.append(torch.zeros(len(at), len(of_gene), dtype=torch.float32, device=device))
        elif len(at):
            # masked genes side by side have one pair of neighbours
            runs, of_run = torch.unique(before, return_inverse=True)
            prior = _of_runs(ends[runs], ends[runs + 1], shown, expected[cell].float(), of_gene)
            rows.append(prior[to_device(of_run, device)])
    return torch.cat(rows) if rows else expected.new_zeros((0, len(of_gene)), dtype=torch.float32)


def _each_cell(
    tokens: Tensor, values: Tensor, hidden: Tensor, visible: Tensor, cu_seqlens: Tensor, denominator: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Give of each cell what a rank is judged by.

    Its positions, the hidden ones among them, the visible values, how many of these stand before each hidden one, and
    the scores of the visible ones between infinity and zero.
    """
    scale = denominator.to(values.device)
    for start, stop in itertools.pairwise(cu_seqlens.tolist()):
        part = slice(start, stop)
        at, seen = hidden[part].nonzero().squeeze(1), visible[part].nonzero().squeeze(1)
        shown = values[part][seen]
        score = shown / scale[tokens[part][seen]]
        ends = torch.cat([score.new_tensor([torch.inf]), score, score.new_zeros(1)])
        yield part, at, shown, torch.searchsorted(seen, at), ends


def _of_runs(above: Tensor, below: Tensor, shown: Tensor, expected: Tensor, denominator: Tensor) -> Tensor:
    """Log-prior of each run of masked genes between two visible scores, float32 `(runs, n_genes)`."""
    grid, number = torch.unique(shown, return_counts=True)
    if len(grid) > GRID:  # continuous values: even groups of them, each by its mean
        group = torch.arange(len(shown), device=shown.device) * GRID // len(shown)
        number = torch.bincount(group, minlength=GRID)
        grid = torch.bincount(group, shown.sort().values, minlength=GRID) / number
    above, below, grid, number = (to_device(x, expected.device) for x in (above, below, grid, number))
    likely = number.log() - (grid - expected[:, None]).square() / (2 * SPREAD**2)
    # whole numbers add up to the same in any order, and differences of them are exact
    share = (likely.softmax(dim=1) * _WHOLE).round().int()
    n, score = len(denominator), -grid / denominator[:, None]
    # a value of the gene lies in the runs from the first of these on, to before the second
    first = torch.searchsorted(-below * (1 - _SLACK), score)
    last = torch.searchsorted(-above * (1 + _SLACK), score, right=True)
    at = torch.stack([first, last]) * n + torch.arange(n, device=score.device)[:, None]
    inside = torch.zeros((len(above) + 1) * n, dtype=torch.int32, device=score.device)
    inside.index_add_(0, at.flatten(), torch.stack([share, -share]).flatten())
    inside = inside.view(-1, n)[:-1].cumsum(dim=0, dtype=torch.int32).clamp_min(0)  # below 0: not in order of score
    return (inside * ((1 - FLOOR) / _WHOLE) + FLOOR).log()


def values_at_ranks(
    tokens: Tensor, values: Tensor, hidden: Tensor, visible: Tensor, cu_seqlens: Tensor, denominator: Tensor
) -> Tensor:
    """Move the values of masked genes towards what their ranks allow, by `SPREAD` at most.

    Parameters
    ----------
    tokens, values
        Packed batch, `(T,)` each, filled in. Not changed.
    hidden
        bool `(T,)`: genes whose values were filled in.
    visible
        bool `(T,)`: genes of which both were given.
    cu_seqlens
        Shape `(B + 1,)`.
    denominator
        As for :func:`rank_log_prior`.

    Returns
    -------
    `(T,)`: of a masked gene the value between those that would give it the scores of the nearest visible genes before
    and behind it, or nearer to it: a gene that does not belong there keeps about its own value. All others as they are.

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
    found, scale = values.clone(), denominator.to(values.device)
    for part, at, _, before, ends in _each_cell(tokens, values, hidden, visible, cu_seqlens, denominator):
        unit, own = scale[tokens[part][at]], values[part][at]
        fits = own.clamp(min=ends[before + 1] * unit, max=ends[before] * unit)
        found[part][at] = fits.clamp(own - SPREAD, own + SPREAD)
    return found
