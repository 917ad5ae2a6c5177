"""Query head: expression of a gene in a cell, predicted from the cell and other cells of its study."""

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
"""Width of the gene embedding of this head."""
CELL_DIM = 32
HIDDEN = 128
"""Width of the two hidden layers."""
LEAST = 1e-5
FEW = 0.3
"""Pseudo-count of cells, which keeps logarithms finite."""


class Context(NamedTuple):
    """Other cells of the study.

    Attributes
    ----------
    state
        `(M, state_dim)`.
    n_genes
        `(M,)`, number of visible genes.
    values
        `(M, n)`, log-normalised expression of the n predicted genes.
    expressed
        `(M, n)`, of the same type: 1 if the value is above zero, else 0.
    log_odds
        `(n,)`, mean log-odds of the state head over the cells.
    """

    state: Tensor
    n_genes: Tensor
    values: Tensor
    expressed: Tensor
    log_odds: Tensor


class QueryHead(nn.Module):
    r"""Prediction of genes from the cell state and attention over other cells of the study; not in the paper.

    Each head h weights the M context cells by :math:`a_{hm} = \mathrm{softmax}_m(e^{\tau_h} \cos(Q_h z, K_h z_m))`; one
    more head has equal weights. The inputs are the weighted frequency of gene g and its weighted mean value where it is
    expressed. Both are shrunk towards the prediction of the state head, more strongly for a small effective number of
    cells, :math:`1 / \sum_m a_{hm}^2`. A linear map of these, and two hidden layers that also have an embedding of the
    gene and the state as input, are added to log-odds and value of the state head. Queries are independent.

    `scripts/mini_objectives.py` trains it on single queries, with and without context and of thinned cells.

    Parameters
    ----------
    state_dim, read_dim
        Widths of the cell state and of the hidden layer of the state head.
    n_genes
        Genes of the vocabulary.
    """

    def __init__(self, state_dim: int, read_dim: int, n_genes: int) -> None:
        super().__init__()
        self.query = nn.Linear(state_dim, HEADS * KEY_DIM, bias=False)
        self.key = nn.Linear(state_dim, HEADS * KEY_DIM, bias=False)
        with torch.no_grad():  # attention starts as similarity of states in random directions
            self.key.weight.copy_(self.query.weight)
        # torch.linspace would import sympy on the meta device, which takes half a second
        self.sharpness = nn.Parameter(torch.tensor([3.0 * head / (HEADS - 1) for head in range(HEADS)]))
        self.prior = nn.Parameter(torch.ones(2))
        self.gene = nn.Embedding(n_genes, GENE_DIM)
        nn.init.normal_(self.gene.weight, std=0.1)
        # inputs: log number of genes of cell and context, whether there is a context, whether cells are thinned
        self.cell = nn.Linear(read_dim + 4, CELL_DIM)
        n_line = 4 * (HEADS + 1) + 3
        n_read = n_line + GENE_DIM + CELL_DIM
        self.hidden = nn.Sequential(nn.Linear(n_read, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN), nn.SiLU())
        self.out = nn.Linear(HIDDEN, 2)
        # a linear term, since inputs from a study unlike the training data are far from zero
        self.line = nn.Linear(n_line, 2, bias=False)
        for weight in (self.out.weight, self.out.bias, self.line.weight):
            nn.init.zeros_(weight)

    def weigh(self, state: Tensor, context: Context, own_row: Tensor | None = None) -> Tensor:
        """Attention weights of the context cells, `(B, HEADS + 1, M)`, each row summing to 1.

        `own_row`, int64 `(B,)`, is the row of the cell itself in the context, which gets no weight; -1: not in it.
        """
        q = F.normalize(self.query(state).view(len(state), HEADS, KEY_DIM), dim=2)
        k = F.normalize(self.key(context.state).view(-1, HEADS, KEY_DIM), dim=2)
        near = torch.einsum("bhd,mhd->bhm", q, k) * self.sharpness.exp()[None, :, None]
        near = torch.cat([near, near.new_zeros(len(state), 1, len(k))], dim=1)  # the last head has equal weights
        if own_row is not None:
            is_own = own_row[:, None] == torch.arange(len(k), device=own_row.device)
            near = near.masked_fill(is_own[:, None], -torch.inf)
        return near.softmax(dim=2)

    def table(
        self,
        state: Tensor,
        head_hidden: Tensor,
        n_genes: Tensor,
        gene: Tensor,
        log_odds: Tensor,
        values: Tensor,
        context: Context,
        own_row: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Predictions of all genes of the context, masked in every cell.

        Terms that depend on the gene or the cell alone are computed once.

        Parameters
        ----------
        state, head_hidden, n_genes
            `(B, state_dim)`, `(B, read_dim)` and `(B,)`: state, hidden layer of the state head and number of genes
            of the predicted cells.
        gene
            int64 `(n,)`, the genes of the context.
        log_odds, values
            `(B, n)`, predictions of the state head.
        context
            Other cells of the study, shared by all predicted cells.
        own_row
            As for :meth:`weigh`.

        Returns
        -------
        `(B, n)` log-odds that each gene is expressed, and its log-normalised value if so.
        """
        weights = self.weigh(state, context, own_row)
        frequency, total = weights @ context.expressed, weights @ context.values  # (B, H, n)
        n = (1 / weights.square().sum(dim=2))[:, :, None]
        prior = F.softplus(self.prior)
        p, base = log_odds.sigmoid()[:, None], values[:, None]
        odds = (frequency * n + prior[0] * p).clamp_min(LEAST)
        odds = odds / ((1 - frequency) * n + prior[0] * (1 - p)).clamp_min(LEAST)
        value = (total * n + prior[1] * base) / (frequency * n + prior[1]) - base
        missed = torch.full_like(frequency, math.log(1 + FEW / 30))
        line = torch.cat(
            [
                odds.log() + 3, missed, value, (frequency * n + FEW).log(),
                torch.stack([log_odds, values, log_odds - context.log_odds], dim=1),
            ],
            dim=1,
        )  # fmt: skip
        log_n = torch.log1p(n_genes.to(head_hidden.dtype)) - 6
        context_log_n = (torch.log1p(context.n_genes.to(head_hidden.dtype)).mean() - 6).expand_as(log_n)
        # with context, of cells that are not thinned
        flags = head_hidden.new_tensor([True, False]).expand(len(head_hidden), 2)
        of_cell = self.cell(torch.cat([head_hidden, log_n[:, None], context_log_n[:, None], flags], dim=1))
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
