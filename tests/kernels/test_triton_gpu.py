"""The Triton kernels on a GPU against a float64 reference: each of `triton_cases.CASES`.

    PYTHONPATH=src python -m pytest tests/kernels/test_triton_gpu.py --noconftest -p no:cacheprovider

`benchmarks/gpu.py` goes through the same cases on a machine without pytest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from triton_cases import CASES

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: the kernels are tested in the interpreter instead"
)


@pytest.mark.parametrize("case", CASES)
def test_case(case):
    CASES[case](device="cuda", backend="triton")
