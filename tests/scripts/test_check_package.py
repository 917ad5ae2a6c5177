"""Lower bounds as exact versions."""

from __future__ import annotations

import tomllib


def test_every_dependency_of_the_core_has_one_and_the_tests_run_there_exist(script):
    check = script("check_package")
    project = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["project"]
    assert len(check.least(project["dependencies"], check.pinned_torch())) == len(project["dependencies"])
    assert [name for name in check.MINIMUM_TESTS if not (check.ROOT / "tests" / name).exists()] == []
