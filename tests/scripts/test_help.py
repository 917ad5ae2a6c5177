"""Every script that is run prints its usage, and does nothing else."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").glob("*.py"))
RUN = [file for file in SCRIPTS if "__main__" in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("file", RUN, ids=[file.stem for file in RUN])
def test_help_is_printed(file, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.setattr("sys.argv", [file.name, "--help"])
    monkeypatch.setattr("sys.stdout.reconfigure", lambda **_: None, raising=False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(file), run_name="__main__")
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {file.name} ")
