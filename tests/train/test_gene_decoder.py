from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva.train.objectives import LEAST_FREQUENCY, GeneDecoder, gene_multinomial_loss, thinned

STUDY = torch.tensor([0, 2, -1, 1, -1])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def decoder():
    """Three studies and seven genes, with weights that are no longer zero."""
    made = GeneDecoder(4, 7, n_studies=3)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, generator=rng())
    return made


def test_logits_are_linear_in_the_scaled_state_with_the_studys_own_offset(decoder):
    state = torch.randn(5, 4, generator=rng(1))
    with torch.no_grad():
        got = decoder(state, STUDY)
    weight, bias = decoder.linear.weight.tolist(), decoder.linear.bias.tolist()
    offsets = decoder.study_bias.weight.detach()
    for i, study in enumerate(STUDY.tolist()):
        offset = offsets[study] if study >= 0 else (offsets[0] + offsets[1] + offsets[2]) / 3
        scale = 1 / math.sqrt(sum(float(x) ** 2 for x in state[i]) / 4)
        expected = [scale * sum(weight[g][k] * float(state[i, k]) for k in range(4)) + bias[g] for g in range(7)]
        torch.testing.assert_close(got[i], torch.tensor(expected) + offset)


def test_an_unseen_study_leaves_the_offsets_of_the_others_where_they_are_on_average(decoder):
    """Their common part gets the gradient, none of them alone."""
    decoder(torch.zeros(1, 4), torch.tensor([-1]))[0, 2].backward()
    grad = decoder.study_bias.weight.grad
    torch.testing.assert_close(grad[:, 2], torch.full((3,), 1 / 3))
    assert grad.abs().sum() == pytest.approx(1)


def test_without_studies_the_batch_may_say_anything():
    made = GeneDecoder(4, 7)
    state = torch.randn(2, 4)
    assert torch.equal(made(state, None), made(state, torch.tensor([9, -5])))


def test_studies_are_checked(decoder):
    state = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="knows 3 studies; the batch does not say which"):
        decoder(state, None)
    for wrong in ([0, 3], [-2, 1]):
        with pytest.raises(ValueError, match=r"in 0 \.\.\. 2, or -1 for another one; got"):
            decoder(state, torch.tensor(wrong))


def test_it_starts_from_the_frequencies():
    frequency = np.array([0, 0, 0, 0.5, 0.3, 0.2, 0.0])
    logits = GeneDecoder(2, 4, 2, frequency)(torch.randn(1, 2), torch.tensor([1]))
    p = torch.softmax(logits[0], 0).detach().numpy()
    np.testing.assert_allclose(p, [0.5, 0.3, 0.2, LEAST_FREQUENCY], rtol=1e-5)
    even = GeneDecoder(2, 4, 2)(torch.randn(1, 2), torch.tensor([0]))
    assert torch.equal(even, torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("frequency", "said"),
    [
        (np.ones(4), r"must be finite and \(7,\).*got shape \(4,\)"),
        (np.full(7, np.nan), "7 values not finite"),
    ],
)
def test_frequencies_that_do_not_fit_are_refused(frequency, said):
    with pytest.raises(ValueError, match=said):
        GeneDecoder(2, 4, 0, frequency)


def test_construction_leaves_torchs_stream():
    before = torch.get_rng_state()
    GeneDecoder(4, 7, 3)
    assert torch.equal(before, torch.get_rng_state())


def cells_of(batch):
    """Tokens and values of each cell."""
    bounds = batch.cu_seqlens.tolist()
    for a, b in itertools.pairwise(bounds):
        yield batch.tokens[a:b], batch.values[a:b]


def test_gene_multinomial_is_its_formula(batch):
    logits = torch.randn(batch.n_cells, 30, generator=rng(4))
    got = gene_multinomial_loss(logits, batch)
    for b, (tokens, values) in enumerate(cells_of(batch)):
        counts = [math.expm1(v) for v in values.tolist()]
        target = [
            0.5 * c / sum(counts) + 0.5 * v / float(values.sum()) for c, v in zip(counts, values.tolist(), strict=True)
        ]
        assert sum(target) == pytest.approx(1)
        log_p = torch.log_softmax(logits[b], 0)
        expected = -sum(t * float(log_p[g - N_SPECIAL]) for t, g in zip(target, tokens.tolist(), strict=True))
        assert float(got[b]) == pytest.approx(expected, rel=1e-5)


def test_an_empty_cell_costs_nothing_and_passes_no_nan_on(batch):
    dropped = torch.zeros(batch.tokens.numel(), dtype=torch.bool)
    dropped[: int(batch.cu_seqlens[1])] = True
    logits = torch.randn(batch.n_cells, 30, generator=rng(4), requires_grad=True)
    loss = gene_multinomial_loss(logits, thinned(batch, dropped))
    assert float(loss[0].detach()) == 0
    assert (loss[1:] > 0).all()
    loss.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_the_least_possible_loss_is_the_targets_entropy(batch):
    """Reached where the prediction is the target itself, as for every cross-entropy."""
    tokens, values = next(cells_of(batch))
    one = dataclasses.replace(batch, tokens=tokens, values=values, cu_seqlens=batch.cu_seqlens[:2])
    counts = torch.expm1(values)
    target = torch.full((30,), 1e-30).index_add_(
        0, tokens - N_SPECIAL, 0.5 * (counts / counts.sum() + values / values.sum())
    )
    entropy = -float((target * target.log()).sum())
    assert float(gene_multinomial_loss(target.log()[None], one)[0]) == pytest.approx(entropy, rel=1e-5)
