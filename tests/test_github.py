"""Workflows, Python versions and the conda recipe agree with pyproject and the Makefile; actions are pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import scdiva as sd

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path for path in sorted((GITHUB / "workflows").glob("*.yaml"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


# What scverse/ecosystem-packages takes since August 2026, as far as it concerns us: tags of its own list (these are on
# it), a category and a language, and no version, which it reads from PyPI.
def jobs_of(name):
    return yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8"))["jobs"]


def steps():
    return [(name, step) for name in WORKFLOWS for job in jobs_of(name).values() for step in job["steps"]]


def made_by(command):
    """Give the targets that a command makes, and the variables that it sets."""
    found = re.findall(r"^make ([a-z-]+)((?: [A-Z]+=\S+)*)$", command, flags=re.M)
    return [(target, re.findall(r"([A-Z]+)=", variables)) for target, variables in found]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_is_well_formed(name):
    read = yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8"))
    assert {"name", "jobs"} <= set(read)
    assert read[True]  # YAML reads the key `on` as true
    for job in read["jobs"].values():
        assert job["runs-on"]
        assert set(job.get("needs", [])) <= set(read["jobs"]) or job["needs"] in read["jobs"]
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
        assert all(
            re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", step["uses"]) for step in job["steps"] if "uses" in step
        )
        assert "permissions" in read or "permissions" in job  # none has the default's, which may write


def test_actions_are_named_by_commit_and_say_of_which_version():
    """A tag can be moved; dependabot raises commit and version together."""
    lines = [line for path in WORKFLOWS.values() for line in path.read_text().splitlines() if "uses:" in line]
    assert [line for line in lines if not re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []
    assert len({line.split("@")[0] for line in lines}) == len({line.strip(" -") for line in lines})


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


def test_the_conda_recipe_asks_for_what_pyproject_asks_for():
    read = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text(encoding="utf-8"))
    assert read["context"] == {"name": PROJECT["name"], "version": sd.__version__}
    conda = {"docstring-parser": "docstring_parser", "torch": "pytorch", "matplotlib": "matplotlib-base"}
    bounds = [re.match(r"([\w-]+)(.*)", line).groups() for line in PROJECT["dependencies"]]
    wanted = [f"{conda.get(name, name)} {bound}" for name, bound in bounds]
    assert read["requirements"]["run"] == [f"python {PROJECT['requires-python']}", *wanted]
    assert read["build"]["python"]["entry_points"] == [f"scdiva = {PROJECT['scripts']['scdiva']}"]
    assert read["about"]["license"] == PROJECT["license"]
    assert read["about"]["license_file"] == PROJECT["license-files"]
    assert read["about"]["summary"] == PROJECT["description"]
