from __future__ import annotations

import torch

from scdiva.models import SetEncoder

TOKENS = torch.tensor([3, 5, 4, 3, 6, 7])
VALUES = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0, 2.5], dtype=torch.float64)
CU = torch.tensor([0, 3, 3, 6], dtype=torch.int32)
VISIBLE = torch.tensor([True, False, True, True, True, True])


def set_encoder() -> SetEncoder:
    encoder = SetEncoder(8, 4, 3, 9, balance=2.5).double()
    for p in encoder.parameters():
        torch.nn.init.normal_(p)
    encoder.full_total.fill_(4.0)  # of the cells' totals 1.5, 0 and 6.5 one lies above
    return encoder


def test_set_encoder_states_have_length_one_and_ignore_depth():
    encoder = set_encoder()
    encoder.full_total.fill_(1e6)  # so little that each gets its own share of the bias
    state = encoder(TOKENS, VALUES, CU, VISIBLE)
    torch.testing.assert_close(state[[0, 2]].norm(dim=1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(encoder(TOKENS, 3 * VALUES, CU, VISIBLE)[[0, 2]], state[[0, 2]])


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
