"""Write a benchmark's figures with what is needed to trust and repeat them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import scdiva

RESULTS = Path(__file__).parent / "results"


def _git(*arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return answer.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def record(name: str, rows: list[dict], **notes: object) -> Path:
    """Write `results/<name>.json`: the rows, and the command, commit, machine and versions that made them."""
    from importlib.metadata import version

    packages = ("torch", "numpy", "anndata", "scanpy", "scikit-learn")
    entry = {
        "command": " ".join(["python", *sys.argv]),
        "commit": _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain", "-uno") else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {"scdiva": scdiva.__version__, **{package: version(package) for package in packages}},
        **notes,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(entry, indent=1) + "\n")
    return path
