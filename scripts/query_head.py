"""A query head as it is trained: single queries, of thinned cells too, with and without other cells of the study."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scdiva.models.queries import FEW, HEADS, LEAST, QueryHead


class Context(NamedTuple):
    """Other cells of the study, as training reads them: :class:`scdiva.models.queries.Context` and `missed`.

    Attributes
    ----------
    missed
        `(M, n)`, probability 2^-c that half of a cell's counts, drawn at random, misses a gene of which it has c; of
        the n genes that are asked about.
    """

    state: Tensor
    n_genes: Tensor
    missed: Tensor
    values: Tensor
    log_odds: Tensor


class SingleQueries(QueryHead):
    r"""A query head that answers single queries, with or without context, of cells that are thinned or masked in part.

    Of a gene that is not detected in a half of the counts it reads how often cells of the context that miss it in one
    half of theirs show it in the other, :math:`\sum_m a_{hm} 2^{-c_{mg}} [c_{mg} > 0] / \sum_m a_{hm} 2^{-c_{mg}}`.

    Parameters
    ----------
    state_dim, read_dim, n_genes
        As for the base.
    """

    def forward(
        self,
        state: Tensor,
        read: Tensor,
        n_genes: Tensor,
        cell: Tensor,
        gene: Tensor,
        column: Tensor,
        log_odds: Tensor,
        values: Tensor,
        *,
        thinned: bool,
        context: Context | None = None,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Answer N queries.

        Parameters
        ----------
        state, read, n_genes
            `(B, state_dim)`, `(B, read_dim)` and `(B,)`: of the cells asked about, what they show.
        cell, gene, column
            int64 `(N,)`: the cell and the gene of each query, and the gene's column in `context`.
        log_odds, values
            `(N,)`, what the state head predicts.
        thinned
            Whether the genes are not detected in a half of the cells' counts, or masked.
        context
            Other cells of the study, all of these cells'.
        own
            As for :meth:`weigh`.

        Returns
        -------
        `(N,)` log-odds that the gene is expressed, and its log-normalised value if it is.
        """
        if context is None:
            found, mean = log_odds.new_zeros(len(cell), 4 * (HEADS + 1)), log_odds
        else:
            weights = self.weigh(state, context, own)
            found = self._seen(weights, cell, column, log_odds, values, context, thinned=thinned)
            mean = context.log_odds[column]
        of_cell = self.cell(self._of_cell(read, n_genes, context, thinned=thinned))
        base = torch.stack([log_odds, values, log_odds - mean], dim=1)
        line = torch.cat([found, base], dim=1)
        parts = [line, self.gene(gene), of_cell[cell]]
        added = self.line(line) + self.out(self.hidden(torch.cat(parts, dim=1)))
        return log_odds + added[:, 0], values + added[:, 1]

    def _seen(
        self,
        weights: Tensor,
        cell: Tensor,
        column: Tensor,
        log_odds: Tensor,
        values: Tensor,
        context: Context,
        *,
        thinned: bool,
    ) -> Tensor:
        """Give what each head reads of the gene of each query, `(N, 4 (HEADS + 1))`."""
        shown = (context.values > 0).to(weights.dtype)
        numbers = torch.stack([context.missed * shown, context.missed, shown, context.values])
        # heads and cells in one product: (4, B H, n)
        rows = weights.flatten(0, 1) @ numbers
        rows = rows.view(4, *weights.shape[:2], -1)[:, cell, :, column]  # (N, 4, H): numbers of queries come first
        late, missed, there, total = rows.unbind(1)
        if not thinned:  # of a masked gene nothing is known yet
            late, missed = there, torch.ones_like(there)
        n = (1 / weights.square().sum(dim=2))[cell]
        few = F.softplus(self.prior)
        p = log_odds.sigmoid()[:, None]
        odds = (late * n + few[0] * p).clamp_min(LEAST) / ((missed - late) * n + few[0] * (1 - p)).clamp_min(LEAST)
        value = (total * n + few[1] * values[:, None]) / (there * n + few[1])
        return torch.cat(
            [
                odds.log() + 3,
                (missed + FEW / 30).log(),
                value - values[:, None],
                (there * n + FEW).log(),
            ],
            dim=1,
        )

    def _of_cell(self, read: Tensor, n_genes: Tensor, context: Context | None, *, thinned: bool) -> Tensor:
        """Give what the head reads of each cell, `(B, read_dim + 4)`."""
        known = torch.log1p(n_genes.to(read.dtype)) - 6
        around = torch.zeros_like(known)
        if context is not None:
            around = (torch.log1p(context.n_genes.to(read.dtype)).mean() - 6).expand_as(known)
        flags = read.new_tensor([context is not None, thinned]).expand(len(read), 2)
        return torch.cat([read, known[:, None], around[:, None], flags], dim=1)
