"""An empty environment outside of the repository, which check_package.py and check_minimum.py install into."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LOCK = ("--constraint", CONSTRAINTS) if sys.version_info[:2] == (3, 11) else ()
"""The locked versions are of Python 3.11; any other takes the newest, all but torch."""


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Say what is being done, then how long it took."""
    print(f"== {what}", flush=True)
    start = time.perf_counter()
    yield
    print(f"   {time.perf_counter() - start:.0f} s", flush=True)


def environment() -> dict[str, str]:
    """Variables of the environment, without those that lead to the repository."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONNOUSERSITE": "1", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}


def run(command: Sequence[str | Path], cwd: Path = ROOT) -> None:
    """Run a command that finds nothing of the repository by itself; end everything if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment(), check=False)
    if done.returncode:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(map(str, command))}")


def build(folder: Path) -> Path:
    """Build the sdist into a folder, and the wheel from the unpacked sdist, so that the sdist is known to be whole."""
    run([sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", folder])
    (sdist,) = folder.glob("scdiva-*.tar.gz")
    unpacked = folder / "unpacked"
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder], cwd=source)
    (wheel,) = folder.glob("scdiva-*.whl")
    return wheel


def empty_environment(folder: Path) -> Path:
    """Make a virtual environment with nothing in it, not even pip. Gives its interpreter."""
    run([sys.executable, "-m", "venv", "--without-pip", folder])
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str | Path) -> None:
    """Call this interpreter's pip for another environment; nothing is compiled ahead."""
    run([sys.executable, "-m", "pip", "--python", python, "--quiet", *arguments], cwd=python.parent)


def pinned_torch() -> str:
    """The requirement of torch, by the exact version of constraints.txt."""
    found = re.search(r"^torch==.*$", CONSTRAINTS.read_text(), flags=re.M)
    if found is None:
        raise SystemExit("constraints.txt has no torch==")
    return found[0]


def run_tests(python: Path, tests: Sequence[str], cwd: Path, options: Sequence[str] = ()) -> None:
    """Run tests of the repository against what is installed, from a folder where src is not on the path."""
    paths = [ROOT / "tests" / name for name in tests]
    where = ["--config-file", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider"]
    run([python, "-m", "pytest", "-q", *where, *options, *paths], cwd=cwd)
