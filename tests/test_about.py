"""What to cite agrees with CITATION.cff and the paper; what is installed is listed whole and cheaply."""

from __future__ import annotations

import contextlib
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import yaml

import scdiva as sd
from scdiva import _about

ROOT = Path(__file__).parents[1]


def test_bibtex_and_citation_file_agree():
    text = sd.cite()
    entries = re.findall(r"^@(\w+)\{(\w+),\n((?:  \w+ = \{.*\},?\n)+)\}$", text, flags=re.M)
    assert [entry[:2] for entry in entries] == [("software", "scdiva"), ("misc", "wang2026scdiva")]
    software, paper = (dict(re.findall(r"^  (\w+) = \{(.*)\},?$", entry[2], flags=re.M)) for entry in entries)
    file = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert software["version"] == file["version"] == sd.__version__
    assert software["title"] == f"{{{file['title']}}}: {file['abstract'].rstrip('.')}"
    assert software["license"] == file["license"]
    assert software["author"] == f"{{{file['authors'][0]['name']}}}"
    assert f"Copyright (c) {software['year']}" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    published = file["preferred-citation"]
    authors = [f"{one['family-names']}, {one['given-names']}" for one in published["authors"]]
    assert paper["author"] == " and ".join(authors)
    assert paper["title"] == f"{{{published['title']}}}"
    assert (paper["year"], paper["note"]) == (str(published["year"]), published["status"].capitalize())


def requirements(_):
    """Requirements in the metadata of the current pyproject.toml; those of an editable install may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield from project["dependencies"]
    for extra, lines in project["optional-dependencies"].items():
        for line in lines:
            requirement, _, marker = line.partition(";")
            yield f"{requirement}; {marker.strip() + ' and ' if marker else ''}extra == '{extra}'"


def installed(name):
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)


def test_versions_name_every_package_of_pyproject(capsys, monkeypatch):
    monkeypatch.setattr(_about.metadata, "requires", requirements)
    sd.print_versions()
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    names = {re.match(r"[\w-]+", line)[0] for line in requirements("")} - {"scdiva"}
    assert len(names) > 25
    assert {"scdiva", "Python", "platform", "CUDA", "threads", *names} <= set(listed)
    assert all(listed[name].endswith(installed(name) or "not installed") for name in names)
    assert listed["scdiva"].endswith(sd.__version__)


def test_a_broken_torch_and_a_bare_source_are_told_and_not_raised(capsys, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(_about.metadata, "requires", missing)
    sd.print_versions()
    output = capsys.readouterr().out
    assert "torch says" in output
    assert "numpy" in output
