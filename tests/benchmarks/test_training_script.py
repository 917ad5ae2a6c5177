from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.train import PretrainingConfig, PretrainingModule

SMALL = ScDiVaConfig(n_genes=90, dim=32, n_layers=2, n_heads=2, ffn_dim=48, max_length=40, anchor="learned")


@pytest.fixture
def training(script):
    return script("training")


def test_flops_are_about_those_that_torch_counts(training):
    """Torch does not count SDPA on a CPU; the formula leaves the small heads out."""
    model = ScDiVa(SMALL, generator=torch.Generator().manual_seed(0)).train()
    module = PretrainingModule(model, PretrainingConfig.paper())
    lengths = torch.tensor([40, 31])
    batch, masked = training.batch_of(SMALL, lengths), []
    counter = FlopCounterMode(display=False)
    with counter:
        training.step(module, batch, None, "fp32", masked)
    assert 0 < masked[0] < 71
    attention = 3 * SMALL.n_layers * sum(4 * n**2 * SMALL.dim for n in (lengths + 1).tolist())
    expected = training.train_flops(SMALL, lengths + 1, masked[0]) - attention
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)
    assert all(parameter.grad is None for parameter in module.parameters())
