"""The integration head by its formula, cell by cell in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva.models import IntegrationHead

N_TOKENS, STATE, OWN = 20 + N_SPECIAL, 5, 3
LENGTHS = [4, 1, 9, 0, 6]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def head():
    made = IntegrationHead(N_TOKENS, STATE, OWN, 7)
    with torch.no_grad():
        for p in made.parameters():  # away from the zeros that hide a path
            p.copy_(0.5 * torch.randn(p.shape, generator=seeded(p.numel())))
    return made


@pytest.fixture
def cells():
    """States, and packed cells of 4, 1, 9, 0 and 6 genes."""
    tokens = torch.cat([torch.randperm(20, generator=seeded(n))[:n] + N_SPECIAL for n in LENGTHS])
    values = torch.rand(len(tokens), generator=seeded(1)) * 4
    bounds = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    return torch.randn(len(LENGTHS), STATE, generator=seeded(2)) * 3, tokens, values, bounds


def by_formula(head, state, tokens, values):
    w = {name: p.detach().double().numpy() for name, p in head.state_dict().items()}
    x = np.zeros(OWN)
    for token, value in zip(tokens.tolist(), values.tolist(), strict=True):
        x += value * w["table.weight"][token]
    z = state.double().numpy()
    u = np.concatenate([z / np.linalg.norm(z), x / max(np.linalg.norm(x), 1e-12)]) / np.sqrt(2)
    y = np.sqrt(STATE + OWN) * u
    for number in (0, 2, 4):
        y = w[f"mlp.{number}.weight"] @ y + w[f"mlp.{number}.bias"]
        if number < 4:
            y = y / (1 + np.exp(-y))
    return u, (u + 0.3 * y) / np.linalg.norm(u + 0.3 * y)


def test_is_its_formula(head, cells):
    state, tokens, values, bounds = cells
    features, found = (part.detach().numpy() for part in (head.features(*cells), head(*cells)))
    assert head.dim == STATE + OWN
    assert found.shape == (5, head.dim)
    for i in range(5):
        at = slice(int(bounds[i]), int(bounds[i + 1]))
        u, w = by_formula(head, state[i], tokens[at], values[at])
        np.testing.assert_allclose(features[i], u, atol=1e-6)
        np.testing.assert_allclose(found[i], w, atol=1e-6)
        assert np.linalg.norm(u) == pytest.approx(1 if LENGTHS[i] else 0.5**0.5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)


def test_gradients_reach_every_weight_and_a_cell_without_genes_has_finite_ones(head, cells):
    (head(*cells) ** 3).sum().backward()
    for name, p in head.named_parameters():
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.abs().sum() > 0, name
