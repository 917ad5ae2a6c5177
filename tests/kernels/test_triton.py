"""The Triton kernels without a GPU: their interpreter in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


def test_interpreted_kernels_agree_with_the_reference():
    names = ("interpreted", "softmax", "first_token")
    files = [f"tests/kernels/test_triton_{name}.py" for name in names]
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert " passed" in answer.stdout
    assert "skipped" not in answer.stdout
