"""The dual loss where some positions only are scored, or something is known of the genes there."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from scdiva._constants import N_SPECIAL
from scdiva.diffusion import dual_loss, mask_tokens

LENGTHS, N_GENES, DIM = (7, 1, 12, 5), 20, 6


@pytest.fixture
def case():
    """Arguments of the loss for a small batch, and which masked positions are scored."""
    g = torch.Generator().manual_seed(0)
    cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    tokens = torch.cat([torch.randperm(N_GENES, generator=g)[:n] for n in LENGTHS]) + N_SPECIAL
    values = torch.rand(len(tokens), generator=g) * 3
    times = torch.tensor([0.6, 0.9, 0.7, 0.5])
    corrupted = mask_tokens(tokens, values, cu, times, g, value_mask_rate=0.3)
    hidden = torch.randn(len(tokens), DIM, generator=g, requires_grad=True)
    weight = torch.randn(N_GENES, DIM, generator=g, requires_grad=True)
    predicted = torch.rand(len(tokens), generator=g, requires_grad=True)
    scored = torch.rand(len(tokens), generator=g) < 0.6
    return (hidden, weight, predicted, tokens, values, corrupted, cu), scored


def slow(arguments, scored, logits):
    """Mean over cells of the mean cross-entropy of their scored positions; of the values all that are hidden."""
    hidden, weight, predicted, tokens, values, corrupted, cu = arguments
    identity, value, row = [], [], 0
    for a, b in itertools.pairwise(cu.tolist()):
        terms, errors = [], []
        for i in range(a, b):
            if corrupted.masked[i] and scored[i]:
                terms.append(
                    F.cross_entropy(weight @ hidden[i] if logits is None else logits[row], tokens[i] - N_SPECIAL)
                )
                row += 1
            if corrupted.value_mask[i]:
                errors.append((predicted[i] - values[i]) ** 2)
        identity += [sum(terms) / len(terms)] if terms else []
        value += [sum(errors) / len(errors)] if errors else []
    return torch.stack(identity).mean(), torch.stack(value).mean()


@pytest.mark.parametrize("some", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_loss_and_gradients_are_those_of_plain_cross_entropy(case, some, given):
    arguments, scored = case
    corrupted = arguments[5]
    asked = corrupted.masked & scored if some else corrupted.masked
    logits = None
    if given:
        logits = torch.randn(int(asked.sum()), N_GENES, generator=torch.Generator().manual_seed(4)).requires_grad_()
    loss, parts = dual_loss(*arguments, value_weight=2.0, scored=scored if some else None, logits=logits)
    identity, value = slow(arguments, asked, logits)
    assert float(parts["identity"]) == pytest.approx(float(identity.detach()), rel=1e-5)
    assert float(parts["value"]) == pytest.approx(float(value.detach()), rel=1e-5)
    assert int(parts["n_masked"]) == int(asked.sum())
    wanted = [arguments[2], logits] if given else list(arguments[:3])
    found = torch.autograd.grad(loss, wanted)
    expected = torch.autograd.grad(identity + 2.0 * value, wanted)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_scoring_some_is_unbiased(case):
    """Over many draws the scored positions give the loss of all."""
    arguments, _ = case
    with torch.no_grad():
        whole = float(dual_loss(*arguments)[1]["identity"])
        masked, cu = arguments[5].masked, arguments[6]
        draws = []
        for seed in range(400):
            # one of each cell's masked positions: the strictest draw
            scored = torch.zeros_like(masked)
            g = torch.Generator().manual_seed(seed)
            for a, b in itertools.pairwise(cu.tolist()):
                places = masked[a:b].nonzero().squeeze(1)
                if len(places):
                    scored[a + places[torch.randint(len(places), (1,), generator=g)]] = True
            draws.append(float(dual_loss(*arguments, scored=scored)[1]["identity"]))
    error = torch.tensor(draws)
    assert abs(float(error.mean()) - whole) < 5 * float(error.std()) / len(draws) ** 0.5
