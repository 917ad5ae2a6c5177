"""The pretraining losses against their formulas, written out cell by cell, and what they train."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scdiva.diffusion import cell_of_token, dual_loss, mask_tokens, rank_log_prior, stratified_times
from scdiva.train import PretrainingModule


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_plain_loss_is_one_masked_pass(tiny, config, batch):
    module = PretrainingModule(tiny(), config(anchor_objective="none", value_mask_rate=0.3))
    loss, parts = module.compute_loss(batch, rng())
    g = rng()
    times = stratified_times(batch.n_cells, g, 1e-3)
    corrupted = mask_tokens(batch.tokens, batch.values, batch.cu_seqlens, times, g, value_mask_rate=0.3)
    out = module.model(corrupted.tokens, corrupted.values, batch.cu_seqlens, value_mask=corrupted.value_mask)
    expected, _ = dual_loss(
        out.hidden, module.model.gene_weight, module.model.values(out, batch.tokens), batch.tokens,
        batch.values, corrupted, batch.cu_seqlens,
    )  # fmt: skip
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert set(parts) == {"identity", "value", "identity_per_token", "value_per_token", "n_masked"}


def test_the_loss_is_the_weighted_sum_of_its_parts(tiny, config, batch):
    module = PretrainingModule(tiny(), config(anchor_objective="genes", value_weight=3.0), n_studies=2)
    loss, parts = module.compute_loss(batch, rng(1))
    expected = parts["identity"] + 3.0 * parts["value"] + parts["genes"]
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("anchor", ["learned", "encoder"])
@pytest.mark.parametrize("objective", ["none", "genes"])
def test_every_objective_reaches_every_weight(tiny, config, batch, anchor, objective):
    module = PretrainingModule(
        tiny(anchor=anchor, anchor_residual=True), config(anchor_objective=objective), n_studies=2
    )
    if module.decoder is not None:  # it starts from zeros, which pass no gradient on
        torch.nn.init.normal_(module.decoder.linear.weight, generator=rng())
    if module.model.anchor_out is not None:
        torch.nn.init.normal_(module.model.anchor_out.weight, generator=rng())
    loss, parts = module.compute_loss(batch, rng(1))
    loss.backward()
    without = {name for name, p in module.named_parameters() if p.grad is None}
    # the state's residual is only reached where the state is used
    assert without == ({"model.anchor_out.weight"} if (anchor, objective) == ("encoder", "none") else set())
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)
    assert ("genes" in parts) == (objective == "genes")


def test_cells_corrupted_too_far_are_not_asked_for_their_genes(tiny, config, batch, monkeypatch):
    """With the limit just above the least time all but the least corrupted cells fall away; the term stays finite."""
    monkeypatch.setattr("scdiva.train.pretraining.DECODED_TIME", 0.0011)
    module = PretrainingModule(tiny(), config(anchor_objective="genes"), n_studies=2)
    loss, parts = module.compute_loss(batch, rng(8))
    assert float(parts["genes"]) == 0.0  # none below it in this batch of 6 strata
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


def gradients(module, batch, precision):
    """Loss and all gradients, as one vector, of a step with this residual stream."""
    module.zero_grad()
    module.model.residual_dtype = torch.bfloat16 if precision == "bf16-residual" else None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision != "fp32"):
        loss, _ = module.compute_loss(batch, rng(2))
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in module.parameters()])


@pytest.mark.parametrize("parts", [1, 2])
def test_a_bf16_residual_stream_gives_the_gradients_up_to_rounding(tiny, config, batch, parts):
    module = PretrainingModule(tiny(anchor="learned", n_layers=4), config(anchor_objective="genes"), n_studies=2)
    torch.nn.init.normal_(module.decoder.linear.weight, std=0.1, generator=rng())
    module.model.blocks.micro_batches = parts
    streams = []
    module.model.blocks[2].register_forward_pre_hook(lambda block, inputs: streams.append(inputs[0].dtype))
    exact, gradient = gradients(module, batch, "fp32")
    for precision, dtype in (("bf16", torch.float32), ("bf16-residual", torch.bfloat16)):
        loss, rounded = gradients(module, batch, precision)
        assert streams[-1] == dtype
        assert loss == pytest.approx(exact, rel=2**-8)
        assert float((rounded - gradient).norm() / gradient.norm()) < 0.02


DENOMINATOR = np.random.default_rng(0).uniform(0.3, 2.0, 33).astype(np.float32)


def with_head(tiny, **fields):
    """A model whose state head says something."""
    model = tiny(state_head=True, state_rank=4, **fields)
    with torch.no_grad():
        model.state_head.gene.normal_(generator=rng(3))
        model.state_head.value.normal_(generator=rng(4))
    return model


@pytest.mark.parametrize("anchor", ["encoder", "learned"])
@pytest.mark.parametrize("place_prior", [False, True])
def test_the_loss_is_told_state_and_places(tiny, config, batch, anchor, place_prior):
    model = with_head(tiny, anchor=anchor)
    chosen = config(anchor_objective="none", scored_genes=2, place_prior=place_prior, value_weight=1.0)
    module = PretrainingModule(model, chosen, denominator=DENOMINATOR if place_prior else None)
    loss, parts = module.compute_loss(batch, rng())
    g = rng()
    times = stratified_times(batch.n_cells, g, 1e-3)
    corrupted = mask_tokens(batch.tokens, batch.values, batch.cu_seqlens, times, g, value_mask_rate=0.1)
    out = model(corrupted.tokens, corrupted.values, batch.cu_seqlens, value_mask=corrupted.value_mask)
    cells = cell_of_token(batch.cu_seqlens, len(batch.tokens))
    number = torch.bincount(cells[corrupted.masked], minlength=batch.n_cells)
    scored = torch.rand(len(batch.tokens), generator=g) < 2 / number[cells]
    mask = corrupted.masked & scored
    assert 0 < int(mask.sum()) < int(corrupted.masked.sum())
    logits = model.logits(out, mask)
    if place_prior:
        with torch.no_grad():
            logits = logits + rank_log_prior(
                *(batch.tokens, batch.values, mask, ~corrupted.value_mask, batch.cu_seqlens),
                model.state_head.values(out.head_hidden),
                torch.from_numpy(DENOMINATOR),
            )
    expected, _ = dual_loss(
        out.hidden, model.gene_weight, model.values(out, batch.tokens), batch.tokens, batch.values, corrupted,
        batch.cu_seqlens, value_weight=1.0, scored=scored, logits=logits,
    )  # fmt: skip
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert int(parts["n_masked"]) == int(mask.sum())
    loss.backward()
    for name, parameter in model.state_head.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_about_so_many_genes_of_a_cell_are_scored(tiny, config):
    module = PretrainingModule(tiny(), config(anchor_objective="none", scored_genes=8))
    masked = torch.rand(4000, generator=rng(1)) < 0.5
    cu = torch.tensor([0, 1000, 1006, 4000], dtype=torch.int32)
    draws = torch.stack([module._scored(masked, cu, rng(seed)) & masked for seed in range(200)]).float()
    per_cell = [float(draws[:, a:b].sum(dim=1).mean()) for a, b in ((0, 1000), (1006, 4000))]
    assert per_cell == pytest.approx([8, 8], abs=5 * (8 / 200) ** 0.5)
    short_cell = masked[1000:1006]
    assert (draws[:, 1000:1006][:, short_cell] == 1).all()  # fewer than eight: all of them
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
