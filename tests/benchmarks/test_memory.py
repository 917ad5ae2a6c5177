"""Peaks are counted in bytes that are known beforehand; activations once a storage."""

from __future__ import annotations

import torch
from torch import nn

MIB = 2**18  # float32 numbers in a MiB


def test_peak_counts_what_lives_at_once(script):
    kept = torch.ones(4 * MIB)

    def work():
        first = torch.ones(6 * MIB)
        del first  # given back before the next: not in the peak
        return kept + torch.ones(4 * MIB)  # 4 + 4 MiB at once: kept was there before

    peak = script("_memory").peak_bytes(work)
    assert 8 * 2**20 <= peak < 8.01 * 2**20


def test_saved_tensors_are_counted_once_and_parameters_are_not(script):
    saved_bytes = script("activations").saved_bytes
    x = torch.randn(100, 8, requires_grad=True)
    model = nn.Linear(8, 4, bias=False)
    with_model = saved_bytes(lambda: model(x).sum(), model)
    assert with_model == {"rest": 100 * 8 * 4}
    # the product saves both of its factors, which share a storage; exp saves its result
    assert saved_bytes(lambda: (x[:50] * x[50:]).exp().sum(), model) == {"rest": 100 * 8 * 4 + 50 * 8 * 4}


def test_bytes_belong_to_the_innermost_part(script):
    activations = script("activations")
    from scdiva.nn import RMSNorm, SwiGLU

    model = nn.Sequential(RMSNorm(16), SwiGLU(16, 32))
    x = torch.randn(10, 16, requires_grad=True)
    saved = activations.saved_bytes(lambda: model(x).sum(), model)
    assert set(saved) == {"norms", "SwiGLU"}
    # input, and gate and up at least
    assert saved["SwiGLU"] >= 10 * (16 + 2 * 32) * 4
    assert saved["norms"] >= 10 * 16 * 4
