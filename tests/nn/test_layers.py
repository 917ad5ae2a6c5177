"""Each layer against its formula in the paper's appendix, written out in float64."""

from __future__ import annotations

import numpy as np
import torch

from scdiva.kernels import rope_tables
from scdiva.models import Attention, Block, SwiGLU


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shaken(module: torch.nn.Module, seed: int = 1) -> torch.nn.Module:
    """The module in float64 with every weight of size 1/2, so that no term of a formula is too small to see."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return module


def slow_rms_norm(x, gamma, eps):
    out = np.empty_like(x)
    for i, row in enumerate(x):
        out[i] = row / np.sqrt(sum(e * e for e in row) / len(row) + eps) * gamma
    return out


def slow_silu(x):
    return x / (1 + np.exp(-x))


def slow_swiglu(x, module: SwiGLU):
    gate, up, down = (array(layer.weight) for layer in (module.gate, module.up, module.down))
    return (slow_silu(x @ gate.T) * (x @ up.T)) @ down.T


def slow_attention(x, module: Attention, base: float):
    """Equation `mha` for one cell, with W_Q, W_K, W_V and the rotation as a complex number."""
    dim = x.shape[1]
    d_h = dim // module.n_heads
    w_q, w_k, w_v = np.split(array(module.qkv.weight), 3)
    turn = np.exp(1j * np.outer(np.arange(len(x)), base ** (-2 * np.arange(d_h // 2) / d_h)))
    heads = []
    for h in range(module.n_heads):
        rows = slice(h * d_h, (h + 1) * d_h)
        q, k, v = x @ w_q[rows].T, x @ w_k[rows].T, x @ w_v[rows].T
        q, k = ((y[:, : d_h // 2] + 1j * y[:, d_h // 2 :]) * turn for y in (q, k))
        scores = np.exp((q @ k.conj().T).real / np.sqrt(d_h))
        heads.append(scores / scores.sum(axis=1, keepdims=True) @ v)
    return np.concatenate(heads, axis=1) @ array(module.out.weight).T


def test_swiglu():
    module = shaken(SwiGLU(6, 10))
    x = draw(5, 6)
    np.testing.assert_allclose(array(module(x)), slow_swiglu(array(x), module), atol=1e-10)


def test_attention():
    module = shaken(Attention(12, 3))
    x = 0.5 * draw(9, 12)
    cos, sin = rope_tables(9, 4, 50.0)
    for backend in ("sdpa", "reference"):
        out = module(x, torch.tensor([0, 9], dtype=torch.int32), cos, sin, backend)
        np.testing.assert_allclose(array(out), slow_attention(array(x), module, 50.0), atol=1e-5)


def test_block_is_pre_norm():
    block = shaken(Block(8, 2, 12, eps=0.1))
    x = draw(6, 8)
    cos, sin = rope_tables(6, 4)
    slow = array(x)
    slow = slow + slow_attention(slow_rms_norm(slow, array(block.attention_norm.weight), 0.1), block.attention, 1e4)
    slow = slow + slow_swiglu(slow_rms_norm(slow, array(block.ffn_norm.weight), 0.1), block.ffn)
    out = block(x, torch.tensor([0, 6], dtype=torch.int32), cos, sin)
    np.testing.assert_allclose(array(out), slow, atol=1e-5)


def test_block_without_positions_ignores_order():
    block = shaken(Block(8, 2, 12))
    x = draw(6, 8)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    cu = torch.tensor([0, 6], dtype=torch.int32)
    torch.testing.assert_close(block(x, cu, None, None)[order], block(x[order], cu, None, None))
    cos, sin = rope_tables(6, 4)
    assert (block(x, cu, cos, sin)[order] - block(x[order], cu, cos, sin)).abs().max() > 1e-2


def test_residual_weights_start_at_the_size_asked_for():
    block = Block(64, 4, 128, out_std=0.005)
    for weight, std in [
        (block.attention.out.weight, 0.005),
        (block.ffn.down.weight, 0.005),
        (block.attention.qkv.weight, 0.02),
        (block.ffn.gate.weight, 0.02),
    ]:
        assert 0.9 * std < weight.std().item() < 1.1 * std
