"""Work that rates are taken of: about what torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.train import PretrainingConfig, PretrainingModule

SMALL = ScDiVaConfig(n_genes=90, dim=32, n_layers=2, n_heads=2, ffn_dim=48, max_length=40, anchor="learned")


@pytest.fixture
def model():
    return ScDiVa(SMALL, generator=torch.Generator().manual_seed(0))


def counted(call):
    counter = FlopCounterMode(display=False)
    with counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("n_genes", [1, 17, 40])
def test_embedding(script, model, n_genes):
    """Torch counts products only, as the formula does; the value embedding's first layer has one input."""
    embedding = script("speed")
    cell = embedding.cell_of(SMALL, n_genes)
    with torch.no_grad():  # SDPA on a CPU is not counted
        assert (
            counted(lambda: model.read(*cell, backend="reference"))
            == embedding.embed_flops(SMALL, [n_genes + 1]) + 64 * n_genes
        )
        assert counted(embedding.products(model, n_genes, torch.float32)) == embedding.linear_flops(SMALL, n_genes)


def test_training(script, model):
    """Torch does not count SDPA on a CPU; the formula leaves the small heads out."""
    training, lengths, masked = script("speed"), torch.tensor([40, 31]), []
    module = PretrainingModule(model.train(), PretrainingConfig.paper())
    found = counted(lambda: training.step(module, training.batch_of(SMALL, lengths), None, "fp32", masked))
    attention = 3 * SMALL.n_layers * sum(4 * n**2 * SMALL.dim for n in (lengths + 1).tolist())
    assert found == pytest.approx(training.train_flops(SMALL, lengths + 1, masked[0]) - attention, rel=0.03)
