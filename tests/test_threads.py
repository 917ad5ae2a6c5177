from __future__ import annotations

import pytest

from scdiva._threads import torch_threads_kept


def test_torch_keeps_its_threads():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    with torch_threads_kept():
        torch.set_num_threads(before + 1)  # as numba's threads do when they start
    assert torch.get_num_threads() == before
