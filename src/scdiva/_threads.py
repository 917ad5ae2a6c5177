"""The number of torch's threads, kept while others start theirs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def torch_threads_kept(within: int | None = None) -> Iterator[None]:
    """Put torch's number of threads back after the block.

    When numba, on which umap-learn and pynndescent run, starts its OpenMP threads it sets their number for torch too.
    With fewer free cores than that (a share of a cluster's node), small models then train dozens of times slower.

    Parameters
    ----------
    within
        Number in the block; None: what it is. Threads that share small products wait for each other, and on a busy
        machine longer than they compute: one is faster.
    """
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else 0
    try:
        if torch is not None and within is not None:
            torch.set_num_threads(within)
        yield
    finally:
        if torch is not None and torch.get_num_threads() != before:
            torch.set_num_threads(before)
