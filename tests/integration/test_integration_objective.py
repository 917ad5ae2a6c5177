"""Training of an integration head: its losses by hand, its loop on a tiny model."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import InMemoryCells
from scdiva.embedding.dataset_pcs import with_dataset_components
from scdiva.integration import objective as I
from scdiva.models.inference import RunConfig, embed_all
from scdiva.train.objectives import thinned_at_random

N_GENES = 30  # of the tiny model


def encoded(model, cells):
    """Cell states, `(n_cells, state_dim)`."""
    return torch.from_numpy(embed_all(model, cells, RunConfig(None, "cpu", "fp32", "state")))


def make_cells(n: int = 120, n_batches: int = 2) -> InMemoryCells:
    """Cells of two types, the odd batches with more of some genes."""
    draw = np.random.default_rng(0)
    batch = np.sort(np.arange(n) % n_batches)
    tokens, values, lengths = [], [], []
    for i in range(n):
        length = int(draw.integers(6, 13))
        tokens.append(draw.permutation(18)[:length] + (0 if i % 4 < 2 else 12) + N_SPECIAL)
        values.append(draw.uniform(0.5, 2, length) * (1 + 3 * batch[i] * (tokens[-1] % 3 == 0)))
        lengths.append(length)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    measured = np.arange(N_GENES) + N_SPECIAL
    return InMemoryCells(
        indptr, np.concatenate(tokens), np.concatenate(values).astype(np.float32), batch, measured, n_batches
    )


def labels_of(cells):
    return np.where(np.arange(cells.n_cells) % 4 < 2, 0, 1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(I, "BATCH_SIZE", 32)


@pytest.fixture
def tiny(tiny, vocabulary):
    """Make a tiny model that has a vocabulary, as one that was loaded."""

    def make(**fields):
        model = tiny(**fields)
        model.vocabulary = vocabulary
        return model

    return make


@pytest.fixture
def headed(tiny):
    """Make a model that is adapted to the cells, with an integration head."""
    return lambda **fields: I.with_head(with_dataset_components(tiny(**fields), make_cells())[0], 3)


@pytest.fixture
def plain(headed):
    """One whose state needs no transformer."""
    return lambda **fields: headed(anchor_residual=False, **fields)


def run(model, labelled=False, steps=12, seed=0):
    cells = make_cells()
    labels = labels_of(cells) if labelled else None
    return I.integrate_model(model, cells, encoded(model, cells), [cells.batch], labels, steps=steps, seed=seed)


def components_of(model, cells):
    return I.components_of(model, cells, encoded(model, cells))


def changed(old, new):
    return {name for name, value in old.items() if not torch.equal(value, new[name])}


def same(first, second):
    return first.keys() == second.keys() and not changed(first, second)


def thinned_components(model, cells, generator):
    packed = thinned_at_random(cells.take(np.arange(cells.n_cells)), I.MAX_TIME, generator).packed
    with torch.no_grad():
        return model.dataset_components(model.encode(*packed), *packed)


def loss_for(model, labelled=True, thin=True):
    """Objectives with states and targets of their own making, two views of each cell, or none."""
    cells = make_cells(12)
    draw = torch.Generator().manual_seed(5)
    target = F.normalize(torch.randn(12, model.integration.dim, generator=draw), dim=1)
    draw = torch.Generator().manual_seed(8)
    views = [thinned_components(model, cells, draw) for _ in range(2 * thin)]
    components = torch.stack([components_of(model, cells), *views])
    labels = labels_of(cells) if labelled else None
    return I.IntegrationLoss(model.integration, components, target, [cells.batch], labels, 0), cells


def losses(objectives, weight=0.0):
    return objectives.losses(np.arange(12), weight, torch.Generator().manual_seed(1))


def test_the_head_is_put_on_a_copy(tiny):
    model = with_dataset_components(tiny(anchor_residual=False), make_cells())[0]
    before = copy.deepcopy(model.state_dict())
    one, two, reseeded = (I.with_head(model, seed) for seed in (1, 1, 2))
    assert model.integration is None
    assert same(model.state_dict(), before)
    assert set(one.state_dict()) - set(before) == {f"integration.{name}" for name in one.integration.state_dict()}
    assert not changed(before, one.state_dict())
    assert same(one.state_dict(), two.state_dict())
    assert not same(one.state_dict(), reseeded.state_dict())
    assert one.config == replace(model.config, integrated=True)


@pytest.mark.parametrize("fields", [{"anchor_residual": False}, {"anchor": "learned"}])
def test_components_in_blocks_are_those_of_single_cells(headed, fields, monkeypatch):
    model, cells = headed(**fields), make_cells(20)
    monkeypatch.setattr(I, "BLOCK_TOKENS", 30)
    components = components_of(model, cells)
    for i in range(20):
        packed = cells.take(np.array([i])).packed
        with torch.no_grad():
            expected = model.dataset_components(model.encode(*packed), *packed)
        torch.testing.assert_close(components[i], expected[0], atol=1e-5, rtol=1e-5)
    assert not components.requires_grad


def test_the_reversed_gradient_by_hand():
    """Through a linear discriminator the gradient is -weight · (softmax - truth) · W; the value is as it was."""
    draw = torch.Generator().manual_seed(0)
    state = torch.randn(3, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    truth = torch.tensor([0, 1, 1])
    same_state = I.reversed_gradient(state, 0.7)
    assert torch.equal(same_state, state)
    F.cross_entropy(same_state @ weight.T, truth, reduction="sum").backward()
    error = (torch.softmax(state @ weight.T, 1) - F.one_hot(truth, 2)).detach()
    torch.testing.assert_close(state.grad, -0.7 * error @ weight.detach())
    torch.testing.assert_close(weight.grad, error.T @ state.detach())  # the discriminator itself learns to tell


def test_the_loss_is_the_sum_of_its_parts_by_hand(plain):
    model = plain()
    objectives, cells = loss_for(model)
    loss, parts = losses(objectives, 0.5)
    head = model.integration
    with torch.no_grad():
        state = head(components_of(model, cells))
        drawn = torch.randint(2, (12,), generator=torch.Generator().manual_seed(1))
        view = head(objectives.components[1 + drawn, torch.arange(12)])
        assert not torch.allclose(view, state)
        unthinned = np.mean([1 - float(a @ b) for a, b in zip(state, objectives.target, strict=True)])
        thinned = np.mean([1 - float(a @ b) for a, b in zip(view, objectives.target, strict=True)])
        frequency, cluster = objectives.priors[0]
        logits = frequency[cluster] + objectives.discriminators[0](state * head.dim**0.5)
        predicted = [-float(F.log_softmax(row, 0)[b]) for row, b in zip(logits, cells.batch, strict=True)]
    assert float(parts["denoising"]) == pytest.approx((unthinned + thinned) / 2, rel=1e-5)
    assert float(parts["reversal"]) == pytest.approx(np.mean(predicted), rel=1e-5)
    assert float(parts["contrast"]) > 0
    expected = I.DENOISING_WEIGHT * parts["denoising"] + parts["reversal"] + I.LABELS_WEIGHT * parts["contrast"]
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-6)
    assert not any(part.requires_grad for part in parts.values())
    assert float(losses(loss_for(plain(), labelled=False)[0])[1]["contrast"]) == 0


def test_without_thinned_cells_whole_cells_are_denoised(plain):
    model = plain()
    objectives, cells = loss_for(model, thin=False)
    with torch.no_grad():
        cosine = (model.integration(components_of(model, cells)) * objectives.target).sum(dim=1)
    assert float(losses(objectives)[1]["denoising"]) == pytest.approx(float(1 - cosine.mean()), rel=1e-5)


def test_a_discriminator_is_given_what_the_kind_of_a_cell_tells(plain):
    """Two kinds whose cells are of other batches: a discriminator that knows no more pays the least there is."""
    kind = np.repeat([0, 1], 200)
    batch = np.where(np.arange(400) % 10 < 8, kind, 1 - kind)
    second_batch = np.arange(400) % 3
    target = F.one_hot(torch.from_numpy(kind), plain().integration.dim).float()
    head = plain().integration
    module = I.IntegrationLoss(head, torch.zeros(1, 400, head.dim), target, [batch, second_batch], None, 0)
    frequency, cluster = module.priors[0]
    shares = frequency.exp().numpy()[cluster]
    np.testing.assert_allclose(shares[np.arange(400), kind], 0.8, atol=0.02)
    np.testing.assert_allclose(module.priors[1][0].exp(), 1 / 3, atol=0.01)
    assert [d[-1].out_features for d in module.discriminators] == [2, 3]


HEAD = {f"integration.mlp.{number}.{part}" for number in (0, 2, 4) for part in ("weight", "bias")}


@pytest.mark.parametrize("fields", [{"anchor_residual": False}, {"anchor": "learned"}])
def test_the_head_is_trained_and_what_is_behind_it_stays(headed, fields):
    model = headed(**fields)
    before = copy.deepcopy(model.state_dict())
    notes = run(model)
    assert changed(before, model.state_dict()) == HEAD
    assert all(p.requires_grad for p in model.parameters())
    assert not model.training
    assert (notes["steps"], notes["stopped"]) == (12, "steps")


@pytest.mark.parametrize(("steps", "n_views"), [(3, 1), (8, 3), (60, 4)])
def test_cells_are_thinned_as_often_as_the_steps_see_them_and_four_times_at_most(plain, monkeypatch, steps, n_views):
    n_cells, thin = [], I.thinned_at_random
    monkeypatch.setattr(
        I, "thinned_at_random", lambda batch, *more: n_cells.append(batch.n_cells) or thin(batch, *more)
    )
    run(plain(), steps=steps)
    assert sum(n_cells) == 120 * n_views  # none at the steps


def test_cells_that_go_through_the_transformer_are_not_thinned(headed, monkeypatch):
    monkeypatch.setattr(I, "thinned_at_random", lambda *_: pytest.fail("encoded again"))
    run(headed(anchor="learned"), steps=3)


@pytest.mark.parametrize(
    ("means", "expected"),
    [((3.0,), False), ((3.0, 2.98), True), ((3.0, 2.96), False), ((3.0, 2.0, 2.5), True), ((3.0, 4.0, 2.9), False)],
)
def test_training_has_converged_when_no_mean_of_fifty_losses_is_lower_by_a_hundredth(means, expected):
    noise, reversal = np.tile([-1.0, 1.0], 25 * len(means)), np.linspace(5, 1, 50 * len(means))
    losses = np.repeat(means, 50) + noise + reversal
    assert I.converged({"loss": list(losses), "reversal": list(reversal)}) is expected


def test_training_ends_when_the_losses_no_longer_fall_and_the_rate_has(plain, monkeypatch):
    checks, judge = [], I.converged
    monkeypatch.setattr(I, "converged", lambda h: checks.append((len(h["loss"]), judge(h))) or checks[-1][1])
    rates, train = [], I.train_steps
    monkeypatch.setattr(
        I,
        "train_steps",
        lambda module, loss_of, rate_of, **more: train(
            module, loss_of, lambda step: rates.append(rate_of(step)) or rates[-1], **more
        ),
    )
    notes = run(plain(), steps=600)
    at = [n for n, _ in checks]
    assert [verdict for _, verdict in checks] == [False] * (len(checks) - 1) + [True]  # asked no more once it has
    assert at == list(range(200, at[-1] + 1, 50))  # not while the reversal rises
    assert (notes["steps"], notes["stopped"]) == (at[-1] + 300, "converged")
    *_, last, none = rates
    assert (last, none) == (pytest.approx(I.LEARNING_RATE / 300), 0)
    monkeypatch.setattr(I, "converged", lambda _: False)
    assert [run(plain(), steps=120)[key] for key in ("steps", "stopped")] == [120, "steps"]


@pytest.mark.parametrize("interrupted", [None, 3, 20])
def test_weights_are_averaged_once_the_reversal_has_risen(plain, monkeypatch, interrupted):
    model, passed = plain(), []
    mlp, losses = model.integration.mlp, I.IntegrationLoss.losses

    def recorded(self, *args):
        passed.append([p.detach().clone() for p in mlp.parameters()])
        if len(passed) == interrupted:
            raise KeyboardInterrupt
        return losses(self, *args)

    last, load = [], type(mlp).load_state_dict
    monkeypatch.setattr(I.IntegrationLoss, "losses", recorded)
    monkeypatch.setattr(
        type(mlp), "load_state_dict", lambda m, s: last.extend(p.detach().clone() for p in m.parameters()) or load(m, s)
    )
    run(model, steps=40)  # rises for 10, averaged over 4
    passed = [*passed[:40], last]
    expected = passed[10] if len(passed) > 11 else last
    for weights in passed[11:]:
        expected = [0.75 * e + 0.25 * w for e, w in zip(expected, weights, strict=True)]
    for parameter, e in zip(mlp.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), e, atol=1e-6, rtol=1e-4)
