"""The bundled model's training: its parts, and that each part is taken up again."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch

from scdiva.models import ScDiVaConfig, load_model
from scdiva.models.storage import find_model
from scdiva.train import PretrainingConfig

SHORT = (
    "--accelerator cpu --context 40 --long-context 60 --transformer-steps 4 --anchor-steps 3 --state-head-steps 3 "
    "--transformer-long-steps 4 --query-head-steps 2 --query-batch-size 8 --batch-size 8 --min-validate-every 2"
)
SMALL = {
    "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 16, "tie_gene_head": True, "anchor_residual": False,
    "anchor_linear_dim": 8, "anchor_learned_dim": 4, "anchor_hidden": 8, "anchor_length": 80, "max_length": 80,
    "state_head": True, "state_rank": 4,
}  # fmt: skip


@pytest.fixture
def trained(script, prepared, monkeypatch):
    """Run the script with a small model; return weights and what was recorded."""
    mini, threads = script("train_mini"), torch.get_num_threads()
    monkeypatch.setattr(mini, "model_config", lambda n_genes: ScDiVaConfig(n_genes=n_genes, **SMALL))

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
    model, records = trained(tmp_path)
    names = ("anchor", "transformer", "state_head", "transformer_long", "query_head")
    assert (records["query_head"]["steps"], model.config.query_head) == (2, True)
    for name, number in zip(names[:4], (3, 4, 3, 4), strict=True):
        assert records[name]["steps"] == number
        assert records[name]["validation"][-1]["step"] == number // 2 * 2
    assert records["transformer_long"]["training"]["place_prior"]
    assert model.metadata["state_head"] == records["state_head"]
    for number in (5, 3, 1):
        for name in names[number:]:
            shutil.rmtree(tmp_path / name)
        again, now = trained(tmp_path, "--resume")
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
        for name in names[number:4]:
            assert now[name]["validation"] == records[name]["validation"]


FIXED = {
    "beta1": 0.9, "beta2": 0.95, "ema_decay": 0.0, "loss_norm": "per_cell", "min_time": 0.001, "anchor_max_time": 0.8,
    "genes_weight": 1.0, "contrast_weight": 0.2, "contrast_temperature": 0.1, "two_view_weight": 0.5,
}  # fmt: skip
"""What were options when the model was trained, and have these values now, or played no part."""


def test_settings_are_those_of_the_bundled_model(script):
    """With its numbers of steps; the place prior and such were not there when its first parts were trained."""
    parts = script("train_mini")
    recorded = json.loads((find_model("scdiva-mini") / "config.json").read_text())["metadata"]
    first, long = {"batch_size": 32, "context": 128, "precision": "auto"}, {"context": 1024, "precision": "bf16"}
    configs = {
        "anchor": parts.config_of("anchor", 2400, validate_every=200, seed=0),
        "transformer": parts.config_of("transformer", 2500, validate_every=208, seed=0, **first),
        "state_head": parts.config_of("state_head", 1200, validate_every=150, seed=0),
        "transformer_long": parts.config_of("transformer_long", 1800, validate_every=180, seed=0, **long),
    }
    for name, config in configs.items():
        training, then = config.to_dict(), recorded[name]["training"]
        removed = {field: value for field, value in then.items() if field not in training}
        assert removed.items() <= FIXED.items(), name
        assert {field: training[field] for field in then if field not in removed} | removed == then, name
        later = {field: value for field, value in training.items() if field not in then}
        assert later.items() <= PretrainingConfig().to_dict().items(), name
