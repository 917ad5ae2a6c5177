"""A residual on the state: where it starts, what is trained, and what a batch holds."""

from __future__ import annotations

import numpy as np
import torch

from scdiva.data.batch import from_ragged
from scdiva.models import load_model


def made(script):
    residual, base = script("residual_state"), load_model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lengths = torch.tensor([30, 300, 1])
        bounds = np.concatenate([[0], lengths.cumsum(0).numpy()])
        tokens = np.concatenate([3 + np.random.default_rng(0).permutation(2000)[:n] for n in lengths]).astype(np.int64)
        values = np.random.default_rng(1).uniform(0.5, 3, len(tokens)).astype(np.float32)
    cells = from_ragged(bounds, tokens, values, np.array([0, 1, 1]))
    return residual, base, residual.with_residual(base, 0), cells


def test_the_residual_starts_from_the_state_of_the_base(script):
    _, base, model, cells = made(script)
    assert model.config.anchor_residual
    with torch.inference_mode():
        torch.testing.assert_close(model.encode(*cells.packed), base.encode(*cells.packed))


def test_the_transformer_learns_and_the_set_encoder_stays(script):
    residual, base, model, cells = made(script)
    config = residual.AnchorConfig(steps=2, batch_size=3, learning_rate=1e-2, warmup_steps=1)
    frequency = np.full(base.config.n_tokens, 1 / base.config.n_tokens)
    module = residual.ResidualModule(model, config, frequency, np.array([1, 2]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = module.configure_optimizers()["optimizer"]
    for step in range(3):  # R is zero at first, and nothing behind it learns
        optimizer.zero_grad()
        loss, parts = module.compute_loss(cells, torch.Generator().manual_seed(step))
        loss.backward()
        optimizer.step()
    assert set(parts) == {"genes", "contrast"}
    changed = {name.split(".")[0] for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"blocks", "norm", "anchor_in", "anchor_out"}
    with torch.inference_mode():
        assert not torch.allclose(model.encode(*cells.packed), base.encode(*cells.packed))
        torch.testing.assert_close(model.encode_anchor(*cells.packed), base.encode_anchor(*cells.packed))
