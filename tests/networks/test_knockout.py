"""How far what a model expects falls without a gene, in one cell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva._constants import MASK, N_SPECIAL
from scdiva.models.inference import read_out
from scdiva.networks.knockout import knockout_falls

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
@pytest.mark.parametrize("first", [0, 3])
def test_falls_are_differences_of_what_is_expected(model, cell, effect, first):
    tokens, values, _ = cell
    sources = torch.tensor([0, 3, 9])
    found = read_out(model, (*cell, sources, torch.tensor(first)), knockout_falls(TARGETS, effect))
    assert found.shape == (3, 15)
    for row, source in enumerate(sources.tolist()):
        hidden = torch.arange(17) % 4 == first
        hidden[source] = False
        before = expected_of(model, tokens, values, hidden, effect)
        left = torch.arange(17) != source
        after = expected_of(model, tokens[left], values[left], hidden[left], effect)
        asked = [t in before for t in TARGETS.tolist()]
        assert int(tokens[source]) not in before
        assert torch.isfinite(found[row]).tolist() == asked
        expected = [before[t] - after[t] for t in TARGETS[asked].tolist()]
        np.testing.assert_allclose(found[row, asked], expected, atol=2e-6)
        assert np.abs(expected).max() > 1e-5


@pytest.mark.parametrize("effect", ["value", "presence"])
def test_falls_of_short_and_long_cells(model, cell, longer, effect):
    read = knockout_falls(TARGETS, effect)
    sources, first = torch.tensor([4, 19]), torch.tensor(1)
    seen = longer[0][:20], longer[1][:20], torch.tensor([0, 20], dtype=torch.int32)
    found = read_out(model, (*longer, sources, first), read)
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
