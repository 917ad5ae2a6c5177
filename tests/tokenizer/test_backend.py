"""Who loops is chosen in one place, and never silently against what was asked for."""

from __future__ import annotations

import logging
import subprocess
import sys

import numba
import numpy as np
import pytest
import scipy.sparse as sp

from scdiva import tokenizer
from scdiva.tokenizer import serialize as module
from scdiva.tokenizer.entropy import EntropyHistogram
from scdiva.tokenizer.serialize import serialize, to_token_space


@pytest.fixture
def without_numba(monkeypatch):
    """As if numba were not installed."""
    monkeypatch.delattr(tokenizer, "_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "scdiva.tokenizer._kernels", None)
    module._loaded.cache_clear()
    yield
    module._loaded.cache_clear()


def run(backend):
    counts = sp.csr_matrix(np.float32([[1, 0, 3], [2, 2, 0]]))
    cells = to_token_space(counts, np.int32([3, 4, 5]), 6, backend=backend)
    histogram = EntropyHistogram(6)
    histogram.update(cells, np.arange(3, 6), backend=backend)
    return *serialize(cells, np.ones(6, np.float32), backend=backend), histogram.counts


def test_numba_is_taken_where_it_is_and_numpy_on_request():
    assert module.kernels() is module.kernels("numba") is sys.modules["scdiva.tokenizer._kernels"]
    assert module.kernels("numpy") is None


def test_without_numba_numpy_does_the_same_and_says_so_once(without_numba, caplog):
    with caplog.at_level(logging.WARNING, logger="scdiva"):
        found = run("auto")
    assert [record.message[:41] for record in caplog.records] == ["genes are ranked by numpy, not by numba, "]
    module._loaded.cache_clear()
    for a, b in zip(found, run("numpy"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_numba_asked_for_by_name_is_never_replaced(without_numba):
    with pytest.raises(ImportError, match=r"backend='numba', but numba can't be used: .*pass backend='auto'"):
        run("numba")


def test_a_backend_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"backend must be .*'cuda'"):
        run("cuda")


def test_an_install_that_cannot_be_written_to_compiles_without_a_cache(monkeypatch):
    kernels = module.kernels("numba")
    njit, asked = numba.njit, []

    def no_folder(*arguments, cache=False, **options):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function 'twice': no locator available for file")
        return njit(*arguments, **options)

    monkeypatch.setattr(numba, "njit", no_folder)
    twice = kernels.compiled(numba.int64(numba.int64))(lambda x: 2 * x)
    assert twice(21) == 42
    assert asked == [True, False]


def test_numba_is_loaded_by_the_first_block_only():
    code = (
        "import sys, scdiva.pp, scdiva.tokenizer.entropy; print('numba' in sys.modules)\n"
        "from scdiva.tokenizer.serialize import kernels; kernels('numpy'); print('numba' in sys.modules)\n"
        "kernels(); print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


def test_switched_off_compilation_means_numpy(monkeypatch):
    code = "from scdiva.tokenizer.serialize import kernels; print(kernels())"
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
