from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva._constants import MASK, N_SPECIAL
from scdiva.models import DualHeads, GeneValueEmbedding


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def test_joint_embedding_is_the_papers_formula():
    module = GeneValueEmbedding(10, 6).double()
    torch.nn.init.normal_(module.value_out.bias)
    tokens, values = torch.tensor([3, 9, 9, MASK]), torch.tensor([0.0, 1.5, 7.0, 2.0], dtype=torch.float64)
    hidden = torch.tensor([False, False, False, True])
    out = array(module(tokens, values, hidden))
    w1, b1 = array(module.value_in.weight)[:, 0], array(module.value_in.bias)
    w2, b2 = array(module.value_out.weight), array(module.value_out.bias)
    for i in range(3):
        inner = w1 * values[i].item() + b1
        expected = array(module.gene.weight)[tokens[i]] + w2 @ (inner / (1 + np.exp(-inner))) + b2
        np.testing.assert_allclose(out[i], expected, atol=1e-12)
    np.testing.assert_allclose(out[3], array(module.gene.weight)[MASK] + array(module.hidden_value), atol=1e-12)


def test_a_hidden_value_is_never_read():
    module = GeneValueEmbedding(10, 6)
    tokens, hidden = torch.tensor([3, 4]), torch.tensor([True, False])
    with_nan = module(tokens, torch.tensor([torch.nan, 1.0]), hidden)
    torch.testing.assert_close(with_nan, module(tokens, torch.tensor([5.0, 1.0]), hidden), atol=0, rtol=0)
    with_nan.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


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
