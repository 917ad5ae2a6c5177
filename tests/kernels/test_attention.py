from __future__ import annotations

import math
import re

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from scdiva.kernels import (
    _attention,
    _sdpa,
    attention_weights,
    resolve_backend,
    rope_attention,
    rope_attention_qkv,
    rope_tables,
)
from scdiva.kernels._attention import first_token_attention

BOTH = pytest.mark.parametrize("backend", ["sdpa", "reference"])


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def random_qkv(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def slow_attention(q, k, v, base: float | None):
    """One head of one cell, as the paper writes it, number by number; RoPE on the pairs (j, j + D/2)."""
    length, dim = q.shape

    def turn(x, pos):
        if base is None:
            return x
        out = x.copy()
        for j in range(dim // 2):
            angle = pos * base ** (-2 * j / dim)
            a, b = x[j], x[j + dim // 2]
            out[j] = math.cos(angle) * a - math.sin(angle) * b
            out[j + dim // 2] = math.sin(angle) * a + math.cos(angle) * b
        return out

    out = np.zeros_like(v)
    for i in range(length):
        scores = [turn(q[i], i) @ turn(k[j], j) / math.sqrt(dim) for j in range(length)]
        weights = np.exp(scores) / np.exp(scores).sum()
        for j in range(length):
            out[i] += weights[j] * v[j]
    return out


@BOTH
@pytest.mark.parametrize("base", [None, 10_000.0, 100.0])
def test_packed_attention_is_the_papers_formula(backend, base):
    lengths = [5, 1, 9, 5]
    q, k, v = random_qkv(sum(lengths), 2, 6, dtype=torch.float64)
    cos, sin = (None, None) if base is None else rope_tables(9, 6, base)
    out = rope_attention(q, k, v, cos=cos, sin=sin, cu_seqlens=bounds(lengths), backend=backend)
    start = 0
    for length in lengths:
        cell = slice(start, start + length)
        for head in range(2):
            expected = slow_attention(*(x[cell, head].numpy() for x in (q, k, v)), base)
            np.testing.assert_allclose(out[cell, head].numpy(), expected, atol=1e-6)
        start += length


@BOTH
@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(0, 17), min_size=1, max_size=7).filter(any), seed=st.integers(0, 99))
def test_packed_and_single_cells_agree(backend, lengths, seed):
    cu = bounds(lengths)
    q, k, v = random_qkv(sum(lengths), 3, 4, seed=seed)
    cos, sin = rope_tables(max(lengths), 4)
    packed = rope_attention(q, k, v, cos=cos, sin=sin, cu_seqlens=cu, backend=backend)

    for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        if start < stop:
            cell = [x[start:stop] for x in (q, k, v)]
            alone = rope_attention(*cell, cos=cos, sin=sin, cu_seqlens=bounds([stop - start]), backend=backend)
            torch.testing.assert_close(alone, packed[start:stop], atol=1e-5, rtol=0)


@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(1, 13), min_size=1, max_size=6), seed=st.integers(0, 99), rotate=st.booleans())
def test_gradients_of_sdpa_are_the_references(lengths, seed, rotate):
    cos, sin = rope_tables(max(lengths), 8) if rotate else (None, None)
    gradients = {}
    for backend in ("sdpa", "reference"):
        qkv = random_qkv(sum(lengths), 2, 8, seed=seed).requires_grad_()
        out = rope_attention(*qkv, cos=cos, sin=sin, cu_seqlens=bounds(lengths), backend=backend)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed + 1))
        (out * weights).sum().backward()
        gradients[backend] = qkv.grad
    assert gradients["reference"].abs().max() > 0
    torch.testing.assert_close(gradients["sdpa"], gradients["reference"], atol=2e-5, rtol=1e-4)


@BOTH
def test_gradients_are_right_in_float64(backend):
    lengths = [3, 1, 3, 2]
    q, k, v = random_qkv(sum(lengths), 1, 4, dtype=torch.float64).requires_grad_().unbind()
    cos, sin = rope_tables(3, 4)

    def attend(q, k, v):
        return rope_attention(q, k, v, cos=cos, sin=sin, cu_seqlens=bounds(lengths), backend=backend)

    assert torch.autograd.gradcheck(attend, (q, k, v))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_tensor_gives_the_bits_of_three(backend, dtype):
    lengths = [7, 1, 7]
    cos, sin = rope_tables(7, 8)
    options = {"cos": cos, "sin": sin, "cu_seqlens": bounds(lengths), "backend": backend}
    qkv = random_qkv(sum(lengths), 2, 8, dtype=dtype).transpose(0, 1).contiguous().requires_grad_()
    results = []
    for out in (rope_attention_qkv(qkv, **options), rope_attention(*qkv.unbind(1), **options)):
        results.append((out, *torch.autograd.grad(out.float().square().sum(), qkv)))
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)


