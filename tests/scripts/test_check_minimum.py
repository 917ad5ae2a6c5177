"""Lower bounds as exact versions."""

from __future__ import annotations

import tomllib

import pytest


@pytest.fixture
def check(script):
    return script("check_minimum")


def test_every_dependency_of_the_core_has_one(check):
    project = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["project"]
    assert len(check.least(project["dependencies"], check.pinned_torch())) == len(project["dependencies"])


def test_the_tests_that_are_run_there_exist(check):
    assert [name for name in check.TESTS if not (check.ROOT / "tests" / name).exists()] == []
