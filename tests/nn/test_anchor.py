from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva.nn import PooledAnchor, SetEncoder

TOKENS = torch.tensor([3, 5, 4, 3, 6, 7])
VALUES = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0, 2.5], dtype=torch.float64)
CU = torch.tensor([0, 3, 3, 6], dtype=torch.int32)
VISIBLE = torch.tensor([True, False, True, True, True, True])
CELLS = [[0, 2], [], [3, 4, 5]]  # the visible tokens of each cell


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def summarise(anchor, tokens, values, cu, visible, table):
    if isinstance(anchor, PooledAnchor):
        return anchor(table, tokens, values, cu, visible)
    return anchor(tokens, values, cu, visible)


@pytest.fixture(params=["pooled", "encoder"])
def anchor(request):
    if request.param == "pooled":
        return PooledAnchor(4).double()
    encoder = SetEncoder(8, 4, 9).double()
    for p in encoder.parameters():
        torch.nn.init.normal_(p)
    return encoder


@pytest.fixture
def table():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_pooled_anchor_is_its_formula(table):
    anchor = PooledAnchor(4, eps=0.01).double()
    torch.nn.init.normal_(anchor.norm.weight)
    out = array(anchor(table, TOKENS, VALUES, CU, VISIBLE))
    for b, rows in enumerate(CELLS):
        mean = np.zeros(4)
        for i in rows:
            mean += VALUES[i].item() * array(table)[TOKENS[i]] / VALUES[rows].sum().item()
        expected = mean / np.sqrt((mean**2).mean() + 0.01) * array(anchor.norm.weight)
        np.testing.assert_allclose(out[b], expected, atol=1e-12)


def test_set_encoder_is_its_formula():
    encoder = SetEncoder(8, 4, 9, eps=0.01).double()
    for p in encoder.parameters():
        torch.nn.init.normal_(p)
    out = array(encoder(TOKENS, VALUES, CU, VISIBLE))
    for b, rows in enumerate(CELLS):
        x = array(encoder.bias).copy()
        for i in rows:
            x += VALUES[i].item() * array(encoder.table.weight)[TOKENS[i]]
        normed = x / np.sqrt((x**2).mean() + 0.01) * array(encoder.norm.weight)
        inner = array(encoder.hidden.weight) @ normed + array(encoder.hidden.bias)
        inner = inner / (1 + np.exp(-inner))
        expected = x + array(encoder.out.weight) @ inner + array(encoder.out.bias)
        np.testing.assert_allclose(out[b], expected, atol=1e-10)


def test_set_encoder_starts_as_a_linear_projection():
    encoder = SetEncoder(8, 4, 9).double()
    z = encoder(TOKENS, VALUES, CU, VISIBLE)
    projection = torch.zeros(3, 4, dtype=torch.float64)
    for b, rows in enumerate(CELLS):
        projection[b] = (VALUES[rows, None] * encoder.table.weight[TOKENS[rows]]).sum(0)
    torch.testing.assert_close(z, projection)


def test_nothing_visible_is_finite_with_finite_gradients(anchor, table):
    table.requires_grad_()
    out = summarise(anchor, TOKENS, VALUES, CU, torch.zeros(6, dtype=torch.bool), table)
    assert out.isfinite().all()
    torch.testing.assert_close(out[0], out[1])  # all hidden is the same as no token
    out.square().sum().backward()
    grads = [p.grad for p in (*anchor.parameters(), table) if p.grad is not None]
    assert grads
    assert all(g.isfinite().all() for g in grads)


def test_hidden_tokens_are_never_read(anchor, table):
    values = VALUES.clone()
    values[~VISIBLE] = torch.nan
    tokens = TOKENS.clone()
    tokens[~VISIBLE] = 7
    expected = summarise(anchor, TOKENS, VALUES, CU, VISIBLE, table)
    assert torch.equal(summarise(anchor, tokens, values, CU, VISIBLE, table), expected)


def test_the_order_of_genes_and_the_other_cells_change_nothing(anchor, table):
    whole = summarise(anchor, TOKENS, VALUES, CU, VISIBLE, table)
    order = torch.tensor([5, 3, 4])
    alone = summarise(
        anchor, TOKENS[order], VALUES[order], torch.tensor([0, 3], dtype=torch.int32), VISIBLE[order], table
    )
    torch.testing.assert_close(alone[0], whole[2], atol=1e-12, rtol=0)
