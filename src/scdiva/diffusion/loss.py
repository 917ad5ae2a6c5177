"""The dual denoising loss, with a gene head whose logits are computed in chunks."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva._settings import to_device
from scdiva.diffusion.masking import Corrupted, cell_of_token
from scdiva.kernels import _attention

CPU_CHUNK, GPU_CHUNK = 1024, 4096
"""Default number of rows of logits per chunk. On a CPU, 1,024 to 4,096 differ by 5% in runtime."""
CPU_BLOCK, GPU_BLOCK = 2**18, 2**26
"""Logits per softmax; on a CPU 1 MiB of float32, which fits into a core's cache."""

ALIGNED = {"cuda": 64}
"""Row lengths of logits are multiples of this number, by type of device."""
FUSED = ("cuda",)
"""Types of device on which the softmax of the logits is one Triton kernel."""
FLOAT32_PRODUCTS = torch.version.cuda is not None and torch.__version__ >= "2.11"
"""Whether `torch.addmm` on CUDA adds a half-precision product to a float32 matrix without rounding the product.

The overload with `out_dtype` exists from 2.8 on, but the first versions require the summand in half precision, too.
"""


def widened(weight: Tensor) -> Tensor:
    """Pad a gene head `(n_genes, dim)` with rows of zeros, so that rows of logits are aligned in memory.

    41,818 genes are not a multiple of 8, and half-precision matrix products that are not aligned to 16 bytes take two
    to three times as long. On CUDA the head therefore has 41,856 rows; the padding is excluded from the softmax.
    """
    more = -weight.shape[0] % ALIGNED.get(weight.device.type, 1)
    return F.pad(weight, (0, 0, 0, more)) if more else weight


def gene_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits `(N, n_genes)` of a gene head `(n_genes, dim)` at hidden states `(N, dim)`, with aligned rows."""
    return F.linear(hidden, widened(weight))[:, : weight.shape[0]]


class _LinearCrossEntropy(torch.autograd.Function):
    """Weighted sum of the cross-entropies of `hidden @ weight.T`, a chunk of rows at a time.

    The gradients are computed in the forward pass, chunk by chunk, so nothing of size rows × vocabulary is kept and no
    logit is computed twice. The loss is a scalar, so backward only multiplies by the incoming gradient.

    With P = softmax − onehot of a chunk and row weights w, the gradients are `diag(w) P weight` and
    `(diag(w) P).T hidden`. w is multiplied with the narrow factors, `P weight` and `hidden`, not with P: this is
    vocabulary / dim times less work, and in float16 w·P would underflow (weights of 1e-6 times probabilities of 1e-5).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        row_weight: Tensor,
        chunk: int,
        compute_dtype: torch.dtype,
        want_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        n_rows, n_genes = hidden.shape[0], weight.shape[0]
        high = row_weight.dtype
        want_hidden = want_grad and ctx.needs_input_grad[0]
        want_weight = want_grad and ctx.needs_input_grad[1]
        nll = hidden.new_empty(n_rows, dtype=high)
        grad_hidden = hidden.new_empty(hidden.shape, dtype=high) if want_hidden else None
        weight_c = widened(weight.to(compute_dtype))
        grad_weight = torch.zeros_like(weight_c, dtype=high) if want_weight else None
        # relative weights of at most 1, so that products do not underflow in float16
        largest = row_weight.abs().amax() if n_rows else row_weight.new_ones(())
        largest = torch.where(largest > 0, largest, 1.0)
        relative = (row_weight / largest)[:, None]
        logits = hidden.new_empty((min(chunk, n_rows), weight_c.shape[0]), dtype=compute_dtype)
        for start in range(0, n_rows, chunk):
            rows = slice(start, start + chunk)
            hidden_c = hidden[rows].to(compute_dtype)
            products = torch.mm(hidden_c, weight_c.T, out=logits[: hidden_c.shape[0]])
            _softmax_minus_one(products, targets[rows], nll[rows], n_genes, keep=want_hidden or want_weight)
            if grad_hidden is not None:
                torch.mul(products @ weight_c, row_weight[rows, None], out=grad_hidden[rows])
            if grad_weight is not None:
                scaled = torch.mul(hidden[rows], relative[rows], out=torch.empty_like(hidden_c))
                if compute_dtype == high:
                    grad_weight.addmm_(products.T, scaled)
                elif FLOAT32_PRODUCTS and grad_weight.is_cuda:
                    torch.addmm(grad_weight, products.T, scaled, out_dtype=high, out=grad_weight)
                else:
                    grad_weight += products.T @ scaled
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight[:n_genes], largest)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(nll)
        return (nll * row_weight).sum(), nll

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_nll: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "masked_cross_entropy has no second derivative: call backward without create_graph=True, or take "
                "F.cross_entropy(hidden @ weight.T, targets) on few rows."
            )
        grad_hidden, grad_weight, largest = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad_loss).to(ctx.dtypes[0])
        if grad_weight is not None:
            grad_weight = (grad_weight * (grad_loss * largest)).to(ctx.dtypes[1])
        return grad_hidden, grad_weight, None, None, None, None, None


