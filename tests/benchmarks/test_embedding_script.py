from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scdiva.models import ScDiVa, ScDiVaConfig

SMALL = ScDiVaConfig(n_genes=90, dim=32, n_layers=2, n_heads=2, ffn_dim=48, max_length=40, anchor="learned")


@pytest.fixture
def embedding(script):
    return script("embedding")


def test_flops_are_those_that_torch_counts(embedding):
    """Torch counts products only, as the formula does; the value embedding's first layer has one input."""
    model = ScDiVa(SMALL, generator=torch.Generator().manual_seed(0))
    for n_genes in (1, 17, 40):
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            model.encode(*embedding.cell_of(SMALL, n_genes), backend="reference")  # SDPA on a CPU is not counted
        assert counter.get_total_flops() == embedding.flops(SMALL, n_genes) + 2 * n_genes * SMALL.dim
        counter = FlopCounterMode(display=False)
        with counter:
            embedding.products(model, n_genes, torch.float32)()
        assert counter.get_total_flops() == embedding.linear_flops(SMALL, n_genes)
