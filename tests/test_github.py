"""What is kept for GitHub, Read the Docs and scverse: it is read there and not here, so its claims are checked here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

import scdiva as sd

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path for path in sorted((GITHUB / "workflows").glob("*.yaml"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

URL = {"type": "string", "format": "uri", "pattern": "^https://"}
NAMES = {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True}
# What scverse/ecosystem-packages takes since August 2026, as far as it concerns us: tags of its own list (these are on
# it), a category and a language, and no version, which it reads from PyPI.
REGISTRY = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string", "maxLength": 400},
        **dict.fromkeys(("project_home", "documentation_home", "tutorials_home"), URL),
        "install": {"properties": {"pypi": {"type": "string"}, "conda": {"pattern": "::"}}, "minProperties": 1},
        "primary_category": {"const": "scRNA-seq"},
        "tags": NAMES
        | {
            "items": {
                "enum": [
                    "cell-type annotation",
                    "data integration",
                    "deep learning",
                    "denoising",
                    "gene regulatory networks",
                    "perturbation",
                    "scRNA-seq",
                ]
            }
        },
        "license": {"const": "BSD-3-Clause"},
        "language": {"const": "Python"},
        "contact": NAMES,
        "publications": {"items": {"pattern": r"^10\.\d{4,9}/[-._;()/:A-Za-z0-9]+$"}},
        "test_command": {"type": "string"},
        "category": {"const": "ecosystem"},
    },
    "additionalProperties": False,
}
OPTIONAL = {"tutorials_home", "publications", "test_command"}


def jobs_of(name):
    return yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8"))["jobs"]


def steps():
    return [(name, step) for name in WORKFLOWS for job in jobs_of(name).values() for step in job["steps"]]


def made_by(command):
    """Give the targets that a command makes, and the variables that it sets."""
    found = re.findall(r"^make ([a-z-]+)((?: [A-Z]+=\S+)*)$", command, flags=re.M)
    return [(target, re.findall(r"([A-Z]+)=", variables)) for target, variables in found]


def test_there_is_a_workflow_for_each_matter():
    assert set(WORKFLOWS) == {"build", "docs", "release", "test"}
    assert not list((GITHUB / "workflows").glob("*.yml"))  # one ending, so that none is overlooked


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


def recipe(*arguments):
    """What make would run, were nothing built yet."""
    given = ("MAKEFLAGS", "MFLAGS", "PYTHON", "VENV", "LOCK", "WORKERS")  # of the make that runs this test
    environment = {name: value for name, value in os.environ.items() if name not in given}
    command = ["make", "--dry-run", "--always-make", *arguments]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return answer.returncode, answer.stdout + answer.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
class TestPythonsOfMake:
    @pytest.fixture
    def python(self, tmp_path):
        """A Python of another version, as far as make asks."""

        def make(version):
            file = tmp_path / f"python{version}"
            file.write_text(f'#!/bin/sh\ncase "$2" in *executable*) echo "$0";; *) echo {version};; esac\n')
            file.chmod(0o755)
            return file

        return make

    @pytest.mark.parametrize(
        ("version", "target", "environment"),
        [
            ("3.11", "test", ".venv"),
            ("3.12", "test", ".venv-newest-3.12"),
            ("3.13", "test", ".venv-newest-3.13"),
            ("3.13", "newest", ".venv-newest-3.13"),
            ("3.11", "newest", ".venv-newest-3.11"),
            ("3.13", "prerelease", ".venv-prerelease-3.13"),
        ],
    )
    def test_each_has_an_environment_and_only_one_the_locked_versions(self, python, version, target, environment):
        """A suite that was to run on 3.13 must never run on what lies there for 3.11."""
        status, commands = recipe(target, f"PYTHON={python(version)}")
        assert status == 0
        assert f"{environment}/bin/python -m pytest -n 2" in commands
        assert ("--constraint constraints.txt" in commands) == (environment == ".venv")
        assert (" --pre " in commands) == (target == "prerelease")

    def test_a_python_that_is_not_there_is_no_other_one(self):
        status, said = recipe("test", "PYTHON=python3.99")
        assert status
        assert "there is no python3.99" in said


def test_pre_releases_may_fail_and_nothing_else():
    free = [name for name, job in jobs_of("test").items() if job.get("continue-on-error")]
    assert free == ["prerelease"]
    gate = jobs_of("test")["check"]
    assert set(gate["needs"]) == set(jobs_of("test")) - {"check"}
    assert gate["steps"][0]["with"]["allowed-failures"] == "prerelease"


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


@pytest.mark.parametrize("form", ["bug_report", "feature_request"])
def test_an_issue_form_asks_for_what_we_need(form):
    read = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{form}.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(read)
    ids = [field["id"] for field in read["body"]]
    assert len(set(ids)) == len(ids)
    if form == "bug_report":
        asked = {field["id"]: field["attributes"]["description"] for field in read["body"]}
        assert "sd.print_versions()" in asked["versions"]
        assert all(field["validations"]["required"] for field in read["body"])


def entry():
    return yaml.safe_load((GITHUB / "ecosystem" / "meta.yaml").read_text(encoding="utf-8"))


def test_the_ecosystem_entry_is_what_the_registry_takes():
    jsonschema.validate(entry(), REGISTRY | {"required": sorted(set(REGISTRY["properties"]) - OPTIONAL)})


@pytest.mark.parametrize("change", [{"version": "0.1.0"}, {"tags": ["foundation model"]}, {"install": {}}])
def test_an_entry_that_the_registry_refuses_is_seen(change):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(entry() | change, REGISTRY)


def test_the_ecosystem_entry_is_true_of_the_package():
    read = entry()
    assert read["name"] == read["install"]["pypi"] == PROJECT["name"]
    assert read["license"] == PROJECT["license"]
    assert made_by(read["test_command"]) == [("test", [])]


def test_the_tutorials_stand_where_the_ecosystem_entry_says():
    """The section of the front page that the link leads to."""
    page, section = entry()["tutorials_home"].rsplit("/", 1)[1].split("#")
    text = (ROOT / "docs" / page.replace(".html", ".md")).read_text(encoding="utf-8")
    assert re.search(rf"^## {section}$", text, flags=re.M | re.I)


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


def test_containers_run_targets_that_there_are():
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert made_by(container["postCreateCommand"]) == [("demo", [])]
    assert 'CMD ["make", "demo"]' in dockerfile
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", dockerfile, flags=re.M) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert set(kept) == {"*", *(f"!{name}" for name in copied)}
    assert f"python:{PROJECT['requires-python'].removeprefix('>=')}" in dockerfile


def test_read_the_docs_builds_what_make_docs_builds():
    read = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text(encoding="utf-8"))
    assert read["version"] == 2
    assert read["sphinx"]["fail_on_warning"] is True
    assert (ROOT / read["sphinx"]["configuration"]).is_file()
    assert read["build"]["tools"]["python"] == PROJECT["requires-python"].removeprefix(">=")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    install = " ".join(read["build"]["jobs"]["install"])
    assert set(re.findall(r"--group (\w+)", install)) <= set(groups)
    assert set(re.findall(r'"\.\[(\w+)\]"', install)) <= set(PROJECT["optional-dependencies"])
    assert install.index("torch==") < install.index("--editable")  # or pip may fetch CUDA


def test_pre_commit_runs_what_make_lint_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    (ruff,) = [repo for repo in hooks if repo["repo"].endswith("ruff-pre-commit")]
    locked = re.search(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), flags=re.M)
    assert ruff["rev"] == f"v{locked[1]}"
    assert {hook["id"] for repo in hooks for hook in repo["hooks"]} >= {"ruff-check", "ruff-format", "mypy"}
