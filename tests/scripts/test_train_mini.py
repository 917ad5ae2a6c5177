"""The bundled model's training: its parts, and that each part is taken up again."""

from __future__ import annotations

import json
import shutil
import sys
import time

import pytest
import torch

from scdiva.models import ScDiVaConfig, load_model

SHORT = (
    "--accelerator cpu --context 40 --long-context 60 --steps 4 --anchor-steps 3 --head-steps 3 --long-steps 4 "
    "--batch-size 8"
)
SMALL = {
    "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 16, "tie_gene_head": True, "anchor_residual": False,
    "anchor_linear_dim": 8, "anchor_learned_dim": 4, "anchor_hidden": 8, "anchor_length": 80, "max_length": 80,
    "state_head": True, "state_rank": 4,
}  # fmt: skip


@pytest.fixture
def trained(script, prepared, monkeypatch):
    """Run the script with a small model and without a time limit; return weights and what was recorded."""
    mini, threads = script("train_mini"), torch.get_num_threads()
    monkeypatch.setattr(mini, "model_config", lambda n_genes: ScDiVaConfig(n_genes=n_genes, **SMALL))
    monkeypatch.setattr(mini, "STARTED", time.monotonic())
    monkeypatch.setattr(mini, "TRIAL_STEPS", 2)  # looks at validation come as often

    def run(out, *options):
        argv = ["train_mini.py", "--prepared", str(prepared), "--out", str(out), *SHORT.split(), *options]
        monkeypatch.setattr(sys, "argv", argv)
        mini.main()
        return load_model(out / "model", device="cpu"), json.loads((out / "metadata.json").read_text())

    torch.set_num_threads(1)  # several add in any order, and weights are compared to the last bit
    yield run
    torch.set_num_threads(threads)


def test_all_parts_are_trained_recorded_and_taken_up_again(trained, tmp_path):
    """Whatever part a run ended in, --resume ends with the same weights."""
    model, said = trained(tmp_path)
    names = ("anchor", "transformer", "state_head", "transformer_long")
    for name, number in zip(names, (3, 4, 3, 4), strict=True):
        assert said[name]["steps"] == number
        assert said[name]["validation"][-1]["step"] == number // 2 * 2
    assert said["transformer_long"]["training"]["place_prior"]
    assert model.metadata["state_head"] == said["state_head"]
    for number in (4, 3, 1):
        for name in names[number:]:
            shutil.rmtree(tmp_path / name)
        again, now = trained(tmp_path, "--resume")
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
        for name in names[number:]:
            assert now[name]["validation"] == said[name]["validation"]
