"""What the fused kernel must compute, case by case, against a float64 reference; outputs are poisoned beforehand.

Needs nothing but torch and scdiva: `test_triton_gpu.py` makes a test of each case, and `benchmarks/gpu.py` goes through
them on a machine without pytest. A case is called with device and backend; it raises AssertionError with what is
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from scdiva.diffusion import masked_cross_entropy
from scdiva.kernels import rope_attention, rope_attention_qkv, rope_tables
from scdiva.kernels._attention import first_token_attention

HEADS = 3
MAX_LENGTH = 4096
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest relative error, by norms. float32 products are formed in full; the others have operands of 8 and 11 bits."""
RAGGED = {
    "odd lengths": [1, 33, 64, 100, 257],
    "empty cells": [0, 5, 0, 1201, 17, 0],
    "one long cell": [MAX_LENGTH],
    "long and short": [2049, 3, 129, 128, 127],
}


def heads_on(device: str, head_dim: int) -> int:
    """Number of heads; fewer in the interpreter, which is slow."""
    return HEADS if device == "cuda" else max(1, 64 // head_dim)


def random_lengths(seed: int) -> list[int]:
    """Cells as they come: a dozen of 0 to 700 tokens."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 701, (12,), generator=draw).tolist()


@contextmanager
def poisoned(device: str) -> Iterator[None]:
    """Fill all new memory with NaN inside the block, so that elements which a kernel does not write are detected.

    First the cached memory of the allocator, then, with an option of torch, every uninitialised tensor.
    """
    if device == "cuda":
        sizes = [1 << 19] * 64 + [1 << 28] * 2
        blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
        del blocks
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def bounds_of(lengths: list[int], device: str) -> torch.Tensor:
    """cu_seqlens."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def leaves(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Random q, k, v and the gradient that comes in."""
    draw = torch.Generator(device).manual_seed(seed)
    q, k, v, grad = (torch.randn(shape, generator=draw, device=device).to(dtype) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], grad


def tables(head_dim: int, device: str, *, rotate: bool = True) -> dict[str, torch.Tensor | None]:
    """Rotations, or none."""
    cos, sin = rope_tables(MAX_LENGTH, head_dim, device=device) if rotate else (None, None)
    return {"cos": cos, "sin": sin}


def outcome(inputs: list[torch.Tensor], grad: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """Output and the gradients of q, k and v."""
    out = rope_attention(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def exact(inputs: list[torch.Tensor], grad: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """The same from the reference, in float64."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    return outcome(wide, grad.double(), **{**options, "backend": "reference"})


def check(results: list[torch.Tensor], true: list[torch.Tensor], limit: float, case: str) -> None:
    """Each result within its limit of the truth; NaN fails."""
    for name, a, b in zip(("out", "dq", "dk", "dv"), results, true, strict=True):
        assert a.isfinite().all(), f"{name} of {case}: {int((~a.isfinite()).sum())} of {a.numel()} are not finite"
        size = float(b.norm())
        # of cells with one token only, the gradients of q and k are 0
        error = float((a.double() - b).norm()) / (size if size > 1e-6 * b.numel() ** 0.5 else b.numel() ** 0.5)
        assert error <= limit, f"{name} of {case}: relative error {error:.3g} > {limit}"


def packed(dtype: torch.dtype, head_dim: int, rotate: bool, *, device: str, backend: str) -> None:
    """Cells of all lengths, one after the other."""
    cells = {**RAGGED, **{f"random {seed}": random_lengths(seed) for seed in range(3)}}
    if device == "cpu":  # a dry run
        cells = {"lengths of a few tiles": [1, 0, 64, 97]}
    for seed, (case, lengths) in enumerate(cells.items()):
        inputs, grad = leaves((sum(lengths), heads_on(device, head_dim), head_dim), dtype, seed, device)
        options = {**tables(head_dim, device, rotate=rotate), "cu_seqlens": bounds_of(lengths, device)}
        true = exact(inputs, grad, **options)
        with poisoned(device):
            results = outcome(inputs, grad, **options, backend=backend, max_seqlen=max(lengths))
        check(results, true, LIMITS[dtype], case)


def one_tensor(dtype: torch.dtype, head_dim: int, rotate: bool, *, device: str, backend: str) -> None:
    """Queries, keys and values as one projection returns them, and gradients in three layouts."""
    lengths = [20, 7, 1] if device == "cpu" else [200, 65, 0, 1, 1201, 64]
    draw = torch.Generator(device).manual_seed(3)
    heads = heads_on(device, head_dim)
    qkv = torch.randn(sum(lengths), 3, heads, head_dim, generator=draw, device=device).to(dtype)
    dense = torch.randn(sum(lengths), heads, head_dim, generator=draw, device=device).to(dtype)
    options = {**tables(head_dim, device, rotate=rotate), "cu_seqlens": bounds_of(lengths, device)}
    strided = dense.transpose(0, 1).contiguous().transpose(0, 1)
    for layout, grad in {"dense": dense, "strided": strided, "expanded": dense[:1, :1].expand_as(dense)}.items():
        true = exact([x.contiguous() for x in qkv.unbind(1)], grad, **options)
        leaf = qkv.clone().requires_grad_()
        with poisoned(device):
            out = rope_attention_qkv(leaf, **options, backend=backend, max_seqlen=max(lengths))
            (gradient,) = torch.autograd.grad(out, leaf, grad)
        check([out.detach(), *gradient.unbind(1)], true, LIMITS[dtype], f"one tensor, {layout} gradient")


def same_bits(dtype: torch.dtype, *, device: str, backend: str) -> None:
    """The same bits every time."""
    lengths = random_lengths(11)
    inputs, grad = leaves((sum(lengths), HEADS, 64), dtype, 5, device)
    options = {
        **tables(64, device), "cu_seqlens": bounds_of(lengths, device), "backend": backend, "max_seqlen": max(lengths),
    }  # fmt: skip
    first = outcome(inputs, grad, **options)
    for turn in range(5):
        with poisoned(device):
            again = outcome(inputs, grad, **options)
        for name, a, b in zip(("out", "dq", "dk", "dv"), first, again, strict=True):
            assert torch.equal(a, b), f"{name} has other bits in run {turn + 2}"


def poison_works(*, device: str, backend: str) -> None:
    """New memory is poisoned: otherwise the cases would not see what a kernel leaves out."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    for n in (1, 1000, 10_000_000):
        with poisoned(device):
            assert torch.empty(n, dtype=torch.bfloat16, device=device).isnan().all()
            assert torch.empty_like(torch.ones(n, device=device)).isnan().all()


def nothing_is_waited_for(*, device: str, backend: str) -> None:
    """With max_seqlen given, a call does not synchronise with the device."""
    inputs, grad = leaves((100, HEADS, 64), torch.bfloat16, 0, device)
    bounds = torch.tensor([0, 40, 100], dtype=torch.int32, device=device)
    options = {**tables(64, device), "cu_seqlens": bounds, "backend": backend, "max_seqlen": 60}
    outcome(inputs, grad, **options)
    if device == "cpu":
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome(inputs, grad, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def softmax(dtype: torch.dtype, *, device: str, backend: str) -> None:
    """Softmax − onehot in place, and the cross-entropies, where they are hard to compute."""
    from scdiva.kernels._triton_softmax import softmax_minus_one

    draw = torch.Generator(device).manual_seed(7)
    relative, smallest = {
        torch.bfloat16: (2**-8, 1e-37),
        torch.float16: (2**-10, 2**-24),
        torch.float32: (3e-5, 1e-37),
    }[dtype]
    for n_rows, n_genes in [(1, 5), (1, 64), (7, 1003), (300, 41_818)][: None if device == "cuda" else 3]:
        logits = 4 * torch.randn(n_rows, -(-n_genes // 64) * 64, generator=draw, device=device)
        targets = torch.randint(1, n_genes - 1, (n_rows,), generator=draw, device=device)
        logits[:, n_genes:] = torch.nan  # padding
        targets[0] = n_genes - 1
        if n_rows > 1:
            targets[1] = 0
            logits[2, targets[2]], logits[3, targets[3] + 1] = 60.0, 60.0  # nearly certain, and nearly impossible
            logits[4, ::2], targets[4] = -torch.inf, 1
            logits[5, targets[5]] = -torch.inf
            logits[6] -= 1e4
        logits = logits.to(dtype)
        exact, at = logits[:, :n_genes].double(), targets[:, None]
        lse, other_lse = exact.logsumexp(1, keepdim=True), exact.scatter(1, at, -torch.inf).logsumexp(1, keepdim=True)
        nll, gradient = lse - exact.gather(1, at), (exact - lse).exp().scatter(1, at, -(other_lse - lse).exp())
        kernel_nll, buffer = torch.full((2, n_rows), torch.nan, device=device), logits.clone()
        softmax_minus_one(buffer, targets, kernel_nll[0], n_genes, keep=False)
        assert torch.equal(buffer.nan_to_num(), logits.nan_to_num())
        softmax_minus_one(buffer, targets, kernel_nll[1], n_genes, keep=True)
        assert torch.equal(*kernel_nll)
        torch.testing.assert_close(kernel_nll[1].double(), nll[:, 0], rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(buffer[:, :n_genes].double(), gradient, rtol=relative, atol=smallest)
        assert not buffer[:, n_genes:].any()
        logits[:, 0] = torch.nan  # no plausible result
        softmax_minus_one(logits, targets, kernel_nll[0], n_genes, keep=True)
        assert kernel_nll[0].isnan().all()
        assert logits[:, :n_genes].isnan().all()


def gene_head(dtype: torch.dtype, *, device: str, backend: str) -> None:
    """Loss and gradients of the gene head in chunks, without a synchronisation."""
    draw = torch.Generator(device).manual_seed(9)
    n_rows, n_genes, chunk = (300, 1003, 128) if device == "cuda" else (24, 203, 10)
    hidden, weight = (torch.randn(n, 64, generator=draw, device=device) for n in (n_rows, n_genes))
    inputs = hidden.requires_grad_(), weight.mul_(0.1).requires_grad_()
    targets = torch.randint(0, n_genes, (n_rows,), generator=draw, device=device)
    row_weight = torch.rand(n_rows, generator=draw, device=device) / 5000

    def result() -> list[torch.Tensor]:
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            loss, nll = masked_cross_entropy(*inputs, targets, row_weight, chunk=chunk)
        return [nll, *torch.autograd.grad(loss, inputs)]

    wide = [x.detach().double().requires_grad_() for x in inputs]
    nll = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, targets, reduction="none")
    true = [nll.detach(), *torch.autograd.grad(row_weight.double() @ nll, wide)]
    result()  # compiled here
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with poisoned(device):
            results = result()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    for name, a, b in zip(("nll", "gradient of hidden", "gradient of weight"), results, true, strict=True):
        error = float((a.double() - b).norm() / b.norm())
        assert error <= LIMITS[dtype], f"{name} of the gene head: relative error {error:.3g} > {LIMITS[dtype]}"


def first_tokens(dtype: torch.dtype, *, device: str, backend: str) -> None:
    """Attention of the first token of each cell, by the kernel and with gradients, without a synchronisation."""
    lengths = [1, 33, 64, 100, 257, 1201]
    cu_seqlens, (cos, sin) = bounds_of(lengths, device), rope_tables(max(lengths), 64, device=device)
    draw = torch.Generator(device).manual_seed(11)
    q, k, v = torch.randn(3, sum(lengths), HEADS, 64, generator=draw, device=device).to(dtype).unbind()
    first, grad = cu_seqlens[:-1].long(), torch.randn(len(lengths), HEADS, 64, generator=draw, device=device)
    k, v = torch.stack([k, v], dim=1).unbind(1)  # views of one projection
    inputs = q[first].requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def result() -> list[torch.Tensor]:
        options = {"cos": cos, "sin": sin, "cu_seqlens": cu_seqlens, "backend": backend}
        with torch.no_grad():
            fused = first_token_attention(*inputs, **options)
        out = first_token_attention(*inputs, **options)
        return [fused, out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))]

    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = rope_attention(*wide, cos=cos, sin=sin, cu_seqlens=cu_seqlens, backend="reference")[first]
    true = [out.detach(), out.detach(), *torch.autograd.grad(out, wide, grad.to(dtype).double())]
    true[2] = true[2][first]
    result()  # compiled here
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        results = result()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    for name, a, b in zip(("kernel", "output", "gradient of q", "of k", "of v"), results, true, strict=True):
        error = float((a.double() - b).norm() / b.norm())
        assert error <= LIMITS[dtype], f"{name} of first tokens: relative error {error:.3g} > {LIMITS[dtype]}"


def _cases() -> Iterator[tuple[str, Callable[..., None]]]:
    yield "new memory is poisoned", poison_works
    yield "nothing is waited for", nothing_is_waited_for
    for dtype in LIMITS:  # bf16 first: what a model runs
        of = str(dtype)[6:]
        for head_dim in (64, 32, 128):
            for rotate in (True, False):
                yield f"{of}, {head_dim}, {'rope' if rotate else 'plain'}", partial(packed, dtype, head_dim, rotate)
        for rotate in (True, False):
            yield f"{of}, one tensor, {'rope' if rotate else 'plain'}", partial(one_tensor, dtype, 64, rotate)
        yield f"{of}, same bits", partial(same_bits, dtype)
        yield f"{of}, softmax of the gene head", partial(softmax, dtype)
        yield f"{of}, loss of the gene head", partial(gene_head, dtype)
        yield f"{of}, first tokens", partial(first_tokens, dtype)


CASES = dict(_cases())
"""By name, in the order of their weight."""
