"""The state head trained alone."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from mini_stages import PRIOR_CELLS, StateHeadConfig, StateHeadModule, start_state_head
from torch import Tensor

from scdiva._constants import N_SPECIAL
from scdiva.diffusion import mask_tokens, stratified_times
from scdiva.train import fit


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_head(tiny, **fields):
    """A model whose state head says something."""
    model = tiny(state_head=True, state_rank=4, **fields)
    with torch.no_grad():
        model.state_head.gene.normal_(generator=rng(3))
        model.state_head.value.normal_(generator=rng(4))
    return model


def slow(model, batch, seen, measured) -> tuple[Tensor, Tensor]:
    """Mean over cells that hide genes of the mean loss of a hidden gene, and of the squared error of its value."""
    identity, value = [], []
    bounds = batch.cu_seqlens.tolist()
    for start, stop in itertools.pairwise(bounds):
        hidden = [i for i in range(start, stop) if seen.masked[i]]
        shown = [i for i in range(start, stop) if not seen.masked[i]]
        if not hidden:
            continue
        cu = torch.tensor([0, stop - start], dtype=torch.int32)
        state = model.encode_anchor(seen.tokens[start:stop], seen.values[start:stop], cu)
        read = model.state_head(state, torch.tensor([len(shown)]))[0]
        log_odds = model.state_head.gene @ read
        share = len(hidden) / (stop - start)
        logits = {g: -torch.log(share + torch.exp(-log_odds[g])) for g in measured}
        free = [logits[g] for g in measured if g not in {int(batch.tokens[i]) - N_SPECIAL for i in shown}]
        total = torch.logsumexp(torch.stack(free), dim=0)
        genes = [int(batch.tokens[i]) - N_SPECIAL for i in hidden]
        identity.append(sum(total - logits[g] for g in genes) / len(genes))
        errors = [model.state_head.value[g] @ read - batch.values[i] for g, i in zip(genes, hidden, strict=True)]
        value.append(sum(error**2 for error in errors) / len(errors))
    return sum(identity) / len(identity), sum(value) / len(value)


@pytest.mark.parametrize("some", [False, True])
def test_the_loss_is_its_formula(tiny, batch, some):
    model = with_head(tiny)
    present = np.unique(batch.tokens.numpy())
    measured = np.unique(np.append(present, [5, 9]))[::-1] if some else None  # in any order
    module = StateHeadModule(model, StateHeadConfig(value_weight=0.3, min_time=0.2), measured)
    loss, parts = module.compute_loss(batch, rng(2))
    g = rng(2)
    times = stratified_times(batch.n_cells, g, 0.2)
    seen = mask_tokens(batch.tokens, batch.values, batch.cu_seqlens, times, g)
    every = range(30) if measured is None else (measured - N_SPECIAL).tolist()
    identity, value = slow(model, batch, seen, every)
    assert float(parts["identity"]) == pytest.approx(float(identity.detach()), rel=1e-5)
    assert float(parts["value"]) == pytest.approx(float(value.detach()), rel=1e-5)
    weights = list(model.state_head.parameters())
    found = torch.autograd.grad(loss, weights)
    expected = torch.autograd.grad(identity + 0.3 * value, weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_genes_without_a_column_learn_nothing(tiny, batch):
    model = with_head(tiny)
    present = np.unique(batch.tokens.numpy())
    absent = np.setdiff1d(np.arange(30), present - N_SPECIAL)
    assert len(absent)
    StateHeadModule(model, StateHeadConfig(), present).compute_loss(batch, rng(1))[0].backward()
    assert (model.state_head.gene.grad[absent] == 0).all()
    assert (model.state_head.gene.grad[present - N_SPECIAL] != 0).any(dim=1).all()


def test_only_the_head_is_trained(tiny, stream, tmp_path):
    model = with_head(tiny)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = StateHeadConfig(steps=60, learning_rate=0.03, warmup_steps=2, log_every=1, validate_every=20)
    module = StateHeadModule(model, config)
    batch = next(iter(stream().val_dataloader()))
    first = float(module.compute_loss(batch, rng(1))[0].detach())
    fit(module, stream(), out_dir=tmp_path, accelerator="cpu", progress=False)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.startswith("state_head.")}
    assert float(module.compute_loss(batch, rng(1))[0].detach()) < first - 0.5


@pytest.mark.parametrize("fields", [{}, {"state_head": True, "anchor": "learned"}])
def test_a_model_without_head_or_state_is_refused(tiny, fields):
    with pytest.raises(ValueError, match='needs state_head=True and anchor="encoder"'):
        StateHeadModule(tiny(**fields), StateHeadConfig())


def test_biases_start_from_how_often_and_how_much(tiny, batch):
    model = with_head(tiny)
    before = model.state_head.gene.detach().clone()
    start_state_head(model, batch.tokens.numpy(), batch.values.numpy(), batch.n_cells)
    tokens, values = batch.tokens.tolist(), batch.values.tolist()
    of_genes, of_values = model.state_head.gene.detach(), model.state_head.value.detach()
    for gene in range(30):
        own = [v for t, v in zip(tokens, values, strict=True) if t == gene + N_SPECIAL]
        odds = (len(own) + PRIOR_CELLS) / (batch.n_cells - len(own) + PRIOR_CELLS)
        assert float(of_genes[gene, -1]) == pytest.approx(np.log(odds), rel=1e-5)
        mean = np.mean(own) if own else np.mean(values)
        assert float(of_values[gene, -1]) == pytest.approx(mean, rel=1e-5)
    assert torch.equal(of_genes[:, :-1], before[:, :-1])


def test_the_start_is_better_than_none(tiny, batch):
    model = tiny(state_head=True)
    module = StateHeadModule(model, StateHeadConfig())
    before = module.compute_loss(batch, rng(1))[1]
    start_state_head(model, batch.tokens.numpy(), batch.values.numpy(), batch.n_cells)
    after = module.compute_loss(batch, rng(1))[1]
    assert all(float(after[name]) < float(before[name]) for name in ("identity", "value"))


@pytest.mark.parametrize(("field", "value"), [("value_weight", -1), ("steps", 0)])
def test_values_without_sense_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        StateHeadConfig(**{field: value})
    assert StateHeadConfig(**dataclasses.asdict(StateHeadConfig(steps=7))).steps == 7
