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


def set_encoder() -> SetEncoder:
    encoder = SetEncoder(8, 4, 3, 9, balance=2.5).double()
    for p in encoder.parameters():
        torch.nn.init.normal_(p)
    encoder.full_total.fill_(4.0)  # of the cells' totals 1.5, 0 and 6.5 one lies above
    return encoder


@pytest.fixture(params=["pooled", "encoder"])
def anchor(request):
    if request.param == "pooled":
        return PooledAnchor(4).double()
    return set_encoder()


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
    encoder = set_encoder()
    out = array(encoder(TOKENS, VALUES, CU, VISIBLE))
    assert encoder.dim == out.shape[1] == 7
    for b, rows in enumerate(CELLS):
        x = array(encoder.bias) * min(1.0, VALUES[rows].sum().item() / 4.0)
        for i in rows:
            x += VALUES[i].item() * array(encoder.table.weight)[TOKENS[i]]
        x = x / max(np.sqrt((x**2).sum()), 1e-12)
        y = x * np.sqrt(4)
        for layer in (encoder.mlp[0], encoder.mlp[2]):
            y = array(layer.weight) @ y + array(layer.bias)
            y = y / (1 + np.exp(-y))
        y = array(encoder.mlp[4].weight) @ y + array(encoder.mlp[4].bias)
        y = y / np.sqrt((y**2).sum())
        np.testing.assert_allclose(out[b], np.concatenate([2.5 * x, y]) / np.sqrt(2.5**2 + 1), atol=1e-10)


def test_set_encoder_states_have_length_one_and_ignore_depth():
    encoder = set_encoder()
    encoder.full_total.fill_(1e6)  # so little that each gets its own share of the bias
    state = encoder(TOKENS, VALUES, CU, VISIBLE)
    torch.testing.assert_close(state[[0, 2]].norm(dim=1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(encoder(TOKENS, 3 * VALUES, CU, VISIBLE)[[0, 2]], state[[0, 2]])


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
