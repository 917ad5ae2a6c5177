"""The loop of fits held in memory, on a task whose solution is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from scdiva.train import loop as L
from scdiva.train.base import decay_groups


def run(steps=60, loss_of=None, **fields):
    """Fit a line to points on a line."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=draw)
    layer = nn.Linear(3, 1)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]]) + 0.5
    options = {"steps": steps, "groups": decay_groups(layer, 0.0), "clip": 1.0, "desc": "fitting"} | fields
    seen = []
    found = L.train_steps(
        layer,
        loss_of or (lambda step: (layer(x) - y).square().mean()),
        lambda step: 0.1 * min(1.0, step / 5),
        after=lambda step, loss: seen.append((step, float(loss), loss.requires_grad)),
        **options,
    )
    return found, layer, seen


def test_it_learns_and_says_how_far():
    found, layer, seen = run()
    assert found == (60, "steps")
    assert [step for step, *_ in seen] == list(range(1, 61))
    assert seen[-1][1] < 0.05 * seen[0][1]
    assert not any(part[2] for part in seen)
    torch.testing.assert_close(layer.weight, torch.tensor([[1.0, 2.0, -1.0]]), atol=0.4, rtol=0)


def test_what_is_frozen_stays():
    layer = nn.Linear(3, 1)
    layer.bias.requires_grad_(False)
    before, x = layer.bias.clone(), torch.ones(4, 3)
    L.train_steps(
        layer, lambda step: layer(x).square().mean(), lambda step: 0.1, steps=3,
        groups=decay_groups(layer, 0.0), clip=1.0, desc="fitting",
    )  # fmt: skip
    assert torch.equal(layer.bias, before)


def test_an_interrupt_leaves_what_was_learned():
    weight = torch.zeros(1, requires_grad=True)

    def loss_of(step):
        if step == 6:
            raise KeyboardInterrupt
        return (weight.sum() - 1).square()

    assert run(loss_of=loss_of)[0] == (5, "interrupted")


def test_a_loss_that_is_not_finite_is_an_error():
    with pytest.raises(FloatingPointError, match="The loss is inf at step 1"):
        run(loss_of=lambda step: torch.tensor(torch.inf, requires_grad=True))


def test_each_epoch_is_a_permutation_of_its_own():
    rows = L.shuffled(np.arange(70), 32, 0, whole=True)
    taken = [next(rows) for _ in range(4)]
    assert all(len(part) == 32 for part in taken)
    first, second = np.concatenate(taken[:2]), np.concatenate(taken[2:])
    assert len(set(first)) == len(set(second)) == 64
    assert not np.array_equal(first, second)
    some = L.shuffled(np.arange(40), 32, 0)
    assert [len(next(some)) for _ in range(3)] == [32, 8, 32]
