"""Attention of the first token of each cell."""

from __future__ import annotations

import pytest
import torch

from scdiva.kernels import rope_attention, rope_tables
from scdiva.kernels._attention import first_token_attention


def inputs(lengths, n_heads=2, head_dim=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), n_heads, head_dim, generator=generator).to(dtype) for _ in range(3))
    return q, k, v, torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize("lengths", [[7], [1], [5, 1, 12, 5], [40, 3]])
@pytest.mark.parametrize("rotated", [True, False])
def test_it_is_the_first_rows_of_attention(lengths, rotated):
    *qkv, bounds = inputs(lengths, dtype=torch.float64)
    cos, sin = rope_tables(max(lengths), 8) if rotated else (None, None)
    given = {"cos": cos, "sin": sin, "cu_seqlens": bounds}
    first = bounds[:-1].long()
    results = []
    for attend in (
        lambda q, k, v: rope_attention(q, k, v, backend="reference", **given)[first],
        lambda q, k, v: first_token_attention(q[first], k, v, **given),
    ):
        q, k, v = (x.clone().requires_grad_() for x in qkv)
        out = attend(q, k, v)
        (out * torch.linspace(-1, 2, 8)).square().sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lengths", [[30], [30, 9]])
def test_bfloat16_is_summed_in_float32(lengths):
    q, k, v, bounds = inputs(lengths, dtype=torch.bfloat16)
    first, (cos, sin) = bounds[:-1].long(), rope_tables(30, 8)
    got = first_token_attention(q[first], k, v, cos=cos, sin=sin, cu_seqlens=bounds)
    exact = rope_attention(q.double(), k.double(), v.double(), cos=cos, sin=sin, cu_seqlens=bounds)[first]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=0.02, atol=0.02)
