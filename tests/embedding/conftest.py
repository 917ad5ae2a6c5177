"""A file of many cells, and a process that is killed while it writes."""

from __future__ import annotations

import os
import signal

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd


@pytest.fixture
def killed():
    """Do something in a forked process, which must end by SIGKILL."""

    def run(work):
        process = os.fork()
        if not process:
            try:
                with sd.settings.override(threads=1):
                    work()
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL

    return run


@pytest.fixture(scope="session")
def kill():
    """End this process at once, in place of another function."""
    return lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="session")
def write_many(adata, tmp_path_factory):
    """Write the toy cells again and again as a file of n cells; some of them without genes."""

    def write(n, empty=()):
        x = sp.vstack([adata.X] * (n // 90 + 1), format="csr")[:n]
        keep = np.ones(n)
        keep[list(empty)] = 0
        x = sp.csr_matrix(sp.diags_array(keep) @ x, dtype=np.float32)
        x.eliminate_zeros()
        path = tmp_path_factory.mktemp("cells") / "cells.h5ad"
        cells = ad.AnnData(x, var=adata.var[[]])
        cells.obs_names = [f"c{i}" for i in range(n)]
        cells.write_h5ad(path)
        return path

    return write
