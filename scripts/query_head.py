"""A query head as it is trained: single queries, of thinned cells too, with and without other cells of the study."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva.diffusion.masking import cell_of_token
from scdiva.models import ScDiVaConfig
from scdiva.nn.layers import INIT_STD, Block, Blocks, linear
from scdiva.nn.queries import FEW, HEADS, LEAST, QueryHead

READER_HEADS = 4


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
    reader_dim
        Width of what a :class:`CellReader` reads for each query; 0: there is none.
    """

    def __init__(self, state_dim: int, read_dim: int, n_genes: int, reader_dim: int = 0) -> None:
        super().__init__(state_dim, read_dim, n_genes)
        first = self.hidden[0]
        assert isinstance(first, nn.Linear)
        if reader_dim:
            self.hidden[0] = nn.Linear(first.in_features + reader_dim, first.out_features)

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
        reading: Tensor | None = None,
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
        reading
            `(N, reader_dim)`, what a :class:`CellReader` reads.

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
        parts = [line, self.gene(gene), of_cell[cell], *([] if reading is None else [reading])]
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


def gene_codes(table: Tensor) -> Tensor:
    """Make the codes by which a :class:`CellReader` knows genes, `(n_tokens, dim)`, of the set encoder's table.

    A gene's row there, all scaled by one number; random numbers, always the same, for genes that have none.
    """
    codes = torch.from_numpy(np.random.RandomState(0).standard_normal(table.shape)).to(table)
    known = table.detach().any(dim=1)
    codes[known] = table.detach()[known] / table.detach()[known].square().mean().sqrt()
    return INIT_STD * codes


class CellReader(nn.Module):
    r"""A transformer over the visible genes of a cell, without positions, and attention of queries to what it makes.

    Genes enter as their codes (:func:`gene_codes`), which are not trained, plus an embedding of their value; before
    them stands the cell state. A query enters as the code of its gene; what it reads is weighed by the gene, unit by
    unit. Queries do not see each other.

    Parameters
    ----------
    config
        Of the model.
    table
        `(n_tokens, anchor_linear_dim)`, of the set encoder.
    dim, layers
        Width and number of its blocks. Where the width is not the table's, codes enter by a linear map.
    """

    def __init__(self, config: ScDiVaConfig, table: Tensor, dim: int, layers: int) -> None:
        super().__init__()
        self.codes = nn.Buffer(gene_codes(table), persistent=False)
        eps = config.norm_eps
        self.code_in = nn.Identity() if dim == table.shape[1] else nn.Linear(table.shape[1], dim, bias=False)
        self.value_in = nn.Sequential(
            linear(1, dim, bias=True, std=1.0), nn.SiLU(), linear(dim, dim, bias=True, std=INIT_STD / dim**0.5)
        )
        nn.init.normal_(self.value_in[0].bias)
        self.state_in = linear(config.state_dim, dim, bias=True)
        out_std = INIT_STD / (2 * layers) ** 0.5
        self.blocks = Blocks(Block(dim, READER_HEADS, dim, eps=eps, out_std=out_std) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps)
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.gate = nn.Linear(dim, dim)

    def forward(
        self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, state: Tensor, asked: Tensor, cell: Tensor
    ) -> Tensor:
        """Read for N queries, `(N, dim)`.

        Parameters
        ----------
        tokens, values, cu_seqlens
            int64 `(T,)`, `(T,)` and `(B + 1,)`: the visible genes of packed cells, and their values.
        state
            `(B, state_dim)`.
        asked, cell
            int64 `(N,)`: tokens of the genes asked about, and the cell of each query, ascending.
        """
        ask = self.code_in(self.codes[asked])
        rows = torch.cat([self.state_in(state), self.code_in(self.codes[tokens]) + self.value_in(values[:, None])])
        genes_of = cell_of_token(cu_seqlens, len(values))
        of = torch.cat([torch.arange(len(state), device=cell.device), genes_of])
        bounds = cu_seqlens + torch.arange(len(cu_seqlens), dtype=cu_seqlens.dtype, device=cell.device)
        longest = int(cu_seqlens.diff().max())
        order = of.argsort(stable=True)  # the state of each cell before its genes
        hidden = self.norm(self.blocks(rows[order], bounds, longest + 1))[order >= len(state)]
        n = len(state)
        queries = _padded(self.query(ask), cell, n)
        keys, found = (_padded(part(hidden), genes_of, n) for part in (self.key, self.value))
        # a cell that shows no gene reads zeros
        visible = torch.arange(keys.shape[1], device=cell.device) < cu_seqlens.diff().clamp_min(1)[:, None]
        read = F.scaled_dot_product_attention(
            *(x.unflatten(2, (READER_HEADS, -1)).transpose(1, 2) for x in (queries, keys, found)),
            attn_mask=visible[:, None, None],
        )
        return read.transpose(1, 2).flatten(2)[cell, _ranks(cell, n)] * (1 + self.gate(ask))


def _ranks(of: Tensor, n: int) -> Tensor:
    """Number rows within their cell; `of`, the cell of each, ascends."""
    number = torch.bincount(of, minlength=n)
    return torch.arange(len(of), device=of.device) - (number.cumsum(0) - number)[of]


def _padded(rows: Tensor, of: Tensor, n: int) -> Tensor:
    """Lay rows of n cells out as `(n, most of a cell, dim)`, zeros behind."""
    at = _ranks(of, n)
    out = rows.new_zeros(n, int(at.max()) + 1 if len(at) else 1, rows.shape[1])
    out[of, at] = rows
    return out
