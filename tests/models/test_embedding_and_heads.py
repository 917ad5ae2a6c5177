from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva._constants import MASK, N_SPECIAL
from scdiva.models import DualHeads, GeneValueEmbedding, SwiGLU
from scdiva.models.layers import look_up_spread, rows_of
from scdiva.train.finetune import LowRankLinear


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


def test_the_look_up_for_gpus_has_the_values_and_gradients_of_the_plain_one():
    table = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([MASK, 5, MASK, 8, 5, MASK, 3, MASK, MASK, MASK, MASK, MASK])
    weight = torch.randn(len(tokens), 4, dtype=torch.float64)
    expected = table[tokens]
    got = look_up_spread(table, tokens)
    assert torch.equal(got, expected)
    gradients = [torch.autograd.grad((rows * weight).sum(), table)[0] for rows in (got, expected)]
    torch.testing.assert_close(*gradients)


def low_rank(layer):
    changed = LowRankLinear(layer, 2, torch.Generator().manual_seed(0))
    torch.nn.init.normal_(changed.up)
    return changed


@pytest.mark.parametrize("of_layer", [lambda layer: layer, low_rank])
def test_gate_and_up_as_one_product_are_the_two_products(of_layer):
    swiglu = SwiGLU(6, 10).double()
    swiglu.gate, swiglu.up = of_layer(swiglu.gate), of_layer(swiglu.up)
    x = torch.randn(5, 6, dtype=torch.float64)
    results = []
    for gate, up in (swiglu.gate_and_up(x), (swiglu.gate(x), swiglu.up(x))):
        swiglu.zero_grad()
        out = swiglu.down(torch.nn.functional.silu(gate) * up)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in swiglu.parameters())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("of_layer", [lambda layer: layer, low_rank])
def test_some_outputs_of_a_layer_are_those_of_the_whole(of_layer):
    layer = of_layer(torch.nn.Linear(6, 10, bias=False).double())
    x = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(rows_of(layer, x, slice(4, None)), layer(x)[:, 4:])
