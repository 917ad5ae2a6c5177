"""The look into a wheel: what is missing, differs or does not belong there is named."""

from __future__ import annotations

import zipfile

import pytest


@pytest.fixture
def check(script):
    return script("check_package")


@pytest.fixture
def source(check, tmp_path):
    """A small package that has everything which is needed."""
    folder = tmp_path / "src" / "scdiva"
    for name in (*check.NEEDED, "scdiva/__init__.py", "scdiva/tl/_embed.py", "scdiva/__pycache__/old.pyc"):
        path = folder.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def wheel_of(source, without=(), more=(), changed=()):
    wheel = source.parents[1] / "scdiva-1.2-py3-none-any.whl"
    names = {
        f"scdiva/{p.relative_to(source)}" for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    names |= {f"scdiva-1.2.dist-info/{name}" for name in ("METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (names | set(more)) - set(without):
            archive.writestr(name, "other" if name in changed else name)
    return wheel


def test_a_whole_wheel_has_no_problems(check, source):
    assert check.problems_of(wheel_of(source), source) == []


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"without": ["scdiva/py.typed"]}, "scdiva/py.typed is missing"),
        ({"without": ["scdiva/tl/_embed.py"]}, "scdiva/tl/_embed.py is missing"),
        ({"without": ["scdiva-1.2.dist-info/licenses/LICENSE"]}, "scdiva-1.2.dist-info/licenses/LICENSE is missing"),
        ({"more": ["tests/test_tl.py"]}, "tests/test_tl.py does not belong there"),
        ({"more": ["docs/index.md"]}, "docs/index.md does not belong there"),
        ({"more": ["scdiva/notes.txt"]}, "scdiva/notes.txt does not belong there"),
        (
            {"changed": ["scdiva/checkpoints/scdiva-mini/model.safetensors"]},
            "scdiva/checkpoints/scdiva-mini/model.safetensors differs from the source",
        ),
    ],
)
def test_a_problem_is_named(check, source, how, said):
    assert check.problems_of(wheel_of(source, **how), source) == [said]


def test_the_tests_that_are_run_there_exist(check):
    assert [name for name in check.TESTS if not (check.ROOT / "tests" / name).exists()] == []
