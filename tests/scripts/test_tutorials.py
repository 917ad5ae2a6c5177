"""The gallery shows a picture of each tutorial."""

from __future__ import annotations


def test_each_tutorial_draws_a_picture_that_the_gallery_shows(script):
    pictures = script("tutorials")
    docs = pictures.TUTORIALS.parent / "docs"
    page = (docs / "tutorials.md").read_text(encoding="utf-8")
    drawn = {tutorial for tutorial, _ in pictures.PICTURES.values()}
    assert drawn == {notebook.stem for notebook in pictures.TUTORIALS.glob("*.ipynb")}
    for name, (tutorial, call) in pictures.PICTURES.items():
        assert (docs / "_static" / name).read_bytes() == pictures.figure_of(tutorial, call)
        assert f":link: notebooks/{tutorial}\n:link-type: doc\n:img-top: _static/{name}\n:img-alt: " in page
