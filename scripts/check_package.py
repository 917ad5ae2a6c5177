"""Build sdist and wheel, and check the wheel in an empty environment; or check the lower bounds of dependencies.

    python scripts/check_package.py [--out dist]
    python scripts/check_package.py --minimum [--torch 2.6.0]

The first installs the wheel without extras and uses it. On Python 3.11 it takes the versions of constraints.txt, on any
other the newest. `--minimum` installs the direct dependencies of the core at their lower bounds (uv's "lowest-direct")
and runs tests on them; torch stays at the version of constraints.txt unless one is given, since its older builds for
Linux on the main index contain gigabytes of CUDA libraries. Environments are temporary.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LOCK = ("--constraint", CONSTRAINTS) if sys.version_info[:2] == (3, 11) else ()
"""The locked versions are of Python 3.11; any other takes the newest, all but torch."""
NEEDED = (
    "checkpoints/scdiva-mini/model.safetensors", "datasets/pbmc3k_small.npz", "datasets/published.tsv",
    "datasets/transcription_factors.txt", "tokenizer/human.safetensors", "py.typed",
)  # fmt: skip
BROUGHT_BY_OTHERS = {"triton"}
"""Of the extras, what packages of the core may bring themselves: torch's CUDA build Triton."""
USE = """
import sys, warnings
import numpy as np
import scdiva as sd

assert sd.__file__.startswith(sys.prefix), f"{sd.__file__} is not the installed package"
warnings.simplefilter("ignore")  # toy cells are few and say so
sd.settings.progress = False
adata = sd.datasets.toy()
sd.tl.embed(adata)
assert adata.obsm["X_scdiva"].shape[0] == adata.n_obs and np.isfinite(adata.obsm["X_scdiva"]).all()
print("embedded", *adata.obsm["X_scdiva"].shape, "with scdiva", sd.__version__)
"""
TESTS = ("test_import.py", "faults/test_installed.py")
WITHOUT_EXTRAS = ("-k", "public_name or promised or version or extra or hint or triton")
TOOLS = ("pytest", "hypothesis", "dask[array]>=2025.9", "distributed>=2025.9")
MINIMUM_TESTS = (
    "test_import.py", "test_validate.py", "cli", "data/test_cells.py", "data/test_files.py", "data/test_stored.py",
    "models/test_pretrained.py", "pl/test_umap.py", "pp", "annotation/test_annotate.py", "embedding/test_embed.py",
    "embedding/test_embed_file.py", "tokenizer",
)  # fmt: skip
"""One of each: reading, matching, embedding, annotating, saving, training by the command line, drawing."""


# environments


def environment() -> dict[str, str]:
    """Variables of the environment, without those that lead to the repository."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    visible = {name: value for name, value in os.environ.items() if name not in hidden}
    return visible | {"PYTHONNOUSERSITE": "1", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}


def run(command: Sequence[str | Path], cwd: Path = ROOT) -> None:
    """Run a command in an environment that does not point to the repository; raise an error if it fails."""
    print("==", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, env=environment(), check=True)


def build(folder: Path) -> Path:
    """Build the sdist into a folder, and the wheel from the unpacked sdist, which shows that the sdist is complete."""
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
    """The interpreter of a new virtual environment without any package."""
    run([sys.executable, "-m", "venv", "--without-pip", folder])
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str | Path) -> None:
    """Call this interpreter's pip for another environment; nothing is compiled ahead."""
    run([sys.executable, "-m", "pip", "--python", python, "--quiet", *arguments], cwd=python.parent)


def pinned_torch() -> str:
    """The requirement of torch in constraints.txt."""
    return re.search(r"^torch==.*$", CONSTRAINTS.read_text(), flags=re.M)[0]


