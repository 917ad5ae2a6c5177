from __future__ import annotations

from functools import partial

import pytest

from scdiva.models import ScDiVaConfig
from scdiva.train import PretrainingConfig


def test_paper_preset():
    c = PretrainingConfig.paper()
    assert (c.cells_per_step, c.value_weight, c.value_mask_rate, c.anchor_objective) == (768, 10.0, 0.0, "none")
    assert c.steps == 308_138
    assert c.steps * c.cells_per_step == pytest.approx(4 * 59_162_450, abs=384)
    assert (c.learning_rate, c.warmup_steps) == (PretrainingConfig().learning_rate, PretrainingConfig().warmup_steps)
    assert PretrainingConfig.preset("paper", steps=5).steps == 5


@pytest.mark.parametrize(
    ("n_devices", "gib", "changes", "expected"),
    [
        (1, 79.1, {}, (192, 4)),  # the largest divisor of 768 within 0.9 * 79.1 GiB
        (8, 79.1, {}, (96, 1)),
        (64, 79.1, {}, (12, 1)),
        (1, 39.5, {}, (96, 8)),
        (1, 79.1, {"precision": "fp32"}, (96, 8)),
        (1, 79.1, {"context": 299}, (768, 1)),
        (1, 2.0, {}, (1, 768)),
        (2, None, {}, (16, 24)),
        (8, 79.1, {"batch_size": 48}, (48, 2)),
        (1, 79.1, {"batch_size": 96, "accumulate": 3}, (96, 8)),
    ],
)
def test_cells_per_step_are_divided_by_devices_and_memory(n_devices, gib, changes, expected):
    c = PretrainingConfig.preset("paper", **changes).for_devices(n_devices, gib, ScDiVaConfig.paper())
    assert (c.batch_size, c.accumulate) == expected
    assert c.batch_size * c.accumulate * n_devices == 768
    assert c.for_devices(n_devices, gib, ScDiVaConfig.paper()) == c


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda paper: paper().for_devices(5, 79.1, ScDiVaConfig.paper()), r"=768 is not a .* number of devices, 5"),
        (
            lambda paper: paper(batch_size=100).for_devices(1, 79.1, ScDiVaConfig.paper()),
            r"of batch_size=100 times the number of devices, 1",
        ),
        (lambda _: PretrainingConfig(batch_size=None), "batch_size=None needs cells_per_step"),
        (lambda paper: paper(batch_tokens=65_536), "batch_tokens and cells_per_step"),
    ],
)
def test_cells_that_devices_do_not_divide_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(partial(PretrainingConfig.preset, "paper"))
    assert PretrainingConfig(accumulate=3).for_devices(5, None, None) == PretrainingConfig(accumulate=3)


def test_values_without_sense_are_refused_by_name():
    wrong = {"steps": 0, "checkpoint_minutes": 0.0, "batch_size": -1, "seed": True, "learning_rate": 0.0, "autotune": 1}
    wrong |= {"final_learning_rate": 1.5, "precision": "fp16", "value_weight": float("inf"), "anchor_objective": "x"}
    for field, value in wrong.items():
        with pytest.raises((TypeError, ValueError), match=field):
            PretrainingConfig(**{field: value})


def test_presets():
    assert PretrainingConfig.preset("paper") == PretrainingConfig.paper()
    mini, base = PretrainingConfig.preset("mini"), PretrainingConfig.preset("base", accumulate=4)
    # the bundled model's: its transformer's first run, and how its last one scored
    of_mini = mini.steps, mini.batch_size, mini.context, mini.learning_rate, mini.warmup_steps
    assert of_mini == (2500, 32, 128, 1e-3, 125)
    assert (mini.scored_genes, mini.place_prior, mini.value_weight, mini.autotune) == (32, True, 1.0, False)
    assert (base.batch_tokens, base.accumulate, base.context) == (65_536, 4, 1200)
    assert PretrainingConfig.preset("base-lat", accumulate=4) == base
    with pytest.raises(ValueError, match=r"got 'bsae' \(did you mean 'base'\?\)"):
        PretrainingConfig.preset("bsae")
    with pytest.raises(ValueError, match=r"PretrainingConfig .*step .*'steps'"):
        PretrainingConfig.preset("base", step=3)
