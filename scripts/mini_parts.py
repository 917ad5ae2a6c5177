"""How each of the parts is run in which `train_mini.py` trains scdiva-mini, and what the later ones start from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from mini_stages import AnchorConfig, AnchorModule, StateHeadConfig, StateHeadModule, start_state_head

from scdiva._rng import step_generator
from scdiva.data.packed import PackedCells
from scdiva.models import ScDiVa
from scdiva.tokenizer import Vocabulary
from scdiva.tokenizer.serialize import score_denominator
from scdiva.train import LinearMap, PretrainingConfig, PretrainingModule

STREAM_SCALE = 0.3
"""By which the last norm is scaled before the transformer is trained on: its logits then start as a correction to what
state and place say, which the first run had to say by itself."""


def anchor_module(
    model: ScDiVa, start: LinearMap, cells: PackedCells, *, steps: int, look: int, seed: int
) -> AnchorModule:
    """Part 2, the set encoder alone."""
    config = AnchorConfig(
        steps=steps,
        batch_size=256,
        learning_rate=1e-3,
        warmup_steps=min(50, max(1, steps // 16)),
        weight_decay=0.01,
        precision="fp32",
        validate_every=look,
        seed=seed,
    )
    return AnchorModule(model, config, start, np.bincount(cells.study, minlength=len(cells.study_names)))


def transformer_module(
    model: ScDiVa, *, batch_size: int, context: int, precision: str, steps: int, look: int, seed: int
) -> PretrainingModule:
    """Part 3, the transformer on the first genes of each cell."""
    config = PretrainingConfig(
        steps=steps,
        batch_size=batch_size,
        context=context,
        learning_rate=1e-3,
        warmup_steps=max(1, steps // 20),
        anchor_objective="none",
        precision=precision,
        validate_every=look,
        autotune=False,  # in a lease of minutes it would take the time of a quarter of the steps
        seed=seed,
    )
    return PretrainingModule(model, config)


def with_state_head(model: ScDiVa, cells: PackedCells, seed: int) -> ScDiVa:
    """The model with a state head that says how often and how much each gene is expressed, whatever the cell."""
    full = ScDiVa(replace(model.config, state_head=True), generator=step_generator(seed, 0, "state head"))
    missing, unexpected = full.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("state_head.") for name in missing)
    _, tokens, values = cells.read(0, cells.n_obs)
    start_state_head(full, tokens, values, cells.n_obs)
    return full


def state_head_module(model: ScDiVa, *, steps: int, look: int, seed: int) -> StateHeadModule:
    """Part 4, the state head alone."""
    config = StateHeadConfig(
        steps=steps,
        batch_size=256,
        learning_rate=3e-3,
        weight_decay=0.05,
        warmup_steps=min(20, max(1, steps // 16)),
        validate_every=look,
        seed=seed,
    )
    return StateHeadModule(model, config)


@torch.no_grad()
def start_long(model: ScDiVa) -> None:
    """Leave to the transformer what it has learned of identities, and none of its values; freeze what stays."""
    model.norm.weight.mul_(STREAM_SCALE)
    model.heads.value.weight.zero_()
    model.heads.value.bias.zero_()
    model.requires_grad_(True)
    for part in (model.embedding.gene, model.anchor, model.state_head):
        part.requires_grad_(False)


def long_module(
    model: ScDiVa, vocabulary: Vocabulary, *, context: int, precision: str, steps: int, look: int, seed: int
) -> PretrainingModule:
    """Part 5, the transformer on nearly whole cells, given state and ranks."""
    config = PretrainingConfig(
        steps=steps,
        batch_size=8,
        context=context,
        learning_rate=1e-3,
        warmup_steps=min(30, max(1, steps // 16)),
        anchor_objective="none",
        scored_genes=32,
        place_prior=True,
        value_weight=1.0,
        precision=precision,
        validate_every=look,
        autotune=False,
        seed=seed,
    )
    denominator = score_denominator(vocabulary.entropy, model.config.entropy_floor)
    return PretrainingModule(model, config, denominator=denominator)
