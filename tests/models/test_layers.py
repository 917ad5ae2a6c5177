"""Blocks in parts, the set encoder, embeddings and layers of other forms than the plain one."""

from __future__ import annotations

import pytest
import torch

from scdiva._constants import MASK
from scdiva.models import Block, Blocks, GeneValueEmbedding, SetEncoder, SwiGLU
from scdiva.models.layers import look_up_spread, rows_of
from scdiva.train.finetune import LowRankLinear


def make_blocks(lengths):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    blocks = Blocks(
        (Block(8, 2, 12).double() for _ in range(2)), rope=(max(lengths) + 1, 10_000.0), backend="reference"
    )
    x = torch.randn(sum(lengths), 8, generator=generator, dtype=torch.float64)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return blocks, x, bounds


@pytest.mark.parametrize("lengths", [[3, 5, 2, 4, 6], [1, 20, 1], [7]])
@pytest.mark.parametrize("n_parts", [2, 3, 8])
def test_parts_give_what_the_whole_gives(lengths, n_parts):
    blocks, x, bounds = make_blocks(lengths)
    results = []
    for parts in (1, n_parts):
        blocks.zero_grad()
        one = x.clone().requires_grad_()
        blocks.micro_batches = parts
        y = blocks(one, bounds, max(lengths))
        (y * torch.linspace(-1, 2, 8)).square().sum().backward()
        results.append([y.detach(), one.grad, *(p.grad.clone() for p in blocks.parameters())])
    for expected, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, expected, rtol=1e-4, atol=1e-6)


def test_no_more_than_one_part_is_held(monkeypatch):
    """Of each part only what goes into each block is kept; cells are never cut."""
    blocks, x, bounds = make_blocks([4] * 8)
    blocks.micro_batches = 4
    forward, sizes, n_saved = Block.forward, [], []

    def record_forward(block, x, cu_seqlens, *args):
        sizes.append((len(x), cu_seqlens.tolist()))
        return forward(block, x, cu_seqlens, *args)

    monkeypatch.setattr(Block, "forward", record_forward)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: n_saved.append(t.numel()) or t, lambda t: t):
        blocks(x.requires_grad_(), bounds, 4)
    assert sizes == [(8, [0, 4, 8])] * 8
    assert sum(n_saved) < (len(blocks) + 1) * x.numel(), "the whole network would keep many times its input"


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


def test_gene_and_value_start_at_the_same_size():
    """Gene and value embeddings start at similar scales; otherwise the first norm would suppress the smaller one."""
    module = GeneValueEmbedding(5000, 256)
    genes = module.gene.weight.std().item()
    values = torch.linspace(0.5, 6.0, 200)
    value_std = module.value_out(torch.nn.functional.silu(module.value_in(values[:, None]))).std().item()
    assert 0.5 < value_std / genes < 5


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
