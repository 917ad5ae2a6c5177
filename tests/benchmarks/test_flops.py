"""FLOPs that rates are shares of are those that torch counts, apart from attention on a CPU and small heads."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.train import PretrainingConfig, PretrainingModule

SMALL = ScDiVaConfig(n_genes=100, dim=32, n_layers=2, n_heads=2, ffn_dim=48, max_length=40, anchor="learned")


def test_flops_of_embedding_and_training(script):
    work, gpu, model = script("_gpu"), script("gpu"), ScDiVa(SMALL, generator=torch.Generator().manual_seed(0))
    for n_genes in (1, 17, 40):
        cell = script("speed").cell_of(SMALL, n_genes)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.read(*cell, backend="reference")  # the value embedding's first layer has one input
        assert counter.get_total_flops() == work.embed_flops(SMALL, [n_genes + 1]) + 64 * n_genes
    lengths = torch.tensor([40, 31])
    module, setting = PretrainingModule(model.train(), PretrainingConfig.paper()), gpu.dry_setting()
    with FlopCounterMode(display=False) as counter:
        loss, parts = module.compute_loss(gpu.batch_of(setting, lengths), torch.Generator().manual_seed(1))
        loss.backward()
    attention = 3 * SMALL.n_layers * sum(4 * n**2 * SMALL.dim for n in (lengths + 1).tolist())
    expected = work.train_flops(SMALL, lengths + 1, float(parts["n_masked"])) - attention
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)
