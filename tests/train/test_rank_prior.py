"""Pretraining with a state head: which positions are scored, and what the network gets of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva.diffusion import cell_of_token, dual_loss, mask_tokens, rank_log_prior, stratified_times
from scdiva.train import PretrainingModule

DENOMINATOR = np.random.default_rng(0).uniform(0.3, 2.0, 33).astype(np.float32)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_head(tiny, **fields):
    """A model whose state head says something."""
    model = tiny(state_head=True, state_rank=4, **fields)
    with torch.no_grad():
        model.state_head.gene.normal_(generator=rng(3))
        model.state_head.value.normal_(generator=rng(4))
    return model


@pytest.mark.parametrize("anchor", ["encoder", "learned"])
@pytest.mark.parametrize("places", [False, True])
def test_the_loss_is_told_state_and_places(tiny, config, batch, anchor, places):
    model = with_head(tiny, anchor=anchor)
    chosen = config(anchor_objective="none", scored_genes=2, place_prior=places, value_weight=1.0)
    module = PretrainingModule(model, chosen, denominator=DENOMINATOR if places else None)
    loss, parts = module.compute_loss(batch, rng())
    g = rng()
    times = stratified_times(batch.n_cells, g, 1e-3)
    corrupted = mask_tokens(batch.tokens, batch.values, batch.cu_seqlens, times, g, value_mask_rate=0.1)
    out = model(corrupted.tokens, corrupted.values, batch.cu_seqlens, value_mask=corrupted.value_mask)
    cells = cell_of_token(batch.cu_seqlens, len(batch.tokens))
    number = torch.bincount(cells[corrupted.masked], minlength=batch.n_cells)
    scored = torch.rand(len(batch.tokens), generator=g) < 2 / number[cells]
    asked = corrupted.masked & scored
    assert 0 < int(asked.sum()) < int(corrupted.masked.sum())
    logits = model.logits(out, asked)
    if places:
        with torch.no_grad():
            logits = logits + rank_log_prior(
                *(batch.tokens, batch.values, asked, ~corrupted.value_mask, batch.cu_seqlens),
                model.state_head.values(out.read),
                torch.from_numpy(DENOMINATOR),
            )
    expected, _ = dual_loss(
        out.hidden, model.gene_weight, model.values(out, batch.tokens), batch.tokens, batch.values, corrupted,
        batch.cu_seqlens, value_weight=1.0, scored=scored, logits=logits,
    )  # fmt: skip
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert int(parts["n_masked"]) == int(asked.sum())
    loss.backward()
    for name, parameter in model.state_head.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_a_state_head_on_lat_trains_the_transformer(tiny, config, batch):
    """With `anchor="learned"` the head reads [LAT] behind the blocks: gradients of its output alone reach them all."""
    model = with_head(tiny, anchor="learned")
    corrupted = mask_tokens(*batch.on_host().packed, stratified_times(batch.n_cells, rng()), rng())
    out = model(corrupted.tokens, corrupted.values, batch.cu_seqlens, value_mask=corrupted.value_mask)
    n_visible = (~corrupted.value_mask).float()
    n_visible = torch.zeros(batch.n_cells).index_add_(0, out.cells, n_visible)
    torch.testing.assert_close(out.read, model.state_head(out.cell_state, n_visible))
    out.read.square().sum().backward()
    for name, parameter in model.blocks.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_about_so_many_genes_of_a_cell_are_scored(tiny, config):
    module = PretrainingModule(tiny(), config(anchor_objective="none", scored_genes=8))
    masked = torch.rand(4000, generator=rng(1)) < 0.5
    cu = torch.tensor([0, 1000, 1006, 4000], dtype=torch.int32)
    draws = torch.stack([module._scored(masked, cu, rng(seed)) & masked for seed in range(200)]).float()
    per_cell = [float(draws[:, a:b].sum(dim=1).mean()) for a, b in ((0, 1000), (1006, 4000))]
    assert per_cell == pytest.approx([8, 8], abs=5 * (8 / 200) ** 0.5)
    few = masked[1000:1006]
    assert (draws[:, 1000:1006][:, few] == 1).all()  # fewer than eight: all of them
    assert module._scored(masked, cu, rng(1)).dtype == torch.bool
    assert PretrainingModule(tiny(), config())._scored(masked, cu, rng(1)) is None


def test_what_is_lacking_is_said(tiny, config):
    fields = {"anchor_objective": "none", "scored_genes": 4, "place_prior": True}
    with pytest.raises(ValueError, match=r"place_prior .*state_head=True, .*denominator"):
        PretrainingModule(tiny(), config(**fields), denominator=DENOMINATOR)
    with pytest.raises(ValueError, match=r"place_prior .*state_head=True, .*denominator"):
        PretrainingModule(tiny(state_head=True), config(**fields))
    with pytest.raises(ValueError, match="state head needs scored_genes"):
        PretrainingModule(tiny(state_head=True), config(anchor_objective="none"))
