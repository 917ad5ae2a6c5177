"""Write the recipe of conda-forge from a built sdist: its version, requirements and SHA-256.

    python scripts/conda_recipe.py dist/scdiva-0.2.0.tar.gz > recipe.yaml

`make conda` builds the sdist first. The recipe is proposed to conda-forge with the first release on PyPI, from the
sdist that was uploaded; conda-forge also requires `extra: recipe-maintainers`, a list of GitHub accounts.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import yaml

CONDA = {"docstring-parser": "docstring_parser", "torch": "pytorch", "matplotlib": "matplotlib-base"}
"""Names on conda-forge that differ from those on PyPI."""


def conda(requirement: str) -> str:
    """A requirement such as `torch>=2.6` as conda writes it."""
    name, bound = re.fullmatch(r"([\w-]+)([^\[;]*)", requirement).groups()
    return f"{CONDA.get(name, name)} {bound}"


def recipe(sdist: Path) -> dict[str, Any]:
    """The recipe of an sdist."""
    with tarfile.open(sdist) as archive:
        file = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/pyproject.toml")
        pyproject = tomllib.loads(file.read().decode())
    project, python = pyproject["project"], f"python {pyproject['project']['requires-python']}"
    homepage = project["urls"]["Documentation"]
    return {
        "schema_version": 1,
        "context": {"name": "scdiva", "version": sdist.name.removeprefix("scdiva-").removesuffix(".tar.gz")},
        "package": {"name": "${{ name }}", "version": "${{ version }}"},
        "source": {
            "url": "https://pypi.org/packages/source/s/scdiva/scdiva-${{ version }}.tar.gz",
            "sha256": hashlib.sha256(sdist.read_bytes()).hexdigest(),
        },
        "build": {
            "number": 0, "noarch": "python",
            "script": "${{ PYTHON }} -m pip install . --no-deps --no-build-isolation -vv",
            "python": {"entry_points": [f"{name} = {target}" for name, target in project["scripts"].items()]},
        },
        "requirements": {
            "host": [python, "pip", *map(conda, pyproject["build-system"]["requires"])],
            "run": [python, *map(conda, project["dependencies"])],
        },
        "tests": [
            {"python": {"imports": ["scdiva", "scdiva.pp", "scdiva.tl", "scdiva.pl"], "pip_check": True}},
            {"script": ["scdiva --version"]},
        ],
        "about": {
            "homepage": homepage, "license": project["license"], "license_file": project["license-files"],
            "summary": project["description"], "documentation": homepage,
        },
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path)
    print(yaml.safe_dump(recipe(parser.parse_args().sdist), sort_keys=False, width=120), end="")
