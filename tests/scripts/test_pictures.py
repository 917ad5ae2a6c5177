"""The pictures are those of tutorials, and the front page shows them all."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "docs" / "_static"


@pytest.fixture
def pictures(script):
    return script("pictures")


def test_each_picture_is_drawn_by_a_tutorial(pictures):
    for tutorial, call in pictures.PICTURES.values():
        assert any(cell.splitlines()[-1].startswith(call) for cell in pictures.cells_of(tutorial)), call


def test_each_tutorial_has_a_picture_on_the_front_page(pictures):
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert {tutorial for tutorial, _ in pictures.PICTURES.values()} == {
        p.stem for p in pictures.TUTORIALS.glob("*.ipynb")
    }
    for name, (tutorial, _) in pictures.PICTURES.items():
        assert (STATIC / name).is_file()
        assert f"](_static/{name})](notebooks/{tutorial}.ipynb)" in page
