"""Synchronisations of a training step, on the meta device, which replaces a GPU and has no data to wait for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scdiva._constants import N_SPECIAL
from scdiva.data.batch import InMemoryCells
from scdiva.diffusion import loss as loss_module
from scdiva.integration.objective import IntegrationObjective
from scdiva.kernels import _attention
from scdiva.train import PretrainingModule

pytest.importorskip("triton", reason="attention elsewhere asks a GPU for the lengths of cells")

ASKING = {
    "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "bincount", "equal",
}  # fmt: skip
"""Operators whose outcome, or its shape, is a matter of numbers on the device."""


class Waits(TorchDispatchMode):
    """Count how often the host would wait for the device, and by what; answer copies to the host with zeros."""

    def __init__(self):
        super().__init__()
        self.counted = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        tensors = [x for x in tree_leaves((arguments, keywords)) if isinstance(x, torch.Tensor)]
        name = function.overloadpacket.__name__
        if any(x.is_meta for x in tensors):
            if name == "_to_copy" and torch.device(keywords.get("device") or "meta").type == "cpu":
                self.counted.append("to cpu")
                return torch.zeros(tensors[0].shape, dtype=tensors[0].dtype)
            by_mask = name.startswith("index") and any(x.dtype in (torch.bool, torch.uint8) for x in tensors[1:])
            if name in ASKING or (by_mask and name not in ("index_fill", "index_fill_")):
                self.counted.append(name)
        return function(*arguments, **keywords)


@pytest.fixture
def device(monkeypatch):
    """The meta device, on which attention runs as on a GPU, with rows of logits as wide."""
    monkeypatch.setattr(_attention, "_triton_obstacle", lambda *_: "")
    monkeypatch.setitem(loss_module.ALIGNED, "meta", 64)
    # torch raises an error for autocast on the meta device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: torch.enable_grad())
    return torch.device("meta")


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"anchor": "learned"}, {"anchor_objective": "none", "value_mask_rate": 0.0}),
        ({}, {}),
        ({"tie_gene_head": True}, {"scored_genes": 3}),
        ({"n_layers": 3}, {"micro_batches": 3}),
        ({"state_head": True, "state_rank": 4}, {"scored_genes": 3, "place_prior": True}),
    ],
)
def test_a_step_waits_once(fields, settings, tiny, config, batch, device, monkeypatch):
    model = tiny(dim=64, attention_backend="triton", **fields)
    module = PretrainingModule(model, config(**settings), n_studies=2, denominator=np.ones(33)).to(device)
    module._trainer = SimpleNamespace(world_size=1, global_rank=0, global_step=0, should_stop=False)
    lines = []
    monkeypatch.setattr(module, "log_dict", lambda values, **_: lines.append(values))
    module.on_fit_start()
    on_device = batch.to(device)
    assert on_device.host is batch
    with Waits() as waits:
        for number in range(2):  # two batches are one step
            module.training_step(on_device, number).backward()
        assert waits.counted == []
        module.on_before_optimizer_step(torch.optim.SGD(module.parameters(), lr=0.1))
        module.on_train_batch_end()
    assert waits.counted == ["to cpu"]
    (line,) = lines  # as each step here is one of the log; the others are read after the step
    assert {"train/loss", "train/identity", "train/n_masked", "train/learning_rate"} <= line.keys()
    assert all(value.device.type == "cpu" for value in line.values()), "nor does Lightning wait for what it logs"
    untrained = [name for name, weight in module.named_parameters() if weight.grad is None]
    assert not untrained
    assert module.all_trained


def test_a_step_is_read_when_the_next_one_is_on_the_device(tiny, config, batch, device):
    model = tiny(dim=64, attention_backend="triton")
    module = PretrainingModule(model, config(log_every=10), n_studies=2).to(device)
    module._trainer = SimpleNamespace(world_size=1, global_rank=0, global_step=3, should_stop=False)
    module.reads_late = True
    module.on_fit_start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer._step_supports_amp_scaling = True
    on_device = batch.to(device)
    with Waits() as waits:
        for number in range(2):
            loss = module.training_step(on_device, number)
            module.on_before_zero_grad(optimizer)
            loss.backward()
            assert waits.counted == [], "all of the second step is launched"
            module.on_before_optimizer_step(optimizer)
            module.on_train_batch_end()
            assert optimizer.found_inf.is_meta, "the optimiser itself skips a step that is not finite"
    assert waits.counted == ["to cpu"]


@pytest.mark.parametrize("anchor", ["learned", "encoder"])
@pytest.mark.parametrize("labelled", [True, False])
def test_losses_of_fine_tuning_do_not_wait(anchor, labelled, tiny, batch, device):
    network = tiny(dim=64, attention_backend="triton", anchor=anchor).to(device)
    indptr, tokens, values = (part.numpy() for part in (batch.cu_seqlens, batch.tokens, batch.values))
    batches, rows = np.arange(6) % 2, np.arange(6)
    cells = InMemoryCells(indptr, tokens, values, batches, np.arange(30) + N_SPECIAL, 1)
    labels = np.array([0, 0, 1, 1, 2, -1]) if labelled else None
    objective = IntegrationObjective(cells, [batches], labels, state_dim=network.state_dim, context=8, seed=0)
    objective.to(device)
    with Waits() as waits:
        loss, _ = objective(network, rows, 0.5, torch.Generator().manual_seed(0))
        loss.backward()
    assert waits.counted == []
    cells.tokens[0] = 99
    with pytest.raises(ValueError, match="token"):  # cells are still checked
        objective(network, rows, 0.5, torch.Generator())


@pytest.mark.parametrize(
    ("fields", "settings", "untrained"),
    [
        ({"anchor_residual": True}, {"anchor_objective": "none"}, "model.anchor_out"),
        ({"state_head": True, "query_head": True}, {"scored_genes": 3}, "model.query_head"),
        ({"adapted": 5}, {}, "model.dataset_components"),
        ({"integrated": True, "adapted": 5}, {}, ("model.dataset_components", "model.integration")),
        ({}, {"anchor_objective": "none"}, None),
        ({"anchor": "learned"}, {"anchor_objective": "none"}, None),
    ],
)
def test_weights_without_gradient_are_known_beforehand(fields, settings, untrained, tiny, config, batch):
    module = PretrainingModule(tiny(**fields), config(**settings), n_studies=2)
    module.compute_loss(batch, torch.Generator().manual_seed(0))[0].backward()
    without_gradient = {name for name, weight in module.named_parameters() if weight.grad is None}
    assert module.all_trained == (not without_gradient)
    assert not without_gradient or all(name.startswith(untrained) for name in without_gradient)
    assert bool(without_gradient) == (untrained is not None)