@pytest.mark.parametrize(
    "qkv", [torch.zeros(6, 2, 2, 4), torch.zeros(6, 3, 8), torch.zeros(6, 3, 2, 4, dtype=torch.int64)]
)
def test_one_tensor_of_another_shape_or_dtype_is_refused(qkv):
    with pytest.raises(ValueError, match=r"qkv must be packed, \(T, 3, H, D\)"):
        rope_attention_qkv(qkv, cu_seqlens=bounds([6]))


@BOTH
def test_one_cell_never_sees_another(backend):
    q, k, v = random_qkv(9, 2, 4)
    cu = bounds([4, 5])
    before = rope_attention(q, k, v, cu_seqlens=cu, backend=backend)
    for x in (q, k, v):
        x[4:] = torch.nan
    after = rope_attention(q, k, v, cu_seqlens=cu, backend=backend)
    assert torch.equal(after[:4], before[:4])
    assert after[4:].isnan().all()


@BOTH
def test_low_precision_keeps_its_dtype_and_follows_the_reference(backend):
    lengths = [33, 70, 1]
    exact = random_qkv(sum(lengths), 2, 16)
    cos, sin = rope_tables(70, 16)
    out = rope_attention(*exact.bfloat16(), cos=cos, sin=sin, cu_seqlens=bounds(lengths), backend=backend)
    expected = rope_attention(*exact, cos=cos, sin=sin, cu_seqlens=bounds(lengths), backend="reference")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("lengths", [[130, 5, 130, 0], [130]])
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("head_dim", [32, 64])
def test_bfloat16_on_a_cpu_takes_a_path_of_its_own_without_gradients(head_dim, rotate, lengths):
    q, k, v = (x.bfloat16() for x in random_qkv(sum(lengths), 3, head_dim))
    cos, sin = rope_tables(130, head_dim) if rotate else (None, None)
    options = {"cos": cos, "sin": sin, "cu_seqlens": bounds(lengths)}
    expected = rope_attention(q.double(), k.double(), v.double(), **options, backend="reference")
    errors = []
    for needs_grad in (False, True):
        assert _sdpa._by_head(q.requires_grad_(needs_grad), k, v) != needs_grad
        out = rope_attention(q, k, v, **options, backend="sdpa")
        assert out.dtype == torch.bfloat16
        errors.append(float((out.double() - expected).norm() / expected.norm()))
    assert max(errors) < 1.5e-2
    with torch.no_grad():
        assert _sdpa._by_head(q, k, v)
        assert not _sdpa._by_head(q.float(), k.float(), v.float())


def test_gradients_in_bfloat16_on_a_cpu_follow_the_reference():
    lengths = [514, 60, 514, 521, 60, 60]  # one cell a product, three, and one for the fused kernel
    qkv = [x.bfloat16().requires_grad_() for x in random_qkv(sum(lengths), 3, 16)]
    exact = [x.detach().double().requires_grad_() for x in qkv]
    for inputs, backend in ((qkv, "sdpa"), (exact, "reference")):
        (rope_attention(*inputs, cu_seqlens=bounds(lengths), backend=backend).double() ** 2).sum().backward()
    for x, expected in zip(qkv, exact, strict=True):
        for got, true in zip(x.grad.split(lengths), expected.grad.split(lengths), strict=True):
            assert float((got.double() - true).norm() / true.norm()) < 2e-2


