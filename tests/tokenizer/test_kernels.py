"""The compiled loops: loaded on first use, and compiled also if the installation is read-only."""

from __future__ import annotations

import errno
import subprocess
import sys


def test_an_install_that_cannot_be_written_to_compiles_without_a_cache(monkeypatch):
    from numba.core import caching

    from scdiva.tokenizer import _kernels

    calls = []

    def no_folder(_cls, _function, _file):
        calls.append(True)

    for locator in caching.CacheImpl._locator_classes:
        monkeypatch.setattr(locator, "from_function", classmethod(no_folder))
    twice = _kernels.compiled(lambda x: 2 * x)
    assert twice(21) == 42
    assert calls


def test_a_full_disk_costs_the_cache_and_not_the_call(monkeypatch):
    from numba.core import caching

    from scdiva.tokenizer import _kernels

    calls = []

    def full(*_):
        calls.append(True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)
    twice = _kernels.compiled(_twice)
    assert twice(21) == 42
    assert twice(2.5) == 5
    assert len(calls) == 2


def _twice(x):
    return 2 * x


def test_switched_off_compilation_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    done = subprocess.run([sys.executable, "-c", "import scdiva.tokenizer._kernels"], capture_output=True, text=True)
    assert "unset it" in done.stderr
    assert "NUMBA_DISABLE_JIT" in done.stderr
