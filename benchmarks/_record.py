"""Timing, goals with intervals, and result files with the command, commit, machine and versions.

Requires numpy and torch only: it runs on GPU machines without anndata.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

import scdiva
from scdiva._settings import multiplies_bf16

RESULTS = Path(os.environ.get("SCDIVA_RESULTS") or Path(__file__).parent / "results")
"""`SCDIVA_RESULTS` redirects short runs, such as `make bench`."""
CODE = ("src", "benchmarks", ":(exclude)benchmarks/results")
"""Uncommitted changes here mark the commit with `+changes`."""
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
PACKAGES = ("torch", "triton", "numpy", "anndata", "scanpy", "scikit-learn", "scvi-tools", "harmonypy")
DRAWS = 10_000
HIDDEN = ("met", "profile", "section", "commit", "processor")


# result files


def commit() -> str:
    """The commit that is checked out, with `+changes` if files of `CODE` differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    try:
        return (
            git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", *CODE) else "")
        ) or "unknown"
    except FileNotFoundError:  # no git
        return "unknown"


def machine() -> dict:
    """Processor with its vector instructions, cores, Python, and the GPU if there is one."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    entry: dict = {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
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
    """Versions of scdiva and of the installed packages."""
    installed = {"scdiva": scdiva.__version__}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def recorded_rows(name: str, *, goals: bool = False) -> list[dict]:
    """Rows of a result file, by default without goals."""
    file = RESULTS / f"{name}.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return [row for row in rows if goals or "met" not in row]


def replaced(rows: list[dict], row: dict, keys: tuple[str, ...]) -> list[dict]:
    """The rows with `row` in place of the one with the same values of `keys`."""
    return [*(other for other in rows if any(other.get(key) != row.get(key) for key in keys)), row]


def record(name: str, rows: list[dict], folder: Path | None = None, **notes: object) -> Path:
    """Write rows to `<name>.json` with command, commit, machine and versions; `notes` override these fields.

    NaN and infinity raise an error.
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
    folder = folder or RESULTS
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(entry, indent=1, allow_nan=False) + "\n")
    return path


# intervals and goals


def bootstrap(values: Sequence[float], groups: Sequence[object] | None = None) -> tuple[float, float]:
    """95% percentile bootstrap interval of a mean over independent groups of values, by default over the values."""
    names = range(len(values)) if groups is None else [str(group) for group in groups]
    _, group = np.unique(names, return_inverse=True)
    sums, sizes = np.bincount(group, np.asarray(values, dtype=float)), np.bincount(group)
    drawn = np.random.default_rng(0).integers(len(sizes), size=(DRAWS, len(sizes)))
    low, high = np.quantile(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1), (0.025, 0.975))
    return float(low), float(high)


def goal(
    what: str,
    value: float,
    at_least: float | None = None,
    at_most: float | None = None,
    *,
    interval: tuple[float, float] | None = None,
    over: str | None = None,
    counted: bool = False,
    **details: object,
) -> dict:
    """A row with a goal: `what`, `value`, one bound, `met` and details.

    `met` is True if the whole interval satisfies the bound, False if no part of it does, and None otherwise. Without an
    interval one run can miss a goal but not meet it. `counted` values are exact.
    """
    if (at_least is None) == (at_most is None):
        raise ValueError(f"{what}: a goal has one bound, at_least or at_most.")
    if not all(map(math.isfinite, (value, *(interval or ())))):
        raise ValueError(f"{what}: {value} is not finite.")
    low, high = (value, value) if counted or interval is None else interval
    if at_least is not None:
        bound, surely, possibly = {"at_least": at_least}, low >= at_least, high >= at_least
    else:
        bound, surely, possibly = {"at_most": at_most}, high <= at_most, low <= at_most  # type: ignore[operator]
    met = (True if interval is not None or counted else None) if surely else None if possibly else False
    row: dict = {"what": what, "value": float(value), **bound, "met": met}
    if counted:
        return {**row, "over": "counted", **details}
    if interval is not None:
        row["interval"] = [round(float(low), 5), round(float(high), 5)]
    return {**row, **({"over": over} if over else {}), **details}


def ratio_goal(
    what: str, times: Sequence[float], others: Sequence[float], *, scale: float = 1.0, **bound_and_details: object
) -> dict:
    """A goal on the ratio of the best times of two arms, with a bootstrap interval over paired rounds."""
    one, other = (np.asarray(seconds, dtype=float) for seconds in (times, others))
    value = scale * one.min() / other.min()
    if len(one) < 2:
        return goal(what, value, **bound_and_details)  # type: ignore[arg-type]
    drawn = np.random.default_rng(0).integers(len(one), size=(2000, len(one)))
    low, high = np.quantile(scale * one[drawn].min(axis=1) / other[drawn].min(axis=1), [0.025, 0.975])
    return goal(what, value, interval=(low, high), over=f"{len(one)} rounds", **bound_and_details)  # type: ignore[arg-type]


def verdict(row: dict) -> str:
    """Whether a goal is met, in words."""
    if row["met"] is False:
        return "missed"
    if "interval" in row:
        return "met" if row["met"] else "within noise"
    return "met" if row.get("over") == "counted" else f"{row.get('over') or 'one run'}, no interval"


def report(rows: Iterable[dict]) -> int:
    """Print the rows; return how many goals were missed."""
    missed = 0
    for row in rows:
        shown = {key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items() if key not in HIDDEN}
        outcome = verdict(row).replace("missed", "MISSED") if "met" in row else ""
        print(", ".join(f"{key} {x}" for key, x in shown.items()), outcome, flush=True)
        missed += row.get("met") is False
    return missed


# time and memory


def interleaved(arms: dict[str, Callable[[], object]], *, repeats: int = 5, warmup: int = 1) -> dict[str, list[float]]:
    """CPU seconds of every run of every arm; arms take turns, so that a busy machine affects all of them."""
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.process_time()
            arms[name]()
            if turn >= warmup:
                seconds[name].append(time.process_time() - start)
    return seconds


def resident() -> int:
    """Maximum resident bytes of this process (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
