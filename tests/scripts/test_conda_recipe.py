"""The conda recipe has the hash of the sdist, its version and the requirements of its pyproject.toml."""

from __future__ import annotations

import hashlib
import re
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_recipe_describes_the_sdist(script, tmp_path):
    sdist = tmp_path / "scdiva-9.8.7.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(ROOT / "pyproject.toml", "scdiva-9.8.7/pyproject.toml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    recipe = script("conda_recipe").recipe(sdist)
    assert recipe["context"] == {"name": "scdiva", "version": "9.8.7"}
    assert recipe["source"]["sha256"] == hashlib.sha256(sdist.read_bytes()).hexdigest()
    bounds = {re.match(r"[\w-]+", line)[0]: re.sub(r"^[\w-]+", "", line) for line in project["dependencies"]}
    renamed = {"docstring-parser": "docstring_parser", "torch": "pytorch", "matplotlib": "matplotlib-base"}
    requirements = [f"{renamed.get(name, name)} {bound}" for name, bound in bounds.items()]
    assert recipe["requirements"]["run"] == [f"python {project['requires-python']}", *requirements]
    assert recipe["requirements"]["host"][0] == f"python {project['requires-python']}"
