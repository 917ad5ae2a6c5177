"""Schedules, groups of weights, draws and checkpoints of tasks; and the loop of fits held in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from scdiva import settings
from scdiva._constants import N_SPECIAL
from scdiva.train import OptimiserConfig, PretrainingModule, TaskModule, steps
from scdiva.train.base import learning_rate_factor
from scdiva.train.steps import decay_groups, shuffled, train_steps


def test_schedule():
    c = OptimiserConfig(steps=110, warmup_steps=10, final_learning_rate=0.1)
    assert [learning_rate_factor(s, c) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate_factor(10, c) == pytest.approx(1.0)
    assert learning_rate_factor(60, c) == pytest.approx(0.55)  # half way down the cosine
    assert learning_rate_factor(110, c) == learning_rate_factor(999, c) == pytest.approx(0.1)
    assert learning_rate_factor(0, OptimiserConfig(steps=1, warmup_steps=0)) == 1.0


def test_norms_biases_and_tables_do_not_decay(tiny, config):
    module = PretrainingModule(tiny(tie_gene_head=True), config(), n_studies=2)
    decayed, spared = decay_groups(module, 0.05)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.05, 0.0)
    names = {id(p): name for name, p in module.named_parameters()}
    decays, spares = ({names[id(p)] for p in group["params"]} for group in (decayed, spared))
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    assert decays.isdisjoint(spares)
    assert {n for n in names.values() if n.endswith("bias") or "norm" in n} <= spares
    assert {"model.embedding.gene.weight", "model.anchor.table.weight", "decoder.study_bias.weight"} <= spares
    assert "decoder.linear.weight" in decays
    assert all(p.ndim == 2 for p in decayed["params"])


def test_embeddings_of_values_change_as_fast_as_those_of_genes(tiny, config):
    """One step of AdamW changes the embeddings of genes and of values by about the learning rate."""
    module = PretrainingModule(tiny(), config(learning_rate=0.01, weight_decay=0.0, warmup_steps=0))
    optimizer, embedding = module.configure_optimizers()["optimizer"], module.model.embedding
    genes, values, masked = torch.arange(N_SPECIAL, 9), torch.linspace(0.5, 3, 9 - N_SPECIAL), torch.zeros(6).bool()
    before = embedding.gene(genes).detach().clone(), embedding.of_values(values, masked).detach().clone()
    embedding.value_in.requires_grad_(False)
    embedding.value_out.bias.requires_grad_(False)
    embedding(genes, values, masked).sum().backward()
    optimizer.step()
    gene, value = (
        (after - start).detach().abs().mean()
        for after, start in zip((embedding.gene(genes), embedding.of_values(values, masked)), before, strict=True)
    )
    assert gene == pytest.approx(0.01, rel=1e-3)
    assert gene / 10 < value < 2 * gene
    rates = {name: group["lr"] for group in optimizer.param_groups for name, p in module.named_parameters()
             if any(p is one for one in group["params"])}  # fmt: skip
    assert len(rates) == len(list(module.parameters()))


def test_optimiser_is_adamw_with_the_configured_numbers(tiny, config):
    module = PretrainingModule(tiny(), config(learning_rate=0.01, warmup_steps=4))
    optimisers = module.configure_optimizers()
    optimizer, scheduler = optimisers["optimizer"], optimisers["lr_scheduler"]["scheduler"]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimisers["lr_scheduler"]["interval"] == "step"
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


class Dropping(TaskModule):
    """A task whose loss is nothing but dropout, drawn from torch's global stream as layers do."""

    def compute_loss(self, batch, generator):
        loss = nn.functional.dropout(torch.ones(1000), 0.5).cumsum(0).mean() + 0 * self.model.weight.sum()
        self.drawn = {"drawn": torch.rand((), generator=generator), "loss": loss.detach()}
        return loss, {"drawn": self.drawn["drawn"]}

    def log_dict(self, values, **_):
        self.logged = values


