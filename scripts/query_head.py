"""A query head as it is trained: single queries, of thinned cells too, with and without other cells of the study."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva.diffusion.masking import cell_of_token
from scdiva.models import ScDiVaConfig
from scdiva.nn.layers import INIT_STD, Block, Blocks, RMSNorm, linear
from scdiva.nn.queries import FEW, HEADS, HIDDEN, LEAST, QueryHead

READER_LAYERS, READER_HEADS = 2, 4


class Context(NamedTuple):
    """Other cells of the study, as the queries of training read them: :class:`scdiva.nn.queries.Context` and `missed`.

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
    ) -> tuple[Tensor, Tensor, Tensor]:
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
        `(N,)` log-odds that the gene is expressed, and its log-normalised value if it is; `(N, width)`, what they are
        made of: what is known of the gene in the cell and its context, the gene, and the cell.
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
        parts = torch.cat([line, self.gene(gene), of_cell[cell]], dim=1)
        added = self.line(line) + self.out(self.hidden(parts))
        return log_odds + added[:, 0], values + added[:, 1], parts

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


def gene_codes(table: Tensor) -> Tensor:
    """Make the codes by which a :class:`ValueReader` knows genes, `(n_tokens, dim)`, of the set encoder's table.

    A gene's row there, all scaled by one number; random numbers, always the same, for genes that have none.
    """
    codes = torch.from_numpy(np.random.RandomState(0).standard_normal(table.shape)).to(table.dtype)
    known = table.detach().any(dim=1)
    codes[known] = table.detach()[known] / table.detach()[known].square().mean().sqrt()
    return INIT_STD * codes


class ValueReader(nn.Module):
    r"""A transformer over the visible genes of a cell, without positions, that adds to the values of masked ones.

    Genes enter as their codes (:func:`gene_codes`), which are not trained, plus what two layers make of their value and
    of what the query head reads of them: what the state head predicts, and cells of the context show. Before them
    stands the cell state. A query enters as the code of its gene, attends to what the transformer makes, and its answer
    follows by two layers from what it reads and the query head's parts. Queries do not see each other.

    Parameters
    ----------
    config
        Of the model: the width of its set encoder's table is the reader's.
    table
        `(n_tokens, anchor_linear_dim)`, of the set encoder.
    n_parts
        Width of what the query head makes its answers of.
    """

    def __init__(self, config: ScDiVaConfig, table: Tensor, n_parts: int) -> None:
        super().__init__()
        self.codes = nn.Buffer(gene_codes(table), persistent=False)
        dim, eps = config.anchor_linear_dim, config.norm_eps
        self.value_in = nn.Sequential(
            linear(1 + n_parts, dim, bias=True, std=0.1), nn.SiLU(), linear(dim, dim, bias=True, std=INIT_STD / dim**0.5)
        )
        nn.init.normal_(self.value_in[0].bias)
        self.state_in = linear(config.state_dim, dim, bias=True)
        out_std = INIT_STD / (2 * READER_LAYERS) ** 0.5
        self.blocks = Blocks(Block(dim, READER_HEADS, dim, eps=eps, out_std=out_std) for _ in range(READER_LAYERS))
        self.norm = RMSNorm(dim, eps)
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.gate = nn.Linear(dim, dim)
        self.hidden = nn.Sequential(nn.Linear(dim + n_parts, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1))
        nn.init.zeros_(self.hidden[2].weight)
        nn.init.zeros_(self.hidden[2].bias)

    def forward(
        self,
        tokens: Tensor,
        values: Tensor,
        parts: Tensor,
        cu_seqlens: Tensor,
        state: Tensor,
        asked: Tensor,
        cell: Tensor,
        asked_parts: Tensor,
    ) -> Tensor:
        """Give what is added to the values of N queries, `(N,)`.

        Parameters
        ----------
        tokens, values, parts, cu_seqlens
            int64 `(T,)`, `(T,)`, `(T, n_parts)` and `(B + 1,)`: the visible genes of packed cells, and their values.
        state
            `(B, state_dim)`.
        asked, cell, asked_parts
            int64 `(N,)`, and `(N, n_parts)`: tokens of the genes asked about, and the cell of each query, ascending.
        """
        ask = self.codes[asked]
        shown = self.value_in(torch.cat([values[:, None], parts], dim=1))
        rows = torch.cat([self.state_in(state), self.codes[tokens] + shown])
        of = torch.cat([torch.arange(len(state), device=cell.device), cell_of_token(cu_seqlens, len(values))])
        bounds = cu_seqlens + torch.arange(len(cu_seqlens), dtype=cu_seqlens.dtype, device=cell.device)
        lengths = cu_seqlens.diff().tolist()
        order = of.argsort(stable=True)  # the state of each cell before its genes
        hidden = self.norm(self.blocks(rows[order], bounds, max(lengths) + 1))[order >= len(state)]
        number = torch.bincount(cell, minlength=len(state)).tolist()
        q, k, v = (
            self.query(ask).split(number),
            self.key(hidden).split(lengths),
            self.value(hidden).split(lengths),
        )
        read = []
        for of_cell in zip(q, k, v, strict=True):
            q_, k_, v_ = (x.unflatten(1, (READER_HEADS, -1)).transpose(0, 1) for x in of_cell)
            # plain products: on a CPU those of bfloat16 are twice as fast as the fused kernel's
            weights = (q_ @ k_.transpose(1, 2) / q_.shape[2] ** 0.5).softmax(dim=2)
            read.append((weights @ v_).transpose(0, 1).flatten(1))
        found = torch.cat(read) * (1 + self.gate(ask))
        return self.hidden(torch.cat([found, asked_parts], dim=1))[:, 0].float()
