"""Low-rank updates: what they add, what they leave, and what is trained of which model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from scdiva.train.loop import RANK, LowRankUpdate, add_low_rank, merge_low_rank, train_states


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def trained(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("shape", "rank"), [((6, 9), 4), ((3, 9), 3), ((9, 2), 2)])
def test_the_update_is_w_plus_a_b(shape, rank):
    weight = torch.randn(shape, generator=draw())
    update = LowRankUpdate(weight, 4, draw(1))
    assert (update.a.shape, update.b.shape) == ((shape[0], rank), (rank, shape[1]))
    assert torch.equal(update(weight), weight)  # B is 0 at first
    with torch.no_grad():
        update.b.copy_(torch.randn(update.b.shape, generator=draw(2)))
    torch.testing.assert_close(update(weight), weight + update.a @ update.b)
    assert torch.linalg.matrix_rank(update(weight) - weight) <= rank
    assert torch.equal(LowRankUpdate(weight, 4, draw(1)).a, update.a)


def test_a_layer_trains_its_update_alone_and_merges():
    layer, x = nn.Linear(9, 6), torch.randn(5, 9, generator=draw())
    before, expected = copy.deepcopy(layer.state_dict()), layer(x).detach()
    add_low_rank(layer, 4, draw(1))
    torch.testing.assert_close(layer(x), expected)
    assert trained(layer) == {"bias", "parametrizations.weight.0.a", "parametrizations.weight.0.b"}
    layer(x).square().sum().backward()
    update = layer.parametrizations.weight[0]
    assert layer.parametrizations.weight.original.grad is None
    with torch.no_grad():
        update.b.add_(update.b.grad)
    assert update.b.any()
    expected = layer(x).detach()
    merge_low_rank(layer)
    assert sorted(layer.state_dict()) == sorted(before)
    assert not torch.equal(layer.weight, before["weight"])
    torch.testing.assert_close(layer(x), expected)
    merge_low_rank(layer)  # nothing is left to merge
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("fields", [{"anchor_residual": False}, {"anchor": "learned"}])
@pytest.mark.parametrize("how", ["lora", "full"])
def test_what_the_state_comes_from_is_trained(tiny, fields, how):
    model = tiny(**fields)
    before, names = copy.deepcopy(model.state_dict()), {name for name, _ in model.named_parameters()}
    train_states(model, how, 0)
    source = "anchor." if fields.get("anchor") is None else ""
    found = trained(model)
    if how == "full":
        assert found == {name for name in names if name.startswith(source)}
    else:
        inside = "anchor." if source else "blocks."
        assert found
        assert all(name.startswith(inside) and name.rsplit(".", 1)[1] in ("a", "b") for name in found)
        layers = [m for m in (model.anchor if source else model.blocks).modules() if isinstance(m, nn.Linear)]
        assert len(found) == 2 * len(layers)
        assert all(layer.parametrizations.weight[0].a.shape[1] <= RANK for layer in layers)
    merge_low_rank(model)
    assert {name for name, _ in model.named_parameters()} == names
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["lora", "full"])
def test_the_transformer_is_trained_where_that_is_said(tiny, how):
    """Though the state is the set encoder's alone."""
    model = tiny(anchor_residual=False)
    before, names = copy.deepcopy(model.state_dict()), {name for name, _ in model.named_parameters()}
    train_states(model, how, 0, transformer=True)
    found = trained(model)
    if how == "full":
        assert found == names
    else:
        layers = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]
        assert len(found) == 2 * len(layers)
        assert all(name.startswith("blocks.") and name.rsplit(".", 1)[1] in ("a", "b") for name in found)
    merge_low_rank(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_seed_determines_the_updates(tiny):
    updates = []
    for seed in (0, 0, 1):
        model = tiny(anchor_residual=False)
        stream = torch.random.get_rng_state()
        train_states(model, "lora", seed)
        assert torch.equal(torch.random.get_rng_state(), stream)
        updates.append([p.detach().clone() for name, p in model.named_parameters() if name.endswith(".a")])
    assert all(torch.equal(one, other) for one, other in zip(updates[0], updates[1], strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(updates[0], updates[2], strict=True))
    assert not torch.equal(updates[0][0][:6, :6], updates[0][1][:6, :6])  # layers draw on their own
