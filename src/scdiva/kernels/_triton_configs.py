"""Tile sizes of the Triton kernels: candidates, those that fit a device, and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Kernel = Literal["forward", "dkdv", "dq"]
KERNELS: tuple[Kernel, ...] = ("forward", "dkdv", "dq")
HEAD_DIMS = (32, 64, 128)
MIN_CAPABILITY = (8, 0)
"""First CUDA architecture with bfloat16 matrix products."""


class Tiles(NamedTuple):
    """Launch configuration of one kernel.

    Attributes
    ----------
    block_q, block_k
        Rows of a tile of queries and of keys.
    warps, stages
        Warps of a program; depth of the pipeline that loads tiles ahead.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """Launch configurations of attention on one kind of device, for one head width and dtype.

    Attributes
    ----------
    forward, dkdv, dq
        Launch of each kernel.
    """

    forward: Tiles
    dkdv: Tiles
    dq: Tiles

    def of(self, kernel: Kernel) -> Tiles:
        """Launch of a kernel."""
        tiles: Tiles = getattr(self, kernel)
        return tiles

    def having(self, kernel: Kernel, tiles: Tiles) -> Plan:
        """Return this plan with another launch of one kernel."""
        return Plan(**{**self._asdict(), kernel: tiles})

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for a checkpoint."""
        return {kernel: list(self.of(kernel)) for kernel in KERNELS}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Plan:
        """Build a plan from the result of :meth:`to_dict`; keys of earlier versions are ignored."""
        return cls(**{kernel: Tiles(*plain[kernel]) for kernel in KERNELS})


# Candidates, on a device with enough shared memory.
_CANDIDATES_16: dict[Kernel, tuple[Tiles, ...]] = {
    "forward": (
        Tiles(128, 64, 8, 2), Tiles(128, 64, 4, 2), Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2),
        Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1),
    ),
    "dkdv": (
        Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 3), Tiles(32, 128, 8, 2),
        Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2), Tiles(32, 64, 4, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2),
        Tiles(32, 32, 4, 1),
    ),
    "dq": (
        Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 128, 4, 2), Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3),
        Tiles(64, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 8, 2), Tiles(32, 32, 4, 1),
    ),
}  # fmt: skip
# float32 is for checking, not for speed: full-precision products run outside of the tensor cores.
_CANDIDATES_32 = Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(16, 16, 4, 1)
# Defaults without tuning, without register spills in ahead-of-time compilation (`tests/kernels/test_triton_aot.py`).
# Wide heads need smaller tiles in the backward pass, especially before Hopper, where the operands of products are in
# registers. On Hopper four warps take half the time of eight (benchmarks/gpu.py, on an H100). There, two programs of
# `dkdv` (220 registers) and three of `dq` (154) share a multiprocessor, so that the exponentials of one overlap the
# products of another.
_HOPPER = Plan(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3))
_HOPPER_WIDE = Plan(Tiles(128, 64, 8, 2), Tiles(32, 128, 8, 2), Tiles(64, 64, 4, 2))
_AMPERE = Plan(Tiles(128, 64, 8, 2), Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 2))
_AMPERE_WIDE = _AMPERE._replace(dkdv=Tiles(32, 32, 8, 2), dq=Tiles(32, 64, 8, 2))
_FULL = Plan(Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1))
_FULL_WIDE = _FULL._replace(dkdv=Tiles(16, 32, 8, 1), dq=Tiles(16, 32, 8, 1))


def shared_bytes(kernel: Kernel, tiles: Tiles, head_dim: int, itemsize: int) -> int:
    """Upper estimate of the shared memory of one program, in bytes.

    Tiles that the loop loads are counted once per stage, and in the backward kernels once more, as on Blackwell. The
    tiles that do not change in the loop (queries, or keys and values in `dkdv`), and the scores and their gradients,
    are counted once.
    """
    q, k = tiles.block_q * head_dim, tiles.block_k * head_dim
    fixed, walked = {"forward": (q, 2 * k), "dq": (2 * q, 2 * k), "dkdv": (2 * k, 2 * q)}[kernel]
    scores = tiles.block_q * tiles.block_k * (1 if kernel == "forward" else 2)
    held = tiles.stages + (kernel != "forward")
    return (fixed + walked * held + scores) * itemsize + 4 * tiles.block_q * tiles.stages * 2


def candidates(
    kernel: Kernel, head_dim: int, itemsize: int, shared_limit: int, capability: tuple[int, int] = MIN_CAPABILITY
) -> list[Tiles]:
    """Tile sizes that fit a device.

    Parameters
    ----------
    kernel
        `"forward"`, `"dkdv"` or `"dq"`.
    head_dim
        Width of a head, one of `HEAD_DIMS`.
    itemsize
        Bytes of a number: 2 or 4.
    shared_limit
        Shared memory that a program may have on the device, in bytes.
    capability
        CUDA architecture of the device, such as `(9, 0)`.
    """
    tried = _CANDIDATES_32 if itemsize == 4 else _CANDIDATES_16[kernel]

    def rows(tiles: Tiles) -> int:
        return tiles.block_k if kernel == "dkdv" else tiles.block_q

    if itemsize == 2 and capability >= (9, 0):  # products with fewer than 64 rows use older instructions
        tried = tuple(tiles for tiles in tried if rows(tiles) >= 64)
    elif itemsize == 2 and kernel != "forward" and head_dim == 128:  # others spill (ahead-of-time compilation)
        tried = tuple(tiles for tiles in tried if rows(tiles) < 64)
    elif itemsize == 2 and kernel == "dkdv":  # before Hopper 64 × 64 scores spill
        tried = tuple(tiles for tiles in tried if min(tiles.block_q, tiles.block_k) < 64)
    return [one for one in tried if shared_bytes(kernel, one, head_dim, itemsize) <= shared_limit] or [tried[-1]]


def default_plan(head_dim: int, itemsize: int, capability: tuple[int, int], shared_limit: int) -> Plan:
    """Choose the plan that is used without tuning.

    Parameters
    ----------
    head_dim, itemsize, shared_limit
        As for :func:`candidates`.
    capability
        CUDA architecture of the device, such as `(9, 0)`.
    """
    half = (_HOPPER, _HOPPER_WIDE) if capability >= (9, 0) else (_AMPERE, _AMPERE_WIDE)
    narrow, wide = (_FULL, _FULL_WIDE) if itemsize == 4 else half
    plan = wide if head_dim == 128 else narrow
    for kernel in KERNELS:
        fitting = candidates(kernel, head_dim, itemsize, shared_limit, capability)
        if plan.of(kernel) not in fitting:
            plan = plan.having(kernel, fitting[0])
    return plan
