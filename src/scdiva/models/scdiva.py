"""The network: a bidirectional transformer over the ranked genes of a cell, with `[LAT]` in front.

It reads top to bottom: the layers of a configuration, one forward pass (embedding, blocks, heads), and the predictions
at masked positions, :meth:`ScDiVa.logits` and :meth:`ScDiVa.values`, which training, validation, sampling and
likelihood share. Losses are in :mod:`scdiva.diffusion`, optimisers in :mod:`scdiva.train`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from scdiva._constants import FINETUNED, LAT, MASK, N_SPECIAL
from scdiva._files import html_table
from scdiva._settings import to_device
from scdiva.diffusion import cell_of_token
from scdiva.diffusion.loss import gene_logits
from scdiva.diffusion.ranks import Ranked
from scdiva.kernels import positions
from scdiva.kernels._attention import longest_cell
from scdiva.models.config import ScDiVaConfig
from scdiva.models.heads import DatasetComponents, DualHeads, Expected, IntegrationHead, StateHead, hidden_gene_logits
from scdiva.models.layers import INIT_STD, Block, Blocks, GeneValueEmbedding, SetEncoder, linear, normed
from scdiva.models.queries import QueryHead
from scdiva.models.reader import Reader
from scdiva.models.storage import save_model

if TYPE_CHECKING:
    from scdiva.tokenizer.vocabulary import Vocabulary


class ScDiVaOutput(NamedTuple):
    """Output of one forward pass.

    Attributes
    ----------
    hidden
        `(T, dim)`, hidden states of the genes after the final norm, in the order of the input; `(0, dim)` without the
        transformer.
    cell_state
        `(B, state_dim)`: `[LAT]` after the final norm; with the set encoder, its state `z`, or `z + R·[LAT]` under
        `anchor_residual`.
    anchor
        `(B, state_dim)`, the state from which `[LAT]` starts; `None` with `anchor="learned"` unless passed as an
        argument.
    cells
        int64 `(T,)`, the cell of each position.
    head_hidden
        `(B, state_rank + 1)`, hidden layer of the state head; `None` without one.
    hidden_share
        `(B,)`, share of each cell's genes whose identity is masked.
    """

    hidden: Tensor
    cell_state: Tensor
    anchor: Tensor | None
    cells: Tensor
    head_hidden: Tensor | None
    hidden_share: Tensor


class ScDiVa(nn.Module):
    """Masked-diffusion transformer of single cells (paper, section 3 and appendix "Model Architecture").

    Cells are packed: their tokens are concatenated, and `cu_seqlens` (int32, `(B + 1,)`) holds the cell boundaries. The
    model puts `[LAT]` before each cell and never masks it. The result for a cell does not depend on other cells.

    Parameters
    ----------
    config
        The architecture.
    generator
        Source of the initial weights. `None` draws from torch's global stream; a generator leaves that unchanged.

    Attributes
    ----------
    config
        The architecture.
    vocabulary
        Genes of the tokens; set by :func:`scdiva.models.load_model`.
    metadata
        Notes of the author, from the model folder.
    origin
        Folder or name from which the model was loaded.
    """

    vocabulary: Vocabulary
    metadata: dict[str, Any] | None = None
    origin: str | None = None
    residual_dtype: torch.dtype | None = None
    """Data type of the residual stream between blocks; None: that of the weights. Set during training alone."""

    def __init__(self, config: ScDiVaConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        if generator is None:
            self._build()
            return
        seed = int(torch.randint(2**63 - 1, (1,), generator=generator, device=generator.device))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self._build()

    def _build(self) -> None:
        """Make the layers, with weights from torch's global stream."""
        c = self.config
        self.embedding = GeneValueEmbedding(c.n_tokens, c.dim)
        self.anchor: SetEncoder | None = None
        self.anchor_in: nn.Module = nn.Identity()
        self.anchor_out: nn.Linear | None = None
        if c.anchor == "encoder":
            widths = c.anchor_linear_dim, c.anchor_learned_dim, c.anchor_hidden
            self.anchor = SetEncoder(c.n_tokens, *widths, c.anchor_balance)
            self.anchor_in = linear(c.state_dim, c.dim)
            if c.anchor_residual:  # starts at zero, so that an untrained residual keeps the state of the encoder
                self.anchor_out = linear(c.dim, c.state_dim, std=0.0)
        self.integration: IntegrationHead | None = None
        self.dataset_components: DatasetComponents | None = None
        if c.integrated:
            self.integration = IntegrationHead(c.adapted, c.integrated_hidden)
        if c.adapted:
            self.dataset_components = DatasetComponents(c.n_tokens, c.state_dim, c.adapted)
        # each of the 2·n_layers additions to the stream increases its variance; weights are scaled to compensate
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
        self.reader = Reader(c.anchor_linear_dim) if c.reader else None

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
            int64 `(T,)`: gene tokens, or `MASK` where the identity is masked; without `[LAT]` and padding. The genes of
            each cell are in order of rank.
        values
            `(T,)`, log-normalised expression; masked values are not read.
        cu_seqlens
            int32 `(B + 1,)`, cell boundaries. A cell may be empty, and all of its tokens may be masked. If it is on the
            CPU and the other tensors are on a device, the batch must have been checked before
            (:func:`scdiva.models.scdiva.check_input`), and the host does not wait for the device. Otherwise the check
            waits once.
        value_mask
            bool `(T,)`, `True` where the value is masked. The value of a `MASK` token is always masked. `None`: no
            other value is masked.
        anchor_state
            `(B, state_dim)`, the cell state from which `[LAT]` starts; `None`: that of the visible tokens.
        backend
            Attention backend of this call; `None`: the configured one.
        use_transformer
            `False` runs no block, and predictions come from the cell state alone; cells may then have
            `config.input_length` genes. Requires an anchor.

        Returns
        -------
        Hidden states of the genes, cell states, anchors; the input of :meth:`logits` and :meth:`values`.

        Raises
        ------
        ValueError
            If the tensors do not fit each other, a token is not in the vocabulary, or a cell is too long.
        """
        c = self.config
        max_length = c.max_length if use_transformer else c.input_length
        longest = check_input(c, tokens, values, cu_seqlens, value_mask, anchor_state, max_length=max_length)
        bounds, cu_seqlens = _with_lat(cu_seqlens), to_device(cu_seqlens, tokens.device)
        masked = tokens == MASK
        value_mask = masked if value_mask is None else value_mask | masked
        anchor = anchor_state
        if anchor is None and self.anchor is not None:
            anchor = self.anchor(tokens, values, cu_seqlens, ~value_mask)

        if use_transformer:
            x, residual, gene_rows, lat_rows = self._embed(tokens, values, cu_seqlens, value_mask, anchor)
            stream = self.blocks.stream(x, bounds, longest + 1, backend, residual=residual)
            x = self.blocks.call(normed, self.norm, *stream)
            hidden = x.index_select(0, gene_rows)
            cell_state = self._cell_state(x.index_select(0, lat_rows), anchor)
        else:
            assert anchor is not None
            hidden, cell_state = anchor.new_empty(0, c.dim), anchor

        cells = cell_of_token(cu_seqlens, tokens.numel())
        share = _mean_of_cells(masked, cu_seqlens, cell_state.dtype)
        head_hidden = None
        if self.state_head is not None:
            head_hidden = self.read_state(cell_state if anchor is None else anchor, ~value_mask, cu_seqlens)
        return ScDiVaOutput(hidden, cell_state, anchor, cells, head_hidden, share)

    def _embed(
        self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, value_mask: Tensor, anchor: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Input of the first block, stream and residual `(T + B, dim)`, and the rows of genes and of `[LAT]`."""
        # not compiled: a compiler would add the gradients of equal tokens with atomics, in random order
        genes = self.embedding.look_up(tokens)
        lat = self.embedding.gene.weight[LAT].expand(cu_seqlens.numel() - 1, -1)
        lat = lat if anchor is None else lat + self.anchor_in(anchor)

        # [LAT] goes in front of each cell: gene i of cell b moves b + 1 rows down
        rows = torch.arange(tokens.numel() + lat.shape[0], device=tokens.device)
        gene_rows = rows[: tokens.numel()] + cell_of_token(cu_seqlens, tokens.numel()) + 1
        lat_rows = cu_seqlens[:-1].long() + rows[: lat.shape[0]]
        x = genes.new_empty(len(rows), genes.shape[1], dtype=self.residual_dtype)
        x = x.index_copy_(0, lat_rows, lat.to(x.dtype)).index_copy_(0, gene_rows, genes.to(x.dtype))
        # only tensors with a row per token are compiled: sizes of 1, such as one cell, would be compiled anew
        residual = self.blocks.call(_values_in_rows, self.embedding, values, value_mask, gene_rows, x)
        return x, residual, gene_rows, lat_rows

    def _cell_state(self, lat: Tensor, anchor: Tensor | None) -> Tensor:
        """Cell state from the final `[LAT]` `(B, dim)`."""
        if anchor is None or self.config.anchor != "encoder":
            return lat
        return anchor if self.anchor_out is None else anchor + self.anchor_out(lat)

    def logits(
        self,
        out: ScDiVaOutput,
        rows: Tensor,
        *,
        genes: Tensor | None = None,
        expected: Expected | None = None,
        ranked: Ranked | None = None,
    ) -> Tensor:
        r"""Logits of the gene at masked positions, :math:`\log p(x_0 \mid x_t)` up to a constant.

        The sum of the transformer's prediction at the position, :math:`W h`, the prediction from the cell state
        (:func:`scdiva.models.heads.hidden_gene_logits`) and the prior from the rank of the position
        (:func:`scdiva.diffusion.rank_log_prior`), as far as they are available.

        Parameters
        ----------
        out
            Output of a forward pass over these cells.
        rows
            Positions, int64 ascending or bool `(T,)`; may be on the CPU.
        genes
            int64 `(n,)`, tokens of the columns; `None`: all.
        expected
            Predictions for these genes that replace those of the state head.
        ranked
            The batch with the observed ranks, which may be on the CPU; requires a state head. No gradient flows through
            the prior.

        Returns
        -------
        `(N, n)`; without `genes` column `j` belongs to token `j + N_SPECIAL`.
        """
        columns = slice(None) if genes is None else genes - N_SPECIAL
        at = to_device(rows, out.hidden.device)
        if self.state_head is None:
            return gene_logits(out.hidden[at], self.gene_weight[columns])
        if expected is None:
            assert out.head_hidden is not None
            expected = self.state_head.expected(out.head_hidden, genes)
        logits = hidden_gene_logits(expected.log_odds, out.hidden_share)[out.cells[at]]
        if len(out.hidden):
            logits = logits + gene_logits(out.hidden[at], self.gene_weight[columns])
        if ranked is not None:
            logits = logits + ranked.log_prior(rows, expected.values.detach(), genes)
        return logits

    def values(
        self, out: ScDiVaOutput, tokens: Tensor, rows: Tensor | slice = slice(None), *, of_genes: Tensor | None = None
    ) -> Tensor:
        """Log-normalised expression `(N,)` at positions `rows` that hold the genes `tokens` `(N,)`.

        Without a state head the value is a function of the hidden state alone, as in the paper; at a `MASK` it always
        is. `of_genes`, `(B, n_genes)`, replaces the values that the state head predicts.
        """
        cells = out.cells[rows]
        value = torch.zeros(tokens.shape, dtype=out.cell_state.dtype, device=tokens.device)
        if len(out.hidden):
            value = self.heads.value(out.hidden[rows]).squeeze(-1)
        if self.state_head is None or out.head_hidden is None:
            return value
        gene = (tokens - N_SPECIAL).clamp_min(0)
        if of_genes is None:
            of_state = (out.head_hidden[cells] * self.state_head.value[gene].to(value.dtype)).sum(dim=1)
        else:
            of_state = of_genes[cells, gene]
        return value + torch.where(tokens >= N_SPECIAL, of_state, 0.0)

    def read_state(self, state: Tensor, visible: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Hidden layer of the state head, `(B, state_rank + 1)`, for cells with these visible genes, bool `(T,)`."""
        assert self.state_head is not None
        n_visible = _mean_of_cells(visible, cu_seqlens, state.dtype) * cu_seqlens.diff()
        return self.state_head(state, n_visible)

    def encode(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, *, backend: str | None = None) -> Tensor:
        """Cell state of uncorrupted cells, `(B, state_dim)`.

        Without a residual, the set encoder alone is run. Otherwise the last block is run for `[LAT]` alone, except in
        training in parts (:attr:`Blocks.micro_batches`). Results differ from those of :meth:`read` by rounding.
        """
        if self.anchor is not None and self.anchor_out is None:
            state = self.encode_anchor(tokens, values, cu_seqlens)
            assert state is not None
            return state
        if self.blocks.micro_batches > 1 and torch.is_grad_enabled():
            return self.read(tokens, values, cu_seqlens, backend=backend).cell_state
        tokens, values, cu_seqlens, anchor = self._with_anchor(tokens, values, cu_seqlens)
        longest = check_input(self.config, tokens, values, cu_seqlens)
        masked, starts = tokens == MASK, to_device(cu_seqlens, tokens.device)
        x, residual, *_ = self._embed(tokens, values, starts, masked, anchor)
        bounds = _with_lat(cu_seqlens)
        lat = self.blocks.of_first_tokens(x, bounds, longest + 1, backend, residual=residual)
        return self._cell_state(normed(self.norm, lat), anchor)

    def read(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, *, backend: str | None = None) -> ScDiVaOutput:
        """Run the network over uncorrupted cells; arguments as in :meth:`forward`.

        Cells may have `config.input_length` genes: a set encoder reads all of them, the transformer the first
        `config.max_length`, to which `hidden` belongs.
        """
        tokens, values, cu_seqlens, anchor = self._with_anchor(tokens, values, cu_seqlens)
        return self(tokens, values, cu_seqlens, anchor_state=anchor, backend=backend)

    def _with_anchor(
        self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Select the genes that the transformer reads, and compute the state of the set encoder from all genes."""
        anchor = self.encode_anchor(tokens, values, cu_seqlens)
        if anchor is not None:
            starts, lengths = cu_seqlens[:-1], cu_seqlens.diff().clamp_max(self.config.max_length)
            cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(cu_seqlens.dtype)
            n = int(cu_seqlens[-1])
            selected = to_device(positions(cu_seqlens, n) + starts[cell_of_token(cu_seqlens, n)], tokens.device)
            tokens, values = tokens[selected], values[selected]
        return tokens, values, cu_seqlens, anchor

    def encode_anchor(
        self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, *, value_mask: Tensor | None = None
    ) -> Tensor | None:
        """State of the set encoder, `(B, state_dim)`; `None` with `anchor="learned"`. Arguments as in :meth:`forward`.

        No transformer block is run.
        """
        check_input(self.config, tokens, values, cu_seqlens, value_mask, max_length=self.config.input_length)
        hidden = tokens == MASK if value_mask is None else value_mask | (tokens == MASK)
        return (
            None if self.anchor is None else self.anchor(tokens, values, to_device(cu_seqlens, tokens.device), ~hidden)
        )

    @torch.no_grad()
    def attention_weights(
        self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield layer, cell and attention weights of uncorrupted cells, one layer of one cell at a time.

        `(H, L + 1, L + 1)` float32 (head, query, key); row and column 0 belong to `[LAT]`. See
        :meth:`scdiva.models.Blocks.attention_weights`.
        """
        longest = check_input(self.config, tokens, values, cu_seqlens)
        anchor = self.encode_anchor(tokens, values, cu_seqlens)
        x, residual, *_ = self._embed(tokens, values, cu_seqlens, tokens == MASK, anchor)
        yield from self.blocks.attention_weights(x + residual, _with_lat(cu_seqlens), longest + 1)

    @property
    def gene_weight(self) -> Tensor:
        """Weight of the gene head, `(n_genes, dim)`; row `j` belongs to token `j + N_SPECIAL`."""
        return self.heads.gene_weight(self.embedding.gene.weight)

    def compile_blocks(self, **options: Any) -> None:
        """Compile each transformer block, value embedding and final norm (`torch.compile`), for any number of tokens.

        Norms, gates and casts are fused around the matrix products. With the Triton backend a block is one graph;
        other backends break the graph at the attention. Compiling takes up to a minute, so it pays in long runs only.
        The names of the weights do not change.

        Parameters
        ----------
        **options
            For `torch.compile`, such as `mode` or `backend`. `fullgraph=True` raises an error at a graph break.
        """
        self.blocks.compile_each(**options)

    def known_vocabulary(self) -> Vocabulary:
        """Return the vocabulary; ValueError if it is not set."""
        if getattr(self, "vocabulary", None) is None:
            raise ValueError(
                "this model has no vocabulary: set `model.vocabulary` to the genes that it was built for, or save it "
                "with save_model(model, vocabulary, folder) and load that"
            )
        return self.vocabulary

    @property
    def seen_tokens(self) -> np.ndarray:
        """Tokens that are genes of the training corpus, bool `(n_tokens,)`."""
        in_corpus = self.vocabulary.table["entropy"].notna().to_numpy()
        return np.concatenate([np.zeros(N_SPECIAL, bool), in_corpus])

    @property
    def state_dim(self) -> int:
        """Width of the cell state."""
        return self.config.state_dim

    @property
    def n_parameters(self) -> int:
        """Number of trainable parameters; tied weights count once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def adaptation(self) -> dict[str, Any] | None:
        """Report of the fit by :func:`scdiva.tl.adapt`; `None`: the model is not adapted."""
        report: dict[str, Any] | None = (self.metadata or {}).get("adaptation")
        return report

    @property
    def finetuned_for(self) -> str | None:
        """Task that the weights were fine-tuned for, `"integrate"`, `"annotate"` or `"perturbation"`, or None."""
        task: str | None = (self.metadata or {}).get(FINETUNED, {}).get("task")
        return task

    def __repr__(self) -> str:
        c = self.config
        return (
            f"ScDiVa({self.n_parameters:,} parameters, {c.n_genes:,} genes, {c.n_layers} layers of width {c.dim}, "
            f"on {next(self.parameters()).device})"
        )

    def _repr_html_(self) -> str:
        c = self.config
        return html_table(
            "ScDiVa",
            {
                "parameters": f"{self.n_parameters:,}",
                "genes": f"{c.n_genes:,}",
                "transformer": f"{c.n_layers} layers of width {c.dim}",
                "device": next(self.parameters()).device,
                "fine-tuned for": self.finetuned_for,
                "adapted by": None if self.adaptation is None else "scdiva.tl.adapt",
                "integrated by": None if self.integration is None else "scdiva.tl.integrate",
            },
        )

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the model, its vocabulary and its metadata to a folder, atomically.

        :func:`scdiva.models.save_model` also takes a model card, other metadata, and a smaller data type.

        Parameters
        ----------
        path
            The folder to create.
        overwrite
            Whether to replace an existing model. Anything else is never replaced.

        Returns
        -------
        The folder.

        Raises
        ------
        FileExistsError
            If `path` exists and is not a saved model, contains other files, or `overwrite` is False.
        ValueError
            If `path` is a URL, the model has no vocabulary, or weights are not finite.

        Examples
        --------
        >>> import scdiva as sd
        >>> model = sd.models.load_model()
        >>> folder = model.save("my-model")
        >>> sd.models.load_model("my-model").config == model.config
        True
        """
        return save_model(self, self.known_vocabulary(), path, metadata=self.metadata, overwrite=overwrite)


def check_input(
    config: ScDiVaConfig,
    tokens: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    value_mask: Tensor | None = None,
    anchor_state: Tensor | None = None,
    *,
    max_length: int | None = None,
) -> int:
    """Check the input of a network.

    Parameters
    ----------
    config
        Configuration of the network.
    tokens, values, cu_seqlens, value_mask, anchor_state
        As for :meth:`scdiva.models.ScDiVa.forward`. With `cu_seqlens` on the CPU and the rest on a device nothing is
        checked.
    max_length
        Maximum number of genes per cell; None: that of the configuration.

    Returns
    -------
    Number of genes of the longest cell.

    Raises
    ------
    ValueError
        If the tensors do not fit each other, a token is not in the vocabulary, or a cell is too long.
    """
    if cu_seqlens.device != tokens.device:
        return int(cu_seqlens.diff().max())
    c = config
    max_length = c.max_length if max_length is None else max_length
    if tokens.dim() != 1 or tokens.dtype != torch.int64:
        raise ValueError(f"tokens must be a packed int64 vector (T,); got {tokens.dtype} {tuple(tokens.shape)}.")
    if values.shape != tokens.shape or not values.is_floating_point():
        raise ValueError(
            f"values must be floating and as long as tokens, {tokens.numel()}; "
            f"got {values.dtype} {tuple(values.shape)}."
        )
    if value_mask is not None and (value_mask.shape != tokens.shape or value_mask.dtype != torch.bool):
        raise ValueError(
            f"value_mask must be bool and as long as tokens, {tokens.numel()}; "
            f"got {value_mask.dtype} {tuple(value_mask.shape)}."
        )
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens must be int32; got {cu_seqlens.dtype}.")
    n_cells, lengths = cu_seqlens.numel() - 1, cu_seqlens.diff()
    too_long = lengths > max_length
    bad = (tokens != MASK) & ((tokens < N_SPECIAL) | (tokens >= c.n_tokens))
    longest, n_too_long, n_bad = longest_cell(cu_seqlens, tokens.numel(), too_long.sum(), bad.sum())
    if n_too_long:
        cell = int(too_long.nonzero()[0])
        raise ValueError(
            f"{n_too_long} cell(s) have more than the {max_length} genes that the model reads, the first "
            f"is cell {cell} of the batch with {int(lengths[cell])}; serialize with max_length={max_length}."
        )
    if n_bad:
        raise ValueError(
            f"{n_bad} token(s) are neither MASK nor one of this model's {c.n_genes} genes, the first is "
            f"{int(tokens[bad][0])}; serialize with the vocabulary that the model was trained with."
        )
    if anchor_state is not None and anchor_state.shape != (n_cells, c.state_dim):
        raise ValueError(f"anchor_state must be {(n_cells, c.state_dim)}; got {tuple(anchor_state.shape)}.")
    return longest


def _values_in_rows(
    embedding: GeneValueEmbedding, values: Tensor, value_mask: Tensor, gene_rows: Tensor, x: Tensor
) -> Tensor:
    """Embeddings of values in the rows of their genes; 0 in the other rows of the stream `x`."""
    value = embedding.of_values(values, value_mask)
    return value.new_zeros(x.shape).index_copy_(0, gene_rows, value)


def _with_lat(cu_seqlens: Tensor) -> Tensor:
    """Boundaries of cells with `[LAT]` before each."""
    return cu_seqlens + torch.arange(cu_seqlens.numel(), dtype=cu_seqlens.dtype, device=cu_seqlens.device)


def _mean_of_cells(flags: Tensor, cu_seqlens: Tensor, dtype: torch.dtype) -> Tensor:
    """Share of each cell's positions that are flagged, `(B,)`; 0 for an empty cell."""
    lengths = cu_seqlens.diff().long()
    total = torch.zeros(len(lengths), dtype=torch.promote_types(dtype, torch.float32), device=flags.device)
    total = total.index_add_(0, cell_of_token(cu_seqlens, flags.numel()), flags.to(total.dtype))
    return (total / lengths.clamp_min(1)).to(dtype)


@torch.no_grad()
def init_gene_embedding(
    model: ScDiVa, matrix: Tensor | np.ndarray, *, generator: torch.Generator | None = None
) -> None:
    """Initialise the gene embeddings from gene vectors, such as those of a truncated SVD of the corpus.

    The first `k` columns of the embeddings become the vectors, scaled by one number so that the mean row norm is that
    of random initialisation; the other columns are drawn at a tenth of the usual standard deviation. Genes whose vector
    is 0 (not in the corpus) and special tokens keep their embeddings.

    Parameters
    ----------
    model
        Changed in place.
    matrix
        `(n_genes, k)`, row `j` for token `j + N_SPECIAL`, leading directions first; `k <= dim`.
    generator
        Source of the random numbers; `None`: torch's global stream.

    Raises
    ------
    ValueError
        If the matrix has another number of genes, too many columns, values that are not finite, or only zeros. The
        model is not changed then.

    Examples
    --------
    >>> import torch
    >>> from scdiva.models import ScDiVa, ScDiVaConfig, init_gene_embedding
    >>> model = ScDiVa(ScDiVaConfig(n_genes=30, dim=16, n_layers=1, n_heads=2, ffn_dim=24))
    >>> vectors = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    >>> init_gene_embedding(model, vectors)
    """
    vectors = torch.as_tensor(matrix)
    c = model.config
    if vectors.dim() != 2 or vectors.shape[0] != c.n_genes or not 1 <= vectors.shape[1] <= c.dim:
        raise ValueError(
            f"The gene matrix must be ({c.n_genes}, k) with 1 <= k <= dim = {c.dim}; got {tuple(vectors.shape)}."
        )
    if not torch.isfinite(vectors).all():
        row = int((~torch.isfinite(vectors)).any(dim=1).nonzero()[0])
        raise ValueError(f"The gene matrix holds NaN or infinite numbers, first in row {row}.")
    if not vectors.any():
        raise ValueError("The gene matrix holds only zeros.")
    rows = model.embedding.gene.weight[N_SPECIAL:]
    vectors = vectors.to(torch.float64)
    nonzero = vectors.any(dim=1)
    rms = vectors[nonzero].square().sum(dim=1).mean().sqrt()
    scale = INIT_STD * rows.shape[1] ** 0.5 / rms
    drawn = torch.randn(rows.shape, generator=generator) * (INIT_STD / 10)
    drawn[:, : vectors.shape[1]] = (vectors * scale).to(drawn.dtype)
    rows[nonzero.to(rows.device)] = drawn[nonzero].to(device=rows.device, dtype=rows.dtype)
