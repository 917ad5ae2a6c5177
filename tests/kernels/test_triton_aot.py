"""The Triton kernels compiled ahead of time, without a GPU: what they will use of one.

Registers and stack come from the compiler's own report, the instructions from the disassembly; a stack is where spilled
registers go.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from packaging.version import Version

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from scdiva.kernels._triton_configs import (  # noqa: E402
    HEAD_DIMS,
    KERNELS,
    Tiles,
    candidates,
    default_plan,
    shared_bytes,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled where Triton interprets"
)

full_precision = pytest.mark.skipif(
    Version(triton.__version__) < Version("3.9"), reason="older ptxas spills in full precision: Triton 3.9 or newer"
)

# Shared memory that a program may ask for: CUDA C++ Programming Guide, table of technical specifications.
SHARED_LIMIT = {100: 227 * 1024, 90: 227 * 1024, 80: 163 * 1024}
MATRIX_PRODUCT = {100: "UTCHMMA", 90: "HGMMA", 80: "HMMA"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
"""Disassemblers that come with Triton."""
TYPES = {"Cu": "*i32", "Targets": "*i64", "factor": "fp32", "scale": "fp32"}
FLOAT32 = ("Lse", "Sums", "Cos", "Sin", "Nll")


def compiled(function, constants: dict, warps: int, stages: int, arch: int = 90, dtype: str = "bf16"):
    names = function.arg_names
    constants = {name: value for name, value in constants.items() if name in names}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name[0].isupper():
            return TYPES.get(name, "*fp32" if name in FLOAT32 else f"*{dtype}")
        return TYPES.get(name, "i32")

    signature = {name: kind(name) for name in names}
    # pointers and strides are multiples of 16, as those of tensors are
    even = [n for n in names if signature[n].startswith("*") or n.endswith(("_token", "_head", "_cell", "n_columns"))]
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, fixed, {(names.index(n),): [["tt.divisibility", 16]] for n in even})
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def build(kernel: str, tiles: Tiles, head_dim: int, arch: int, dtype: str = "bf16"):
    from scdiva.kernels import _triton_kernels

    blocks = {"BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k, "TILE": tiles.block_q, "HALF": head_dim // 2}
    constants = blocks | {"ROTATE": True, "PRECISION": "ieee" if dtype == "fp32" else "tf32"}
    function = getattr(_triton_kernels, f"{kernel}_kernel")
    return compiled(function, constants, tiles.warps, tiles.stages, arch, dtype)


def inspect(compiled, folder: Path) -> tuple[int, int, str]:
    """Registers of a thread, bytes of its stack, and the machine code."""
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file], capture_output=True, text=True, check=True)
    code = subprocess.run([TOOLS / "nvdisasm", file], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr).groups()
    return int(registers), int(stack), code.stdout


# the largest head, which needs the most registers, on each architecture; and the usual one on Hopper
@pytest.mark.parametrize(
    ("head_dim", "arch", "dtype"),
    [(64, 90, "bf16"), (128, 90, "bf16"), (128, 80, "bf16"), (128, 100, "bf16"), (64, 90, "fp16")],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_chosen_tiles_do_not_spill_and_use_the_tensor_cores(kernel, head_dim, arch, dtype, tmp_path):
    limit = SHARED_LIMIT[arch]
    plan = default_plan(head_dim, 2, divmod(arch, 10), limit)
    compiled = build(kernel, plan.of(kernel), head_dim, arch, dtype)
    registers, stack, code = inspect(compiled, tmp_path)
    assert registers <= 255
    assert stack == 0
    assert not re.search(r"\b(STL|LDL)\b", code)
    assert MATRIX_PRODUCT[arch] in code
    # what decides whether tiles fit a device must not promise too little
    assert compiled.metadata.shared <= shared_bytes(kernel, plan.of(kernel), head_dim, 2) <= limit


@full_precision
@pytest.mark.parametrize("kernel", KERNELS)
def test_full_precision_does_not_spill_on_hopper(kernel, tmp_path):
    head_dim = max(HEAD_DIMS)  # the most registers
    tiles = default_plan(head_dim, 4, (9, 0), SHARED_LIMIT[90]).of(kernel)
    compiled = build(kernel, tiles, head_dim, 90, "fp32")
    _, stack, code = inspect(compiled, tmp_path)
    assert stack == 0
    assert "FFMA" in code
    assert "HGMMA" not in code, "products in full precision: none on the tensor cores"
    assert compiled.metadata.shared <= shared_bytes(kernel, tiles, head_dim, 4) <= SHARED_LIMIT[90]


@pytest.mark.parametrize(("kernel", "most_registers", "programs"), [("dkdv", 232, 2), ("dq", 168, 3)])
def test_backward_products_and_loads_on_hopper(kernel, most_registers, programs, tmp_path):
    """Products are 64 columns wide, and softmax sums are loaded by few instructions."""
    compiled = build(kernel, default_plan(64, 2, (9, 0), SHARED_LIMIT[90]).of(kernel), 64, 90)
    registers, stack, code = inspect(compiled, tmp_path)
    assert stack == 0
    assert registers <= most_registers
    assert set(re.findall(r"HGMMA\.(\d+x\d+x\d+)", code)) == {"64x64x16"}
    copies = re.findall(r"\bLDGSTS\S*", code)
    assert copies, "tiles are copied to shared memory ahead"
    assert sum(".128" not in copy for copy in copies) <= 8
    # A multiprocessor has 65,536 registers and 228 KiB of shared memory. A thread gets a multiple of 8 registers, and
    # 1 KiB is reserved for each program.
    assert programs * 128 * (-(-registers // 8) * 8) <= 65_536
    assert programs * (compiled.metadata.shared + 1024) <= 228 * 1024


def test_the_copy_with_rotation_compiles(tmp_path):
    _, stack, _ = inspect(build("rotate", Tiles(64, 64, 4, 1), 64, 90), tmp_path)
    assert stack == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_shared_memory_of_the_largest_tiles_is_not_underestimated(kernel):
    largest = max(candidates(kernel, 64, 2, SHARED_LIMIT[90]), key=lambda t: shared_bytes(kernel, t, 64, 2))
    assert build(kernel, largest, 64, 90).metadata.shared <= shared_bytes(kernel, largest, 64, 2)


@pytest.mark.parametrize(("dtype", "keep"), [("bf16", True), ("bf16", False), ("fp32", True)])
def test_the_softmax_loads_16_bytes_and_two_programs_fill_a_multiprocessor(dtype, keep, tmp_path):
    from scdiva.kernels import _triton_softmax as softmax

    constants = {"KEEP": keep, "GROUPS": softmax.GROUPS, "WIDE": 4 if dtype == "fp32" else 8}
    kernel = compiled(softmax.softmax_kernel, constants, softmax.WARPS, 1, dtype=dtype)
    registers, stack, code = inspect(kernel, tmp_path)
    assert stack == 0
    assert registers * softmax.WARPS * 32 * 2 <= 65_536
    loads = re.findall(r"\b(?:LDG|LDGSTS)\.[A-Z0-9.]*", code)
    # beside the target and its logit, each pass has one load for each of its 16 bytes, and the second as many stores
    assert sum(".128" in one for one in loads) == len(loads) - 2 == 1 + keep
    assert len(re.findall(r"\bSTG\.E\.128", code)) == keep


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_of_first_tokens_loads_16_bytes_and_three_programs_fill_a_multiprocessor(head_dim, tmp_path):
    from scdiva.kernels import _triton_first_token as first_token

    constants = {"HALF": head_dim // 2, "BLOCK_K": first_token.BLOCK_K, "ROTATE": True}
    kernel = compiled(first_token.first_token_kernel, constants, first_token.WARPS, first_token.STAGES)
    registers, stack, code = inspect(kernel, tmp_path)
    assert stack == 0
    assert registers * first_token.WARPS * 32 * 3 <= 65_536
    loads = re.findall(r"\b(?:LDG|LDGSTS)\.[A-Z0-9.]*", code)
    # beside boundaries and the query: both halves of keys, values, cosines and sines
    assert sum(".128" in one for one in loads) >= 5


@pytest.mark.parametrize("kernel", ["rotate", *KERNELS])
def test_no_number_of_tokens_cells_or_tiles_compiles_anew(kernel):
    """What Triton looks a compiled kernel up by is the same for all."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from scdiva.kernels import _triton_kernels

    function = getattr(_triton_kernels, f"{kernel}_kernel")
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(function.signature, function.params, backend)
    specializations = set()
    for n_tokens, n_tiles in [(1, 1), (16, 1), (17, 2), (4_096, 16), (131_072, 19), (65_530, 10)]:
        arguments = {"n_tokens": n_tokens, "n_tiles": n_tiles, "n_heads": 8, "factor": 0.18, "scale": 0.125}
        for p in function.params:
            if p.is_constexpr:
                arguments[p.name] = True if p.name == "ROTATE" else 64
            elif p.name[0].isupper() and "_" not in p.name:
                kind = torch.int32 if p.name == "Cu" else torch.float32 if p.name in FLOAT32 else torch.bfloat16
                arguments[p.name] = torch.empty(64, dtype=kind)
        specializations.add(str(binder(**{p.name: arguments.get(p.name, 64) for p in function.params})[1]))
    assert len(specializations) == 1
    assert "i32" in specializations.pop()
