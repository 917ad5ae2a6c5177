"""Run by test_triton.py with TRITON_INTERPRET=1: the kernel on a CPU, and a model that is compiled around it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from scdiva.kernels import _triton, rope_attention, rope_tables
from scdiva.kernels._attention import first_token_attention
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.inference import at_precision


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize(
    ("head_dim", "rotated", "dtype"),
    [(32, True, torch.float32), (64, True, torch.float16), (64, False, torch.float32), (128, True, torch.float32)],
)
def test_the_kernel_is_the_first_rows_of_attention(head_dim, rotated, dtype):
    """Keys and values are views of one projection; cells of less than a tile, of one and of several."""
    assert _triton.INTERPRETED
    cu_seqlens = bounds([1, 63, 64, 130, 5])
    n, first = int(cu_seqlens[-1]), cu_seqlens[:-1].long()
    generator = torch.Generator().manual_seed(head_dim)
    q, kv = torch.randn(n, 2, head_dim, generator=generator), torch.randn(n, 2, 2, head_dim, generator=generator)
    q, k, v = q.to(dtype), *kv.to(dtype).unbind(1)
    cos, sin = rope_tables(130, head_dim) if rotated else (None, None)
    options = {"cos": cos, "sin": sin, "cu_seqlens": cu_seqlens}
    got = first_token_attention(q[first], k, v, backend="triton", **options)
    expected = rope_attention(q.double(), k.double(), v.double(), backend="reference", **options)[first]
    bound = 2e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(got.double(), expected, atol=bound, rtol=bound)


def model(n_layers: int = 3) -> ScDiVa:
    config = ScDiVaConfig(n_genes=50, dim=64, n_layers=n_layers, n_heads=2, ffn_dim=96, max_length=40, anchor="learned")
    return ScDiVa(config, generator=torch.Generator().manual_seed(0)).eval()


@pytest.mark.parametrize(("precision", "grad"), [("fp32", True), ("bf16", False)])
def test_encode_compiles_once_for_all_batches(precision, grad):
    """Value embedding, blocks, and keys and values of the last block: three graphs without a break."""
    network, counter = model(), CompileCounterWithBackend("eager")
    batches = [[40, 0, 20], [7, 13, 20, 20], [5], [16] * 3, [33, 31], [2] * 9]
    cells = [(torch.arange(sum(n)) % 50 + 3, torch.ones(sum(n)), bounds(n)) for n in batches]
    with torch.no_grad():
        expected = [network.encode(*cell, backend="reference") for cell in cells]
    for number, (cell, state) in enumerate(zip(cells, expected, strict=True)):
        if number % 3 == 0:  # as in another call of tl.embed
            network = at_precision(network, precision)
            network.compile_blocks(backend=counter, fullgraph=True)
        with torch.set_grad_enabled(grad):
            got = network.encode(*cell, backend="triton")
        if precision == "fp32":  # the interpreter's bfloat16 is wrong
            torch.testing.assert_close(got.detach(), state, atol=1e-5, rtol=1e-5)
        if grad:
            got.sum().backward()
    # an empty graph is one that torch discarded and traced again with constants such as eps
    assert sum(len(graph.graph.nodes) > 0 for graph in counter.graphs) == 3
