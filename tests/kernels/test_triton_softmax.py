"""Run by test_triton.py with TRITON_INTERPRET=1: the gene head's softmax on a CPU, against float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from triton_cases import gene_head, softmax

from scdiva.diffusion import loss
from scdiva.kernels import _triton_softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # bfloat16 is wrong in the interpreter
def test_softmax_minus_one_agrees_with_float64(dtype):
    softmax(dtype, device="cpu", backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_loss_agrees_with_float64(dtype, monkeypatch):
    calls = []

    def counted(*arguments, **options):
        calls.append(options)
        original(*arguments, **options)

    original = _triton_softmax.softmax_minus_one
    monkeypatch.setattr(_triton_softmax, "softmax_minus_one", counted)
    monkeypatch.setattr(loss, "FUSED", ("cpu",))
    monkeypatch.setitem(loss.ALIGNED, "cpu", 64)
    gene_head(dtype, device="cpu", backend="triton")
    assert calls == [{"keep": True}] * 6  # two calls of three chunks each


def test_other_layouts():
    """Targets of any stride are read; logits that are not contiguous raise an error, because they are overwritten."""
    logits, nll = torch.randn(4, 64), torch.empty(2, 4)
    targets = torch.tensor([[3, 0], [5, 0], [63, 0], [0, 0]])[:, 0]
    for row, column in zip(nll, (targets, targets.contiguous()), strict=True):
        _triton_softmax.softmax_minus_one(logits.clone(), column, row, 64, keep=True)
    assert torch.equal(*nll)
    with pytest.raises(ValueError, match="contiguous"):
        _triton_softmax.softmax_minus_one(logits.T, targets, nll[0], 4, keep=True)
