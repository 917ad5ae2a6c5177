"""Training within a time limit, from a carried corpus to a model folder."""

from __future__ import annotations

import json
import shutil
import sys
import time

import pytest
import torch

from scdiva.models import ScDiVaConfig, load_model


@pytest.fixture
def mini(script, monkeypatch):
    """The script with a model of a size for tests."""
    module = script("train_mini")

    def small(n_genes):
        return ScDiVaConfig(
            n_genes=n_genes, dim=16, n_layers=1, n_heads=2, ffn_dim=16, tie_gene_head=True, anchor_residual=False,
            anchor_linear_dim=8, anchor_learned_dim=4, anchor_hidden=8, anchor_length=80, max_length=80,
            state_head=True, state_rank=4,
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
    monkeypatch.setattr(mini, "PIECE", 20_000)
    options = (
        f"--prepared {tmp_path / 'carried'} --out {tmp_path / 'run'} --time-limit 40 --accelerator cpu --context 40 "
        "--long-context 60 --steps 40 --anchor-steps 20 --head-steps 20 --long-steps 30"
    )
    monkeypatch.setattr(sys, "argv", ["train_mini.py", *options.split()])
    begun = time.monotonic()
    mini.main()
    assert time.monotonic() - begun < 60  # the machine of a test may pause

    said = json.loads((tmp_path / "run" / "metadata.json").read_text())
    assert said["time_limit"] == 40
    assert said["corpus"]["train"] == {"cells_packed": 130, "cells_of": 130}
    for name, most in (("anchor", 20), ("transformer", 40), ("state_head", 20), ("transformer_long", 30)):
        part = said[name]
        if name not in said["out_of_time"]:
            assert part["steps"] == part["training"]["steps"]
        assert 1 <= part["steps"] <= most
        assert part["cells_seen"] == part["steps"] * part["training"]["batch_size"]
    assert load_model(tmp_path / "run" / "model").config.dim == 16

    assert json.loads((out / "metadata.json").read_text()) == said
    for file in (tmp_path / "run" / "model").iterdir():
        pieces = sorted((out / "model").glob(f"{file.name}*"))
        assert b"".join(piece.read_bytes() for piece in pieces) == file.read_bytes()
        assert all(piece.stat().st_size <= 20_000 for piece in pieces)
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


SHORT = (
    "--accelerator cpu --context 40 --long-context 60 --steps 4 --anchor-steps 3 --head-steps 3 --long-steps 4 "
    "--batch-size 8"
)


@pytest.fixture
def trained(mini, prepared, monkeypatch):
    """Run the script without a time limit; return weights and what was recorded."""

    def run(out, *options):
        monkeypatch.setattr(mini, "TRIAL_STEPS", 2)  # looks at validation come as often
        argv = ["train_mini.py", "--prepared", str(prepared), "--out", str(out), *SHORT.split(), *options]
        monkeypatch.setattr(sys, "argv", argv)
        mini.main()
        model = load_model(out / "model", device="cpu")
        return model, json.loads((out / "metadata.json").read_text())

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several add in any order, and weights are compared to the last bit
    yield run
    torch.set_num_threads(threads)


def same(one, other):
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_all_parts_are_trained_and_recorded(trained, tmp_path):
    model, said = trained(tmp_path)
    assert "time_limit" not in said
    assert not (tmp_path / "trial").exists()
    assert model.config.state_head
    steps = {"anchor": 3, "transformer": 4, "state_head": 3, "transformer_long": 4}
    for name, number in steps.items():
        assert said[name]["steps"] == number
        assert said[name]["validation"][-1]["step"] == number // 2 * 2
        assert said[name]["validation"][-1]["loss"] > 0
    assert said["transformer_long"]["validation_cells"] == 200
    assert said["transformer_long"]["training"]["place_prior"]
    assert "variance_explained" in said["anchor"]
    assert model.metadata["state_head"] == said["state_head"]


def test_each_part_is_taken_up_again(trained, tmp_path):
    """Whatever part a run ended in, --resume ends with the same weights."""
    model, said = trained(tmp_path)
    again, _ = trained(tmp_path, "--resume")
    assert same(model, again)
    names = ("transformer", "state_head", "transformer_long")
    for number in (2, 1, 0):
        for name in names[number:]:
            shutil.rmtree(tmp_path / name)
        again, now = trained(tmp_path, "--resume")
        assert same(model, again)
        for name in names[number:]:
            assert now[name]["validation"] == said[name]["validation"]


def test_a_transformer_that_is_stopped_has_no_later_parts_until_it_is_done(trained, tmp_path):
    whole, _ = trained(tmp_path / "whole")
    half, said = trained(tmp_path / "half", "--stop-at", "2")
    assert said["transformer"]["steps"] == 2
    assert not {"state_head", "transformer_long"} & set(said)
    assert half.state_head is None
    rest, said = trained(tmp_path / "half", "--resume")
    assert said["transformer"]["steps"] == 4
    assert same(whole, rest)
