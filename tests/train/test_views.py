from __future__ import annotations

import itertools
import math

import pytest
import torch

from scdiva.data.batch import CellBatch
from scdiva.train.objectives import (
    contrast_loss,
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


def test_contrast_is_its_formula_with_negatives_of_one_study():
    one, other = torch.randn(5, 4, generator=rng(6)), torch.randn(5, 4, generator=rng(7))
    study = [0, 1, 0, 0, 2]
    tau, total = 0.2, 0.0
    for i in range(5):
        peers = [j for j in range(5) if study[j] == study[i]]
        for a, b in ((one, other), (other, one)):
            s = [float(torch.cosine_similarity(a[i], b[j], dim=0)) / tau for j in peers]
            own = float(torch.cosine_similarity(a[i], b[i], dim=0)) / tau
            total += math.log(sum(math.exp(x) for x in s)) - own
    assert float(contrast_loss(one, other, torch.tensor(study), tau)) == pytest.approx(total / 10, rel=1e-5)
    # alone in its study, a cell has nothing to be told from
    assert float(contrast_loss(one, other, torch.arange(5), tau)) == pytest.approx(0, abs=1e-6)
    assert float(contrast_loss(one[:0], other[:0], torch.tensor(study)[:0], tau)) == 0
    # without studies all others are negatives
    everything = contrast_loss(one, other, None, tau)
    assert float(everything) == pytest.approx(float(contrast_loss(one, other, torch.zeros(5), tau)))
    assert float(everything) > 0.1


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


def test_supervised_contrast_draws_partners_together_and_has_finite_gradients():
    state = torch.randn(6, 4, generator=rng(2)).requires_grad_()
    labels = torch.tensor([0, 0, 1, 1, -1, 7])
    supervised_contrast_loss(state, labels, 0.1).backward()
    assert torch.isfinite(state.grad).all()
    assert not state.grad[4].any()
    with torch.no_grad():
        nearer = state - 0.1 * state.grad
        assert supervised_contrast_loss(nearer, labels, 0.1) < supervised_contrast_loss(state, labels, 0.1)


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
    return state, positives, present, left_out


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


def test_pairs_without_negatives_or_positives_are_nothing_and_their_gradients_finite():
    state, positives, present, left_out = some_pairs()
    state.requires_grad_()
    everything = torch.ones(6, 6, dtype=torch.bool)
    for there, out in ((present, everything), (torch.zeros_like(present), left_out)):
        found = pair_contrast_loss(state, positives, there, out, 0.2)
        found.backward()
        assert float(found.detach()) == 0
        assert torch.isfinite(state.grad).all()
        assert not state.grad.any()


def test_the_contrast_of_pairs_draws_to_positives_and_spares_cells_left_out():
    state, positives, present, left_out = some_pairs()
    found = pair_contrast_loss(state, positives, present, left_out, 0.2)
    nearer = torch.where(present[..., None], positives + state, positives)
    assert pair_contrast_loss(state, nearer, present, left_out, 0.2) < found
    state.requires_grad_()
    only = torch.zeros_like(present)
    only[0, 0] = True
    pair_contrast_loss(state, positives, only, left_out, 0.2).backward()
    assert not state.grad[1].any()  # no negative of the first cell
    assert all(state.grad[j].any() for j in (0, 2, 3, 4, 5))
