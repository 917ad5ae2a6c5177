"""The judge of the fault table: what passed survived, what failed is lost, and too few variants are noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "fault_table.py"
TESTS = """
import pytest
@pytest.mark.fault("one")
@pytest.mark.parametrize("n", range(3))
def test_one(n): assert n < 2
@pytest.mark.fault("two")
@pytest.mark.fault("three")
def test_two(): pass
@pytest.mark.fault("two")
def test_three(): pytest.skip("no such extra")
@pytest.fixture
def broken(): raise RuntimeError
@pytest.mark.fault("three")
def test_four(broken): pass
def test_unmarked(): assert False
"""


def test_it_counts(tmp_path):
    (tmp_path / "test_of_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = fault: of it\n")
    answer = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    lines = [line.split() for line in answer.stdout.splitlines()]
    assert ["one", "3", "2", "1"] in lines
    assert ["two", "1", "1", "0"] in lines
    assert ["three", "2", "1", "1"] in lines
    assert "3 classes, 6 variants, 4 survived, lost = 2" in answer.stdout
    assert "fewer than 3 variants: three, two" in answer.stdout
    assert "fewer than 75 classes" in answer.stdout
    assert answer.returncode == 1
