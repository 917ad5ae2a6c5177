"""The attention kernels compiled ahead of time for GPUs that are not here: registers, spills, matrix instructions.

    python benchmarks/aot.py [--archs 80 90 100]      # about five minutes of a CPU; needs Triton and pytest, no GPU

What `backend="auto"` can choose, in bfloat16: the launch by default, for every width of a head; and, for heads of 64,
every launch that tuning may take, and the default one rotating in the loop where that is tried. A register that spills
stands on the thread's stack: 0 bytes of stack, no spills. The compiler is called as the tests call it
(`tests/kernels/test_triton_aot.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _record import record
from _timing import goal, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))

from test_triton_aot import MATRIX_PRODUCT, SHARED_LIMIT, build, inspect

from scdiva.kernels._triton_configs import HEAD_DIMS, KERNELS, Tiles, candidates, default_plan


def chosen(arch: int) -> Iterator[tuple[str, str, int, Tiles, dict]]:
    """By whom a launch is chosen, its kernel, the width of a head, its tiles, and flags of the kernel."""
    capability, limit = divmod(arch, 10), SHARED_LIMIT[arch]
    for head_dim in HEAD_DIMS:
        plan = default_plan(head_dim, 2, capability, limit)
        for kernel in KERNELS:
            yield "default", kernel, head_dim, plan.of(kernel), {}
    plan = default_plan(64, 2, capability, limit)
    for kernel in KERNELS:
        if capability >= (9, 0):  # before, tuning does not try it
            in_loop = {"Q_READY": False} if kernel == "dkdv" else {"K_READY": False}
            yield "rotated in the loop", kernel, 64, plan.of(kernel), in_loop
        for tiles in candidates(kernel, 64, 2, limit, capability):
            if tiles != plan.of(kernel):
                yield "tuning", kernel, 64, tiles, {}


def compiled(arch: int, folder: Path) -> Iterator[dict]:
    """A row for each launch."""
    for by, kernel, head_dim, tiles, flags in chosen(arch):
        built = build(kernel, tiles, head_dim, arch, **flags)
        registers, stack, code = inspect(built, folder)
        yield {
            "section": f"sm_{arch}", "what": f"sm_{arch}, {by}: {kernel}, heads of {head_dim}", "tiles": list(tiles),
            "registers": registers, "stack_bytes": stack, "shared_kib": round(built.metadata.shared / 1024, 1),
            "matrix_instructions": code.count(MATRIX_PRODUCT[arch]),
        }  # fmt: skip


def judged(arch: int, rows: list[dict]) -> Iterator[dict]:
    """The goals of an architecture: untimed launches do not spill, and all multiply on its matrix units."""
    for by in ("default", "rotated in the loop", "tuning"):
        some = [row for row in rows if row["what"].startswith(f"sm_{arch}, {by}")]
        if not some:
            continue
        name = {"section": f"sm_{arch}", "of": len(some)}
        if by != "tuning":  # which chooses by time: a launch that spills can be the fastest
            spilling = sum(row["stack_bytes"] > 0 for row in some)
            yield goal(f"sm_{arch}, {by}: launches that spill", spilling, at_most=0, counted=True, **name)
        slow = sum(row["matrix_instructions"] == 0 for row in some)
        what = f"sm_{arch}, {by}: launches without {MATRIX_PRODUCT[arch]}"
        yield goal(what, slow, at_most=0, counted=True, **name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", nargs="+", type=int, choices=sorted(SHARED_LIMIT), default=sorted(SHARED_LIMIT))
    arguments = parser.parse_args()
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        for arch in arguments.archs:
            found = []
            for row in compiled(arch, Path(folder)):
                report([row])
                found.append(row)
            rows += [*judged(arch, found), *found]
    record("aot", rows)
    return report(row for row in rows if "met" in row)


if __name__ == "__main__":
    sys.exit(main())
