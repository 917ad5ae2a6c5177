"""Layers: embedding, attention, gate and blocks (paper, appendix "Model Architecture"), and the set encoder."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scdiva._constants import MASK
from scdiva._settings import to_device
from scdiva.kernels import attention_weights, resolve_backend, rope_attention_qkv, rope_tables
from scdiva.kernels._attention import first_token_attention

INIT_STD = 0.02
"""Standard deviation of initial weights, as in GPT-2; the paper does not state it."""


def linear(n_in: int, n_out: int, *, bias: bool = False, std: float = INIT_STD) -> nn.Linear:
    """Linear layer with weights from N(0, std²) and zero bias."""
    layer = nn.Linear(n_in, n_out, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def rows_of(layer: nn.Module, x: Tensor, rows: slice) -> Tensor:
    """Apply the rows `rows` of a linear layer without bias; returns `(..., n)`."""
    if isinstance(layer, nn.Linear):
        return F.linear(x.to(layer.weight.dtype), layer.weight[rows])
    y: Tensor = layer(x)
    return y[..., rows]


def perceptron(n_in: int, hidden: int, n_out: int, activation: nn.Module | None = None) -> nn.Sequential:
    """Two hidden layers and a linear last one, with torch's default initialisation.

    Parameters
    ----------
    n_in, hidden, n_out
        Widths.
    activation
        Activation of the hidden layers; None: SiLU.
    """
    act = activation or nn.SiLU()
    return nn.Sequential(nn.Linear(n_in, hidden), act, nn.Linear(hidden, hidden), act, nn.Linear(hidden, n_out))


def normed(norm: nn.RMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Norm of a stream and its residual, computed in the dtype of the weight if the stream has another one."""
    return norm((x if residual is None else x + residual).to(norm.weight.dtype))


class GeneValueEmbedding(nn.Module):
    r"""Sum of the embeddings of a gene and its value.

    :math:`\mathrm{Emb}_{id}(g) + W_2\,\mathrm{SiLU}(W_1 v + b_1) + b_2` (paper, eqs. `joint_embedding`, `mlp_val`).
    For a masked value the learned vector `hidden_value` replaces the output of the MLP (paper, algorithm 1, line 9);
    the value 0 would mean "measured and absent".

    Parameters
    ----------
    n_tokens
        Rows of the table: special tokens and genes.
    dim
        Width of the embedding and of the value MLP.
    """

    def __init__(self, n_tokens: int, dim: int) -> None:
        super().__init__()
        self.gene = nn.Embedding(n_tokens, dim)
        # the input of W1 is of order 1, and so are its weights and biases, so that its units bend at different values;
        # W2 scales the sum of `dim` such units to the size of a gene embedding
        self.value_in = linear(1, dim, bias=True, std=1.0)
        self.value_out = linear(dim, dim, bias=True, std=INIT_STD / dim**0.5)
        self.hidden_value = nn.Parameter(torch.empty(dim))
        nn.init.normal_(self.gene.weight, std=INIT_STD)
        nn.init.normal_(self.value_in.bias)
        nn.init.normal_(self.hidden_value, std=INIT_STD)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Embeddings of genes `(T, dim)`, given int64 tokens `(T,)`."""
        if self.gene.weight.is_cuda and torch.is_grad_enabled():
            return look_up_spread(self.gene.weight, tokens)
        return self.gene(tokens)

    def of_values(self, values: Tensor, value_mask: Tensor) -> Tensor:
        """Embeddings of values alone, `(T, dim)`; arguments as in :meth:`forward`."""
        inputs = values.to(self.value_in.weight.dtype).masked_fill(value_mask, 0.0).unsqueeze(-1)
        value = self.value_out(F.silu(self.value_in(inputs)))
        # in the dtype of the product, as the residuals of the blocks: another dtype would be compiled anew
        return torch.where(value_mask.unsqueeze(-1), self.hidden_value.to(value.dtype), value)

    def forward(self, tokens: Tensor, values: Tensor, value_mask: Tensor) -> Tensor:
        """Embed packed tokens.

        Parameters
        ----------
        tokens
            int64 `(T,)`.
        values
            Log-normalised expression `(T,)`; values at `value_mask` are never read.
        value_mask
            bool `(T,)`, `True` where the value is masked.

        Returns
        -------
        `(T, dim)`.
        """
        return self.look_up(tokens) + self.of_values(values, value_mask)


def look_up_spread(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of a table, `F.embedding(tokens, table)`, with a fast gradient of the row of `MASK` on a GPU.

    In training `MASK` is up to half of all tokens, and the backward pass of `F.embedding` adds all gradients of one row
    in one thread per column. Here masked positions read other rows, which differ between positions and get the gradient
    0, and the row of `MASK` is broadcast.
    """
    masked = tokens == MASK
    spread_rows = torch.arange(tokens.numel(), device=tokens.device) % table.shape[0]
    return torch.where(masked.unsqueeze(-1), table[MASK], F.embedding(torch.where(masked, spread_rows, tokens), table))


