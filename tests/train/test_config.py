from __future__ import annotations

import pytest

from scdiva.train import OptimiserConfig, PretrainingConfig


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
        ("batch_size", 2.5),
        ("batch_tokens", 0),
        ("batch_tokens", 4096.0),
        ("batch_tokens", True),
        ("batch_tokens", 1200),
        ("context", 64.0),
        ("seed", True),
        ("accumulate", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("final_learning_rate", 1.5),
        ("warmup_steps", -1),
        ("weight_decay", -0.1),
        ("clip", -1),
        ("seed", -1),
        ("precision", "fp16"),
        ("context", 0),
        ("value_weight", float("inf")),
        ("value_mask_rate", 1.1),
        ("anchor_objective", "contrast"),
        ("anchor_objective", None),
        ("compile_blocks", True),
        ("autotune", 1),
        ("checkpoint_every", "often"),
    ],
)
def test_values_without_sense_are_refused_by_name(field, value):
    with pytest.raises((TypeError, ValueError), match=field):
        PretrainingConfig(**{field: value})


def test_base_has_no_pretraining_fields():
    with pytest.raises(TypeError, match="value_weight"):
        OptimiserConfig(value_weight=1.0)


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


@pytest.mark.parametrize("kind", [OptimiserConfig, PretrainingConfig])
def test_every_configuration_comes_back(kind):
    config = kind(seed=3)
    assert kind(**config.to_dict()) == config
    with pytest.raises(ValueError, match="steps must be at least 1"):
        kind(steps=0)
