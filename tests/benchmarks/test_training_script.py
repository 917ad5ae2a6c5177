from __future__ import annotations

import math
import sys

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


def test_a_step_trains(training):
    model = ScDiVa(SMALL, generator=torch.Generator().manual_seed(0)).train()
    module = PretrainingModule(model, PretrainingConfig.paper())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    batch, before, masked = training.batch_of(SMALL, torch.tensor([20])), model.gene_weight.clone(), []
    training.step(module, batch, None, "bf16", masked)
    assert torch.equal(model.gene_weight, before)
    training.step(module, batch, optimizer, "bf16", masked)
    assert not torch.equal(model.gene_weight, before)
    assert masked[0] == masked[1]


@pytest.mark.parametrize("in_hardware", [True, False])
def test_all_rows_come_from_a_run(training, monkeypatch, in_hardware):
    monkeypatch.setattr(sys.modules["_timing"], "multiplies_bf16", lambda device: in_hardware)
    rows = training.measure(SMALL, 1, side=32)
    precisions = ["fp32", "bf16"] if in_hardware else ["fp32"]
    assert [row["what"].split(", ", 1)[1] for row in rows] == [
        *(f"share of matmul rate, {precision}" for precision in precisions),
        f"share of matmul rate, {precisions[-1]}, typical cells",
        f"share of matmul rate, {precisions[-1]}, without AdamW",
    ]
    for row in rows:
        assert all(math.isfinite(value) and value > 0 for key, value in row.items() if key != "what")
        assert row["value"] == pytest.approx(row["gflops"] / row["matmul_gflops"])
        assert row["gflops"] == pytest.approx(row["cells_per_cpu_second"] * row["gflop_per_cell"])
    assert rows[-2]["genes_per_cell"] < rows[0]["genes_per_cell"] == 40
