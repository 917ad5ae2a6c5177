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
LEAST = 1e-5
FEW = 0.3
"""Cells beside those counted that keep logarithms finite."""


class Context(NamedTuple):
    """Other cells of the study, as queries read them.

    Attributes
    ----------
    state
        `(M, state_dim)`.
    n_genes
        `(M,)`, genes that each shows.
    values
        `(M, n)`, log-normalised expression of the n genes that are asked about.
    expressed
        `(M, n)`, of the same type: 1 where that is above zero, else 0.
    log_odds
        `(n,)`, mean over the cells of the state head's log-odds.
    """

    state: Tensor
    n_genes: Tensor
    values: Tensor
    expressed: Tensor
    log_odds: Tensor


class QueryHead(nn.Module):
    r"""Answer queries by the cell's state and by attention over other cells of its study. Ours, not the paper's.

    Each head h weighs the M context cells by :math:`a_{hm} = \mathrm{softmax}_m(e^{\tau_h} \cos(Q_h z, K_h z_m))`; one
    more weighs all equally. Of gene g it reads how often cells so weighted show the gene, and the mean of its value
    where it is expressed. Both are shrunk towards what the state head predicts, the more the smaller the effective
    number of cells, :math:`1 / \sum_m a_{hm}^2`. A linear map of these, and two hidden layers that also see an
    embedding of the gene and the state, add to the state head's log-odds and value. Queries do not see each other.

    How it is trained, on single queries, with and without context and of thinned cells, is
    `scripts/mini_objectives.py`.

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
        """Answer for all genes of the context, masked in every cell.

        What depends on the gene or the cell alone is computed once for it, and no number is copied to the queries.

        Parameters
        ----------
        state, read, n_genes
            `(B, state_dim)`, `(B, read_dim)` and `(B,)`: of the cells asked about, what they show.
        gene
            int64 `(n,)`, the genes of the context.
        log_odds, values
            `(B, n)`, what the state head predicts.
        context
            Other cells of the study, all of these cells'.
        own
            As for :meth:`weigh`.

        Returns
        -------
        `(B, n)` log-odds that each gene is expressed, and its log-normalised value if it is.
        """
        weights = self.weigh(state, context, own)
        there, total = weights @ context.expressed, weights @ context.values  # (B, H, n)
        n = (1 / weights.square().sum(dim=2))[:, :, None]
        few = F.softplus(self.prior)
        p, base = log_odds.sigmoid()[:, None], values[:, None]
        odds = (there * n + few[0] * p).clamp_min(LEAST) / ((1 - there) * n + few[0] * (1 - p)).clamp_min(LEAST)
        value = (total * n + few[1] * base) / (there * n + few[1]) - base
        missed = torch.full_like(there, math.log(1 + FEW / 30))
        line = torch.cat(
            [
                odds.log() + 3, missed, value, (there * n + FEW).log(),
                torch.stack([log_odds, values, log_odds - context.log_odds], dim=1),
            ],
            dim=1,
        )  # fmt: skip
        known = torch.log1p(n_genes.to(read.dtype)) - 6
        around = (torch.log1p(context.n_genes.to(read.dtype)).mean() - 6).expand_as(known)
        flags = read.new_tensor([True, False]).expand(len(read), 2)  # with context, of cells that are not thinned
        of_cell = self.cell(torch.cat([read, known[:, None], around[:, None], flags], dim=1))
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
