"""The network: a bidirectional transformer over the ranked genes of a cell, with `[LAT]` in front.

No loss and no optimiser live here; `scdiva.diffusion` corrupts and scores, `scdiva.train` trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from scdiva._constants import LAT, MASK, N_SPECIAL
from scdiva.kernels import positions, resolve_backend, rope_tables
from scdiva.models._packed_input import check_input, mean_of_cells, of_tokens
from scdiva.models._saving import save
from scdiva.models._summary import model_html, model_line
from scdiva.models.config import ScDiVaConfig
from scdiva.nn.anchor import PooledAnchor, SetEncoder
from scdiva.nn.embedding import GeneValueEmbedding, TimeEmbedding
from scdiva.nn.heads import DualHeads, StateHead, hidden_gene_logits
from scdiva.nn.integration import IntegrationHead
from scdiva.nn.layers import INIT_STD, Block, RMSNorm, linear
from scdiva.nn.own_components import OwnComponents
from scdiva.nn.parts import run_in_parts
from scdiva.nn.queries import QueryHead

if TYPE_CHECKING:
    from scdiva.tokenizer.vocabulary import Vocabulary


class ScDiVaOutput(NamedTuple):
    """What one pass gives.

    Attributes
    ----------
    hidden
        `(T, dim)`, the gene positions after the final norm, in the order of the input.
    cell_state
        `(B, state_dim)`: `[LAT]` after the final norm; with the set encoder, its state `z`, or `z + R·[LAT]` under
        `anchor_residual`.
    anchor
        `(B, state_dim)`, the state that `[LAT]` started from; `None` with `anchor="learned"` unless one was given.
    cells
        int64 `(T,)`, the cell of each position.
    read
        `(B, state_rank + 1)`, what a state head makes of each cell; `None` without one.
    hidden_share
        `(B,)`, share of each cell's identities that is hidden; `None` without a state head.
    """

    hidden: Tensor
    cell_state: Tensor
    anchor: Tensor | None
    cells: Tensor
    read: Tensor | None
    hidden_share: Tensor | None


class ScDiVa(nn.Module):
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

    vocabulary: Vocabulary
    """The genes that the tokens stand for; set by :func:`scdiva.models.load_model`."""
    __repr__, _repr_html_ = model_line, model_html
    save = save
    micro_batches = 1
    """Parts of a batch that training runs the blocks over in turn; see :func:`scdiva.nn.parts.run_in_parts`."""

    def __init__(self, config: ScDiVaConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self._rope: tuple[Tensor, Tensor] | None = None
        if generator is None:
            self._build()
            return
        seed = int(torch.randint(2**63 - 1, (1,), generator=generator, device=generator.device))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self._build()

    def _build(self) -> None:
        c = self.config
        self.embedding = GeneValueEmbedding(c.n_tokens, c.dim)
        self.time = TimeEmbedding(c.dim) if c.time_conditioning else None
        self.anchor: nn.Module | None = None
        self.anchor_in: nn.Module = nn.Identity()
        self.anchor_out: nn.Linear | None = None
        if c.anchor == "pooled":
            self.anchor = PooledAnchor(c.dim, c.norm_eps)
            self.anchor_in = linear(c.dim, c.dim)
        elif c.anchor == "encoder":
            self.anchor = SetEncoder(
                c.n_tokens, c.anchor_linear_dim, c.anchor_learned_dim, c.anchor_hidden, c.anchor_balance
            )
            self.anchor_in = linear(c.state_dim, c.dim)
            if c.anchor_residual:  # from zero: the encoder's state is kept until this has learned
                self.anchor_out = linear(c.dim, c.state_dim, std=0.0)
        widths = c.n_tokens, c.state_dim, c.integrated_own_dim, c.integrated_hidden
        self.integration = IntegrationHead(*widths) if c.integrated else None
        self.own = OwnComponents(*widths[:2], c.adapted_dim, alone=c.adapted == "own") if c.adapted != "no" else None
        # each of the 2·n_layers writes to the stream adds its variance: scaled down so that the sum keeps its size
        out_std = INIT_STD / (2 * c.n_layers) ** 0.5
        self.blocks = nn.ModuleList(
            Block(c.dim, c.n_heads, c.ffn_dim, eps=c.norm_eps, out_std=out_std) for _ in range(c.n_layers)
        )
        self.norm = RMSNorm(c.dim, c.norm_eps)
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
        time: Tensor | None = None,
        anchor_state: Tensor | None = None,
        prompt: Tensor | None = None,
        backend: str | None = None,
    ) -> ScDiVaOutput:
        """Run the network once.

        Parameters
        ----------
        tokens
            int64 `(T,)`: gene tokens, or `MASK` where the identity is hidden; without `[LAT]` and padding. In each
            cell they stand in order of rank.
        values
            `(T,)`, log-normalised expression; not read where hidden.
        cu_seqlens
            int32 `(B + 1,)`, cell boundaries. A cell may be empty, and all of its tokens may be masked.
        value_mask
            bool `(T,)`, `True` where the value is hidden. The value of a `MASK` token always is. `None`: only there.
        time
            `(B,)`, diffusion times in [0, 1]; needed if the model is conditioned on time, else ignored.
        anchor_state
            `(B, state_dim)`, the cell state of another view of the same cells to start `[LAT]` from (the paper's
            "global prompt"); `None`: from the visible tokens of this input.
        prompt
            `(T, dim)`, added to what each position enters with, such as the mark of a perturbed gene; `None`: nothing.
        backend
            Attention backend of this call; `None`: the configured one.

        Returns
        -------
        Hidden states of the genes, cell states, anchors. :meth:`gene_logits`, :meth:`predict_values` go on from these.

        Raises
        ------
        ValueError
            If the tensors don't fit each other, a token isn't one of this vocabulary, or a cell is too long.
        """
        longest = check_input(self.config, tokens, values, cu_seqlens, value_mask, time, anchor_state)
        hidden_identity = tokens == MASK
        value_mask = hidden_identity if value_mask is None else value_mask | hidden_identity
        anchor = self._encode_anchor(tokens, values, cu_seqlens, ~value_mask) if anchor_state is None else anchor_state
        x, bounds, lat_rows, gene_rows = self._sequence(tokens, values, cu_seqlens, value_mask, time, anchor, prompt)
        cos, sin = self._tables(x.device)
        backend = self._resolved(backend, x.device)
        if self.micro_batches > 1 and torch.is_grad_enabled():
            x = run_in_parts(self.blocks, x, bounds, self.micro_batches, cos, sin, backend, longest + 1)
        else:
            for block in self.blocks:
                x = block(x, bounds, cos, sin, backend, longest + 1)
        x = self.norm(x)

        cell_state = x[lat_rows]
        if anchor is not None and self.config.anchor == "encoder":
            cell_state = anchor if self.anchor_out is None else anchor + self.anchor_out(cell_state)
        cells = of_tokens(torch.arange(len(cell_state), device=x.device), cu_seqlens, tokens.numel())
        read = share = None
        if self.state_head is not None:
            read = self.read_state(cell_state if anchor is None else anchor, ~value_mask, cu_seqlens)
            share = mean_of_cells(hidden_identity, cu_seqlens, read.dtype)
        return ScDiVaOutput(x[gene_rows], cell_state, anchor, cells, read, share)

    def read_state(self, state: Tensor, visible: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Give what the state head makes of cells `(B, state_rank + 1)` with these visible genes, bool `(T,)`."""
        assert self.state_head is not None
        n_visible = mean_of_cells(visible, cu_seqlens, state.dtype) * cu_seqlens.diff()
        return self.state_head(state, n_visible)

    def _sequence(
        self,
        tokens: Tensor,
        values: Tensor,
        cu_seqlens: Tensor,
        value_mask: Tensor,
        time: Tensor | None,
        anchor: Tensor | None,
        prompt: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Make what enters the first block `(T + B, dim)`, its cell boundaries, the rows of `[LAT]` and of genes."""
        genes = self.embedding(tokens, values, value_mask)
        genes = genes if prompt is None else genes + prompt
        lat = self.embedding.gene.weight[LAT].expand(cu_seqlens.numel() - 1, -1)
        if anchor is not None:
            lat = lat + self.anchor_in(anchor)

        cells = torch.arange(lat.shape[0], device=tokens.device)
        cell_of_gene = of_tokens(cells, cu_seqlens, tokens.numel())
        if self.time is not None and time is not None:
            shift = self.time(time)
            lat, genes = lat + shift, genes + shift[cell_of_gene]

        # [LAT] goes in front of each cell: gene i of cell b moves b + 1 places down
        rows = torch.arange(tokens.numel() + lat.shape[0], device=tokens.device)
        gene_rows = rows[: tokens.numel()] + cell_of_gene + 1
        lat_rows = cu_seqlens[:-1].long() + cells
        source = torch.empty_like(rows)
        source[torch.cat([lat_rows, gene_rows])] = rows
        x = torch.cat([lat, genes])[source]
        bounds = cu_seqlens + torch.arange(cu_seqlens.numel(), dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        return x, bounds, lat_rows, gene_rows

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Rotations of all positions, kept for the device that asked last; no buffers, which `model.to` would round."""
        c = self.config
        if c.position != "rope":
            return None, None
        if self._rope is None or self._rope[0].device != device:
            with torch.inference_mode(False):  # else no training step could use them later
                self._rope = rope_tables(c.max_length + 1, c.head_dim, c.rope_base, device=device)
        return self._rope

    def _resolved(self, backend: str | None, device: torch.device) -> str:
        """Decide on the attention backend here, since a block may be compiled."""
        autocast, block = torch.is_autocast_enabled(device.type), self.blocks[0]
        assert isinstance(block, Block)
        dtype = torch.get_autocast_dtype(device.type) if autocast else block.attention.qkv.weight.dtype
        backend = backend or self.config.attention_backend
        return resolve_backend(backend, head_dim=self.config.head_dim, dtype=dtype, device=device)

    def compile_blocks(self, **options: Any) -> None:
        """Compile each transformer block in place (`torch.compile`), for any number of tokens.

        Norms, gates and casts fuse into few kernels around the matrix products. With the Triton backend a block is one
        graph; elsewhere attention breaks it. Compiling takes up to a minute, so it pays in long runs only. The names of
        the weights stay as they are.

        Parameters
        ----------
        **options
            For `torch.compile`, such as `mode` or `backend`. `fullgraph=True` refuses a graph break.
        """
        for block in self.blocks:
            block.compile(**{"dynamic": True, **options})

    def release_blocks(self) -> None:
        """Undo :meth:`compile_blocks`."""
        for block in self.blocks:
            block._compiled_call_impl = None

    @torch.no_grad()
    def attention_weights(
        self,
        tokens: Tensor,
        values: Tensor,
        cu_seqlens: Tensor,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Attention weights of uncorrupted cells, one layer of one cell at a time.

        Parameters
        ----------
        tokens, values, cu_seqlens
            As in :meth:`forward`.
        layers, heads
            Their numbers, from 0; `None`: all.

        Yields
        ------
        Layer, cell of the batch, and float32 weights `(heads, L + 1, L + 1)` (head, query, key). Row and column 0 are
        `[LAT]`'s. They exist until the next are asked for, so what a caller sums up is all that is held.

        Raises
        ------
        ValueError
            As :meth:`forward`; if a layer or head doesn't exist.
        """
        asked = range(len(self.blocks)) if layers is None else sorted(set(layers))
        if any(not 0 <= layer < len(self.blocks) for layer in asked):
            raise ValueError(f"layers must be numbers from 0 to {len(self.blocks) - 1}; got {list(asked)}.")
        time = None if self.time is None else torch.zeros(cu_seqlens.numel() - 1, device=tokens.device)
        longest = check_input(self.config, tokens, values, cu_seqlens, None, time, None)
        masked = tokens == MASK
        anchor = self._encode_anchor(tokens, values, cu_seqlens, ~masked)
        x, bounds, _, _ = self._sequence(tokens, values, cu_seqlens, masked, time, anchor)
        cos, sin = self._tables(x.device)
        backend = self._resolved(None, x.device)
        for number, block in enumerate(self.blocks[: (last := max(asked, default=-1)) + 1]):
            assert isinstance(block, Block)
            if number in asked:
                for cell, weights in enumerate(block.attention_weights(x, bounds, cos, sin, heads)):
                    yield number, cell, weights
            x = block(x, bounds, cos, sin, backend, longest + 1) if number < last else x

    def encode(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, *, backend: str | None = None) -> Tensor:
        """Return the cell state of :meth:`read`; a set encoder without residual needs no transformer: none is run."""
        alone = self.config.anchor == "encoder" and self.anchor_out is None
        anchor = self.encode_anchor(tokens, values, cu_seqlens) if alone else None
        return self.read(tokens, values, cu_seqlens, backend=backend).cell_state if anchor is None else anchor

    def read(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, *, backend: str | None = None) -> ScDiVaOutput:
        """Run the network over uncorrupted cells; arguments as in :meth:`forward`.

        Cells may be as long as `config.input_length`: a set encoder sees them whole, the transformer the first
        `config.max_length` genes. Those are the genes of `hidden`.
        """
        c = self.config
        anchor = self.encode_anchor(tokens, values, cu_seqlens) if c.anchor == "encoder" else None
        if anchor is not None:
            kept = positions(cu_seqlens, tokens.numel()) < c.max_length
            lengths = cu_seqlens.diff().clamp_max(c.max_length)
            cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(cu_seqlens.dtype)
            tokens, values = tokens[kept], values[kept]
        time = None if self.time is None else torch.zeros(cu_seqlens.numel() - 1, device=tokens.device)
        return self(tokens, values, cu_seqlens, time=time, anchor_state=anchor, backend=backend)

    def encode_anchor(
        self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, *, value_mask: Tensor | None = None
    ) -> Tensor | None:
        """Return what `[LAT]` would start from, without running a transformer block.

        Arguments as in :meth:`forward`. `(B, state_dim)`, or `None` with `anchor="learned"`.
        """
        c = self.config
        check_input(c, tokens, values, cu_seqlens, value_mask, None, None, max_length=c.input_length, needs_time=False)
        hidden = tokens == MASK if value_mask is None else value_mask | (tokens == MASK)
        return self._encode_anchor(tokens, values, cu_seqlens, ~hidden)

    def _encode_anchor(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, visible: Tensor) -> Tensor | None:
        if self.anchor is None:
            return None
        if isinstance(self.anchor, PooledAnchor):
            return self.anchor(self.embedding.gene.weight, tokens, values, cu_seqlens, visible)
        return self.anchor(tokens, values, cu_seqlens, visible)

    @property
    def gene_weight(self) -> Tensor:
        """Weight of the gene head, `(n_genes, dim)`; row `j` belongs to token `j + N_SPECIAL`."""
        return self.heads.gene_weight(self.embedding.gene.weight)

    def gene_logits(self, out: ScDiVaOutput, rows: Tensor) -> Tensor:
        """Logits `(N, n_genes)` of positions `rows`, int64 or bool `(T,)`; column `j` is of token `j + N_SPECIAL`."""
        logits = nn.functional.linear(out.hidden[rows], self.gene_weight)
        of_cells = self.state_logits(out)
        return logits if of_cells is None else logits + of_cells[out.cells[rows]].to(logits.dtype)

    def state_logits(self, out: ScDiVaOutput) -> Tensor | None:
        """Part of the logits of hidden genes that the cell state gives, `(B, n_genes)`; `None` without a state head."""
        if self.state_head is None or out.read is None or out.hidden_share is None:
            return None
        return hidden_gene_logits(self.state_head.log_odds(out.read), out.hidden_share)

    def predict_values(self, out: ScDiVaOutput, tokens: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Log-normalised expression `(N,)` at positions `rows`, given which genes `tokens` `(N,)` are there.

        Without a state head the genes do not count: as in the paper, the value is read off the stream alone. At a
        `MASK`, whose gene is not known, it is read off the stream in any case.
        """
        values = self.heads.value(out.hidden[rows]).squeeze(-1)
        if self.state_head is None or out.read is None:
            return values
        of_gene = self.state_head.value[(tokens - N_SPECIAL).clamp_min(0)].to(values.dtype)
        of_state = (out.read[out.cells[rows]] * of_gene).sum(dim=1)
        return values + torch.where(tokens >= N_SPECIAL, of_state, 0.0)

    @property
    def state_dim(self) -> int:
        """Width of the cell state."""
        return self.config.state_dim

    @property
    def adaptation(self) -> dict[str, Any] | None:
        """What :func:`scdiva.tl.adapt` noted of its choice; `None`: the model is not adapted."""
        found: dict[str, Any] | None = (getattr(self, "metadata", None) or {}).get("adaptation")
        return found

    @property
    def n_parameters(self) -> int:
        """Number of trained numbers; tied weights count once."""
        return sum(p.numel() for p in self.parameters())