def test_weights_rebuild_the_output():
    lengths = [4, 0, 7]
    q, k, v = random_qkv(sum(lengths), 3, 6)
    cos, sin = rope_tables(7, 6)
    out = rope_attention(q, k, v, cos=cos, sin=sin, cu_seqlens=bounds(lengths), backend="reference")
    weights = list(attention_weights(q, k, cos=cos, sin=sin, cu_seqlens=bounds(lengths)))
    assert [tuple(w.shape) for w in weights] == [(3, n, n) for n in lengths]
    torch.testing.assert_close(weights[2].sum(-1), torch.ones(3, 7))
    torch.testing.assert_close(out[4:], torch.einsum("hqk,khd->qhd", weights[2], v[4:]))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3, 1, 48), torch.float32, "not 48. Pass backend='auto'"),
        ((3, 1, 64), torch.float64, "not torch.float64. Pass backend='auto'"),
        ((3, 1, 64), torch.float32, "on 'cpu'. Pass backend='auto'"),
    ],
)
def test_triton_refuses_what_it_cannot_do(shape, dtype, message):
    pytest.importorskip("triton", reason="Triton is not installed")
    q = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match=re.escape(message)):
        rope_attention(q, q, q, cu_seqlens=bounds([3]), backend="triton")


def test_without_triton_the_error_says_how_to_install_it(monkeypatch):
    _attention._triton_obstacle.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    q = torch.zeros(3, 1, 64)
    with pytest.raises(ImportError, match=re.escape('pip install "scdiva[gpu]"')):
        rope_attention(q, q, q, cu_seqlens=bounds([3]), backend="triton")
    _attention._triton_obstacle.cache_clear()


@pytest.mark.parametrize(
    ("head_dim", "dtype", "obstacle", "chosen"),
    [
        (64, torch.bfloat16, "", "triton"),
        (48, torch.bfloat16, "", "sdpa"),
        (64, torch.float64, "", "sdpa"),
        (64, torch.bfloat16, "it is Tuesday", "sdpa"),
    ],
)
def test_auto_takes_triton_on_cuda_and_says_once_why_not(monkeypatch, caplog, head_dim, dtype, obstacle, chosen):
    monkeypatch.setattr(_attention, "_triton_obstacle", lambda *device: obstacle)
    _attention._log_once.cache_clear()
    with caplog.at_level("WARNING", logger="scdiva"):
        for _ in range(2):
            backend = resolve_backend("auto", head_dim=head_dim, dtype=dtype, device=torch.device("cuda", 0))
            assert backend == chosen
    assert len(caplog.records) == (chosen == "sdpa")
    _attention._log_once.cache_clear()


GOOD = torch.zeros(6, 2, 4)


TABLES = rope_tables(6, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "flash"}, "Unknown attention backend 'flash'"),
        ({"k": torch.zeros(5, 2, 4)}, "one shape"),
        ({"v": torch.zeros(6, 2, 4, dtype=torch.float64)}, "one floating dtype"),
        ({"q": GOOD[None], "k": GOOD[None], "v": GOOD[None]}, r"must be packed, \(T, H, D\)"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "int32"),
        ({"cu_seqlens": torch.tensor([0], dtype=torch.int32)}, "at least one cell"),
        ({"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, "tokens, 6; .*0 to 5"),
        ({"cu_seqlens": torch.tensor([1, 6], dtype=torch.int32)}, "it goes from 1 to 6"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 6], dtype=torch.int32)}, "falls in between"),
        ({"sin": None}, "Pass both cos and sin"),
        ({"cos": TABLES[0][:5], "sin": TABLES[1][:5]}, "6 tokens.*cos and sin hold 5"),
        ({"cos": TABLES[0][:, :1], "sin": TABLES[1][:, :1]}, r"must be \(max_pos, 4/2\)"),
    ],
)
def test_bad_packed_input_is_refused(change, message):
    arguments = {
        "q": GOOD,
        "k": GOOD,
        "v": GOOD,
        "cos": TABLES[0],
        "sin": TABLES[1],
        "cu_seqlens": bounds([6]),
    } | change
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(ValueError, match=message):
        rope_attention(q, k, v, **arguments)


def inputs(lengths, n_heads=2, head_dim=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), n_heads, head_dim, generator=generator).to(dtype) for _ in range(3))
    return q, k, v, torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize("lengths", [[7], [1], [5, 1, 12, 5], [40, 3]])
@pytest.mark.parametrize("rotated", [True, False])
def test_it_is_the_first_rows_of_attention(lengths, rotated):
    *qkv, bounds = inputs(lengths, dtype=torch.float64)
    cos, sin = rope_tables(max(lengths), 8) if rotated else (None, None)
    options = {"cos": cos, "sin": sin, "cu_seqlens": bounds}
    first = bounds[:-1].long()
    results = []
    for attend in (
        lambda q, k, v: rope_attention(q, k, v, backend="reference", **options)[first],
        lambda q, k, v: first_token_attention(q[first], k, v, **options),
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
