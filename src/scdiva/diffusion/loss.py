"""The dual denoising loss, with a gene head that never holds tokens × vocabulary."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scdiva._constants import N_SPECIAL
from scdiva.diffusion.masking import Corrupted, cell_of_token

LossNorm = Literal["per_cell", "inv_t", "sum"]
"""How the positions of a cell are weighted, see :func:`loss_weights`."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Weighted sum of the cross-entropies of `hidden @ weight.T`, a chunk of rows at a time.

    The gradients are worked out beside the loss while a chunk's logits are at hand, so nothing of size
    rows × vocabulary outlives its chunk and no logit is computed twice. The loss is one scalar, so backward only has
    to multiply by the incoming gradient.
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
        # softmax and sums in float32 at least (float64 stays float64), whatever the matrix products run in
        high = torch.promote_types(hidden.dtype, torch.float32)
        want_hidden = want_grad and ctx.needs_input_grad[0]
        want_weight = want_grad and ctx.needs_input_grad[1]
        nll = torch.empty(hidden.shape[0], dtype=high, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=high) if want_weight else None
        weight_c = weight.to(compute_dtype)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            hidden_c = hidden[rows].to(compute_dtype)
            target = targets[rows, None]
            logits = (hidden_c @ weight_c.T).to(high)
            log_norm = torch.logsumexp(logits, dim=1, keepdim=True)
            nll[rows] = (log_norm - logits.gather(1, target)).squeeze(1)
            if want_hidden or want_weight:
                # d loss / d logits = w * (softmax - onehot), in place of the logits
                grad = logits.sub_(log_norm).exp_()
                grad.scatter_add_(1, target, grad.new_full(target.shape, -1.0))
                grad.mul_(row_weight[rows, None])
                grad_c = grad.to(compute_dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad_c @ weight_c).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight += (grad_c.T @ hidden_c).to(high)
        ctx.grads = (grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(nll)
        return (nll * row_weight).sum(), nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, grad_nll: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.grads
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def masked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_weight: Tensor | None = None, *, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a linear gene head on the hidden states of masked positions.

    Equal, in value and in every gradient, to
    `row_weight @ F.cross_entropy(hidden @ weight.T, targets, reduction="none")` without ever holding more than `chunk`
    rows of logits (for a batch of 192 × 1200 tokens and 41,818 genes these would be 18 GiB in bfloat16). log-sum-exp
    and the accumulated gradient of `weight` are float32 (float64 for float64 input). Inside `torch.autocast` the
    matrix products run in autocast's dtype.

    The row weights are asked for beforehand because the gradients are computed in the forward pass.

    Parameters
    ----------
    hidden
        Shape `(N, dim)`; rows of masked positions only.
    weight
        Shape `(n_genes, dim)`.
    targets
        int64 of shape `(N,)`: the gene's row in `weight`, i.e. token minus `N_SPECIAL`.
    row_weight
        Shape `(N,)`; no gradient flows into it. None is all ones.
    chunk
        Rows per step.

    Returns
    -------
    `loss`, a scalar with gradient, and `nll` of shape `(N,)`, without gradient, in nats.

    Raises
    ------
    ValueError
        If shapes disagree or a target is no row of `weight`.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden (N, dim) and weight (n_genes, dim) must agree in dim, got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}."
        )
    if targets.shape != hidden.shape[:1] or (row_weight is not None and row_weight.shape != hidden.shape[:1]):
        raise ValueError(f"targets and row_weight need one entry for each of the {hidden.shape[0]} rows of hidden.")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}.")
    wrong = (targets < 0) | (targets >= weight.shape[0])
    if bool(wrong.any()):
        raise ValueError(
            f"{int(wrong.sum())} targets are no gene of a head with {weight.shape[0]} genes "
            f"(first: {int(targets[wrong][0])}). Targets are tokens minus {N_SPECIAL}."
        )
    high = torch.promote_types(hidden.dtype, torch.float32)
    if row_weight is None:
        row_weight = torch.ones(hidden.shape[0], device=hidden.device)
    kind = hidden.device.type
    autocast = torch.is_autocast_enabled(kind)
    compute_dtype = torch.get_autocast_dtype(kind) if autocast else torch.promote_types(hidden.dtype, weight.dtype)
    # custom functions run outside of autograd: what the caller's grad mode is must be told
    loss, nll = _LinearCrossEntropy.apply(
        hidden, weight, targets, row_weight.detach().to(high), chunk, compute_dtype, torch.is_grad_enabled()
    )
    return loss, nll


