"""The integration head by its formula, cell by cell in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva.models import IntegrationHead

DIM = 5


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def head():
    module = IntegrationHead(DIM, 7)
    with torch.no_grad():
        for p in module.parameters():  # weights of zero would hide parts of the network
            p.copy_(0.5 * torch.randn(p.shape, generator=seeded(p.numel())))
    return module


def test_is_its_formula(head):
    components = torch.randn(4, DIM, generator=seeded(2)) * 3
    integrated = head(components).detach().numpy()
    w = {name: p.detach().double().numpy() for name, p in head.state_dict().items()}
    for cell, state in zip(components.double().numpy(), integrated, strict=True):
        u = cell / np.linalg.norm(cell)
        y = np.sqrt(DIM) * u
        for number in (0, 2, 4):
            y = w[f"mlp.{number}.weight"] @ y + w[f"mlp.{number}.bias"]
            if number < 4:
                y = y / (1 + np.exp(-y))
        expected = (u + 0.3 * y) / np.linalg.norm(u + 0.3 * y)
        np.testing.assert_allclose(state, expected, atol=1e-6)
    torch.testing.assert_close(head(7 * components), head(components), atol=1e-6, rtol=0)


def test_gradients_reach_every_weight_and_a_cell_at_the_centre_has_finite_ones(head):
    (head(torch.tensor([[0.0] * DIM, [1.0, 0.5, 0.0, -1.0, 2.0]])) ** 3).sum().backward()
    for name, p in head.named_parameters():
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.abs().sum() > 0, name
