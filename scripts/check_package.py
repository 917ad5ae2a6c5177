"""What a stranger gets: sdist and wheel, built, looked into, installed without extras in an empty environment, used.

    python scripts/check_package.py [--out dist]

The environment stands in a temporary folder and is removed at the end. On Python 3.11 it takes the versions of
constraints.txt, on any other the newest.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from empty_environment import (
    LOCK,
    ROOT,
    build,
    empty_environment,
    environment,
    pinned_torch,
    pip,
    run,
    run_tests,
    stage,
)

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
    """Return the table [project] of pyproject.toml."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, help="folder that sdist and wheel are copied to; existing ones are replaced"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scdiva-package-") as name:
        folder = Path(name)
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
        if arguments.out:
            arguments.out.mkdir(exist_ok=True)
            for old in arguments.out.glob("scdiva-*"):
                old.unlink()
            for built in (*folder.glob("scdiva-*.tar.gz"), wheel):
                shutil.copy2(built, arguments.out)
    print("package: good")


if __name__ == "__main__":
    main()
