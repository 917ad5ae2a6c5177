"""Answers to queries: whether a cell expresses a gene, and how much, given the cell and other cells of its study."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = 8
"""Attention heads over the context cells."""
KEY_DIM = 32
GENE_DIM = 32
"""Width of a gene's own embedding here."""
CELL_DIM = 32
HIDDEN = 128
"""Width of the two hidden layers that answer a query."""
_LEAST = 1e-5
_FEW = 0.3
"""Cells beside those counted that keep logarithms finite."""


class Context(NamedTuple):
    """Other cells of the study, as queries read them.

    Attributes
    ----------
    state
        `(M, state_dim)`.
    n_genes
        `(M,)`, genes that each shows.
    missed
        `(M, n)`, probability :math:`2^{-c}` that half of a cell's counts, drawn at random, misses a gene of which it
        has c; of the n genes that are asked about.
    values
        `(M, n)`, log-normalised expression of these genes.
    log_odds
        `(n,)`, mean over the cells of the state head's log-odds.
    """

    state: Tensor
    n_genes: Tensor
    missed: Tensor
    values: Tensor
    log_odds: Tensor


class QueryHead(nn.Module):
    r"""Answer queries by the cell's state and by attention over other cells of its study. Ours, not the paper's.

    Each head h weighs the M context cells by :math:`a_{hm} = \mathrm{softmax}_m(e^{\tau_h} \cos(Q_h z, K_h z_m))`; one
    more weighs all equally. Of gene g it reads how often cells so weighted that miss the gene in one half of their
    counts show it in the other, :math:`\sum_m a_{hm} 2^{-c_{mg}} [c_{mg} > 0] / \sum_m a_{hm} 2^{-c_{mg}}` (of a gene
    that is hidden, how often they show it at all), and the mean of its value where it is expressed. Both are shrunk
    towards what the state head predicts, the more the smaller the effective number of cells,
    :math:`1 / \sum_m a_{hm}^2`. A linear map of these, and two hidden layers that also see an embedding of the gene and
    the state, add to the state head's log-odds and value. Queries do not see each other. Without context the head reads
    the state and the gene alone.

    Parameters
    ----------
    state_dim, read_dim
        Widths of the cell state, and of what the state head makes of it.
    n_genes
        Genes of the vocabulary.
    """

    def __init__(self, state_dim: int, read_dim: int, n_genes: int) -> None:
        super().__init__()
        self.query = nn.Linear(state_dim, HEADS * KEY_DIM, bias=False)
        self.key = nn.Linear(state_dim, HEADS * KEY_DIM, bias=False)
        with torch.no_grad():  # at first similarity of states, in random directions
            self.key.weight.copy_(self.query.weight)
        # not torch.linspace, which imports sympy where the module is made without memory, for half a second
        self.sharpness = nn.Parameter(torch.tensor([3.0 * head / (HEADS - 1) for head in range(HEADS)]))
        self.prior = nn.Parameter(torch.ones(2))
        self.gene = nn.Embedding(n_genes, GENE_DIM)
        nn.init.normal_(self.gene.weight, std=0.1)
        # log numbers of genes, of the cell and of the context; whether there is one; whether cells are thinned
        self.cell = nn.Linear(read_dim + 4, CELL_DIM)
        n_line = 4 * (HEADS + 1) + 3
        n_read = n_line + GENE_DIM + CELL_DIM
        self.hidden = nn.Sequential(nn.Linear(n_read, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN), nn.SiLU())
        self.out = nn.Linear(HIDDEN, 2)
        # beside it, since what the context shows of a study that is far from those seen is far from zero
        self.line = nn.Linear(n_line, 2, bias=False)
        for weight in (self.out.weight, self.out.bias, self.line.weight):
            nn.init.zeros_(weight)

    def weigh(self, state: Tensor, context: Context, own: Tensor | None = None) -> Tensor:
        """Weights of the context cells for each cell, `(B, HEADS + 1, M)`, each row summing to 1.

        `own`, int64 `(B,)`, is the row of the context that is the cell itself, which gets no weight; -1: none is.
        """
        q = F.normalize(self.query(state).view(len(state), HEADS, KEY_DIM), dim=2)
        k = F.normalize(self.key(context.state).view(-1, HEADS, KEY_DIM), dim=2)
        near = torch.einsum("bhd,mhd->bhm", q, k) * self.sharpness.exp()[None, :, None]
        near = torch.cat([near, near.new_zeros(len(state), 1, len(k))], dim=1)  # the last weighs all equally
        if own is not None:
            near = near.masked_fill((own[:, None] == torch.arange(len(k), device=own.device))[:, None], -torch.inf)
        return near.softmax(dim=2)

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
        added = self.line(line) + self.out(self.hidden(torch.cat([line, self.gene(gene), of_cell[cell]], dim=1)))
        return log_odds + added[:, 0], values + added[:, 1]

    def table(
        self,
        state: Tensor,
        read: Tensor,
        n_genes: Tensor,
        gene: Tensor,
        log_odds: Tensor,
        values: Tensor,
        context: Context,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`forward`, of all genes `(n,)` of the context, masked in every cell.

        `log_odds`, `values` and the answers are `(B, n)`. What depends on the gene or the cell alone is computed once
        for it, and no number is copied to the queries: a third of the time.
        """
        weights = self.weigh(state, context, own)
        shown = (context.values > 0).to(weights.dtype)
        there, total = weights @ shown, weights @ context.values  # (B, H, n)
        n = (1 / weights.square().sum(dim=2))[:, :, None]
        few = F.softplus(self.prior)
        p, base = log_odds.sigmoid()[:, None], values[:, None]
        odds = (there * n + few[0] * p).clamp_min(_LEAST) / ((1 - there) * n + few[0] * (1 - p)).clamp_min(_LEAST)
        value = (total * n + few[1] * base) / (there * n + few[1]) - base
        missed = torch.full_like(there, math.log(1 + _FEW / 30))
        line = torch.cat(
            [
                odds.log() + 3, missed, value, (there * n + _FEW).log(),
                torch.stack([log_odds, values, log_odds - context.log_odds], dim=1),
            ],
            dim=1,
        )  # fmt: skip
        of_cell = self.cell(self._of_cell(read, n_genes, context, thinned=False))
        first, second = self.hidden[0], self.hidden[2]
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        of_line, of_gene, of_state = first.weight.split([line.shape[1], GENE_DIM, CELL_DIM], dim=1)

        def product(weight: Tensor, columns: Tensor) -> Tensor:
            return torch.bmm(weight.expand(len(columns), -1, -1), columns)

        hidden = product(of_line, line)
        hidden += of_gene @ self.gene(gene).T
        hidden += (of_cell @ of_state.T + first.bias)[:, :, None]
        hidden = product(second.weight, F.silu(hidden, inplace=True))
        hidden += second.bias[:, None]
        added = product(self.line.weight, line) + product(self.out.weight, F.silu(hidden, inplace=True))
        added += self.out.bias[:, None]
        return log_odds + added[:, 0], values + added[:, 1]

    def _of_cell(self, read: Tensor, n_genes: Tensor, context: Context | None, *, thinned: bool) -> Tensor:
        """Give what the head reads of each cell, `(B, read_dim + 4)`."""
        known = torch.log1p(n_genes.to(read.dtype)) - 6
        around = torch.zeros_like(known)
        if context is not None:
            around = (torch.log1p(context.n_genes.to(read.dtype)).mean() - 6).expand_as(known)
        flags = read.new_tensor([context is not None, thinned]).expand(len(read), 2)
        return torch.cat([read, known[:, None], around[:, None], flags], dim=1)

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
        odds = (late * n + few[0] * p).clamp_min(_LEAST) / ((missed - late) * n + few[0] * (1 - p)).clamp_min(_LEAST)
        value = (total * n + few[1] * values[:, None]) / (there * n + few[1])
        return torch.cat(
            [
                odds.log() + 3,
                (missed + _FEW / 30).log(),
                value - values[:, None],
                (there * n + _FEW).log(),
            ],
            dim=1,
        )
