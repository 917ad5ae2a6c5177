"""Lower bounds as exact versions."""

from __future__ import annotations

import re
import tomllib

import pytest


@pytest.fixture
def check(script):
    return script("check_minimum")


def test_each_bound_becomes_a_version(check):
    assert check.least(["numpy>=2.0", "torch>=2.6", "umap-learn>=0.5.7"], "torch==2.13.0") == [
        "numpy==2.0",
        "torch==2.13.0",
        "umap-learn==0.5.7",
    ]


@pytest.mark.parametrize("dependency", ["numpy", "numpy>=2.0,<3", "numpy<3", "numpy>=2.0; python_version > '3.11'"])
def test_what_has_no_plain_bound_is_refused(check, dependency):
    with pytest.raises(SystemExit, match=f"{re.escape(repr(dependency))} is not of the form name>=version"):
        check.least([dependency], "torch==2.13.0")


def test_every_dependency_of_the_core_has_one(check):
    project = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["project"]
    assert len(check.least(project["dependencies"], check.pinned_torch())) == len(project["dependencies"])


def test_the_tests_that_are_run_there_exist(check):
    assert [name for name in check.TESTS if not (check.ROOT / "tests" / name).exists()] == []
