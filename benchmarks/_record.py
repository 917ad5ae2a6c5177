"""Write a benchmark's figures with what is needed to trust and repeat them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import scdiva
from scdiva._settings import multiplies_bf16

RESULTS = Path(os.environ.get("SCDIVA_RESULTS") or Path(__file__).parent / "results")
"""Short runs, such as `make bench`, write elsewhere through this variable."""
CODE = ("src", "benchmarks", ":(exclude)benchmarks/results")
"""Changed or new files here mark the commit with `+changes`."""
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""Names in /proc/cpuinfo of the instructions that multiply matrices."""
PACKAGES = ("torch", "triton", "liger-kernel", "numpy", "anndata", "scanpy", "scikit-learn")


def _git(*arguments: str) -> str:
    try:
        answer = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except FileNotFoundError:
        return ""
    return answer.stdout.strip()


def commit() -> str:
    """The commit that is checked out, with `+changes` if files of `CODE` differ from it or are not in it."""
    head = _git("rev-parse", "HEAD")
    dirty = _git("-C", "..", "status", "--porcelain", "--", *CODE)
    return (head + ("+changes" if dirty else "")) or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _instructions() -> list[str]:
    """Which of `INSTRUCTIONS` the processor has; none where the system doesn't say."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    has = next((line.split() for line in text.splitlines() if line.startswith(("flags", "Features"))), [])
    return [name for name in INSTRUCTIONS if name in has]


def machine() -> dict:
    """Processor, its vector instructions, what torch makes of them, cores, Python, and the GPU if torch can use one."""
    entry: dict = {
        "processor": _processor(),
        "instructions": _instructions(),
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
        "multiplies_bf16": multiplies_bf16("cpu"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        entry |= {"gpu": gpu.name, "gpu_gib": round(gpu.total_memory / 2**30), "cuda": torch.version.cuda}
    return entry


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of scdiva and of those packages that are installed: a GPU machine may have no anndata."""
    found = {"scdiva": scdiva.__version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def rows_so_far(name: str, *, goals: bool = False) -> list[dict]:
    """Rows of the present results, by default without goals."""
    file = RESULTS / f"{name}.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return [row for row in rows if goals or "met" not in row]


def replaced(rows: list[dict], row: dict, keys: tuple[str, ...]) -> list[dict]:
    """The rows, with `row` in place of the one that has the same values of these keys."""
    place = [row.get(key) for key in keys]
    return [*(other for other in rows if [other.get(key) for key in keys] != place), row]


def record(name: str, rows: list[dict], folder: Path | None = None, **notes: object) -> Path:
    """Write `<name>.json` into `results` or a folder: rows with command, commit, machine and versions.

    Notes override fields of the same name (`commit=...` where the code runs without its repository). NaN and infinity
    raise an error.
    """
    entry = {
        "command": " ".join(["python", *sys.argv]),
        "commit": notes.get("commit") or commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": notes.get("machine") or machine(),
        "versions": versions(),
        **notes,
        "rows": rows,
    }
    folder = RESULTS if folder is None else folder
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(entry, indent=1, allow_nan=False) + "\n")
    return path
