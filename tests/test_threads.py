from __future__ import annotations

import pytest

from scdiva._threads import torch_threads_kept


def test_torch_keeps_its_threads():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    with torch_threads_kept():
        torch.set_num_threads(before + 1)  # as numba's threads do when they start
    assert torch.get_num_threads() == before


def test_a_number_holds_within_the_block_and_no_longer():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    with torch_threads_kept(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError), torch_threads_kept(before + 1):
        raise RuntimeError
    assert torch.get_num_threads() == before
