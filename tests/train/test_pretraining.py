"""The pretraining losses against their formulas, written out cell by cell, and what they train."""

from __future__ import annotations

import pytest
import torch

from scdiva.diffusion import dual_loss, mask_tokens, stratified_times
from scdiva.train import PretrainingModule, fit


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


def test_bf16_autocast_gives_nearly_the_same_loss(tiny, config, batch):
    module = PretrainingModule(tiny(), config(anchor_objective="genes"), n_studies=2)
    exact, _ = module.compute_loss(batch, rng(9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = module.compute_loss(batch, rng(9))
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.03)
    assert all(p.grad.dtype == torch.float32 for p in module.parameters() if p.grad is not None)


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


def test_training_with_a_bf16_residual_stream_follows_the_default(tiny, config, stream):
    losses = {}
    for precision in ("bf16", "bf16-residual"):
        module = PretrainingModule(
            tiny(anchor="learned"), config(steps=60, precision=precision, validate_every=60, anchor_objective="none")
        )
        losses[precision] = []
        module.record = lambda means, to=losses[precision]: to.append(means["loss"])
        fit(module, stream(), out_dir=None, accelerator="cpu", progress=False)
        assert module.model.residual_dtype is None
    default, other = (torch.tensor(each) for each in losses.values())
    assert float(other[-10:].mean()) < 0.9 * float(other[:10].mean())
    assert float((other - default).abs().max()) < 0.02 * float(default.mean())
