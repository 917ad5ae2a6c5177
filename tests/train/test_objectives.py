"""Objectives of the cell state against their formulas."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import CellBatch
from scdiva.train.objectives import (
    LEAST_FREQUENCY,
    GeneDecoder,
    gene_multinomial_loss,
    pair_contrast_loss,
    supervised_contrast_loss,
    thinned,
    thinned_at_random,
)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cells_of(batch):
    """Tokens and values of each cell."""
    bounds = batch.cu_seqlens.tolist()
    for a, b in itertools.pairwise(bounds):
        yield batch.tokens[a:b], batch.values[a:b]


def test_thinning_at_random_hides_genes_at_each_cells_own_rate():
    n_cells, n_genes = 400, 50
    bounds = torch.arange(0, n_cells * n_genes + 1, n_genes, dtype=torch.int32)
    tokens = torch.arange(3, 3 + n_genes).repeat(n_cells)
    batch = CellBatch(tokens, torch.ones(tokens.numel()), bounds, torch.arange(n_cells))
    thin = thinned_at_random(batch, 0.5, rng())
    share = 1 - thin.cu_seqlens.diff() / n_genes
    assert share.mean() == pytest.approx(0.25, abs=0.02)  # the mean of U(0, 0.5)
    assert share.std() > 0.12  # one rate for all would leave what 50 draws spread, 0.06
    assert torch.equal(thin.study, batch.study)
    assert torch.equal(thinned_at_random(batch, 0.0, rng()).tokens, batch.tokens)


def test_thinned_keeps_order_and_boundaries(batch):
    dropped = torch.rand(batch.tokens.numel(), generator=rng(3)) < 0.5
    first = slice(0, int(batch.cu_seqlens[1]))
    dropped[first] = True  # a cell that loses everything
    thin = thinned(batch, dropped)
    assert thin.cu_seqlens.dtype == torch.int32
    assert int(thin.cu_seqlens[1]) == 0
    start = 0
    for (tokens, values), (kept, kept_values) in zip(cells_of(batch), cells_of(thin), strict=True):
        keep = ~dropped[start : start + len(tokens)]
        assert torch.equal(kept, tokens[keep])
        assert torch.equal(kept_values, values[keep])
        start += len(tokens)
    assert torch.equal(thin.study, batch.study)


def slow_supervised_contrast(state, labels, tau):
    z = [row / row.norm() for row in state.double()]
    known = [i for i, label in enumerate(labels) if label >= 0]
    per_cell = []
    for i in known:
        partners = [p for p in known if p != i and labels[p] == labels[i]]
        if partners:
            below = sum(math.exp(float(z[i] @ z[j]) / tau) for j in known if j != i)
            per_cell.append(
                -sum(math.log(math.exp(float(z[i] @ z[p]) / tau) / below) for p in partners) / len(partners)
            )
    return sum(per_cell) / len(per_cell)


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_supervised_contrast_is_its_formula(tau):
    """Cells without a label and cells alone in theirs have no term; the latter are still among the others."""
    state, labels = torch.randn(9, 4, generator=rng(1)), [0, 1, -1, 0, 2, 1, 0, -1, 5]
    found = supervised_contrast_loss(state, torch.tensor(labels), tau)
    assert float(found) == pytest.approx(slow_supervised_contrast(state, labels, tau), rel=1e-5)
    assert float(supervised_contrast_loss(3 * state, torch.tensor(labels), tau)) == pytest.approx(float(found))
    moved = state.clone()
    moved[[2, 7]] = torch.randn(2, 4, generator=rng(8))
    assert float(supervised_contrast_loss(moved, torch.tensor(labels), tau)) == float(found)
    moved[4] = -moved[4]
    assert float(supervised_contrast_loss(moved, torch.tensor(labels), tau)) != float(found)


@pytest.mark.parametrize("labels", [[-1, -1, -1], [0, 1, 2], [0, -1, -1], []])
def test_supervised_contrast_of_no_pair_is_nothing(labels):
    state = torch.randn(len(labels), 4, generator=rng(3), requires_grad=True)
    found = supervised_contrast_loss(state, torch.tensor(labels, dtype=torch.int64), 0.1)
    assert float(found.detach()) == 0


def some_pairs():
    """Six cells, two positives of each, some absent, and cells that are no negatives."""
    draw = torch.Generator().manual_seed(3)
    state = torch.randn(6, 5, generator=draw, dtype=torch.float64)
    positives = torch.randn(2, 6, 5, generator=draw, dtype=torch.float64)
    present = torch.tensor([[1, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 1]], dtype=torch.bool)
    left_out = torch.zeros(6, 6, dtype=torch.bool)
    left_out[0, 1] = left_out[1, 0] = left_out[4, 2] = True
    return F.normalize(state, dim=1), F.normalize(positives, dim=2), present, left_out


@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_the_contrast_of_pairs_is_its_formula(tau):
    state, positives, present, left_out = some_pairs()

    def similar(x, y):
        return math.exp(float(x @ y / x.norm() / y.norm()) / tau)

    terms = []
    for which, i in present.nonzero().tolist():
        own = similar(state[i], positives[which, i])
        others = sum(similar(state[i], state[j]) for j in range(6) if j != i and not left_out[i, j])
        terms.append(-math.log(own / (own + others)))
    assert len(terms) == 8
    found = pair_contrast_loss(state, positives, present, left_out, tau)
    assert float(found) == pytest.approx(sum(terms) / 8, rel=1e-9)
    positives[0, 3] += 1  # absent
    assert float(pair_contrast_loss(state, positives, present, left_out, tau)) == float(found)
    low = pair_contrast_loss(state.bfloat16(), positives.bfloat16(), present, left_out, tau)
    assert low.dtype == torch.float32


STUDY = torch.tensor([0, 2, -1, 1, -1])


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


def test_studies_are_checked(decoder):
    state = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="3 studies"):
        decoder(state, None)
    for wrong in ([0, 3], [-2, 1]):
        with pytest.raises(ValueError, match="3 studies"):
            decoder(state, torch.tensor(wrong))


def test_it_starts_from_the_frequencies():
    frequency = np.array([0, 0, 0, 0.5, 0.3, 0.2, 0.0])
    logits = GeneDecoder(2, 4, 2, frequency)(torch.randn(1, 2), torch.tensor([1]))
    p = torch.softmax(logits[0], 0).detach().numpy()
    np.testing.assert_allclose(p, [0.5, 0.3, 0.2, LEAST_FREQUENCY], rtol=1e-5)
    even = GeneDecoder(2, 4, 2)(torch.randn(1, 2), torch.tensor([0]))
    assert torch.equal(even, torch.zeros(1, 4))


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
