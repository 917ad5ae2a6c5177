"""The bundled model's training: its parts, what fits a time limit, and that each part is taken up again."""

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
    for number in (2, 0):
        for name in names[number:]:
            shutil.rmtree(tmp_path / name)
        again, now = trained(tmp_path, "--resume")
        assert same(model, again)
        for name in names[number:]:
            assert now[name]["validation"] == said[name]["validation"]
