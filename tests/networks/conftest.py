"""A small model, and a cell of 17 genes."""

from __future__ import annotations

import pytest
import torch

from scdiva._constants import N_SPECIAL


@pytest.fixture(scope="module", params=[False, True], ids=["stream", "state head"])
def model(network, request):
    return network(n_layers=2, max_length=20, state_head=request.param)


@pytest.fixture
def cell():
    """A cell of 17 genes, packed."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randperm(30, generator=draw)[:17] + N_SPECIAL
    return tokens, torch.rand(17, generator=draw) * 4, torch.tensor([0, 17], dtype=torch.int32)


@pytest.fixture
def longer(cell):
    """The same cell with ten genes more than the model sees."""
    tokens, values, _ = cell
    more = torch.tensor([t for t in range(N_SPECIAL, N_SPECIAL + 30) if t not in tokens.tolist()])[:13]
    return torch.cat([tokens, more]), torch.cat([values, torch.ones(13)]), torch.tensor([0, 30], dtype=torch.int32)
