"""Pictures of the site are those of its pages, and what doesn't fit a window is said."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "screenshots.py"


@pytest.fixture
def screenshots():
    spec = importlib.util.spec_from_file_location("screenshots", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path):
    """Two pages, one of which is wider than the screen of a phone."""
    for name, width in {"index": 300, "results/wide": 900, "generated/scdiva.tl.embed": 1}.items():
        page = tmp_path / "site" / f"{name}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<!doctype html><body style="margin: 0"><div style="width: {width}px">text</div>')
    (tmp_path / "site" / "genindex.html").touch()
    return tmp_path / "site"


def test_pages_are_those_that_are_written(screenshots, site):
    assert screenshots.pages_of(site) == ["index", "results/wide", "generated/scdiva.tl.embed"]


def test_a_page_wider_than_its_window_is_said(screenshots, site, tmp_path):
    pytest.importorskip("playwright", reason="of the group screenshots")
    if screenshots.CHROMIUM is None:
        pytest.skip("there is no Chromium")
    command = [sys.executable, SCRIPT, "index", "results/wide", "--site", site, "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"results/wide, telephone-{scheme}: 510 px wider than the window" for scheme in ("light", "dark")
    ]
    assert len(list((tmp_path / "out").glob("*.png"))) == 8