def test_dropout_and_masks_follow_seed_and_step_and_spare_the_global_stream(batch):
    network = nn.Linear(1, 1)

    def steps(n, start=0, seed=0):
        task = Dropping(network, OptimiserConfig(seed=seed))
        task.batches_seen = start
        draws = []
        for i in range(n):
            task.training_step(batch, i)
            draws.append(tuple(float(v) for v in task.drawn.values()))
        assert task.batches_seen == start + n
        return draws

    before = torch.get_rng_state()
    first = steps(4)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(5)  # the user draws in between; nothing changes
    assert steps(4) == first
    assert steps(2, start=2) == first[2:]
    assert len({value for step in first for value in step}) == 8
    assert steps(4, seed=1) != first
    # validation is corrupted alike every time, each batch in its way
    task, drawn = Dropping(network, OptimiserConfig()), []
    for n_batches, number in ((0, 1), (50, 1), (50, 2)):
        task.batches_seen = n_batches
        task.validation_step(batch, number)
        drawn.append(float(task.logged["val/drawn"]))
    assert drawn[0] == drawn[1] != drawn[2]


def test_checkpoint_of_another_run_is_refused(tiny, config):
    module = PretrainingModule(tiny(), config(seed=0))
    checkpoint: dict = {"state_dict": module.state_dict()}
    module.batches_seen = 12
    module.on_save_checkpoint(checkpoint)
    same = PretrainingModule(tiny(), config(seed=0, checkpoint_every=7, precision="bf16"))
    same.on_load_checkpoint(checkpoint)
    assert same.batches_seen == 12
    with pytest.raises(ValueError, match="seed: 0 then, 1 now"):
        PretrainingModule(tiny(), config(seed=1)).on_load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="PretrainingModule, not Dropping"):
        Dropping(nn.Linear(1, 1), OptimiserConfig()).on_load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="no scdiva task"):
        module.on_load_checkpoint({})


def fit_line(steps=60, loss_of=None, frozen=(), last=60):
    """Fit a line to points on a line; what the loop says, the layer, and the losses."""
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]]) + 0.5
    layer, losses = nn.Linear(3, 1), []
    for name, p in layer.named_parameters():
        nn.init.zeros_(p)
        p.requires_grad_(name not in frozen)

    def of_line(step):
        loss = (layer(x) - y).square().mean()
        losses.append(float(loss.detach()))
        return loss

    rate = lambda step: 0.1 * min(1.0, step / 5) * (step <= last)  # noqa: E731
    return train_steps(layer, loss_of or of_line, rate, steps=steps, desc="fitting"), layer, losses


def test_it_learns_and_says_how_far():
    outcome, layer, losses = fit_line()
    assert outcome == (len(losses), "steps") == (60, "steps")
    assert losses[-1] < 0.05 * losses[0]
    torch.testing.assert_close(layer.weight, torch.tensor([[1.0, 2.0, -1.0]]), atol=0.4, rtol=0)


def test_a_learning_rate_of_zero_ends_it_and_the_bar(monkeypatch):
    bars, bar = [], steps.progress_bar
    monkeypatch.setattr(steps, "progress_bar", lambda **how: bars.append(bar(**how)) or bars[-1])
    with settings.override(progress=True):
        outcome, _, losses = fit_line(last=20)
    assert outcome == (len(losses), "converged") == (20, "converged")
    assert (bars[0].total, bars[0].n) == (20, 20)


def test_an_interrupt_leaves_what_was_learned():
    weight = torch.zeros(1, requires_grad=True)

    def loss_of(step):
        if step == 6:
            raise KeyboardInterrupt
        return (weight.sum() - 1).square()

    assert fit_line(loss_of=loss_of)[0] == (5, "interrupted")


def test_a_loss_that_is_not_finite_is_an_error():
    with pytest.raises(FloatingPointError, match="The loss is inf at step 1"):
        fit_line(loss_of=lambda step: torch.tensor(torch.inf, requires_grad=True))


def test_each_epoch_is_a_permutation_of_its_own():
    rows = shuffled(np.arange(70), 32, 0, drop_last=True)
    batches = [next(rows) for _ in range(4)]
    assert all(len(part) == 32 for part in batches)
    first, second = np.concatenate(batches[:2]), np.concatenate(batches[2:])
    assert len(set(first)) == len(set(second)) == 64
    assert not np.array_equal(first, second)
    all_rows = shuffled(np.arange(40), 32, 0)
    assert [len(next(all_rows)) for _ in range(3)] == [32, 8, 32]
