"""What goes into a pass through the network, checked, and what comes out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from scdiva._constants import MASK, N_SPECIAL
from scdiva.kernels._attention import longest_cell
from scdiva.models.config import ScDiVaConfig


class ScDiVaOutput(NamedTuple):
    """What one pass gives.

    Attributes
    ----------
    hidden
        `(T, dim)`, the gene positions after the final norm, in the order of the input; `(0, dim)` without transformer.
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
        `(B,)`, share of each cell's identities that is masked.
    """

    hidden: Tensor
    cell_state: Tensor
    anchor: Tensor | None
    cells: Tensor
    read: Tensor | None
    hidden_share: Tensor


def check_input(
    config: ScDiVaConfig,
    tokens: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    value_mask: Tensor | None,
    anchor_state: Tensor | None,
    *,
    max_length: int | None = None,
) -> int:
    """Check what a network is given.

    Parameters
    ----------
    config
        Of the network.
    tokens, values, cu_seqlens, value_mask, anchor_state
        As :meth:`scdiva.models.ScDiVa.forward` takes them.
    max_length
        Most genes of a cell; None takes the configuration's.

    Returns
    -------
    Number of genes of the longest cell.

    Raises
    ------
    ValueError
        If the tensors don't fit each other, a token isn't one of this vocabulary, or a cell is too long.
    """
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


def mean_of_cells(flags: Tensor, cu_seqlens: Tensor, dtype: torch.dtype) -> Tensor:
    """Share of each cell's positions that are flagged, `(B,)`; 0 of an empty cell."""
    lengths = cu_seqlens.diff().long()
    total = torch.segment_reduce(flags.to(dtype), "sum", lengths=lengths, unsafe=True)
    return total / lengths.clamp_min(1)
