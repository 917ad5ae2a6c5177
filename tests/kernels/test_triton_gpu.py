"""The Triton kernels on a GPU against a float64 reference, outputs poisoned beforehand.

Needs nothing but torch, triton and pytest, so that it also runs on a bare GPU machine:

    PYTHONPATH=src python -m pytest tests/kernels/test_triton_gpu.py --noconftest -p no:cacheprovider
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from scdiva.kernels import rope_attention, rope_tables

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: the kernels are tested in the interpreter instead"
)

HEADS = 3
MAX_LENGTH = 4096
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative error, by norms. float32 products are formed in full; the others have operands of 11 and 8 bits."""
RAGGED = {
    "odd lengths": [1, 33, 64, 100, 257],
    "empty cells": [0, 5, 0, 1201, 17, 0],
    "one long cell": [MAX_LENGTH],
    "long and short": [2049, 3, 129, 128, 127],
}
COMBINATIONS = [
    pytest.param(dtype, head_dim, rotate, id="-".join([str(dtype)[6:], str(head_dim), "rope" if rotate else "plain"]))
    for dtype in LIMITS
    for head_dim in (32, 64, 128)
    for rotate in (True, False)
]


def random_lengths(seed: int) -> list[int]:
    """Cells as they come: a dozen of 0 to 700 tokens."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 701, (12,), generator=draw).tolist()


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill all new memory with NaN inside the block, so that what a kernel leaves out shows.

    First what the allocator has at hand, then, by torch's own means, every tensor that is made without a content.
    """
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in [1 << 19] * 64 + [1 << 28] * 2]
    del blocks
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_new_memory_is_poisoned():
    """Otherwise the tests below would not see what a kernel leaves out."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    for n in (1, 1000, 10_000_000):
        with poisoned():
            assert torch.empty(n, dtype=torch.bfloat16, device="cuda").isnan().all()
            assert torch.empty_like(torch.ones(n, device="cuda")).isnan().all()


def leaves(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Random q, k, v and the gradient that comes in."""
    draw = torch.Generator("cuda").manual_seed(seed)
    q, k, v, grad = (torch.randn(shape, generator=draw, device="cuda").to(dtype) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], grad


def outcome(inputs: list[torch.Tensor], grad: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """Output and the gradients of q, k and v."""
    out = rope_attention(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def exact(inputs: list[torch.Tensor], grad: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """The same from the reference, in float64."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    return outcome(wide, grad.double(), **{**options, "backend": "reference"})


def check(found: list[torch.Tensor], true: list[torch.Tensor], limit: float, case: str) -> None:
    """Each result within its limit of the truth; NaN fails."""
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, true, strict=True):
        assert a.isfinite().all(), f"{name} of {case}: {int((~a.isfinite()).sum())} of {a.numel()} are not finite"
        size = float(b.norm())
        # of cells with one token only, the gradients of q and k are 0
        error = float((a.double() - b).norm()) / (size if size > 1e-6 * b.numel() ** 0.5 else b.numel() ** 0.5)
        assert error <= limit, f"{name} of {case}: relative error {error:.3g} > {limit}"


def tables(head_dim: int, *, rotate: bool) -> dict[str, torch.Tensor | None]:
    cos, sin = rope_tables(MAX_LENGTH, head_dim, device="cuda") if rotate else (None, None)
    return {"cos": cos, "sin": sin}


@pytest.mark.parametrize(("dtype", "head_dim", "rotate"), COMBINATIONS)
def test_packed(dtype, head_dim, rotate):
    cases = {**RAGGED, **{f"random {seed}": random_lengths(seed) for seed in range(3)}}
    for seed, (case, lengths) in enumerate(cases.items()):
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        inputs, grad = leaves((sum(lengths), HEADS, head_dim), dtype, seed)
        options = {**tables(head_dim, rotate=rotate), "cu_seqlens": bounds}
        true = exact(inputs, grad, **options)
        with poisoned():
            found = outcome(inputs, grad, **options, backend="triton", max_seqlen=max(lengths))
        check(found, true, LIMITS[dtype], case)


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_rows_of_a_wider_tensor(dtype):
    """As in the model: q, k and v are slices of one projection."""
    lengths = [200, 65, 1]
    bounds = torch.tensor([0, 200, 265, 266], dtype=torch.int32, device="cuda")
    draw = torch.Generator("cuda").manual_seed(3)
    qkv = torch.randn(sum(lengths), 3, HEADS, 64, generator=draw, device="cuda").to(dtype)
    grad = torch.randn(sum(lengths), HEADS, 64, generator=draw, device="cuda").to(dtype)
    options = {**tables(64, rotate=True), "cu_seqlens": bounds}
    true = exact([x.contiguous() for x in qkv.unbind(1)], grad, **options)
    inputs = [x.requires_grad_() for x in qkv.unbind(1)]
    with poisoned():
        found = outcome(inputs, grad, **options, backend="triton", max_seqlen=200)
    check(found, true, LIMITS[dtype], "slices")


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_the_same_bits_every_time(dtype):
    lengths = random_lengths(11)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    inputs, grad = leaves((sum(lengths), HEADS, 64), dtype, 5)
    options = {**tables(64, rotate=True), "cu_seqlens": bounds, "backend": "triton", "max_seqlen": max(lengths)}
    first = outcome(inputs, grad, **options)
    for _ in range(5):
        with poisoned():
            again = outcome(inputs, grad, **options)
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a, b)


def test_no_device_is_waited_for():
    """With max_seqlen given, a call asks the device for nothing."""
    bounds = torch.tensor([0, 40, 100], dtype=torch.int32, device="cuda")
    inputs, grad = leaves((100, HEADS, 64), torch.bfloat16, 0)
    options = {**tables(64, rotate=True), "cu_seqlens": bounds, "backend": "triton", "max_seqlen": 60}
    outcome(inputs, grad, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome(inputs, grad, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