def loss_weights(
    hidden_mask: Tensor, cu_seqlens: Tensor, probability: Tensor, loss_norm: LossNorm = "per_cell"
) -> Tensor:
    """Weight of each position in the loss, so that `loss = Σ weight · error`.

    ==========  ==================================  ================================================================
    loss_norm   weight of a hidden position         what it estimates
    ==========  ==================================  ================================================================
    per_cell    1 / abs(M_b) / (cells with any M)   the paper's training algorithm; with t ~ U(0, 1) the any-order
                                                    bound on log p(cell) per gene
    inv_t       1 / (t_b L_b) / B                   the same bound by the continuous-time weight 1 / t, `tL` being
                                                    the expectation of abs(M)
    sum         1 / B                               the plain sum of the paper's main text; no bound
    ==========  ==================================  ================================================================

    Parameters
    ----------
    hidden_mask
        bool, shape `(T,)`.
    cu_seqlens
        Shape `(B + 1,)`.
    probability
        Shape `(B,)`: with which probability a position of the cell was hidden (`t` for identities). Read by "inv_t".
    loss_norm
        See the table.

    Returns
    -------
    float32 of shape `(T,)`, 0 where nothing is hidden.

    Raises
    ------
    ValueError
        For an unknown `loss_norm`, or "inv_t" with a probability of 0.
    """
    if loss_norm not in get_args(LossNorm):
        raise ValueError(f"loss_norm must be one of {', '.join(get_args(LossNorm))}, got {loss_norm!r}.")
    n_cells = cu_seqlens.numel() - 1
    cells = cell_of_token(cu_seqlens, hidden_mask.numel())
    picked = hidden_mask.float()
    if loss_norm == "sum":
        return picked / n_cells
    if loss_norm == "inv_t":
        if bool((probability <= 0).any()):
            raise ValueError('loss_norm="inv_t" divides by t: draw times with min_time > 0.')
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).clamp_min(1)
        per_cell = 1.0 / (probability.to(picked) * lengths) / n_cells
    else:
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
    times: Tensor,
    *,
    loss_norm: LossNorm = "per_cell",
    value_weight: float = 10.0,
    value_mask_rate: float = 0.0,
    chunk: int = 1024,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Dual denoising loss: identity cross-entropy plus λ times the squared error of the value.

    Paper, section "Depth-Invariant Sampling and Optimization" and algorithm "scDiVa Training". The identity term runs
    over the masked positions; the value term over every position with a hidden value, which are the same unless
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
        The clean batch, `(T,)` each.
    corrupted
        What the denoiser saw.
    cu_seqlens, times
        Shapes `(B + 1,)` and `(B,)`.
    loss_norm
        See :func:`loss_weights`.
    value_weight
        λ; 10 in the paper's table "Training configuration".
    value_mask_rate
        With which `corrupted` was drawn: a value is hidden with probability `t + (1 - t) * rate` (read by "inv_t").
    chunk
        Rows of logits held at once.

    Returns
    -------
    The loss (scalar) and its parts without gradient: `identity` (nats), `value` (squared log-normalised units, not yet
    times λ), the plain means over positions `identity_per_token` and `value_per_token`, and `n_masked`.
    """
    times = times.to(hidden.device)
    w_identity = loss_weights(corrupted.masked, cu_seqlens, times, loss_norm)
    w_value = loss_weights(corrupted.value_mask, cu_seqlens, times + (1 - times) * value_mask_rate, loss_norm)
    masked, hidden_value = corrupted.masked, corrupted.value_mask
    identity, nll = masked_cross_entropy(
        hidden[masked], gene_weight, tokens[masked] - N_SPECIAL, w_identity[masked], chunk=chunk
    )
    high = torch.promote_types(predicted_values.dtype, torch.float32)
    error_sq = (predicted_values[hidden_value].to(high) - values[hidden_value].to(high)).square()
    value = (error_sq * w_value[hidden_value].to(high)).sum()
    loss = identity + value_weight * value
    parts = {
        "identity": identity.detach(),
        "value": value.detach(),
        "identity_per_token": nll.sum() / max(nll.numel(), 1),
        "value_per_token": error_sq.detach().sum() / max(error_sq.numel(), 1),
        "n_masked": masked.sum(),
    }
    return loss, parts