class SwiGLU(nn.Module):
    r"""Gated feed-forward network.

    :math:`(\mathrm{SiLU}(x W_g) \odot (x W_u))\, W_d` (paper, eq. `swiglu`; Shazeer 2020), without biases.

    Parameters
    ----------
    dim, hidden
        Width of the stream and of the gate.
    out_std
        Standard deviation of the initial :math:`W_d`.
    """

    def __init__(self, dim: int, hidden: int, *, out_std: float = INIT_STD) -> None:
        super().__init__()
        self.gate = linear(dim, hidden)
        self.up = linear(dim, hidden)
        self.down = linear(hidden, dim, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., dim)` to `(..., dim)`."""
        gate, up = self.gate_and_up(x) if x.is_cuda else (self.gate(x), self.up(x))
        if torch.is_grad_enabled():
            return self.down(F.silu(gate) * up)
        # in place: on a CPU, allocating memory of this width takes longer than writing to it
        return self.down(F.silu(gate, inplace=True).mul_(up))

    def gate_and_up(self, x: Tensor) -> tuple[Tensor, ...]:
        """Both inner products as one: on a GPU, x and its gradient are then read and written once.

        Stored weights and low-rank updates stay separate; concatenating two weights takes microseconds.
        """
        if not (isinstance(self.gate, nn.Linear) and isinstance(self.up, nn.Linear)):
            return self.gate(x), self.up(x)
        weight = torch.cat([self.gate.weight, self.up.weight])
        return F.linear(x.to(weight.dtype), weight).chunk(2, dim=-1)


class Attention(nn.Module):
    r"""Bidirectional multi-head attention within each cell.

    :math:`\mathrm{Concat}(\mathrm{head}_1 \ldots \mathrm{head}_H) W_O` (paper, eq. `mha`), without biases.
    `qkv.weight` is the concatenation of :math:`W_Q, W_K, W_V`, each `(dim, dim)`.

    Parameters
    ----------
    dim, n_heads
        Width of the stream; number of heads, which divides it.
    out_std
        Standard deviation of the initial :math:`W_O`.
    """

    def __init__(self, dim: int, n_heads: int, *, out_std: float = INIT_STD) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.qkv = linear(dim, 3 * dim)
        self.out = linear(dim, dim, std=out_std)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        backend: str = "auto",
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Attend over packed tokens `(T, dim)`; arguments as in :func:`scdiva.kernels.rope_attention`."""
        qkv = self.project(x)
        heads = rope_attention_qkv(qkv, cos=cos, sin=sin, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, backend=backend)
        return self.out(heads.flatten(start_dim=1))

    def keys_and_values(self, x: Tensor) -> Tensor:
        """Keys and values, `(T, 2, H, D)`, of packed tokens `(T, dim)`."""
        return rows_of(self.qkv, x, slice(x.shape[1], None)).view(x.shape[0], 2, self.n_heads, -1)

    def of_first_tokens(
        self,
        x: Tensor,
        keys_and_values: Tensor,
        cu_seqlens: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        backend: str = "auto",
    ) -> Tensor:
        """Attend from the first token of each cell alone, `(B, dim)`, to all tokens of the cell."""
        q = rows_of(self.qkv, x, slice(x.shape[1])).view(x.shape[0], self.n_heads, -1)
        k, v = keys_and_values.unbind(dim=1)
        heads = first_token_attention(q, k, v, cos=cos, sin=sin, cu_seqlens=cu_seqlens, backend=backend)
        return self.out(heads.flatten(start_dim=1))

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values, `(T, 3, H, D)`, of packed tokens `(T, dim)`."""
        return self.qkv(x).view(x.shape[0], 3, self.n_heads, -1)


class Block(nn.Module):
    r"""Pre-norm transformer block.

    :math:`x' = x + \mathrm{Attention}(\mathrm{RMSNorm}(x))`, then
    :math:`x' + \mathrm{FFN}(\mathrm{RMSNorm}(x'))` (paper, eqs. `prenorm_attn` and `prenorm_ffn`).

    Parameters
    ----------
    dim, n_heads, ffn_dim
        Widths of stream and gate, number of heads.
    eps
        Epsilon of both norms.
    out_std
        Standard deviation of the two weights that write to the residual stream.
    """

    def __init__(self, dim: int, n_heads: int, ffn_dim: int, *, eps: float = 1e-5, out_std: float = INIT_STD) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps)
        self.attention = Attention(dim, n_heads, out_std=out_std)
        self.ffn_norm = nn.RMSNorm(dim, eps)
        self.ffn = SwiGLU(dim, ffn_dim, out_std=out_std)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        backend: str = "auto",
        max_seqlen: int | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the block; arguments as in :func:`scdiva.kernels.rope_attention`.

        The output of the feed-forward network is not added to the stream here but where the stream is next read. There
        a compiler fuses the sum with the next norm.

        Parameters
        ----------
        x
            Packed tokens `(T, dim)`.
        residual
            `(T, dim)`, to be added to `x` first; None: 0.

        Returns
        -------
        Stream and residual, both `(T, dim)`, whose sum is the output.
        """
        x = x if residual is None else x + residual
        x = x + self.attention(normed(self.attention_norm, x), cu_seqlens, cos, sin, backend, max_seqlen)
        return x, self.ffn(normed(self.ffn_norm, x))

    def keys_and_values(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Keys and values, `(T, 2, H, D)`; arguments as in :meth:`forward`."""
        return self.attention.keys_and_values(normed(self.attention_norm, x, residual))

    def of_first_tokens(self, x: Tensor, keys_and_values: Tensor, *attention: Any) -> Tensor:
        """Output for the first token of each cell, `(B, dim)`; arguments as in :meth:`Attention.of_first_tokens`."""
        x = x + self.attention.of_first_tokens(normed(self.attention_norm, x), keys_and_values, *attention)
        return x + self.ffn(normed(self.ffn_norm, x))


class Blocks(nn.ModuleList):
    r"""Sequence of transformer blocks over packed cells.

    The blocks share the rotations of all positions, the attention backend, and the number of parts of a batch. The
    names of the weights are those of a :class:`torch.nn.ModuleList`.

    Parameters
    ----------
    blocks
        Blocks of equal width.
    rope
        Number of positions and base of the rotary frequencies; None: attention without positions.
    backend
        Default attention backend, see :func:`scdiva.kernels.rope_attention`.
    """

    micro_batches = 1
    """Parts of a batch that training processes in turn, see :meth:`forward`."""

    def __init__(
        self, blocks: Iterable[Block] = (), rope: tuple[int, float] | None = None, backend: str = "auto"
    ) -> None:
        super().__init__(blocks)
        self.rope, self.backend = rope, backend
        self._tables: tuple[Tensor, Tensor] | None = None
        self._options: dict[str, Any] | None = None
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, backend: str | None = None) -> Tensor:
        """Map packed tokens `(T, dim)` to `(T, dim)`; arguments as in :meth:`stream`."""
        x, residual = self.stream(x, cu_seqlens, max_seqlen, backend)
        return x if residual is None else x + residual

    def stream(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        backend: str | None = None,
        *,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Residual stream after the blocks.

        Attention is within cells, so a batch can be processed in `micro_batches` parts of whole cells with about equal
        numbers of tokens. With gradients, only the input of each block, `(T, dim)`, is then kept, and the backward pass
        runs the block again on each part (Chen et al. 2016, "Training deep nets with sublinear memory cost"): the
        additional memory is that of the activations of one block on one part. The gradients are those of the whole
        batch, summed in another order. It costs one more forward pass.

        Parameters
        ----------
        x
            `(T, dim)`.
        cu_seqlens
            `(B + 1,)`, cell boundaries; may be on the CPU. If they are on a device, the host waits for them with
            `micro_batches` above 1.
        max_seqlen
            Tokens of the longest cell.
        backend
            Attention backend; None: the default.
        residual
            `(T, dim)`, added to `x` in the first block; None: 0.

        Returns
        -------
        Stream and residual, see :meth:`Block.forward`; a residual of None is 0.
        """
        shared = *self._rotations(x.device), self._resolved(backend, x.device), max_seqlen
        bounds, cu_seqlens = cu_seqlens, to_device(cu_seqlens, x.device)
        if self.micro_batches <= 1 or not torch.is_grad_enabled():
            for block in self:
                x, residual = block(x, cu_seqlens, *shared, residual)
            return x, residual

        def recomputed(block: nn.Module, *inputs: Any) -> Tensor:
            def summed() -> Tensor:  # so that one tensor per block is kept, not two
                x, residual = block(*inputs)
                return x + residual

            run: Callable[..., Tensor] = checkpoint
            return run(summed, use_reentrant=False, preserve_rng_state=False)

        x = x if residual is None else x + residual
        bounds = bounds.cpu()
        ends = torch.linspace(0, float(bounds[-1]), self.micro_batches + 1)[1:-1]
        at = torch.searchsorted(bounds, ends.to(bounds.dtype))
        cells = torch.unique(torch.cat([torch.tensor([0]), at, torch.tensor([len(bounds) - 1])])).tolist()
        outs = []
        for first, last in itertools.pairwise(cells):
            start, stop = int(bounds[first]), int(bounds[last])
            part, part_seqlens = x[start:stop], cu_seqlens[first : last + 1] - start
            for block in self:
                part = recomputed(block, part, part_seqlens, *shared)
            outs.append(part)
        return torch.cat(outs), None

    def of_first_tokens(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        backend: str | None = None,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Compute the output for the first token of each cell only, `(B, dim)`; arguments as in :meth:`stream`.

        The last block then needs only keys and values of the other tokens. No cell may be empty. `micro_batches` is
        ignored.
        """
        cu_seqlens = to_device(cu_seqlens, x.device)
        cos, sin = self._rotations(x.device)
        backend = self._resolved(backend, x.device)
        for block in list(self)[:-1]:
            x, residual = block(x, cu_seqlens, cos, sin, backend, max_seqlen, residual)
        last, first = self[-1], cu_seqlens[:-1]
        assert isinstance(last, Block)
        keys_and_values = self.call(Block.keys_and_values, last, x, residual)
        x = x.index_select(0, first)
        if residual is not None:
            x = x + residual.index_select(0, first)
        return last.of_first_tokens(x, keys_and_values, cu_seqlens, cos, sin, backend)

    def attention_weights(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield layer, cell and attention weights, `(H, L, L)`, one layer of one cell at a time.

        Arguments as in :meth:`forward`; see :func:`scdiva.kernels.attention_weights`.
        """
        cos, sin = self._rotations(x.device)
        backend = self._resolved(None, x.device)
        for number, block in enumerate(self):
            assert isinstance(block, Block)
            q, k, _ = block.attention.project(normed(block.attention_norm, x)).unbind(1)
            weights = attention_weights(q, k, cos=cos, sin=sin, cu_seqlens=cu_seqlens)
            for cell, of_cell in enumerate(weights):
                yield number, cell, of_cell
            if number + 1 < len(self):
                x = torch.add(*block(x, cu_seqlens, cos, sin, backend, max_seqlen))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of tensors and modules that surround the blocks; compiled if the blocks are."""
        if self._options is None:
            return function(*args)
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, **self._options)
        return self._compiled[function](*args)

    def compile_each(self, **options: Any) -> None:
        """Compile each block in place (`torch.compile` with these options), for any number of tokens."""
        self._options, self._compiled = {"dynamic": True, **options}, {}
        for block in self:
            block.compile(**self._options)

    def release_each(self) -> None:
        """Undo :meth:`compile_each`."""
        self._options, self._compiled = None, {}
        for block in self:
            block._compiled_call_impl = None

    def _rotations(self, device: torch.device) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Rotations of all positions, cached for one device; no buffers, which `model.to` would round."""
        if self.rope is None:
            return None, None
        if self._tables is None or self._tables[0].device != device:
            n_positions, base = self.rope
            with torch.inference_mode(False):  # inference tensors could not be used in training later
                self._tables = rope_tables(n_positions, self._attention().head_dim, base, device=device)
        return self._tables

    def _resolved(self, backend: str | None, device: torch.device) -> str:
        """Attention backend; resolved here because blocks may be compiled."""
        attention = self._attention()
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else attention.qkv.weight.dtype
        return resolve_backend(backend or self.backend, head_dim=attention.head_dim, dtype=dtype, device=device)

    def _attention(self) -> Attention:
        first = self[0]
        assert isinstance(first, Block)
        return first.attention


def weighted_sum(table: Tensor, tokens: Tensor, weights: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Weighted sum of table rows over the tokens of each cell.

    Parameters
    ----------
    table
        `(n_tokens, dim)`.
    tokens
        int64 `(T,)`, rows of the table.
    weights
        `(T,)`, weights of the tokens.
    cu_seqlens
        Cell boundaries `(B + 1,)`.

    Returns
    -------
    `(B, dim)`; 0 for a cell without tokens. `(T, dim)` is never formed.
    """
    return F.embedding_bag(
        tokens, table, offsets=cu_seqlens[:-1].long(), per_sample_weights=weights.to(table.dtype), mode="sum"
    )


class SetEncoder(nn.Module):
    r"""Encoder of the set of visible genes, from whose state `[LAT]` starts.

    The paper's figure 2 draws a "latent encoder" that its text does not define. This one is a sum over a set, so it
    depends neither on the order of the genes nor on other cells:

    .. math::

        x = \sum v\,A_g + \min\Bigl(1, \frac{\sum v}{s}\Bigr)\,b, \qquad
        y = \mathrm{MLP}(\sqrt{k}\,\hat x), \qquad
        z = \frac{[\alpha\,\hat x,\; \hat y]}{\sqrt{\alpha^2 + 1}}

    with :math:`\hat x = x / \lVert x \rVert`, so that :math:`z` has length 1 and hardly depends on the depth of the
    cell, which scales :math:`x`. The bias :math:`b` subtracts the mean of the corpus. A cell that shows fewer genes
    (low depth, a panel of genes) contains less of that mean, and less of it is subtracted: the whole mean would shift
    all such cells in the same direction, away from deeper cells of their types. A cell whose values sum to :math:`s`
    (the buffer `full_total`, a share of the corpus mean) or more gets the whole bias. With :math:`A` from a truncated
    SVD of the corpus (:func:`scdiva.train.fit_linear_map`), :math:`\hat x` is a strong zero-shot embedding before the
    first training step, and the learned part cannot overwrite it, because it has separate coordinates.

    Parameters
    ----------
    n_tokens
        Rows of the table :math:`A`: special tokens and genes.
    linear_dim, learned_dim
        Widths of :math:`x` (k) and :math:`y`; `dim` is their sum, the width of :math:`z`.
    hidden
        Width of the two hidden SiLU layers of the MLP.
    balance
        :math:`\alpha`, weight of the linear part.
    """

    def __init__(self, n_tokens: int, linear_dim: int, learned_dim: int, hidden: int, balance: float) -> None:
        super().__init__()
        self.balance = balance
        self.table = nn.Embedding(n_tokens, linear_dim)
        self.bias = nn.Parameter(torch.zeros(linear_dim))
        self.full_total = nn.Buffer(torch.ones(1))  # s
        self.dim = linear_dim + learned_dim
        self.mlp = perceptron(linear_dim, hidden, learned_dim)
        nn.init.normal_(self.table.weight, std=INIT_STD)

    def parts(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Both parts of each cell's state, each of length 1: `(B, linear_dim)` and `(B, learned_dim)`."""
        weights = values.masked_fill(~visible, 0.0)
        total = weighted_sum(torch.ones_like(self.table.weight[:, :1]), tokens, weights, cu_seqlens)
        bias = (total / self.full_total).clamp_max(1.0) * self.bias
        x = F.normalize(weighted_sum(self.table.weight, tokens, weights, cu_seqlens) + bias, dim=1)
        y = F.normalize(self.mlp(x * x.shape[1] ** 0.5), dim=1)
        return x, y

    def forward(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, visible: Tensor) -> Tensor:
        """Encode each cell from its visible tokens; `visible` bool `(T,)`. Returns `(B, linear_dim + learned_dim)`."""
        x, y = self.parts(tokens, values, cu_seqlens, visible)
        return torch.cat([self.balance * x, y], dim=1) / (self.balance**2 + 1) ** 0.5


def in_bf16(module: nn.Module) -> nn.Module:
    """Copy a module with its linear layers in bfloat16; all other modules are shared."""
    if isinstance(module, nn.Linear):
        return Bf16Linear(module)
    copied = copy.copy(module)
    copied._modules = {name: child if child is None else in_bf16(child) for name, child in module._modules.items()}
    return copied


class Bf16Linear(nn.Linear):
    """Linear layer in bfloat16; sums are in float32 before rounding."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight = _fixed_bf16(layer.weight)
        self.bias = None if layer.bias is None else _fixed_bf16(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., in_features)` to `(..., out_features)`."""
        return F.linear(x.to(torch.bfloat16), self.weight, self.bias)


def _fixed_bf16(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().to(torch.bfloat16), requires_grad=False)
