"""Lower bounds hold: the direct dependencies of the core at their least versions, and tests run on them.

    python scripts/check_minimum.py [--torch 2.6.0]

What these bring in turn is as new as they allow (what uv calls "lowest-direct"). torch stays at the version of
constraints.txt unless one is asked for: its older builds for Linux on the main index hold gigabytes of CUDA libraries.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import tomllib
from pathlib import Path

from empty_environment import ROOT, build, empty_environment, pinned_torch, pip, run_tests, stage

TOOLS = ("pytest", "hypothesis", "dask[array]>=2025.9", "distributed>=2025.9")
TESTS = (
    "test_import.py",
    "test_validate.py",
    "cli",
    "data/test_cells.py",
    "data/test_files.py",
    "data/test_stored.py",
    "models/test_pretrained.py",
    "pl/test_umap.py",
    "pp",
    "tl/test_annotate.py",
    "tl/test_embed.py",
    "tl/test_embed_file.py",
    "tokenizer",
)
"""One of each: reading, matching, embedding, annotating, saving, training by the command line, drawing."""


def least(dependencies: list[str], torch: str) -> list[str]:
    """The lower bound of each requirement as its exact version; torch as it is given."""
    pinned = []
    for requirement in dependencies:
        bound = re.fullmatch(r"([\w.-]+)>=([\w.]+)(,<[\w.]+)?", requirement)
        if bound is None:
            raise SystemExit(f"dependency {requirement!r} is not of the form name>=version or name>=version,<version")
        pinned.append(torch if bound[1] == "torch" else f"{bound[1]}=={bound[2]}")
    return pinned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--torch", metavar="VERSION", help="torch's version, where the index has a build of it for CPUs"
    )
    arguments = parser.parse_args()
    torch = f"torch=={arguments.torch}" if arguments.torch else pinned_torch()
    bounds = least(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"], torch)
    with tempfile.TemporaryDirectory(prefix="scdiva-minimum-") as name:
        folder = Path(name)
        with stage("the wheel"):
            wheel = build(folder)
        with stage("an empty environment of least versions: " + " ".join(bounds)):
            python = empty_environment(folder / "venv")
            pip(python, "install", "--no-compile", torch)
            pip(python, "install", "--no-compile", *bounds, wheel, *TOOLS)
            pip(python, "check")
        with stage("tests"):
            run_tests(python, TESTS, folder, ["--disable-warnings"])  # old packages warn of new ones
    print("minimum: good")


if __name__ == "__main__":
    main()
