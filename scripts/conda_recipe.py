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

CONDA = {"docstring-parser": "docstring_parser", "torch": "pytorch", "matplotlib": "matplotlib-base"}
"""Names on conda-forge that differ from those on PyPI."""
RECIPE = """\
schema_version: 1

context:
  name: scdiva
  version: "{version}"

package:
  name: ${{{{ name }}}}
  version: ${{{{ version }}}}

source:
  url: https://pypi.org/packages/source/s/scdiva/scdiva-${{{{ version }}}}.tar.gz
  sha256: {sha256}

build:
  number: 0
  noarch: python
  script: ${{{{ PYTHON }}}} -m pip install . --no-deps --no-build-isolation -vv
  python:
    entry_points:
{scripts}

requirements:
  host:
    - python {python}
    - pip
{build}
  run:
    - python {python}
{run}

tests:
  - python:
      imports: [scdiva, scdiva.pp, scdiva.tl, scdiva.pl]
      pip_check: true
  - script:
      - scdiva --version

about:
  homepage: {homepage}
  license: {license}
  license_file:
{license_files}
  summary: {summary}
  documentation: {homepage}
"""


def recipe(sdist: Path) -> str:
    """The recipe of an sdist as YAML."""
    with tarfile.open(sdist) as archive:
        folder = sdist.name.removesuffix(".tar.gz")
        files = {
            name: archive.extractfile(f"{folder}/{name}").read().decode() for name in ("pyproject.toml", "PKG-INFO")
        }
    pyproject = tomllib.loads(files["pyproject.toml"])
    project = pyproject["project"]
    return RECIPE.format(
        version=re.search(r"^Version: (.+)$", files["PKG-INFO"], flags=re.M)[1],
        sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        scripts=lines((f"{name} = {target}" for name, target in project["scripts"].items()), 6),
        python=project["requires-python"],
        build=lines(map(conda, pyproject["build-system"]["requires"]), 4),
        run=lines(map(conda, project["dependencies"]), 4),
        homepage=project["urls"]["Documentation"],
        license=project["license"],
        license_files=lines(project["license-files"], 4),
        summary=project["description"],
    )


def conda(requirement: str) -> str:
    """A requirement such as `torch>=2.6` as conda writes it."""
    name, bound = re.fullmatch(r"([\w-]+)([^\[;]*)", requirement).groups()
    return f"{CONDA.get(name, name)} {bound}"


def lines(items, indent: int) -> str:
    return "\n".join(f"{' ' * indent}- {item}" for item in items)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path)
    print(recipe(parser.parse_args().sdist), end="")
