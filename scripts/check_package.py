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
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LOCK = ("--constraint", CONSTRAINTS) if sys.version_info[:2] == (3, 11) else ()
"""The locked versions are of Python 3.11; any other takes the newest, all but torch."""
NEEDED = (
    "scdiva/py.typed",
    "scdiva/checkpoints/scdiva-mini/README.md",
    "scdiva/checkpoints/scdiva-mini/SHA256SUMS",
    "scdiva/checkpoints/scdiva-mini/config.json",
    "scdiva/checkpoints/scdiva-mini/model.safetensors",
    "scdiva/checkpoints/scdiva-mini/vocabulary.safetensors",
    "scdiva/datasets/pbmc3k_cell_types.tsv",
    "scdiva/datasets/pbmc3k_small.LICENSE.txt",
    "scdiva/datasets/pbmc3k_small.npz",
    "scdiva/datasets/published.tsv",
    "scdiva/datasets/transcription_factors.txt",
    "scdiva/tokenizer/human.safetensors",
)
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
ABSENT = """
import importlib.metadata, sys
here = {name for name in sys.argv[1:] if list(importlib.metadata.distributions(name=name))}
sys.exit(f"the core brings what belongs to extras: {sorted(here)}" if here else 0)
"""
TESTS = ("test_import.py", "faults/test_installed.py")
WITHOUT_EXTRAS = ("-k", "public_name or promised or version or extra or hint or triton")
TOOLS = ("pytest", "hypothesis", "dask[array]>=2025.9", "distributed>=2025.9")
MINIMUM_TESTS = (
    "test_import.py",
    "test_validate.py",
    "cli",
    "data/test_cells.py",
    "data/test_files.py",
    "data/test_stored.py",
    "models/test_pretrained.py",
    "pl/test_umap.py",
    "pp",
    "annotation/test_annotate.py",
    "embedding/test_embed.py",
    "embedding/test_embed_file.py",
    "tokenizer",
)
"""One of each: reading, matching, embedding, annotating, saving, training by the command line, drawing."""


# environments


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


# checks


def problems_of(wheel: Path, source: Path = ROOT / "src" / "scdiva") -> list[str]:
    """What is missing in a wheel, differs from the sources, or does not belong there."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    files = {
        f"scdiva/{path.relative_to(source).as_posix()}": path
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    licences = {f"{info}/licenses/{name}" for name in project()["license-files"]}
    wanted = {*files, *NEEDED, *licences, f"{info}/METADATA", f"{info}/entry_points.txt"}
    problems = [f"{name} is missing" for name in sorted(wanted - set(held))]
    problems += [
        f"{n} differs from the source" for n in sorted(set(files) & set(held)) if held[n] != files[n].read_bytes()
    ]
    foreign = [name for name in held if name not in files and name.split("/")[0] != info]
    return problems + [f"{name} does not belong there" for name in sorted(foreign)]


def project() -> dict[str, Any]:
    """The table [project] of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def extras() -> set[str]:
    """Names of the packages that only extras name."""
    lines = [line for lines in project()["optional-dependencies"].values() for line in lines]
    named = {re.split(r"[\[><=; ]", line)[0] for line in lines}
    core = {re.split(r"[\[><=; ]", line)[0] for line in project()["dependencies"]}
    return named - core - BROUGHT_BY_OTHERS - {"scdiva"}


def run_readme_example(python: Path, folder: Path) -> None:
    """Run the README's first block of Python as a script in an empty folder; a warning is a failure."""
    found = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    if found is None:
        raise SystemExit("README.md has no Python")
    folder.mkdir()
    (folder / "example.py").write_text(found[1], encoding="utf-8")
    done = subprocess.run(
        [python, "example.py"], cwd=folder, env=environment(), capture_output=True, text=True, check=False
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
    bounds = least(project()["dependencies"], torch)
    with stage("the wheel"):
        wheel = build(folder)
    with stage("an empty environment with the lower bounds: " + " ".join(bounds)):
        python = empty_environment(folder / "venv")
        pip(python, "install", "--no-compile", torch)
        pip(python, "install", "--no-compile", *bounds, wheel, *TOOLS)
        pip(python, "check")
    with stage("tests"):
        run_tests(python, MINIMUM_TESTS, folder, ["--disable-warnings"])  # old packages warn of new ones


def check_package(folder: Path, out: Path | None) -> None:
    """Build sdist and wheel, install the wheel and use it; copy both to `out`."""
    with stage("sdist, and the wheel from it"):
        wheel = build(folder)
        if problems := problems_of(wheel):
            raise SystemExit(f"{wheel.name}: " + "; ".join(problems))
        print(f"   {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, as the sources")
    with stage("an empty environment: torch, then the wheel, no extras"):
        python = empty_environment(folder / "venv")
        pip(python, "install", "--no-compile", *LOCK, pinned_torch())
        pip(python, "install", "--no-compile", *LOCK, wheel)
        pip(python, "check")
        run([python, "-c", ABSENT, *sorted(extras())], cwd=folder)
    with stage("used there: embed, the README's example, command line"):
        run([python, "-c", USE], cwd=folder)
        run_readme_example(python, folder / "example")
        for option in ("--version", "--help"):
            run([python.parent / "scdiva", option], cwd=folder)
    with stage("every public name, and the hints of missing extras"):
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
    with tempfile.TemporaryDirectory(prefix="scdiva-package-") as name:
        if arguments.minimum:
            check_minimum(Path(name), f"torch=={arguments.torch}" if arguments.torch else pinned_torch())
        else:
            check_package(Path(name), arguments.out)
    print(f"{'minimum' if arguments.minimum else 'package'}: good")


if __name__ == "__main__":
    main()
