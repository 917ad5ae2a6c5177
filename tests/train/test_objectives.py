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
    dropped[: int(batch.cu_seqlens[1])] = True  # a cell that loses everything
    thin = thinned(batch, dropped)
    assert thin.cu_seqlens.dtype == torch.int32
    masks = dropped.split(batch.cu_seqlens.diff().tolist())
    for (tokens, values), (thin_tokens, thin_values), drop in zip(cells_of(batch), cells_of(thin), masks, strict=True):
        assert torch.equal(thin_tokens, tokens[~drop])
        assert torch.equal(thin_values, values[~drop])
    assert torch.equal(thin.study, batch.study)


def slow_supervised_contrast(state, labels, tau):
    z = state.double() / state.double().norm(dim=1, keepdim=True)
    labelled = [i for i, label in enumerate(labels) if label >= 0]
    per_cell = []
    for i in labelled:
        similar = {j: math.exp(float(z[i] @ z[j]) / tau) for j in labelled if j != i}
        partners = [similar[p] / sum(similar.values()) for p in similar if labels[p] == labels[i]]
        per_cell += [-sum(map(math.log, partners)) / len(partners)] if partners else []
    return sum(per_cell) / len(per_cell)


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_supervised_contrast_is_its_formula(tau):
    """Cells without a label and cells alone in theirs have no term; the latter are still among the others."""
    state, labels = torch.randn(9, 4, generator=rng(1)), [0, 1, -1, 0, 2, 1, 0, -1, 5]
    loss = supervised_contrast_loss(state, torch.tensor(labels), tau)
    assert float(loss) == pytest.approx(slow_supervised_contrast(state, labels, tau), rel=1e-5)
    assert float(supervised_contrast_loss(3 * state, torch.tensor(labels), tau)) == pytest.approx(float(loss))
    moved = state.clone()
    moved[[2, 7]] = torch.randn(2, 4, generator=rng(8))
    assert float(supervised_contrast_loss(moved, torch.tensor(labels), tau)) == float(loss)
    moved[4] = -moved[4]
    assert float(supervised_contrast_loss(moved, torch.tensor(labels), tau)) != float(loss)


@pytest.mark.parametrize("labels", [[-1, -1, -1], [0, 1, 2], [0, -1, -1], []])
def test_supervised_contrast_of_no_pair_is_nothing(labels):
    state = torch.randn(len(labels), 4, generator=rng(3), requires_grad=True)
    loss = supervised_contrast_loss(state, torch.tensor(labels, dtype=torch.int64), 0.1)
    assert float(loss.detach()) == 0


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
        positive = similar(state[i], positives[which, i])
        negatives = sum(similar(state[i], state[j]) for j in range(6) if j != i and not left_out[i, j])
        terms.append(-math.log(positive / (positive + negatives)))
    assert len(terms) == 8
    loss = pair_contrast_loss(state, positives, present, left_out, tau)
    assert float(loss) == pytest.approx(sum(terms) / 8, rel=1e-9)
    positives[0, 3] += 1  # absent
    assert float(pair_contrast_loss(state, positives, present, left_out, tau)) == float(loss)
    low = pair_contrast_loss(state.bfloat16(), positives.bfloat16(), present, left_out, tau)
    assert low.dtype == torch.float32


STUDY = torch.tensor([0, 2, -1, 1, -1])


@pytest.fixture
def decoder():
    """Three studies and seven genes, with weights that are no longer zero."""
    network = GeneDecoder(4, 7, n_studies=3)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, generator=rng())
    return network


def test_logits_are_linear_in_the_scaled_state_with_the_studys_own_offset(decoder):
    state = torch.randn(5, 4, generator=rng(1))
    with torch.no_grad():
        got = decoder(state, STUDY)
    offsets = decoder.study_bias.weight.detach()
    for i, study in enumerate(STUDY.tolist()):
        offset = offsets[study] if study >= 0 else offsets.mean(dim=0)
        scaled = state[i] / state[i].square().mean().sqrt()
        expected = decoder.linear.weight.detach() @ scaled + decoder.linear.bias.detach()
        torch.testing.assert_close(got[i], expected + offset)
    for wrong in (None, [0, 3], [-2, 1]):
        with pytest.raises(ValueError, match="3 studies"):
            decoder(state[:2], wrong and torch.tensor(wrong))


def test_it_starts_from_the_frequencies():
    frequency = np.array([0, 0, 0, 0.5, 0.3, 0.2, 0.0])
    logits = GeneDecoder(2, 4, 2, frequency)(torch.randn(1, 2), torch.tensor([1]))
    p = torch.softmax(logits[0], 0).detach().numpy()
    np.testing.assert_allclose(p, [0.5, 0.3, 0.2, LEAST_FREQUENCY], rtol=1e-5)
    even = GeneDecoder(2, 4, 2)(torch.randn(1, 2), torch.tensor([0]))
    assert torch.equal(even, torch.zeros(1, 4))


def test_gene_multinomial_is_its_formula(batch):
    """A cell without genes costs nothing, and passes no NaN on."""
    dropped = torch.zeros(batch.tokens.numel(), dtype=torch.bool)
    dropped[: int(batch.cu_seqlens[1])] = True
    batch = thinned(batch, dropped)
    logits = torch.randn(batch.n_cells, 30, generator=rng(4), requires_grad=True)
    got = gene_multinomial_loss(logits, batch)
    for b, (tokens, values) in enumerate(cells_of(batch)):
        counts = values.double().expm1()
        target = 0.5 * counts / counts.sum() + 0.5 * values / values.sum()
        expected = -(target * logits[b].log_softmax(0)[tokens - N_SPECIAL]).sum()
        assert float(got[b].detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(got[0].detach()) == 0
    got.sum().backward()
    assert torch.isfinite(logits.grad).all()
