from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva.models import DualHeads, GeneValueEmbedding


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def test_gene_and_value_start_at_the_same_size():
    """Neither drowns the other at the start: the norm of the first block would hide the smaller one."""
    module = GeneValueEmbedding(5000, 256)
    genes = module.gene.weight.std().item()
    values = torch.linspace(0.5, 6.0, 200)
    shown = module.value_out(torch.nn.functional.silu(module.value_in(values[:, None]))).std().item()
    assert 0.5 < shown / genes < 5


@pytest.mark.parametrize("tied", [False, True])
def test_heads_are_linear_and_know_no_special_token(tied):
    heads, table = DualHeads(6, 10, tied=tied), torch.randn(10 + N_SPECIAL, 6)
    weight = heads.gene_weight(table)
    assert weight.shape == (10, 6)
    names = [name for name, _ in heads.named_parameters()]
    assert names == (["value.weight", "value.bias"] if tied else ["gene.weight", "value.weight", "value.bias"])
    if tied:
        torch.testing.assert_close(weight, table[N_SPECIAL:])
    hidden = torch.randn(4, 6)
    expected = array(hidden) @ array(heads.value.weight)[0] + array(heads.value.bias)
    np.testing.assert_allclose(array(heads.value(hidden))[:, 0], expected, atol=1e-6)
