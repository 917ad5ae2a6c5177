"""Run by test_triton.py with TRITON_INTERPRET=1: every kernel, number by number, on a CPU.

float32 and float16 only: the interpreter's bfloat16 is wrong without a word (a known fault of Triton's).
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parent))
from triton_cases import one_tensor, packed

from scdiva.kernels import (
    _triton,
    _triton_configs,
    autotune_attention,
    keep_attention_plan,
    rope_attention,
    rope_attention_qkv,
    rope_tables,
)
from scdiva.kernels._triton_configs import KERNELS, Tiles
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.layers import Block


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def cells(lengths: list[int], head_dim: int, n_heads: int = 1):
    """Queries, keys and values as they come from one projection, and a gradient."""
    source = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(sum(lengths), 3, n_heads, head_dim, generator=source)
    return qkv, torch.randn(sum(lengths), n_heads, head_dim, generator=source)


def test_this_is_the_interpreter():
    assert _triton.INTERPRETED


@pytest.mark.parametrize(
    ("head_dim", "dtype", "rotate"),
    [(32, torch.float32, True), (32, torch.float32, False), (64, torch.float16, True), (128, torch.float32, True)],
)
def test_packed_cells_and_their_gradients_agree_with_float64(head_dim, dtype, rotate):
    packed(dtype, head_dim, rotate, device="cpu", backend="triton")


def test_gradients_in_any_layout():
    one_tensor(torch.float32, 32, True, device="cpu", backend="triton")


def test_three_tensors_give_the_bits_of_one():
    qkv, grad = cells([40, 3], 32, n_heads=2)
    cos, sin = rope_tables(40, 32)
    options = {"cos": cos, "sin": sin, "cu_seqlens": bounds([40, 3]), "backend": "triton"}
    one = rope_attention_qkv(qkv.requires_grad_(), **options)
    (gradient,) = torch.autograd.grad(one, qkv, grad)
    inputs = [x.detach().contiguous().requires_grad_() for x in qkv.unbind(1)]
    out = rope_attention(*inputs, **options)
    three = [out, *torch.autograd.grad(out, inputs, grad)]
    for got, expected in zip(three, [one, *gradient.unbind(1)], strict=True):
        assert torch.equal(got, expected)


def test_the_gradient_of_a_projection_is_not_copied(monkeypatch):
    """It lies where the kernels wrote it."""
    kernels, written = _triton.backward, []
    monkeypatch.setattr(_triton, "backward", lambda *args: written.append(kernels(*args)) or written[-1])
    projected = torch.randn(29, 192, requires_grad=True)
    out = rope_attention_qkv(projected.view(29, 3, 2, 32), cu_seqlens=bounds([20, 9]), backend="triton")
    (gradient,) = torch.autograd.grad(out.square().sum(), projected)
    assert gradient.data_ptr() == written[0].data_ptr()


def test_any_layout_and_a_generous_bound():
    lengths = [20, 45]
    qkv, _ = cells(lengths, 32, n_heads=2)
    q, k, v = qkv.unbind(1)
    strided = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    assert strided[0].stride(-1) != 1
    options = {"cu_seqlens": bounds(lengths), "backend": "triton"}
    expected = rope_attention(q, k, v, **options)
    assert torch.equal(rope_attention(*strided, **options), expected)
    assert torch.equal(rope_attention(q, k, v, max_seqlen=1000, **options), expected)


def test_tuning_keeps_what_was_fastest(monkeypatch):
    """A simulated clock makes one candidate fastest; every candidate is executed."""
    tried = Tiles(32, 32, 1, 1), Tiles(32, 16, 1, 1), Tiles(16, 32, 1, 1)
    monkeypatch.setattr(_triton_configs, "_CANDIDATES_32", tried)
    monkeypatch.setattr(_triton, "shared_limit", lambda device: 10**6)
    monkeypatch.setattr(_triton, "_tuned", {})
    blocks = 16, 32

    def seconds(call):
        plan = call.args[-1]
        tiles = [plan.of(kernel) for kernel in KERNELS]
        if (32, 32, 1, 1) in tiles:
            raise OutOfResources(1, 1, "shared memory")
        return 1.0 + sum(one[:2] != blocks for one in tiles)

    monkeypatch.setattr(_triton, "median_seconds", seconds)
    kind = {"head_dim": 32, "dtype": torch.float32, "device": "cpu"}
    stored_plan = autotune_attention(n_heads=1, length=20, n_tokens=40, **kind)
    plan = _triton.device_plan(torch.device("cpu"), 32, torch.float32)
    assert {plan.of(kernel)[:2] for kernel in KERNELS} == {blocks}
    monkeypatch.setattr(_triton, "_tuned", {})
    assert _triton.device_plan(torch.device("cpu"), 32, torch.float32) != plan
    keep_attention_plan(json.loads(json.dumps(stored_plan)), **kind)  # as from a file
    assert _triton.device_plan(torch.device("cpu"), 32, torch.float32) == plan


def test_no_tokens():
    qkv = torch.zeros(0, 3, 2, 32, requires_grad=True)
    out = rope_attention_qkv(qkv, cu_seqlens=bounds([0, 0]), backend="triton")
    out.sum().backward()
    assert out.shape == (0, 2, 32)
    assert qkv.grad.shape == qkv.shape


def test_the_operator_keeps_torch_s_rules():
    """Schema, fake tensors, autograd registration and dynamic shapes, as torch itself checks them."""
    lengths = [3, 20]
    qkv, _ = cells(lengths, 32, n_heads=2)
    cos, sin = rope_tables(20, 32)
    torch.library.opcheck(_triton._attention, (qkv.requires_grad_(), cos, sin, bounds(lengths), 20))


def test_a_block_is_one_graph_and_agrees_compiled():
    block = Block(64, 2, 96)
    torch.manual_seed(0)
    cos, sin = rope_tables(50, 32)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ([4, 5], [30, 1, 12]):
        x = torch.randn(sum(lengths), 64)
        results = []
        for call in (block, compiled):
            leaf = x.clone().requires_grad_()
            out = torch.add(*call(leaf, bounds(lengths), cos, sin, "triton", max(lengths)))
            out.square().sum().backward()
            results.append((out.detach(), leaf.grad))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)


def small_model(n_layers: int = 1) -> ScDiVa:
    config = ScDiVaConfig(n_genes=50, dim=64, n_layers=n_layers, n_heads=2, ffn_dim=96, max_length=40, anchor="learned")
    return ScDiVa(config, generator=torch.Generator().manual_seed(0)).eval()


def test_batches_of_any_length_compile_once_and_agree():
    """Whatever the numbers of cells and tokens: values, blocks and norm are a graph each without gradients and with."""
    model = small_model(n_layers=2)
    names, counter = list(model.state_dict()), CompileCounterWithBackend("eager")
    batches = [[40, 0, 20], [7, 13, 20, 20], [5], [16] * 3, [33, 31], [2] * 9]
    batches = [(torch.arange(sum(n)) % 50 + 3, torch.ones(sum(n)), bounds(n)) for n in batches]
    with torch.no_grad():
        expected = [model(*cells, backend="reference").hidden for cells in batches]
    model.compile_blocks(backend=counter, fullgraph=True)
    for n_graphs, grad in ((3, False), (6, True)):
        for cells, hidden in zip(batches, expected, strict=True):
            with torch.set_grad_enabled(grad):
                out = model(*cells, backend="triton")
            torch.testing.assert_close(out.hidden.detach(), hidden, atol=1e-5, rtol=1e-5)
            if grad:
                out.hidden.sum().backward()
        # an empty graph is one that torch discarded and traced again with constants such as eps
        assert sum(len(graph.graph.nodes) > 0 for graph in counter.graphs) == n_graphs
    assert list(model.state_dict()) == names
