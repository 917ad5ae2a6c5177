from __future__ import annotations

import pytest

from scdiva.train import PretrainingConfig


def test_paper_preset():
    c = PretrainingConfig.paper()
    assert (c.batch_size, c.value_weight, c.value_mask_rate, c.anchor_objective) == (768, 10.0, 0.0, "none")
    assert c.steps == 308_138
    assert c.steps * c.batch_size == pytest.approx(4 * 59_162_450, abs=384)
    assert (c.learning_rate, c.warmup_steps) == (PretrainingConfig().learning_rate, PretrainingConfig().warmup_steps)
    assert PretrainingConfig.preset("paper", steps=5).steps == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("batch_size", -1),
        ("batch_tokens", 0),
        ("batch_tokens", 1200),
        ("seed", True),
        ("learning_rate", 0.0),
        ("final_learning_rate", 1.5),
        ("precision", "fp16"),
        ("value_weight", float("inf")),
        ("value_mask_rate", 1.1),
        ("anchor_objective", "contrast"),
        ("autotune", 1),
    ],
)
def test_values_without_sense_are_refused_by_name(field, value):
    with pytest.raises((TypeError, ValueError), match=field):
        PretrainingConfig(**{field: value})


def test_presets():
    assert PretrainingConfig.preset("paper") == PretrainingConfig.paper()
    mini, base = PretrainingConfig.preset("mini"), PretrainingConfig.preset("base", accumulate=4)
    # the bundled model's: its transformer's first run, and how its last one scored
    assert (mini.steps, mini.batch_size, mini.context, mini.learning_rate, mini.warmup_steps) == (
        2500,
        32,
        128,
        1e-3,
        125,
    )
    assert (mini.scored_genes, mini.place_prior, mini.value_weight, mini.autotune) == (32, True, 1.0, False)
    assert (base.batch_tokens, base.accumulate, base.context) == (65_536, 4, 1200)
    assert PretrainingConfig.preset("base-lat", accumulate=4) == base
    with pytest.raises(ValueError, match=r"got 'bsae' \(did you mean 'base'\?\)"):
        PretrainingConfig.preset("bsae")
    with pytest.raises(ValueError, match=r"PretrainingConfig .*step .*'steps'"):
        PretrainingConfig.preset("base", step=3)
