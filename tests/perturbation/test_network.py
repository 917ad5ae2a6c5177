"""Perturbed genes in front of a cell, and the head beside a slow and obvious reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva._constants import MASK, N_SPECIAL
from scdiva.perturbation.network import PerturbationHead, PerturbationSizes, perturbed, treatments

SIZES = PerturbationSizes(dim=6, state_dim=5, n_labels=2, n_genes=9, rank=3, hidden=7)


@st.composite
def cells(draw):
    """Ragged cells of ten genes, what is perturbed in each, and a length with room for that."""
    n = draw(st.integers(1, 4))
    genes = st.integers(N_SPECIAL, N_SPECIAL + 9)
    read = [draw(st.lists(genes, unique=True, max_size=8)) for _ in range(n)]
    part = st.one_of(genes, st.just(MASK))
    parts = [draw(st.lists(part, min_size=1, max_size=3, unique_by=lambda p: p if p != MASK else None)) for _ in read]
    return read, parts, draw(st.integers(max(map(len, parts)), 12))


def packed(read):
    tokens = torch.tensor([t for cell in read for t in cell], dtype=torch.int64)
    values = torch.arange(1, len(tokens) + 1, dtype=torch.float32)
    bounds = torch.tensor(np.concatenate([[0], np.cumsum([len(cell) for cell in read])]), dtype=torch.int32)
    return tokens, values, bounds


def padded(parts):
    most = max(map(len, parts))
    return torch.tensor([p + [-1] * (most - len(p)) for p in parts])


@settings(max_examples=150)
@given(cells())
def test_cells_beside_lists(drawn):
    read, parts, length = drawn
    tokens, values, bounds = packed(read)
    found = perturbed(tokens, values, bounds, padded(parts), length)
    assert found.cu_seqlens.dtype == bounds.dtype
    assert found.cu_seqlens[0] == 0
    at = 0
    for i, (cell, own) in enumerate(zip(read, parts, strict=True)):
        left = [(t, float(values[at + j])) for j, t in enumerate(cell) if t not in own]
        at += len(cell)
        expected = [*((t, 0.0) for t in own), *left][:length]
        lo, hi = found.cu_seqlens[i : i + 2].tolist()
        assert list(zip(found.tokens[lo:hi].tolist(), found.values[lo:hi].tolist(), strict=True)) == expected
        assert found.value_mask[lo:hi].tolist() == [True] * len(own) + [False] * (len(expected) - len(own))
        assert found.position[i].tolist() == [*range(lo, lo + len(own)), *[-1] * (found.position.shape[1] - len(own))]
    assert found.cu_seqlens[-1] == len(found.tokens) == len(found.values) == len(found.value_mask)


def test_a_perturbed_gene_is_never_cut_off_and_never_twice():
    read = [[3, 4, 5, 6], [7, 8, 9], []]
    found = perturbed(*packed(read), torch.tensor([[6, 5], [3, MASK], [4, -1]]), 3)
    assert found.tokens.tolist() == [6, 5, 3, 3, MASK, 7, 4]
    assert found.values.tolist() == [0, 0, 1, 0, 0, 5, 0]
    assert found.cu_seqlens.tolist() == [0, 3, 6, 7]
    assert found.position.tolist() == [[0, 1], [3, 4], [6, -1]]


def test_what_is_given_is_not_changed():
    tokens, values, bounds = packed([[3, 4], [5]])
    before = [part.clone() for part in (tokens, values, bounds)]
    perturbed(tokens, values, bounds, torch.tensor([[3], [4]]), 5)
    assert all(torch.equal(one, other) for one, other in zip((tokens, values, bounds), before, strict=True))


def head_with_something(seed=0) -> PerturbationHead:
    head = PerturbationHead(SIZES, torch.Generator().manual_seed(seed)).double()
    with torch.no_grad():
        for number, parameter in enumerate(head.parameters()):
            draw = torch.Generator().manual_seed(number)
            parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return head


def test_untrained_it_adds_nothing():
    head = PerturbationHead(SIZES, torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    change = head(torch.randn(4, 6, generator=draw), torch.randn(2, 5, generator=draw), torch.tensor([[0, 1], [2, -1]]))
    assert change.shape == (2, 9)
    assert not change.any()
    assert head.mark.any()  # but what is perturbed is marked
    change.sum().backward()
    with torch.no_grad():
        head.directions.add_(1.0)
    head(torch.ones(4, 6), torch.ones(2, 5), torch.tensor([[0, 1], [2, -1]])).sum().backward()
    assert head.mlp[-1].weight.grad.any()  # and it can learn


def test_the_change_beside_plain_formulas():
    head, draw = head_with_something(), np.random.default_rng(0)
    hidden, state = draw.normal(size=(8, 6)), draw.normal(size=(3, 5))
    place = [[1, 4], [5, -1], [0, 7]]
    w = {name: value.detach().numpy() for name, value in head.state_dict().items()}
    expected = []
    for b in range(3):
        own = [hidden[p] for p in place[b] if p >= 0]
        z = state[b] / np.linalg.norm(state[b]) * np.sqrt(5)
        x = np.concatenate([z, np.sum(own, axis=0), np.mean(own, axis=0)])
        for layer in (0, 2, 4):
            x = w[f"mlp.{layer}.weight"] @ x + w[f"mlp.{layer}.bias"]
            x = x / (1 + np.exp(-x)) if layer < 4 else x
        expected.append(w["directions"] @ x)
    found = head(torch.from_numpy(hidden), torch.from_numpy(state), torch.tensor(place))
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-9)


def test_marks_labels_and_doses_go_to_the_perturbed_places_alone():
    head = head_with_something()
    read = perturbed(*packed([[3, 4, 5], [6]]), torch.tensor([[4, MASK], [MASK, -1]]), 8)
    label, dose = torch.tensor([[-1, 1], [0, -1]]), torch.tensor([2.0, -1.0]).double()
    found = head.prompt(read, label, dose).detach()
    mark, step, labels = head.mark.detach(), head.dose.detach(), head.labels.weight.detach()
    expected = torch.zeros(len(read.tokens), 6).double()
    expected[0] = mark + 2 * step
    expected[1] = mark + 2 * step + labels[1]
    expected[int(read.cu_seqlens[1])] = mark - step + labels[0]
    torch.testing.assert_close(found, expected)


def test_weights_are_the_generators():
    heads = [PerturbationHead(SIZES, torch.Generator().manual_seed(seed)).state_dict() for seed in (3, 3, 4)]
    torch.manual_seed(17)
    again = PerturbationHead(SIZES, torch.Generator().manual_seed(3)).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in heads[0].items())
    assert all(torch.equal(value, heads[1][name]) for name, value in heads[0].items())
    assert not torch.equal(heads[0]["mark"], heads[2]["mark"])


@pytest.mark.parametrize("n_labels", [0, 1])
def test_few_labels(n_labels):
    sizes = PerturbationSizes(dim=2, state_dim=2, n_labels=n_labels, n_genes=1, rank=1, hidden=1)
    assert PerturbationHead(sizes).labels.weight.shape == (1, 2)


def test_treatments_become_numbers(network, measured):
    model = network()
    a, b = (str(name) for name in model.vocabulary.symbols[:2])
    tokens = dict(zip((a, b), model.vocabulary.match([a, b]).tokens.tolist(), strict=True))
    screen = measured((a, "x", "y"), doses=[1, 2, 4])
    token, label, dose = treatments(model, screen, [(a, "x"), (b,), ("y", "x")], np.array([2.0, 4.0, 1.0]))
    assert token.tolist() == [[tokens[a], MASK], [tokens[b], -1], [MASK, MASK]]
    assert label.tolist() == [[-1, 0], [-1, -1], [1, 0]]
    assert dose.tolist() == [0, 1, -1]
    assert (token.dtype, label.dtype) == (torch.int64, torch.int64)
    assert treatments(model, screen, [], np.array([]))[0].shape == (0, 1)
    with pytest.raises(KeyError):
        treatments(model, screen, [("z",)], np.ones(1))
