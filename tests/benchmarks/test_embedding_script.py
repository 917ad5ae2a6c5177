from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.inference import open_encoder

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


def test_the_padded_arm_gives_the_same_states(embedding):
    model = ScDiVa(SMALL, generator=torch.Generator().manual_seed(0)).eval()
    lengths = embedding.typical_lengths(5, 40)
    assert np.median(lengths) == 30
    assert max(lengths) == 40
    cells = [embedding.cell_of(SMALL, n, seed) for seed, n in enumerate(lengths)]
    with open_encoder(model, threads=1) as encode:
        unpadded = embedding.one_by_one(encode, cells)
    np.testing.assert_allclose(embedding.encode_padded(model, cells, 40), unpadded, atol=1e-5)
    plain = embedding.encode_as_scgpt(model, embedding.transformer_encoder(SMALL, nested=False), cells, 40)
    assert plain.shape == unpadded.shape
