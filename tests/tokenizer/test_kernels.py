"""The compiled loops: loaded when they are first needed, and compiled whatever the install can be written to."""

from __future__ import annotations

import subprocess
import sys

import numba


def test_an_install_that_cannot_be_written_to_compiles_without_a_cache(monkeypatch):
    from scdiva.tokenizer import _kernels

    njit, asked = numba.njit, []

    def no_folder(*arguments, cache=False, **options):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function 'twice': no locator available for file")
        return njit(*arguments, **options)

    monkeypatch.setattr(numba, "njit", no_folder)
    twice = _kernels.compiled(numba.int64(numba.int64))(lambda x: 2 * x)
    assert twice(21) == 42
    assert asked == [True, False]


def test_numba_is_loaded_by_the_first_block_only():
    code = (
        "import sys, scdiva.pp, scdiva.tokenizer.entropy; print('numba' in sys.modules)\n"
        "import numpy as np, scipy.sparse as sp; from scdiva.tokenizer.serialize import to_token_space\n"
        "to_token_space(sp.csr_matrix(np.float32([[1]])), np.int32([3]), 4); print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_switched_off_compilation_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    done = subprocess.run([sys.executable, "-c", "import scdiva.tokenizer._kernels"], capture_output=True, text=True)
    assert "unset it" in done.stderr
    assert "NUMBA_DISABLE_JIT" in done.stderr
