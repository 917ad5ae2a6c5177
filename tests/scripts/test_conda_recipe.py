"""The conda recipe has the hash of the sdist, its version and the requirements of its pyproject.toml."""

from __future__ import annotations

import hashlib
import io
import re
import runpy
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
script = runpy.run_path(str(ROOT / "scripts" / "conda_recipe.py"))


@pytest.fixture
def sdist(tmp_path):
    file = tmp_path / "scdiva-9.8.7.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        contents = {
            "pyproject.toml": (ROOT / "pyproject.toml").read_bytes(),
            "PKG-INFO": b"Name: scdiva\nVersion: 9.8.7\n",
        }
        for name, content in contents.items():
            entry = tarfile.TarInfo(f"scdiva-9.8.7/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file


def test_the_recipe_describes_the_sdist(sdist):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    read = yaml.safe_load(script["recipe"](sdist))
    assert read["context"] == {"name": "scdiva", "version": "9.8.7"}
    assert read["source"]["sha256"] == hashlib.sha256(sdist.read_bytes()).hexdigest()
    bounds = {re.match(r"[\w-]+", line)[0]: re.sub(r"^[\w-]+", "", line) for line in project["dependencies"]}
    renamed = {"docstring-parser": "docstring_parser", "torch": "pytorch", "matplotlib": "matplotlib-base"}
    wanted = [f"{renamed.get(name, name)} {bound}" for name, bound in bounds.items()]
    assert read["requirements"]["run"] == [f"python {project['requires-python']}", *wanted]
    assert read["requirements"]["host"][0] == f"python {project['requires-python']}"
    assert read["build"]["python"]["entry_points"] == [f"scdiva = {project['scripts']['scdiva']}"]
    assert read["about"]["license_file"] == project["license-files"]
    assert read["about"]["summary"] == project["description"]