@functools.cache
def _fused(kind: str, index: int | None) -> bool:
    """Whether the Triton kernel can run on a device; if not, log the reason, once."""
    obstacle = _attention._triton_obstacle(kind, index)
    if obstacle:
        logging.getLogger("scdiva").warning("the softmax of the gene head runs in PyTorch, not in Triton: %s", obstacle)
    return not obstacle


def _softmax_minus_one(logits: Tensor, targets: Tensor, nll: Tensor, n_genes: int, *, keep: bool) -> None:
    """Write the cross-entropies of `logits` to `nll`; with `keep`, turn the logits into softmax − onehot, in place.

    Columns from `n_genes` on are padding: their probability and gradient are 0, whatever their values. On CUDA one
    Triton kernel reads the logits twice, the second time from the cache, and writes them once; in PyTorch these are
    some ten passes.
    """
    device = logits.device
    if device.type in FUSED and nll.dtype == torch.float32 and _fused(device.type, device.index):
        from scdiva.kernels import _triton_softmax

        _triton_softmax.softmax_minus_one(logits, targets, nll, n_genes, keep=keep)
        return
    logits[:, n_genes:] = -torch.inf
    # blocks of rows keep the float32 copies of half-precision logits small, and on a CPU in the cache
    block = CPU_BLOCK if device.type == "cpu" else GPU_BLOCK
    step = max(1, block // max(logits.shape[1], 1))
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        target = targets[rows, None]
        log_p = torch.log_softmax(logits[rows], dim=1, dtype=nll.dtype)
        picked = log_p.gather(1, target)
        torch.neg(picked.squeeze(1), out=nll[rows])
        if keep:
            torch.exp(log_p, out=logits[rows])
            logits[rows].scatter_(1, target, torch.expm1(picked).to(logits.dtype))


def masked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_weight: Tensor | None = None, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a linear gene head on the hidden states of masked positions.

    Equal, in value and in every gradient, to
    `row_weight @ F.cross_entropy(hidden @ weight.T, targets, reduction="none")` without ever holding more than `chunk`
    rows of logits (for a batch of 192 × 1200 tokens and 41,818 genes these would be 18 GiB in bfloat16). log-sum-exp
    and the accumulated gradients are float32 (float64 for float64 input). Inside `torch.autocast` the matrix products
    run in autocast's dtype.

    The gradients are computed in the forward pass, which therefore needs the row weights. There is no second
    derivative.

    Parameters
    ----------
    hidden
        Shape `(N, dim)`; rows of masked positions only.
    weight
        Shape `(n_genes, dim)`.
    targets
        int64 of shape `(N,)`: the gene's row in `weight`, i.e. token minus `N_SPECIAL`.
    row_weight
        Shape `(N,)`, a constant. None is all ones.
    chunk
        Rows per chunk. None: 1,024 on a CPU; 4,096 elsewhere, where smaller chunks take longer to accumulate into the
        gradient of `weight`.

    Returns
    -------
    `loss`, a scalar with gradient, and `nll` of shape `(N,)`, without gradient, in nats.

    Raises
    ------
    ValueError
        If `targets` or `row_weight` and `hidden` differ in length, `row_weight` requires a gradient, or a target is not
        a row of `weight`. On CUDA an invalid target triggers an assertion of the device, to avoid a synchronisation.
    RuntimeError
        In backward under `create_graph=True`.

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion import masked_cross_entropy
    >>> hidden, weight = torch.zeros(2, 4), torch.zeros(8, 4)
    >>> loss, each = masked_cross_entropy(hidden, weight, torch.tensor([1, 5]))
    >>> [round(float(x), 1) for x in each.exp()]  # uniform over eight genes
    [8.0, 8.0]
    """
    if targets.shape != hidden.shape[:1] or (row_weight is not None and row_weight.shape != hidden.shape[:1]):
        raise ValueError(f"targets and row_weight need one entry for each of the {hidden.shape[0]} rows of hidden.")
    kind = hidden.device.type
    if chunk is None:
        chunk = CPU_CHUNK if kind == "cpu" else GPU_CHUNK
    if row_weight is not None and row_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "row_weight requires a gradient, and none would reach it: pass row_weight.detach(). (The gradient of a "
            "row's weight is its nll.)"
        )
    wrong = (targets < 0) | (targets >= weight.shape[0])
    if kind == "cuda":
        torch._assert_async(~wrong.any(), f"targets are not genes of a head with {weight.shape[0]} genes")
    elif kind != "meta" and bool(wrong.any()):
        raise ValueError(
            f"{int(wrong.sum())} targets are not genes of a head with {weight.shape[0]} genes "
            f"(first: {int(targets[wrong][0])}). Targets are tokens minus {N_SPECIAL}."
        )
    compute_dtype = torch.promote_types(hidden.dtype, weight.dtype)
    # softmax and sums in float32 (float64 for float64 input), whatever the dtype of the matrix products
    high = torch.promote_types(compute_dtype, torch.float32)
    if torch.is_autocast_enabled(kind) and compute_dtype != torch.float64:
        compute_dtype = torch.get_autocast_dtype(kind)
    row_weight = hidden.new_ones(hidden.shape[0], dtype=high) if row_weight is None else row_weight.detach().to(high)
    with torch.autocast(kind, enabled=False):  # dtypes are set explicitly
        # custom functions run without grad mode, so that of the caller is passed
        loss, nll = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, weight, targets, row_weight, chunk, compute_dtype, torch.is_grad_enabled()
        )
    return loss, nll


def loss_weights(hidden_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Weight of each position in the loss, `1 / |M| / B`, so that `loss = Σ weight · error`.

    M are the masked positions of a cell, B the number of cells with masked positions. This is the paper's training
    algorithm; with t ~ U(0, 1) it is the any-order bound on log p(cell) per gene. The sum in the paper's main text is
    not a bound.

    Parameters
    ----------
    hidden_mask
        bool, shape `(T,)`.
    cu_seqlens
        Shape `(B + 1,)`.

    Returns
    -------
    float32 of shape `(T,)`, 0 where nothing is masked.

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion import loss_weights
    >>> hidden = torch.tensor([True, True, False, True, False])
    >>> loss_weights(hidden, torch.tensor([0, 3, 5])).tolist()
    [0.25, 0.25, 0.0, 0.5, 0.0]
    """
    n_cells = cu_seqlens.numel() - 1
    cells = cell_of_token(cu_seqlens, hidden_mask.numel())
    picked = hidden_mask.float()
    count = torch.zeros(n_cells, device=picked.device).index_add_(0, cells, picked)
    per_cell = 1.0 / count.clamp_min(1) / (count > 0).sum().clamp_min(1)
    return picked * per_cell[cells]


def dual_loss(
    hidden: Tensor,
    gene_weight: Tensor,
    predicted_values: Tensor,
    tokens: Tensor,
    values: Tensor,
    corrupted: Corrupted,
    cu_seqlens: Tensor,
    *,
    value_weight: float = 10.0,
    scored: Tensor | None = None,
    logits: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Dual denoising loss: identity cross-entropy plus λ times the squared error of the value.

    Paper, section "Depth-Invariant Sampling and Optimization" and algorithm "scDiVa Training". The identity term runs
    over the masked positions; the value term over every position with a masked value, which are the same unless
    value-only masks were drawn.

    Parameters
    ----------
    hidden
        Shape `(T, dim)`: the denoiser's last hidden states. The gene head is applied to the masked ones only.
    gene_weight
        Shape `(n_genes, dim)`: the gene head.
    predicted_values
        Shape `(T,)`.
    tokens, values
        The clean batch, `(T,)` each; on one device with `corrupted`, `cu_seqlens` and `scored`. If that is the CPU and
        `hidden` is on another device, masks are computed on the CPU without synchronisation.
    corrupted
        The corrupted batch, the denoiser's input.
    cu_seqlens
        Shape `(B + 1,)`.
    value_weight
        λ; 10 in the paper's table "Training configuration".
    scored
        bool `(T,)`: masked positions whose identity is scored, a random subset in each cell. None: all. Weights are
        divided by their number.
    logits
        `(N, n_genes)`, logits of the scored positions if they are not those of the gene head alone
        (:meth:`scdiva.models.ScDiVa.logits`). None: `hidden @ gene_weight.T`, computed in chunks.

    Returns
    -------
    The loss (scalar) and its parts without gradient: `identity` (nats), `value` (squared log-normalised units, not yet
    times λ), the plain means over positions `identity_per_token` and `value_per_token`, and `n_masked`.

    Examples
    --------
    >>> import torch
    >>> from scdiva.diffusion import dual_loss, mask_tokens
    >>> tokens, values = torch.tensor([3, 4, 5, 3, 6]), torch.tensor([2.0, 1.5, 1.0, 3.0, 0.5])
    >>> cu_seqlens = torch.tensor([0, 3, 5])  # two cells, of 3 and of 2 genes
    >>> generator = torch.Generator().manual_seed(0)
    >>> hidden = mask_tokens(tokens, values, cu_seqlens, torch.tensor([1.0, 1.0]), generator)
    >>> loss, parts = dual_loss(torch.zeros(5, 4), torch.zeros(8, 4), values, tokens, values, hidden, cu_seqlens)
    >>> round(parts["identity"].exp().item(), 1), parts["value"].item()
    (8.0, 0.0)
    """
    masked, hidden_value = corrupted.masked, corrupted.value_mask
    masked = masked if scored is None else masked & scored
    w_identity, w_value = loss_weights(masked, cu_seqlens), loss_weights(hidden_value, cu_seqlens)
    # row numbers once, because each boolean index is a synchronisation with the device
    rows, n_masked, n_hidden = masked.nonzero().squeeze(1), masked.sum(), hidden_value.sum()
    tensors = rows, tokens[rows] - N_SPECIAL, w_identity[rows], values, hidden_value, w_value, n_masked, n_hidden
    rows, genes, weight, values, hidden_value, w_value, n_masked, n_hidden = (
        to_device(x, hidden.device) for x in tensors
    )
    if logits is None:
        identity, nll = masked_cross_entropy(hidden.index_select(0, rows), gene_weight, genes, weight)
    else:
        each = torch.nn.functional.cross_entropy(logits, genes, reduction="none")
        identity, nll = (each * weight).sum(), each.detach()
    high = torch.promote_types(predicted_values.dtype, torch.float32)
    error = torch.where(hidden_value, predicted_values.to(high) - values.to(high), 0.0)
    error_sq = error.square()
    value = (error_sq * w_value.to(high)).sum()
    loss = identity + value_weight * value
    parts = {
        "identity": identity.detach(),
        "value": value.detach(),
        "identity_per_token": nll.sum() / max(nll.numel(), 1),
        "value_per_token": error_sq.detach().sum() / n_hidden.clamp_min(1),
        "n_masked": n_masked,
    }
    return loss, parts
