"""Join of a cell's state with components of one data set."""

from __future__ import annotations

import pytest
import torch

from scdiva.nn import OwnComponents

TOKENS, VALUES = torch.tensor([3, 5, 4, 3]), torch.tensor([1.0, 2.0, 0.5, 3.0])
CU = torch.tensor([0, 2, 4, 4])  # the last cell has no gene


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1.5])
def test_the_join_is_its_formula(alone, scale):
    join = OwnComponents(6, 2, 3, alone=alone, scale=scale)
    torch.nn.init.normal_(join.table.weight)
    state, table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]), join.table.weight.detach()
    own = torch.stack([table[3] + 2 * table[5], 0.5 * table[4] + 3 * table[3], torch.zeros(3)])
    if scale:
        own[:2] *= scale / own[:2].norm(dim=1, keepdim=True).sqrt()
    found = join(state, TOKENS, VALUES, CU).detach()
    torch.testing.assert_close(found, own if alone else torch.cat([state, own], dim=1))
    assert found.shape[1] == join.dim
