from __future__ import annotations

import pytest
import torch
from torch import nn

from scdiva.train import OptimiserConfig, PretrainingModule, TaskModule
from scdiva.train.base import decay_groups, learning_rate_factor


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
    names = {id(p): name for name, p in module.named_parameters()}
    assert decayed["weight_decay"] == 0.05
    assert spared["weight_decay"] == 0.0
    decayed_names = {names[id(p)] for p in decayed["params"]}
    spared_names = {names[id(p)] for p in spared["params"]}
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    assert decayed_names.isdisjoint(spared_names)
    assert {n for n in spared_names if n.endswith("bias") or "norm" in n} == {
        n for n in names.values() if n.endswith("bias") or "norm" in n
    }
    assert {"model.embedding.gene.weight", "model.anchor.table.weight", "decoder.study_bias.weight"} <= spared_names
    assert "decoder.linear.weight" in decayed_names
    assert all(p.ndim == 2 for p in decayed["params"])


def test_optimiser_is_adamw_with_the_configured_numbers(tiny, config):
    module = PretrainingModule(tiny(), config(learning_rate=0.01, warmup_steps=4))
    made = module.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert made["lr_scheduler"]["interval"] == "step"
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
        seen = []
        for i in range(n):
            task.training_step(batch, i)
            seen.append(tuple(float(v) for v in task.drawn.values()))
        return seen, task.batches_seen

    before = torch.get_rng_state()
    first, count = steps(4)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(5)  # the user draws in between; nothing changes
    assert steps(4)[0] == first
    assert steps(2, start=2)[0] == first[2:]
    assert count == 4
    assert len({value for step in first for value in step}) == 8
    assert steps(4, seed=1)[0] != first


def test_validation_is_corrupted_alike_every_time(batch):
    task = Dropping(nn.Linear(1, 1), OptimiserConfig())
    task.validation_step(batch, 1)
    first = float(task.logged["val/drawn"])
    task.batches_seen = 50
    task.validation_step(batch, 1)
    assert float(task.logged["val/drawn"]) == first
    task.validation_step(batch, 2)
    assert float(task.logged["val/drawn"]) != first


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
