"""Blocks one after the other: in parts, and the rotations that they share."""

from __future__ import annotations

import pytest
import torch

from scdiva.models import Block, Blocks


def made(lengths):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    blocks = Blocks(
        (Block(8, 2, 12).double() for _ in range(2)), rope=(max(lengths) + 1, 10_000.0), backend="reference"
    )
    x = torch.randn(sum(lengths), 8, generator=generator, dtype=torch.float64)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return blocks, x, bounds


@pytest.mark.parametrize("lengths", [[3, 5, 2, 4, 6], [1, 20, 1], [7]])
@pytest.mark.parametrize("n_parts", [2, 3, 8])
def test_parts_give_what_the_whole_gives(lengths, n_parts):
    blocks, x, bounds = made(lengths)
    found = []
    for parts in (1, n_parts):
        blocks.zero_grad()
        one = x.clone().requires_grad_()
        blocks.micro_batches = parts
        y = blocks(one, bounds, max(lengths))
        (y * torch.linspace(-1, 2, 8)).square().sum().backward()
        found.append([y.detach(), one.grad, *(p.grad.clone() for p in blocks.parameters())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


def test_no_more_than_one_part_is_held(monkeypatch):
    """Of each part only what goes into each block is kept; cells are never cut."""
    blocks, x, bounds = made([4] * 8)
    blocks.micro_batches = 4
    forward, sizes, kept = Block.forward, [], []

    def seen(block, x, cu_seqlens, *args):
        sizes.append((len(x), cu_seqlens.tolist()))
        return forward(block, x, cu_seqlens, *args)

    monkeypatch.setattr(Block, "forward", seen)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        blocks(x.requires_grad_(), bounds, 4)
    assert sizes == [(8, [0, 4, 8])] * 8
    assert sum(kept) < (len(blocks) + 1) * x.numel(), "the whole network would keep many times its input"
