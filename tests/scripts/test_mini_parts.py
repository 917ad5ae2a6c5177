"""What the parts of the bundled model's training start from, and that their settings are those it records."""

from __future__ import annotations

import json

import torch

from scdiva.data.packed import PackedCells
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.models.hub import find_model
from scdiva.tokenizer import Vocabulary
from scdiva.train import fit_linear_map

FIXED = {
    "beta1": 0.9, "beta2": 0.95, "ema_decay": 0.0, "loss_norm": "per_cell", "min_time": 0.001, "anchor_max_time": 0.8,
    "genes_weight": 1.0, "contrast_weight": 0.2, "contrast_temperature": 0.1, "two_view_weight": 0.5,
}  # fmt: skip
"""What were options when the model was trained, and have these values now, or played no part."""


def test_settings_are_those_of_the_bundled_model(script, prepared):
    """With its numbers of steps; the place prior and such were not there when its first parts were trained."""
    parts, vocabulary = script("mini_parts"), Vocabulary.read(prepared / "vocabulary.safetensors")
    cells = PackedCells(prepared / "train.h5", vocabulary)
    config = ScDiVaConfig(
        n_genes=vocabulary.n_genes, dim=16, n_layers=1, n_heads=2, ffn_dim=16, tie_gene_head=True, max_length=80,
        anchor_residual=False, anchor_linear_dim=8, anchor_learned_dim=4, anchor_hidden=8, anchor_length=80,
        state_rank=4,
    )  # fmt: skip
    model = ScDiVa(config, generator=torch.Generator().manual_seed(0))
    recorded = json.loads((find_model("scdiva-mini") / "config.json").read_text())["metadata"]
    full = parts.with_state_head(model, cells, 0)
    first, long = {"batch_size": 32, "context": 128, "precision": "auto"}, {"context": 1024, "precision": "bf16"}
    start = fit_linear_map(cells, model.config.anchor_linear_dim)
    made = {
        "anchor": parts.anchor_module(model, start, cells, steps=2400, look=200, seed=0),
        "transformer": parts.transformer_module(model, **first, steps=2500, look=208, seed=0),
        "state_head": parts.state_head_module(full, steps=1200, look=150, seed=0),
        "transformer_long": parts.long_module(full, vocabulary, **long, steps=1800, look=180, seed=0),
    }
    for name, module in made.items():
        training = module.config.to_dict()
        then = recorded[name]["training"]
        gone = {field: value for field, value in then.items() if field not in training}
        assert gone.items() <= FIXED.items(), name
        assert {field: training[field] for field in then if field not in gone} | gone == then, name
        later = {field: value for field, value in training.items() if field not in then}
        assert later.items() <= {"scored_genes": None, "place_prior": False, "micro_batches": 1}.items(), name
