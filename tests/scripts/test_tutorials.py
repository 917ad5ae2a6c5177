"""The script that keeps what the tutorials show."""

import pytest


def test_what_differs_between_two_runs_is_taken_out(script):
    nbformat = pytest.importorskip("nbformat")
    cell = nbformat.v4.new_code_cell("1", metadata={"execution": {"shell.execute_reply": "now"}})
    cell.outputs = [nbformat.v4.new_output("stream", name=name, text="x") for name in ("stderr", "stdout")]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    script("tutorials").tidy(notebook)
    assert cell.metadata == {}
    assert [output.name for output in cell.outputs] == ["stdout"]
