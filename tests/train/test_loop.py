"""The loop of fits held in memory, on a real task, and the low-rank updates that it trains."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.train import OptimiserConfig, PretrainingConfig, PretrainingModule, TaskModule
from scdiva.train import loop as L
from scdiva.train.adaptation import AdaptationCells
from scdiva.train.loop import RANK, LowRankUpdate, add_low_rank, merge_low_rank, train_states
from scdiva.train.objectives import GeneDecoder, gene_multinomial_loss, thinned_at_random

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


class GenesModule(TaskModule):
    """The genes of a cell from the learned part of its state, which a set encoder gives of the thinned cell."""

    def __init__(self, model, config, n_studies):
        super().__init__(model, config)
        frequency = np.full(model.config.n_tokens, 1 / N_GENES)
        self.decoder = GeneDecoder(model.config.anchor_learned_dim, model.config.n_genes, n_studies, frequency)
        model.requires_grad_(False)
        model.anchor.mlp.requires_grad_(True)

    def compute_loss(self, batch, generator):
        view = thinned_at_random(batch, 0.8, generator)
        state = self.model.anchor.parts(*view.packed, torch.ones_like(view.tokens, dtype=torch.bool))[1]
        return gene_multinomial_loss(self.decoder(state, batch.study), batch).mean(), {}


def module_of(model, cells, **fields) -> GenesModule:
    settings = {"batch_size": 32, "learning_rate": 1e-2, "warmup_steps": 1, "precision": "fp32"} | fields
    return GenesModule(model, OptimiserConfig(**settings), cells.n_batches)


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


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def trained(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("shape", "rank"), [((6, 9), 4), ((3, 9), 3), ((9, 2), 2)])
def test_the_update_is_w_plus_a_b(shape, rank):
    weight = torch.randn(shape, generator=draw())
    update = LowRankUpdate(weight, 4, draw(1))
    assert (update.a.shape, update.b.shape) == ((shape[0], rank), (rank, shape[1]))
    assert torch.equal(update(weight), weight)  # B is 0 at first
    with torch.no_grad():
        update.b.copy_(torch.randn(update.b.shape, generator=draw(2)))
    torch.testing.assert_close(update(weight), weight + update.a @ update.b)
    assert torch.linalg.matrix_rank(update(weight) - weight) <= rank
    assert torch.equal(LowRankUpdate(weight, 4, draw(1)).a, update.a)


def test_a_layer_trains_its_update_alone_and_merges():
    layer, x = nn.Linear(9, 6), torch.randn(5, 9, generator=draw())
    before, expected = copy.deepcopy(layer.state_dict()), layer(x).detach()
    add_low_rank(layer, 4, draw(1))
    torch.testing.assert_close(layer(x), expected)
    assert trained(layer) == {"bias", "parametrizations.weight.0.a", "parametrizations.weight.0.b"}
    layer(x).square().sum().backward()
    update = layer.parametrizations.weight[0]
    assert layer.parametrizations.weight.original.grad is None
    with torch.no_grad():
        update.b.add_(update.b.grad)
    assert update.b.any()
    expected = layer(x).detach()
    merge_low_rank(layer)
    assert sorted(layer.state_dict()) == sorted(before)
    assert not torch.equal(layer.weight, before["weight"])
    torch.testing.assert_close(layer(x), expected)
    merge_low_rank(layer)  # nothing is left to merge
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("fields", [{"anchor_residual": False}, {"anchor": "learned"}])
@pytest.mark.parametrize("how", ["lora", "full"])
def test_what_the_state_comes_from_is_trained(tiny, fields, how):
    model = tiny(**fields)
    before, names = copy.deepcopy(model.state_dict()), {name for name, _ in model.named_parameters()}
    train_states(model, how, 0)
    source = "anchor." if fields.get("anchor") is None else ""
    found = trained(model)
    if how == "full":
        assert found == {name for name in names if name.startswith(source)}
    else:
        inside = "anchor." if source else "blocks."
        assert found
        assert all(name.startswith(inside) and name.rsplit(".", 1)[1] in ("a", "b") for name in found)
        layers = [m for m in (model.anchor if source else model.blocks).modules() if isinstance(m, nn.Linear)]
        assert len(found) == 2 * len(layers)
        assert all(layer.parametrizations.weight[0].a.shape[1] <= RANK for layer in layers)
    merge_low_rank(model)
    assert {name for name, _ in model.named_parameters()} == names
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_seed_determines_the_updates(tiny):
    updates = []
    for seed in (0, 0, 1):
        model = tiny(anchor_residual=False)
        stream = torch.random.get_rng_state()
        train_states(model, "lora", seed)
        assert torch.equal(torch.random.get_rng_state(), stream)
        updates.append([p.detach().clone() for name, p in model.named_parameters() if name.endswith(".a")])
    assert all(torch.equal(one, other) for one, other in zip(updates[0], updates[1], strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(updates[0], updates[2], strict=True))
    assert not torch.equal(updates[0][0][:6, :6], updates[0][1][:6, :6])  # layers draw on their own
