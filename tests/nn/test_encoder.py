from __future__ import annotations

import numpy as np
import torch

from scdiva.models import SetEncoder

TOKENS = torch.tensor([3, 5, 4, 3, 6, 7])
VALUES = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0, 2.5], dtype=torch.float64)
CU = torch.tensor([0, 3, 3, 6], dtype=torch.int32)
VISIBLE = torch.tensor([True, False, True, True, True, True])
CELLS = [[0, 2], [], [3, 4, 5]]  # the visible tokens of each cell


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def set_encoder() -> SetEncoder:
    encoder = SetEncoder(8, 4, 3, 9, balance=2.5).double()
    for p in encoder.parameters():
        torch.nn.init.normal_(p)
    encoder.full_total.fill_(4.0)  # of the cells' totals 1.5, 0 and 6.5 one lies above
    return encoder


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


def test_nothing_visible_is_finite_with_finite_gradients():
    encoder = set_encoder()
    out = encoder(TOKENS, VALUES, CU, torch.zeros(6, dtype=torch.bool))
    assert out.isfinite().all()
    torch.testing.assert_close(out[0], out[1])  # all masked is the same as no token
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())


def test_masked_tokens_are_never_read():
    encoder = set_encoder()
    values, tokens = VALUES.clone(), TOKENS.clone()
    values[~VISIBLE], tokens[~VISIBLE] = torch.nan, 7
    assert torch.equal(encoder(tokens, values, CU, VISIBLE), encoder(TOKENS, VALUES, CU, VISIBLE))


def test_the_order_of_genes_and_the_other_cells_change_nothing():
    encoder = set_encoder()
    whole, order = encoder(TOKENS, VALUES, CU, VISIBLE), torch.tensor([5, 3, 4])
    alone = encoder(TOKENS[order], VALUES[order], torch.tensor([0, 3], dtype=torch.int32), VISIBLE[order])
    torch.testing.assert_close(alone[0], whole[2], atol=1e-12, rtol=0)
