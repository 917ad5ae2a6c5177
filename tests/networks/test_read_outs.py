"""What a model says of the pairs of genes of one cell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva._constants import MASK, N_SPECIAL
from scdiva.models.inference import open_encoder, read_out
from scdiva.networks.read_outs import attention_ranks, knockout_falls


@pytest.fixture(scope="module", params=[False, True], ids=["stream", "state head"])
def model(network, request):
    return network(n_layers=2, max_length=20, state_head=request.param)


@pytest.fixture
def cell():
    """A cell of 17 genes, packed."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randperm(30, generator=draw)[:17] + N_SPECIAL
    return tokens, torch.rand(17, generator=draw) * 4, torch.tensor([0, 17], dtype=torch.int32)


def longer(tokens, values):
    """The same cell with ten genes more than the model sees."""
    more = torch.tensor([t for t in range(N_SPECIAL, N_SPECIAL + 30) if t not in tokens.tolist()])[:13]
    return torch.cat([tokens, more]), torch.cat([values, torch.ones(13)]), torch.tensor([0, 30], dtype=torch.int32)


@pytest.mark.parametrize("chosen", [{}, {"layers": [1]}, {"heads": [1]}, {"layers": [0], "heads": [0]}])
def test_ranks_of_averaged_attention(model, cell, chosen):
    ranks = read_out(model, cell, attention_ranks(**chosen))
    assert (ranks.shape, ranks.dtype) == ((17, 17), torch.float32)
    mean = np.zeros((17, 17))
    for layer, _, weights in model.attention_weights(*cell):
        for head in chosen.get("heads", (0, 1)):
            if layer in chosen.get("layers", (0, 1)):
                mean += weights[head, 1:, 1:].detach().double().numpy()
    order = mean.argsort(axis=1)
    for query in range(17):
        np.testing.assert_allclose(ranks[query, order[query]], np.arange(1, 18) / 17)


def test_ranks_of_the_genes_that_the_transformer_sees(model, cell):
    long = longer(*cell[:2])
    with pytest.raises(ValueError, match="genes"):
        list(model.attention_weights(*long))
    seen = long[0][:20], long[1][:20], torch.tensor([0, 20], dtype=torch.int32)
    ranks = read_out(model, long, attention_ranks())
    assert torch.equal(ranks, read_out(model, seen, attention_ranks()))
    assert ranks.shape == (20, 20)
    alone = tuple(part[:1] for part in cell[:2])
    assert read_out(model, (*alone, torch.tensor([0, 1], dtype=torch.int32)), attention_ranks()).tolist() == [[1.0]]


TARGETS = torch.arange(N_SPECIAL, N_SPECIAL + 30, 2).flip(0)


def expected_of(model, tokens, values, hidden, effect):
    """What the model expects of genes that are not visible, by token: their values, or how often each is there."""
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
    places, seen = hidden.nonzero().squeeze(1), tokens[~hidden].tolist()
    with torch.no_grad():
        out = model(torch.where(hidden, MASK, tokens), values, bounds)
        chance = model.logits(out, hidden).double().softmax(dim=1)
        if effect == "presence":
            often = chance.sum(dim=0).log()
        else:
            each = [model.values(out, torch.full_like(places, t + N_SPECIAL), places) for t in range(30)]
            often = (chance * torch.stack(each, dim=1)).sum(dim=0) / chance.sum(dim=0)
    return {i + N_SPECIAL: float(x) for i, x in enumerate(often) if i + N_SPECIAL not in seen}


@pytest.mark.parametrize("effect", ["value", "presence"])
@pytest.mark.parametrize("removal", ["remove", "mask"])
@pytest.mark.parametrize("first", [0, 3])
def test_falls_are_differences_of_what_is_expected(model, cell, effect, removal, first):
    tokens, values, _ = cell
    sources = torch.tensor([0, 3, 9])
    found = read_out(model, (*cell, sources, torch.tensor(first)), knockout_falls(TARGETS, effect, removal))
    assert found.shape == (3, 15)
    for row, source in enumerate(sources.tolist()):
        hidden = torch.arange(17) % 4 == first
        hidden[source] = False
        before = expected_of(model, tokens, values, hidden, effect)
        if removal == "remove":
            left = torch.arange(17) != source
            after = expected_of(model, tokens[left], values[left], hidden[left], effect)
        else:
            masked = tokens.clone()
            masked[source] = MASK
            after = expected_of(model, masked, values, hidden, effect)
        asked = [t in before for t in TARGETS.tolist()]
        assert int(tokens[source]) not in before
        assert torch.isfinite(found[row]).tolist() == asked
        expected = [before[t] - after[t] for t in TARGETS[asked].tolist()]
        np.testing.assert_allclose(found[row, asked], expected, atol=2e-6)
        assert np.abs(expected).max() > 1e-5


@pytest.mark.parametrize("effect", ["value", "presence"])
@pytest.mark.parametrize("removal", ["remove", "mask"])
def test_falls_of_short_and_long_cells(model, cell, effect, removal):
    read = knockout_falls(TARGETS, effect, removal)
    long = longer(*cell[:2])
    sources, first = torch.tensor([4, 19]), torch.tensor(1)
    seen = long[0][:20], long[1][:20], torch.tensor([0, 20], dtype=torch.int32)
    found = read_out(model, (*long, sources, first), read)
    assert found.shape == (2, 15)
    np.testing.assert_array_equal(found, read_out(model, (*seen, sources, first), read))
    for n, hidden in ((1, 0), (1, 2), (2, 1), (3, 3)):
        few = cell[0][:n], cell[1][:n], torch.tensor([0, n], dtype=torch.int32)
        falls = read_out(model, (*few, torch.tensor([0]), torch.tensor(hidden)), read)
        is_hidden = [place == hidden and place > 0 for place in range(n)]
        if not any(is_hidden):  # nothing is asked
            assert torch.isnan(falls).all()
        else:
            there = few[0].tolist()
            told = [t == there[hidden] or t not in there for t in TARGETS.tolist()]
            assert torch.isfinite(falls).tolist() == [told]
    none = read_out(model, (*cell, torch.tensor([], dtype=torch.long), first), read)
    assert none.shape == (0, 15)


def test_what_is_not_there_is_refused(model, cell):
    with pytest.raises(ValueError, match='removal must be "remove" or "mask", got \'cut\''):
        knockout_falls(TARGETS, removal="cut")
    with pytest.raises(ValueError, match='effect must be "value" or "presence", got \'sign\''):
        knockout_falls(TARGETS, "sign")
    with pytest.raises(ValueError, match="layers must be numbers from 0 to 1"):
        read_out(model, cell, attention_ranks(layers=[2]))


def test_workers_change_nothing_and_the_model_is_left_as_it_was(model, cell):
    tokens, values, _ = cell
    cells = [(tokens[:n], values[:n], torch.tensor([0, n], dtype=torch.int32)) for n in range(1, 18)]
    with torch.inference_mode():
        expected = [read_out(model, one, attention_ranks()).numpy() for one in cells]
    for threads in (1, 3):
        with open_encoder(model, threads=threads, what=attention_ranks()) as encode:
            for found, one in zip(encode(lambda c: c, cells), expected, strict=True):
                np.testing.assert_array_equal(found, one)
    assert not model.training
    assert torch.is_grad_enabled()
