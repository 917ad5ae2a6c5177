"""Workflows and Python versions agree with pyproject and the Makefile."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path for path in sorted((GITHUB / "workflows").glob("*.yaml"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def jobs_of(name):
    return yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8"))["jobs"]


def steps():
    return [(name, step) for name in WORKFLOWS for job in jobs_of(name).values() for step in job["steps"]]


def made_by(command):
    """Give the targets that a command makes, and the variables that it sets."""
    matches = re.findall(r"^make ([a-z-]+)((?: [A-Z]+=\S+)*)$", command, flags=re.M)
    return [(target, re.findall(r"([A-Z]+)=", variables)) for target, variables in matches]


def test_workflows_call_targets_that_there_are():
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.M))
    variables = set(re.findall(r"^([A-Z]+) [?:]?=", MAKEFILE, flags=re.M)) | set(
        re.findall(r"\$\(([A-Z]+)\)", MAKEFILE)
    )
    called = {target for _, step in steps() for target, _ in made_by(step.get("run", ""))}
    assert called == {"test", "test-faults", "lint", "docs", "screenshots", "package", "minimum", "prerelease"}
    assert called <= targets
    assert {name for _, step in steps() for _, names in made_by(step.get("run", "")) for name in names} <= variables
    assert sum("make " in step.get("run", "") for _, step in steps()) == sum(
        len(made_by(step.get("run", ""))) for _, step in steps()
    )


def test_pythons_that_are_promised_are_tested():
    matrix = jobs_of("test")["test"]["strategy"]["matrix"]
    promised = {line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if line.startswith("Programming Language")}
    assert {"3.11", "3.12", "3.13"} == set(matrix["python"]) >= promised - {"3"}
    assert PROJECT["requires-python"] == f">={min(matrix['python'], key=lambda v: int(v.split('.')[1]))}"
    assert {"ubuntu-latest", "macos-latest"} == {*matrix["os"], *(extra["os"] for extra in matrix["include"])}


def test_a_release_needs_no_secret():
    assert "secrets." not in "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS.values())
    publish = jobs_of("release")["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert all("run" not in step for step in publish["steps"])  # none of our code holds the permission to publish
    assert "make package" in [step.get("run") for step in jobs_of("release")["build"]["steps"]]


def test_the_least_torch_is_that_of_pyproject():
    (bound,) = [line.split(">=")[1] for line in PROJECT["dependencies"] if line.startswith("torch>=")]
    commands = [step.get("run", "") for step in jobs_of("test")["minimum"]["steps"]]
    assert f"make minimum TORCH={bound}.0" in commands
