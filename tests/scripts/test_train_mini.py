"""Training within a time limit, from a carried corpus to a model folder."""

from __future__ import annotations

import json
import sys
import time

import pytest

from scdiva.models import ScDiVaConfig, load_model


@pytest.fixture
def mini(script, monkeypatch):
    """The script with a model of a size for tests."""
    module = script("train_mini")

    def small(n_genes):
        return ScDiVaConfig(
            n_genes=n_genes, dim=16, n_layers=1, n_heads=2, ffn_dim=16, tie_gene_head=True, anchor_residual=False,
            anchor_linear_dim=8, anchor_learned_dim=4, anchor_hidden=8, anchor_length=80,
        )  # fmt: skip

    monkeypatch.setattr(module, "model_config", small)
    monkeypatch.setattr(module, "TRIAL_STEPS", 6)
    monkeypatch.setattr(module, "STARTED", time.monotonic())
    return module


def test_a_time_limit_is_kept_and_the_schedule_ends(mini, script, prepared, tmp_path, monkeypatch):
    script("carry_corpus").pack(prepared, tmp_path / "carried")
    out = tmp_path / "handed_over"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setattr(mini, "PIECE", 10_000)
    options = (
        f"--prepared {tmp_path / 'carried'} --out {tmp_path / 'run'} --time-limit 10 --accelerator cpu --context 40"
    )
    monkeypatch.setattr(sys, "argv", ["train_mini.py", *options.split(), "--steps", "40", "--anchor-steps", "20"])
    begun = time.monotonic()
    mini.main()
    assert time.monotonic() - begun < 20  # the machine of a test may pause

    said = json.loads((tmp_path / "run" / "metadata.json").read_text())
    assert said["time_limit"] == 10
    assert said["corpus"]["train"] == {"cells_packed": 130, "cells_of": 130}
    if "transformer" not in said["out_of_time"]:
        assert said["transformer"]["steps"] == said["transformer"]["training"]["steps"]
    assert 1 <= said["transformer"]["steps"] <= 40
    assert load_model(tmp_path / "run" / "model").config.dim == 16

    assert json.loads((out / "metadata.json").read_text()) == said
    for file in (tmp_path / "run" / "model").iterdir():
        pieces = sorted((out / "model").glob(f"{file.name}*"))
        assert b"".join(piece.read_bytes() for piece in pieces) == file.read_bytes()
        assert all(piece.stat().st_size <= 10_000 for piece in pieces)
    assert len(list((out / "model").glob("model.safetensors.*"))) > 1


def test_steps_that_fit(mini):
    def trial(watch):
        trainer = type("Trainer", (), {"should_stop": False})()
        for _ in range(10):
            time.sleep(0.01)
            watch.on_train_batch_end(trainer)

    steps = mini.steps_that_fit(1.1, 10**6, trial)
    assert 30 <= steps <= 90  # 85% of a second at ten milliseconds each, on a machine that may pause
    assert mini.steps_that_fit(1.1, 7, trial) == 7
    with pytest.raises(SystemExit, match="raise it"):
        mini.steps_that_fit(0.1, 7, trial)


def test_a_run_that_takes_too_long_is_ended(mini):
    trainer = type("Trainer", (), {"should_stop": False})()
    watch = mini.Watch(0.02)
    watch.on_train_batch_end(trainer)
    assert not watch.stopped
    time.sleep(0.03)
    watch.on_train_batch_end(trainer)
    assert watch.stopped
    assert trainer.should_stop


def test_an_unlimited_run_needs_no_trial(mini, prepared, tmp_path, monkeypatch):
    options = f"--prepared {prepared} --out {tmp_path} --accelerator cpu --context 40 --steps 2 --anchor-steps 2"
    monkeypatch.setattr(sys, "argv", ["train_mini.py", *options.split()])
    mini.main()
    said = json.loads((tmp_path / "metadata.json").read_text())
    assert said["transformer"]["steps"] == 2
    assert "time_limit" not in said
    assert not (tmp_path / "trial").exists()
