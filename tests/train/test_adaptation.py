"""Training on, on cells in memory: the pieces by hand, the loop on a real task."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva.train import AnchorConfig, PretrainingConfig, PretrainingModule
from scdiva.train import adaptation as A
from scdiva.train import low_rank as L
from scdiva.train.gene_decoder import gene_multinomial_loss

N_GENES = 30
LIMITS = A.Limits(max_epochs=5, patience=3, seconds=np.inf)


def make_cells(n: int = 240, n_batches: int = 2) -> A.AdaptationCells:
    """Cells of two types among the last 25 genes; the second batch has twice the values."""
    draw = np.random.default_rng(0)
    batch = np.arange(n) % n_batches
    tokens, values, lengths = [], [], []
    for i in range(n):
        length = int(draw.integers(3, 9))
        genes = draw.permutation(12)[:length] + (0 if i % 4 < 2 else 13)
        tokens.append(genes + 5 + N_SPECIAL)
        values.append(draw.uniform(0.5, 2, length) * (1 + batch[i]))
        lengths.append(length)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    measured = np.arange(5, 30) + N_SPECIAL
    return A.AdaptationCells(
        indptr, np.concatenate(tokens), np.concatenate(values).astype(np.float32), batch, measured, n_batches
    )


def config(**fields) -> AnchorConfig:
    return AnchorConfig(**{"batch_size": 32, "learning_rate": 1e-2, "warmup_steps": 1, "precision": "fp32"} | fields)


def states(model, cells):
    batch = cells.take(np.arange(cells.n_cells))
    return model.encode(batch.tokens, batch.values, batch.cu_seqlens).detach()


def test_frequency_is_the_mean_share_of_counts():
    cells = make_cells(4, 1)
    expected = np.zeros(N_GENES + N_SPECIAL)
    for i in range(4):
        at = slice(cells.indptr[i], cells.indptr[i + 1])
        counts = np.expm1(cells.values[at].astype(float))
        expected[cells.tokens[at]] += counts / counts.sum() / 4
    np.testing.assert_allclose(cells.frequency(N_GENES + N_SPECIAL), expected, rtol=1e-6)


def test_a_low_rank_update_starts_from_nothing_and_is_merged(tiny):
    model = tiny()
    layout, before = list(model.state_dict()), model.anchor.table.weight.detach().clone()
    L.add_low_rank(model.anchor.table, 3, torch.Generator().manual_seed(0))
    assert torch.equal(model.anchor.table.weight, before)
    torch.nn.init.ones_(model.anchor.table.parametrizations.weight[0].b)
    trained = model.anchor.table.weight.detach().clone()
    change = trained - before
    assert np.linalg.matrix_rank(change.numpy(), tol=1e-4) == 1  # the rows of b are equal
    L.merge_low_rank(model)
    assert list(model.state_dict()) == layout
    assert torch.equal(model.anchor.table.weight, trained)
    assert type(model.anchor.table) is torch.nn.Embedding


def test_focusing_keeps_the_leading_directions_within_batches(tiny):
    cells, model = make_cells(), tiny()
    old, batch = copy.deepcopy(model.anchor), cells.take(np.arange(cells.n_cells))

    def x(encoder):
        dense = torch.zeros(cells.n_cells, N_GENES + N_SPECIAL)
        for i in range(cells.n_cells):
            at = slice(cells.indptr[i], cells.indptr[i + 1])
            dense[i, batch.tokens[at]] = batch.values[at]
        return (dense @ encoder.table.weight + encoder.bias).detach().numpy()

    share = A.focus_linear(model.anchor, cells, 3)
    within = x(old).copy()
    for b in range(2):
        within[cells.batch == b] -= within[cells.batch == b].mean(axis=0)
    _, s, vt = np.linalg.svd(within, full_matrices=False)
    assert share == pytest.approx((s[:3] ** 2).sum() / (s**2).sum(), rel=1e-4)
    centred = x(old) - x(old).mean(axis=0)
    np.testing.assert_allclose(x(model.anchor), centred @ vt[:3].T @ vt[:3], atol=1e-6)


def test_the_loss_is_that_of_the_measured_genes(tiny):
    cells = make_cells()
    module = A.EncoderAdaptation(tiny(), config(max_time=1e-9, panel_rate=0.0, contrast_weight=0.0), cells)
    torch.nn.init.normal_(module.decoder.linear.weight, generator=torch.Generator().manual_seed(0))
    assert module.decoder.linear.out_features == 25
    batch = cells.take(np.arange(5))
    loss, parts = module.compute_loss(batch, torch.Generator().manual_seed(0))
    visible = torch.ones_like(batch.tokens, dtype=torch.bool)
    y = module.model.anchor.parts(batch.tokens, batch.values, batch.cu_seqlens, visible)[1]
    logits = torch.full((5, N_GENES), -1e9)  # a gene that is not measured has no share
    logits[:, 5:] = module.decoder(y, batch.study)
    assert float(loss.detach()) == pytest.approx(float(gene_multinomial_loss(logits, batch).mean().detach()), rel=1e-5)
    assert float(parts["genes"]) == float(loss.detach())


def run(model, seed=0, **fields):
    cells = make_cells()
    module = A.EncoderAdaptation(model, config(seed=seed), cells)
    limits = LIMITS._replace(**fields)
    return A.continue_training(module, cells, limits, progress=False), cells


def test_training_helps_repeats_and_leaves_the_random_stream(tiny):
    one, two, other = tiny(), tiny(), tiny()
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    found, cells = run(one)
    assert torch.equal(torch.rand(2), expected)
    again, _ = run(two)
    run(other, seed=1)
    assert found["improved"]
    assert found["best_loss"] == min(found["history"]["validation_loss"])
    assert found["improvement"] == pytest.approx(found["start_loss"] - found["best_loss"])
    assert found["improvement"] > 0
    assert (found["n_training"], found["n_validation"]) == (216, 24)
    assert found["history"] == again["history"]
    assert torch.equal(states(one, cells), states(two, cells))
    assert not torch.equal(states(one, cells), states(other, cells))


def test_the_best_weights_are_those_that_are_left(tiny):
    """The loss of the held-out cells, taken anew, is the best one of the history."""
    cells, model = make_cells(), tiny()
    module = A.EncoderAdaptation(model, config(learning_rate=0.3), cells)  # so high that the last look is not the best
    found = A.continue_training(module, cells, A.Limits(30, 3, np.inf), progress=False)
    assert found["stopped"] == "patience"
    assert found["history"]["validation_loss"][-1] > found["best_loss"]
    held = np.sort(np.random.default_rng(A.step_seed(0, 0, "split")).permutation(240)[:24])
    with torch.no_grad():
        loss, _ = module.compute_loss(cells.take(held), A.step_generator(0, 0, "validation"))
    assert float(loss) == pytest.approx(found["best_loss"], rel=1e-6)


def test_what_does_not_help_is_undone(tiny):
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    cells = make_cells()
    module = A.EncoderAdaptation(model, config(), cells)

    def spoil():
        module.config = config(learning_rate=1e-12)
        torch.nn.init.zeros_(model.anchor.table.weight)
        torch.nn.init.normal_(module.decoder.linear.bias, std=10, generator=torch.Generator().manual_seed(0))
        return {"spoilt": True}

    found = A.continue_training(module, cells, LIMITS, prepare=spoil, progress=False)
    assert found["spoilt"]
    assert not found["improved"]
    assert found["improvement"] == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_budget_of_time_ends_it(tiny):
    found, _ = run(tiny(), seconds=0.0)
    assert found["stopped"] == "minutes"
    assert found["steps"] == 1
    assert not found["improved"]


def test_an_interrupt_leaves_the_best_model_so_far(tiny):
    cells, model = make_cells(), tiny()
    module = A.EncoderAdaptation(model, config(), cells)
    compute, calls = module.compute_loss, []

    def interrupted(batch, generator):
        calls.append(torch.is_grad_enabled())
        if network and sum(calls[network[0] :]) > A.FIRST_CHECK + 3:  # past the first look
            raise KeyboardInterrupt
        return compute(batch, generator)

    network: list[int] = []
    module.compute_loss = interrupted
    found = A.continue_training(module, cells, LIMITS, prepare=lambda: network.append(len(calls)) or {}, progress=False)
    assert found["stopped"] == "interrupted"
    assert found["improved"]
    assert found["best_loss"] == found["history"]["validation_loss"][-1] < found["start_loss"]


def test_a_loss_that_is_not_finite_is_an_error(tiny):
    cells, model = make_cells(), tiny()
    module = A.EncoderAdaptation(model, config(), cells)
    with torch.no_grad():
        module.decoder.linear.weight.fill_(torch.inf)
    with pytest.raises(FloatingPointError, match="Lower learning_rate"):
        A.continue_training(module, cells, LIMITS, progress=False)


def test_a_transformer_is_trained_by_the_same_loop(tiny):
    cells, model = make_cells(), tiny(anchor="learned")
    c = PretrainingConfig(batch_size=16, learning_rate=1e-2, warmup_steps=1, precision="fp32", compile_blocks="no")
    module = PretrainingModule(model, c, 2, cells.frequency(model.config.n_tokens))
    found = A.continue_training(module, cells, LIMITS._replace(max_epochs=5), max_length=4, progress=False)
    assert found["improved"]
