"""The loop of fits held in memory, on a task whose solution is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from scdiva import settings
from scdiva.train import base as L


def run(steps=60, loss_of=None, frozen=(), last=60):
    """Fit a line to points on a line; what the loop says, the layer, and the losses."""
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]]) + 0.5
    layer, seen = nn.Linear(3, 1), []
    for name, p in layer.named_parameters():
        nn.init.zeros_(p)
        p.requires_grad_(name not in frozen)

    def of_line(step):
        loss = (layer(x) - y).square().mean()
        seen.append(float(loss.detach()))
        return loss

    rate = lambda step: 0.1 * min(1.0, step / 5) * (step <= last)  # noqa: E731
    return L.train_steps(layer, loss_of or of_line, rate, steps=steps, desc="fitting"), layer, seen


def test_it_learns_and_says_how_far():
    found, layer, seen = run()
    assert found == (len(seen), "steps") == (60, "steps")
    assert seen[-1] < 0.05 * seen[0]
    torch.testing.assert_close(layer.weight, torch.tensor([[1.0, 2.0, -1.0]]), atol=0.4, rtol=0)


def test_a_learning_rate_of_zero_ends_it_and_the_bar(monkeypatch):
    bars, bar = [], L.progress_bar
    monkeypatch.setattr(L, "progress_bar", lambda **how: bars.append(bar(**how)) or bars[-1])
    with settings.override(progress=True):
        found, _, seen = run(last=20)
    assert found == (len(seen), "converged") == (20, "converged")
    assert (bars[0].total, bars[0].n) == (20, 20)


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
