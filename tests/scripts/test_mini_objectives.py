"""Parts of a model trained alone: their losses are their formulas, and nothing else of the model learns."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from mini_objectives import StateHeadConfig, StateHeadModule, contrast_loss

from scdiva._constants import N_SPECIAL
from scdiva.diffusion import mask_tokens, stratified_times


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_contrast_is_its_formula_with_negatives_of_one_study():
    first, second = torch.randn(5, 4, generator=rng(6)), torch.randn(5, 4, generator=rng(7))
    study = [0, 1, 0, 0, 2]
    tau, total = 0.2, 0.0
    for i in range(5):
        peers = [j for j in range(5) if study[j] == study[i]]
        for a, b in ((first, second), (second, first)):
            similar = {j: float(torch.cosine_similarity(a[i], b[j], dim=0)) / tau for j in peers}
            total += math.log(sum(math.exp(x) for x in similar.values())) - similar[i]
    assert float(contrast_loss(first, second, torch.tensor(study), tau)) == pytest.approx(total / 10, rel=1e-5)


@pytest.fixture
def with_head(tiny):
    """A model whose state head says something."""
    model = tiny(state_head=True, state_rank=4)
    torch.nn.init.normal_(model.state_head.gene, generator=rng(3))
    torch.nn.init.normal_(model.state_head.value, generator=rng(4))
    return model


def slow_head(model, batch, corrupted):
    """Mean over cells that hide genes of the mean loss of a hidden gene, and of the squared error of its value."""
    identity, value = [], []
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        hidden = [i for i in range(start, stop) if corrupted.masked[i]]
        visible = [i for i in range(start, stop) if not corrupted.masked[i]]
        if not hidden:
            continue
        cu = torch.tensor([0, stop - start], dtype=torch.int32)
        state = model.encode_anchor(corrupted.tokens[start:stop], corrupted.values[start:stop], cu)
        features = model.state_head(state, torch.tensor([len(visible)]))[0]
        log_odds, share = model.state_head.gene @ features, len(hidden) / (stop - start)
        logits = -torch.log(share + torch.exp(-log_odds))
        free = [logits[g] for g in range(30) if g not in {int(batch.tokens[i]) - N_SPECIAL for i in visible}]
        total = torch.logsumexp(torch.stack(free), dim=0)
        genes = [int(batch.tokens[i]) - N_SPECIAL for i in hidden]
        identity.append(sum(total - logits[g] for g in genes) / len(genes))
        errors = [model.state_head.value[g] @ features - batch.values[i] for g, i in zip(genes, hidden, strict=True)]
        value.append(sum(error**2 for error in errors) / len(errors))
    return sum(identity) / len(identity), sum(value) / len(value)


def test_loss_of_the_state_head_is_its_formula(with_head, batch):
    module = StateHeadModule(with_head, StateHeadConfig(value_weight=0.3, min_time=0.2))
    loss, _ = module.compute_loss(batch, rng(2))
    g = rng(2)
    times = stratified_times(batch.n_cells, g, 0.2)
    corrupted = mask_tokens(batch.tokens, batch.values, batch.cu_seqlens, times, g)
    identity, value = slow_head(with_head, batch, corrupted)
    expected = identity + 0.3 * value
    torch.testing.assert_close(loss, expected)
    weights = list(with_head.state_head.parameters())
    assert {id(p) for p in module.parameters() if p.requires_grad} == set(map(id, weights))
    for gradient, expected_gradient in zip(*(torch.autograd.grad(of, weights) for of in (loss, expected)), strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
