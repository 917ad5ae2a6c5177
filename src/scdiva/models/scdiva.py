"""The network: a bidirectional transformer over the ranked genes of a cell, with `[LAT]` in front.

To be read top to bottom: what is built of a configuration, one pass (embed, blocks, heads), and what is predicted of
masked positions, :meth:`ScDiVa.logits` and :meth:`ScDiVa.values`. Training, validation, sampling and likelihood ask
these two. No loss and no optimiser live here; `scdiva.diffusion` corrupts and scores, `scdiva.train` trains.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from scdiva._constants import LAT, MASK, N_SPECIAL
from scdiva._device import to_device
from scdiva.diffusion import cell_of_token
from scdiva.diffusion.loss import gene_logits
from scdiva.diffusion.ranks import Ranked
from scdiva.kernels import positions
from scdiva.models.encoder import SetEncoder
from scdiva.models.heads import DatasetComponents, DualHeads, Expected, IntegrationHead, StateHead, hidden_gene_logits
from scdiva.models.layers import INIT_STD, Block, Blocks, GeneValueEmbedding, linear
from scdiva.models.network import Network, ScDiVaOutput, check_input, mean_of_cells
from scdiva.models.queries import QueryHead


class ScDiVa(Network):
    """Masked-diffusion transformer of single cells (paper, section 3 and appendix "Model Architecture").

    Cells come packed: their tokens one after the other, `cu_seqlens` (int32, `(B + 1,)`) marking where each begins. The
    model itself puts `[LAT]` before each cell; it is never masked. A cell's result doesn't depend on the others.

    Parameters
    ----------
    config
        The architecture.
    generator
        Source of the initial weights. `None` draws from torch's global stream; a generator leaves that as it was.
    """

    def _build(self) -> None:
        c = self.config
        self.embedding = GeneValueEmbedding(c.n_tokens, c.dim)
        self.anchor: SetEncoder | None = None
        self.anchor_in: nn.Module = nn.Identity()
        self.anchor_out: nn.Linear | None = None
        if c.anchor == "encoder":
            widths = c.anchor_linear_dim, c.anchor_learned_dim, c.anchor_hidden
            self.anchor = SetEncoder(c.n_tokens, *widths, c.anchor_balance)
            self.anchor_in = linear(c.state_dim, c.dim)
            if c.anchor_residual:  # from zero: the encoder's state is kept until this has learned
                self.anchor_out = linear(c.dim, c.state_dim, std=0.0)
        self.integration: IntegrationHead | None = None
        self.dataset_components: DatasetComponents | None = None
        if c.integrated:
            self.integration = IntegrationHead(c.n_tokens, c.state_dim, c.integrated_own_dim, c.integrated_hidden)
        if c.adapted:
            self.dataset_components = DatasetComponents(c.n_tokens, c.state_dim, c.adapted)
        # each of the 2·n_layers writes to the stream adds its variance: scaled down so that the sum keeps its size
        out_std = INIT_STD / (2 * c.n_layers) ** 0.5
        self.blocks = Blocks(
            (Block(c.dim, c.n_heads, c.ffn_dim, eps=c.norm_eps, out_std=out_std) for _ in range(c.n_layers)),
            rope=(c.max_length + 1, c.rope_base) if c.position == "rope" else None,
            backend=c.attention_backend,
        )
        self.norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.heads = DualHeads(c.dim, c.n_genes, tied=c.tie_gene_head)
        self.state_head = StateHead(c.state_dim, c.state_rank, c.n_genes) if c.state_head else None
        self.query_head = QueryHead(c.state_dim, c.state_rank + 1, c.n_genes) if c.query_head else None

    def forward(
        self,
        tokens: Tensor,
        values: Tensor,
        cu_seqlens: Tensor,
        *,
        value_mask: Tensor | None = None,
        anchor_state: Tensor | None = None,
        backend: str | None = None,
        use_transformer: bool = True,
    ) -> ScDiVaOutput:
        """Run the network once.

        Parameters
        ----------
        tokens
            int64 `(T,)`: gene tokens, or `MASK` where the identity is masked; without `[LAT]` and padding. In each
            cell they stand in order of rank.
        values
            `(T,)`, log-normalised expression; not read where masked.
        cu_seqlens
            int32 `(B + 1,)`, cell boundaries. A cell may be empty, and all of its tokens may be masked. On the CPU with
            the rest on a device, the batch was checked beforehand (:func:`scdiva.models.network.check_input`), and the
            device is asked for nothing. Otherwise it is waited for once, by that check.
        value_mask
            bool `(T,)`, `True` where the value is masked. The value of a `MASK` token always is. `None`: only there.
        anchor_state
            `(B, state_dim)`, the cell state to start `[LAT]` from; `None`: that of the visible tokens of this input.
        backend
            Attention backend of this call; `None`: the configured one.
        use_transformer
            Without it no block is run, and cells may be as long as `config.input_length`: what is predicted comes
            from the cell state alone. Needs a state to start from.

        Returns
        -------
        Hidden states of the genes, cell states, anchors. :meth:`logits` and :meth:`values` go on from these.

        Raises
        ------
        ValueError
            If the tensors don't fit each other, a token isn't one of this vocabulary, or a cell is too long.
        """
        c = self.config
        most = c.max_length if use_transformer else c.input_length
        longest = check_input(c, tokens, values, cu_seqlens, value_mask, anchor_state, max_length=most)
        bounds, cu_seqlens = _with_lat(cu_seqlens), to_device(cu_seqlens, tokens.device)
        masked = tokens == MASK
        value_mask = masked if value_mask is None else value_mask | masked
        anchor = anchor_state
        if anchor is None and self.anchor is not None:
            anchor = self.anchor(tokens, values, cu_seqlens, ~value_mask)

        if use_transformer:
            x, lat_rows, gene_rows = self._embed(tokens, values, cu_seqlens, value_mask, anchor)
            x = self.norm(self.blocks(x, bounds, longest + 1, backend))
            hidden, cell_state = x[gene_rows], x[lat_rows]
            if anchor is not None and c.anchor == "encoder":
                cell_state = anchor if self.anchor_out is None else anchor + self.anchor_out(cell_state)
        else:
            assert anchor is not None
            hidden, cell_state = anchor.new_empty(0, c.dim), anchor

        cells = cell_of_token(cu_seqlens, tokens.numel())
        share = mean_of_cells(masked, cu_seqlens, cell_state.dtype)
        read = None
        if self.state_head is not None:
            read = self.read_state(cell_state if anchor is None else anchor, ~value_mask, cu_seqlens)
        return ScDiVaOutput(hidden, cell_state, anchor, cells, read, share)

    def _embed(
        self,
        tokens: Tensor,
        values: Tensor,
        cu_seqlens: Tensor,
        value_mask: Tensor,
        anchor: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Make what enters the first block `(T + B, dim)`, the rows of `[LAT]` and of genes."""
        genes = self.embedding(tokens, values, value_mask)
        lat = self.embedding.gene.weight[LAT].expand(cu_seqlens.numel() - 1, -1)
        lat = lat if anchor is None else lat + self.anchor_in(anchor)

        # [LAT] goes in front of each cell: gene i of cell b moves b + 1 places down
        rows = torch.arange(tokens.numel() + lat.shape[0], device=tokens.device)
        gene_rows = rows[: tokens.numel()] + cell_of_token(cu_seqlens, tokens.numel()) + 1
        lat_rows = cu_seqlens[:-1].long() + rows[: lat.shape[0]]
        source = torch.empty_like(rows)
        source[torch.cat([lat_rows, gene_rows])] = rows
        x = torch.cat([lat, genes])[source]
        return x, lat_rows, gene_rows

    def logits(
        self,
        out: ScDiVaOutput,
        rows: Tensor,
        *,
        genes: Tensor | None = None,
        expected: Expected | None = None,
        ranked: Ranked | None = None,
    ) -> Tensor:
        r"""Logits of which gene stands at masked positions, :math:`\log p(x_0 \mid x_t)` up to a constant.

        The sum of what is there: what the transformer predicts at the position, :math:`W h`; what the state of the cell
        predicts (:func:`scdiva.models.heads.hidden_gene_logits`); what the rank of the position implies
        (:func:`scdiva.diffusion.rank_log_prior`).

        Parameters
        ----------
        out
            Of a pass over these cells.
        rows
            Positions, int64 ascending or bool `(T,)`; may be on the CPU.
        genes
            int64 `(n,)`, tokens of the columns; `None`: all.
        expected
            What the state predicts of these genes, where the state head is not to be asked.
        ranked
            The batch, which may be on the CPU, if ranks are to be read; needs a state head. No gradient goes through
            them.

        Returns
        -------
        `(N, n)`; without `genes` column `j` is of token `j + N_SPECIAL`.
        """
        columns = slice(None) if genes is None else genes - N_SPECIAL
        at = to_device(rows, out.hidden.device)
        if self.state_head is None:
            return gene_logits(out.hidden[at], self.gene_weight[columns])
        if expected is None:
            assert out.read is not None
            expected = self.state_head.expected(out.read, genes)
        logits = hidden_gene_logits(expected.log_odds, out.hidden_share)[out.cells[at]]
        if len(out.hidden):
            logits = logits + gene_logits(out.hidden[at], self.gene_weight[columns])
        if ranked is not None:
            logits = logits + ranked.log_prior(rows, expected.values.detach(), genes)
        return logits

    def values(
        self, out: ScDiVaOutput, tokens: Tensor, rows: Tensor | slice = slice(None), *, of_genes: Tensor | None = None
    ) -> Tensor:
        """Log-normalised expression `(N,)` at positions `rows`, given which genes `tokens` `(N,)` are there.

        Without a state head the genes do not count: as in the paper, the value is read off the stream alone. At a
        `MASK`, whose gene is not known, it is read off the stream in any case. `of_genes`, `(B, n_genes)`, is what the
        state predicts of each gene, where the state head is not to be asked.
        """
        cells, there = out.cells[rows], tokens >= N_SPECIAL
        found = torch.zeros(tokens.shape, dtype=out.cell_state.dtype, device=tokens.device)
        if len(out.hidden):
            found = self.heads.value(out.hidden[rows]).squeeze(-1)
        if self.state_head is None or out.read is None:
            return found
        gene = (tokens - N_SPECIAL).clamp_min(0)
        if of_genes is None:
            of_state = (out.read[cells] * self.state_head.value[gene].to(found.dtype)).sum(dim=1)
        else:
            of_state = of_genes[cells, gene]
        return found + torch.where(there, of_state, 0.0)

    def read_state(self, state: Tensor, visible: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Give what the state head makes of cells `(B, state_rank + 1)` with these visible genes, bool `(T,)`."""
        assert self.state_head is not None
        n_visible = mean_of_cells(visible, cu_seqlens, state.dtype) * cu_seqlens.diff()
        return self.state_head(state, n_visible)

    def encode(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, *, backend: str | None = None) -> Tensor:
        """Return the cell state of :meth:`read`; a set encoder without residual needs no transformer: none is run."""
        alone = self.anchor is not None and self.anchor_out is None
        anchor = self.encode_anchor(tokens, values, cu_seqlens) if alone else None
        return self.read(tokens, values, cu_seqlens, backend=backend).cell_state if anchor is None else anchor

    def read(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, *, backend: str | None = None) -> ScDiVaOutput:
        """Run the network over uncorrupted cells; arguments as in :meth:`forward`.

        Cells may be as long as `config.input_length`: a set encoder sees them whole, the transformer the first
        `config.max_length` genes. Those are the genes of `hidden`.
        """
        anchor = self.encode_anchor(tokens, values, cu_seqlens)
        if anchor is not None:
            starts, lengths = cu_seqlens[:-1], cu_seqlens.diff().clamp_max(self.config.max_length)
            cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(cu_seqlens.dtype)
            n = int(cu_seqlens[-1])
            kept = to_device(positions(cu_seqlens, n) + starts[cell_of_token(cu_seqlens, n)], tokens.device)
            tokens, values = tokens[kept], values[kept]
        return self(tokens, values, cu_seqlens, anchor_state=anchor, backend=backend)

    def encode_anchor(
        self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, *, value_mask: Tensor | None = None
    ) -> Tensor | None:
        """Return what `[LAT]` would start from, without running a transformer block.

        Arguments as in :meth:`forward`. `(B, state_dim)`, or `None` with `anchor="learned"`.
        """
        c = self.config
        check_input(c, tokens, values, cu_seqlens, value_mask, None, max_length=c.input_length)
        hidden = tokens == MASK if value_mask is None else value_mask | (tokens == MASK)
        return (
            None if self.anchor is None else self.anchor(tokens, values, to_device(cu_seqlens, tokens.device), ~hidden)
        )

    @torch.no_grad()
    def attention_weights(
        self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield layer, cell and attention weights of uncorrupted cells, one layer of one cell at a time.

        `(H, L + 1, L + 1)` float32 (head, query, key); row and column 0 are `[LAT]`'s. See
        :meth:`scdiva.models.Blocks.attention_weights`.
        """
        longest = check_input(self.config, tokens, values, cu_seqlens, None, None)
        anchor = self.encode_anchor(tokens, values, cu_seqlens)
        x, _, _ = self._embed(tokens, values, cu_seqlens, tokens == MASK, anchor)
        yield from self.blocks.attention_weights(x, _with_lat(cu_seqlens), longest + 1)

    @property
    def gene_weight(self) -> Tensor:
        """Weight of the gene head, `(n_genes, dim)`; row `j` belongs to token `j + N_SPECIAL`."""
        return self.heads.gene_weight(self.embedding.gene.weight)


def _with_lat(cu_seqlens: Tensor) -> Tensor:
    """Boundaries of cells with `[LAT]` before each."""
    return cu_seqlens + torch.arange(cu_seqlens.numel(), dtype=cu_seqlens.dtype, device=cu_seqlens.device)
