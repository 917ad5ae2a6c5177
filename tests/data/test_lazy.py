from __future__ import annotations

import subprocess
import sys

import pytest

import scdiva.data


def test_names_are_loaded_when_used():
    from scdiva.data.cells import open_cells

    assert scdiva.data.open_cells is open_cells
    assert "CellDataModule" in dir(scdiva.data)
    with pytest.raises(AttributeError, match="no attribute 'open_cell'"):
        scdiva.data.open_cell  # noqa: B018


def test_preparing_needs_no_torch():
    code = "import sys, scdiva.pp, scdiva.get, scdiva.data.cells; print(sorted({'torch', 'scanpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