def run_tests(python: Path, tests: Sequence[str], cwd: Path, options: Sequence[str] = ()) -> None:
    """Run tests of the repository against what is installed, from a folder where src is not on the path."""
    paths = [ROOT / "tests" / name for name in tests]
    where = ["--config-file", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider"]
    run([python, "-m", "pytest", "-q", *where, *options, *paths], cwd=cwd)


# checks


def check_content(wheel: Path, source: Path = ROOT / "src" / "scdiva") -> None:
    """Compare the files of a wheel with the sources."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if name.startswith("scdiva/")}
    paths = (path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = {f"scdiva/{path.relative_to(source).as_posix()}": path.read_bytes() for path in paths}
    if different := {name for name in held.keys() | files.keys() if held.get(name) != files.get(name)}:
        raise SystemExit(f"{wheel.name} differs from the sources: {sorted(different)}")
    if missing := {name for name in NEEDED if f"scdiva/{name}" not in held}:
        raise SystemExit(f"{wheel.name} lacks {sorted(missing)}")


def project() -> dict[str, Any]:
    """The table [project] of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def check_extras(python: Path) -> None:
    """Check that the core installs no package that only extras require."""

    def names(lines: Iterable[str]) -> set[str]:
        return {re.split(r"[\[><=; ]", line)[0].lower().replace("_", "-") for line in lines}

    of_extras = names(line for lines in project()["optional-dependencies"].values() for line in lines)
    listed = subprocess.check_output([sys.executable, "-m", "pip", "--python", python, "list", "--format=freeze"])
    installed = names(listed.decode().splitlines())
    if brought := (of_extras - names(project()["dependencies"]) - BROUGHT_BY_OTHERS - {"scdiva"}) & installed:
        raise SystemExit(f"the core installs packages of extras: {sorted(brought)}")


def run_readme_example(python: Path, folder: Path) -> None:
    """Run the first Python block of the README in an empty folder; a warning is a failure."""
    code = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), flags=re.M | re.S)[1]
    folder.mkdir()
    done = subprocess.run(
        [python, "-c", code], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode or "Warning" in done.stderr or not (folder / "umap.png").is_file():
        raise SystemExit(f"the README's first example failed, warned or drew nothing:\n{done.stdout}{done.stderr}")


def least(dependencies: list[str], torch: str) -> list[str]:
    """The lower bound of each requirement as an exact version; `torch` for torch."""
    pinned = []
    for requirement in dependencies:
        bound = re.fullmatch(r"([\w.-]+)>=([\w.]+)(,<[\w.]+)?", requirement)
        if bound is None:
            raise SystemExit(f"dependency {requirement!r} is not of the form name>=version or name>=version,<version")
        pinned.append(torch if bound[1] == "torch" else f"{bound[1]}=={bound[2]}")
    return pinned


def check_minimum(folder: Path, torch: str) -> None:
    """Run tests with the direct dependencies at their lower bounds."""
    wheel, python = build(folder), empty_environment(folder / "venv")
    pip(python, "install", "--no-compile", torch)
    pip(python, "install", "--no-compile", *least(project()["dependencies"], torch), wheel, *TOOLS)
    pip(python, "check")
    run_tests(python, MINIMUM_TESTS, folder, ["--disable-warnings"])  # old packages warn of new ones


def check_package(folder: Path, out: Path | None) -> None:
    """Build sdist and wheel, install the wheel and use it; copy both to `out`."""
    wheel, python = build(folder), empty_environment(folder / "venv")
    check_content(wheel)
    pip(python, "install", "--no-compile", *LOCK, pinned_torch())
    pip(python, "install", "--no-compile", *LOCK, wheel)
    pip(python, "check")
    check_extras(python)
    run([python, "-c", USE], cwd=folder)
    run_readme_example(python, folder / "example")
    run([python.parent / "scdiva", "--version"], cwd=folder)
    pip(python, "install", "--no-compile", *LOCK, "pytest")
    run_tests(python, TESTS, folder, WITHOUT_EXTRAS)
    if out:
        out.mkdir(exist_ok=True)
        for old in out.glob("scdiva-*"):
            old.unlink()
        for built in (*folder.glob("scdiva-*.tar.gz"), wheel):
            shutil.copy2(built, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for sdist and wheel; earlier ones in it are deleted")
    parser.add_argument("--minimum", action="store_true", help="check the lower bounds of dependencies instead")
    parser.add_argument("--torch", metavar="VERSION", help="torch's version for --minimum")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scdiva-package-") as folder:
        if arguments.minimum:
            check_minimum(Path(folder), f"torch=={arguments.torch}" if arguments.torch else pinned_torch())
        else:
            check_package(Path(folder), arguments.out)


if __name__ == "__main__":
    main()
