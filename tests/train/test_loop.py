"""The loop of fits held in memory, on a real task."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.train import AnchorConfig, AnchorModule, LinearMap, PretrainingConfig, PretrainingModule
from scdiva.train import loop as L
from scdiva.train.adaptation import AdaptationCells

N_GENES = 30
LIMITS = L.Limits(max_epochs=10, patience=3, seconds=np.inf)


def make_cells(n: int = 240, n_batches: int = 2) -> AdaptationCells:
    """Cells of two types among the last 25 genes; the second batch has twice the values."""
    draw = np.random.default_rng(0)
    batch = np.sort(np.arange(n) % n_batches)
    tokens, values, lengths = [], [], []
    for i in range(n):
        length = int(draw.integers(3, 9))
        genes = draw.permutation(12)[:length] + (0 if i % 4 < 2 else 13)
        tokens.append(genes + 5 + N_SPECIAL)
        values.append(draw.uniform(0.5, 2, length) * (1 + batch[i]))
        lengths.append(length)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    measured = np.arange(5, 30) + N_SPECIAL
    return AdaptationCells(
        indptr, np.concatenate(tokens), np.concatenate(values).astype(np.float32), batch, measured, n_batches
    )


def config(**fields) -> AnchorConfig:
    return AnchorConfig(**{"batch_size": 32, "learning_rate": 1e-2, "warmup_steps": 1, "precision": "fp32"} | fields)


def module_of(model, cells, **fields) -> AnchorModule:
    """A set encoder's module, whose linear part is the model's own."""
    encoder = model.anchor
    weight, bias = encoder.table.weight.detach().numpy().copy(), encoder.bias.detach().numpy().copy()
    start = LinearMap(weight, bias, np.ones(len(bias)), np.full(model.config.n_tokens, 1 / N_GENES), 1.0)
    return AnchorModule(model, config(**fields), start, np.bincount(cells.batch))


def states(model, cells):
    batch = cells.take(np.arange(cells.n_cells))
    return model.encode(batch.tokens, batch.values, batch.cu_seqlens).detach()


def run(model, seed=0, **fields):
    cells = make_cells()
    module = module_of(model, cells, seed=seed)
    limits = L.Limits(25, 20, np.inf)._replace(**fields)
    return L.continue_training(module, cells, cells.split(0.1, seed), limits, progress=False), cells


def test_training_helps_repeats_and_leaves_the_random_stream(tiny):
    one, two, other = tiny(), tiny(), tiny()
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    found, cells = run(one)
    assert torch.equal(torch.rand(2), expected)
    again, _ = run(two)
    run(other, seed=1, max_epochs=5)
    assert found["best_loss"] == pytest.approx(min(found["history"]["validation_loss"]), rel=L.TOLERANCE)
    assert found["best_loss"] < found["start_loss"]
    assert found["history"] == again["history"]
    assert torch.equal(states(one, cells), states(two, cells))
    assert not torch.equal(states(one, cells), states(other, cells))


def test_the_best_weights_are_those_that_are_left(tiny):
    """The loss of the held-out cells, taken anew, is the best one of the history."""
    cells, model = make_cells(), tiny()
    module = module_of(model, cells, learning_rate=0.3)  # so high that the last look is not the best
    split = cells.split(0.1, 0)
    found = L.continue_training(module, cells, split, L.Limits(30, 3, np.inf), progress=False)
    assert found["stopped"] == "patience"
    assert found["history"]["validation_loss"][-1] > found["best_loss"]
    with torch.no_grad():
        loss, _ = module.compute_loss(cells.take(split.held_out), step_generator(0, 0, "validation"))
    assert float(loss) == pytest.approx(found["best_loss"], rel=1e-6)


def test_what_does_not_help_is_undone(tiny):
    cells, model = make_cells(), tiny()
    before = copy.deepcopy(model.state_dict())
    module = module_of(model, cells, learning_rate=1e-12)
    with torch.no_grad():
        for p in module.decoder.parameters():
            p.normal_(std=10, generator=torch.Generator().manual_seed(0))
    found = L.continue_training(module, cells, cells.split(0.1, 0), LIMITS, progress=False)
    assert found["stopped"] == "patience"
    assert found["best_loss"] == found["start_loss"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_budget_of_time_ends_it(tiny):
    found, _ = run(tiny(), seconds=0.0)
    assert found["stopped"] == "minutes"
    assert found["steps"] == 1


def test_an_interrupt_leaves_the_best_model_so_far(tiny):
    cells, model = make_cells(), tiny()
    module = module_of(model, cells)
    compute, trained = module.compute_loss, []

    def interrupted(batch, generator):
        trained.append(torch.is_grad_enabled() and module.model.anchor.mlp[0].weight.requires_grad)
        if sum(trained) > 10 * L.FIRST_CHECK + 3:  # past some looks
            raise KeyboardInterrupt
        return compute(batch, generator)

    module.compute_loss = interrupted
    limits = LIMITS._replace(max_epochs=50, patience=20)
    found = L.continue_training(module, cells, cells.split(0.1, 0), limits, progress=False)
    assert found["stopped"] == "interrupted"
    assert found["best_loss"] < found["start_loss"]


def test_a_loss_that_is_not_finite_is_an_error(tiny):
    cells, model = make_cells(), tiny()
    module = module_of(model, cells)
    with torch.no_grad():
        module.decoder.linear.weight.fill_(torch.inf)
    with pytest.raises(FloatingPointError, match="Lower learning_rate"):
        L.continue_training(module, cells, cells.split(0.1, 0), LIMITS, progress=False)


def test_a_transformer_is_trained_by_the_same_loop(tiny):
    cells, model = make_cells(), tiny(anchor="learned")
    c = PretrainingConfig(batch_size=16, learning_rate=1e-2, warmup_steps=1, precision="fp32", compile_blocks="no")
    module = PretrainingModule(model, c, 2, np.full(model.config.n_tokens, 1 / N_GENES))
    split = cells.split(0.1, 0)
    found = L.continue_training(module, cells, split, LIMITS, max_length=4, progress=False)
    assert found["best_loss"] < found["start_loss"]


def test_each_epoch_is_a_permutation_of_its_own():
    rows = L.shuffled(np.arange(70), 32, 0, whole=True)
    taken = [next(rows) for _ in range(4)]
    assert all(len(part) == 32 for part in taken)
    first, second = np.concatenate(taken[:2]), np.concatenate(taken[2:])
    assert len(set(first)) == len(set(second)) == 64
    assert not np.array_equal(first, second)
    some = L.shuffled(np.arange(40), 32, 0)
    assert [len(next(some)) for _ in range(3)] == [32, 8, 32]
