"""Blocks run over the cells of a batch part by part, for a device that cannot hold the activations of all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def run_in_parts(
    blocks: Iterable[nn.Module],
    x: Tensor,
    cu_seqlens: Tensor,
    n_parts: int,
    cos: Tensor | None,
    sin: Tensor | None,
    backend: str,
    max_seqlen: int,
) -> Tensor:
    """Run blocks one after the other over a batch, some of its cells at a time.

    Blocks look at one cell at a time, so the result is that of the whole batch. Of each part only what goes in and out
    is kept; in the backward pass it is run again (Chen et al. 2016, "Training deep nets with sublinear memory cost").
    Gradients then are those of the whole batch, added up in another order, and the activations of one part are the
    most that is held. It costs one more forward pass.

    Parameters
    ----------
    blocks
        Transformer blocks.
    x
        `(T, dim)`.
    cu_seqlens
        `(B + 1,)`; read back from a GPU.
    n_parts
        At most so many parts, of whole cells and about as many tokens each.
    cos, sin, backend, max_seqlen
        As for :class:`~scdiva.nn.layers.Block`.

    Returns
    -------
    `(T, dim)`.
    """
    bounds = cu_seqlens.cpu()
    wanted = torch.linspace(0, float(bounds[-1]), n_parts + 1)[1:-1]
    at = torch.searchsorted(bounds, wanted.to(bounds.dtype))
    cells = torch.unique(torch.cat([torch.tensor([0]), at, torch.tensor([len(bounds) - 1])])).tolist()

    def through(part: Tensor, starts: Tensor) -> Tensor:
        for block in blocks:
            part = block(part, starts, cos, sin, backend, max_seqlen)
        return part

    step: Callable[..., Tensor] = checkpoint
    outs = []
    for first, last in itertools.pairwise(cells):
        start, stop = int(bounds[first]), int(bounds[last])
        starts = cu_seqlens[first : last + 1] - start
        outs.append(step(through, x[start:stop], starts, use_reentrant=False))
    return torch.cat(outs)
