"""Numbers that docs/method.md states, against the code and the bundled model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scdiva.diffusion import stratified_times
from scdiva.models import ScDiVa, ScDiVaConfig
from scdiva.train import PretrainingConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("field", "ours", "paper", "said"),
    [
        ("entropy_floor", 0.3, 0.0, "0.3 nats (`entropy_floor`) under the entropy; 0 in the paper's preset"),
        ("anchor", "encoder", "learned", 'the default, `"encoder"`'),
        ("state_head", False, False, "(`state_head=True`, off by default, on in `scdiva-mini`)"),
        ("max_length", 1200, 1200, "1,200"),
    ],
)
def test_fields_of_the_network(field, ours, paper, said):
    assert getattr(ScDiVaConfig(), field) == ours
    assert getattr(ScDiVaConfig.paper(), field) == paper
    assert said in PAGE


@pytest.mark.parametrize(
    ("field", "ours", "paper", "said"),
    [
        ("value_mask_rate", 0.1, 0.0, "`value_mask_rate` = 0.1 loses its value alone; 0 in the paper's preset"),
        ("value_weight", 10.0, 10.0, "λ = 10 (`value_weight`)"),
        ("anchor_objective", "genes", "none", '`"genes"`, the\ndefault'),
    ],
)
def test_fields_of_training(field, ours, paper, said):
    assert getattr(PretrainingConfig(), field) == ours
    assert getattr(PretrainingConfig.paper(), field) == paper
    assert said in PAGE


def test_the_length_of_training():
    assert f"{PretrainingConfig.paper().steps:,} steps of 768 cells" in PAGE


def test_departures_that_are_no_field_are_listed():
    """Each, with what in the code it speaks of."""
    start = PAGE.index("These\nare not")
    listed = PAGE[start : PAGE.index("## 1.")]
    fields = {*ScDiVaConfig().to_dict(), *PretrainingConfig().to_dict()}
    said = ("stratified over the batch", "a learned vector, and not 0", "not the paper's Algorithm 2", "after Harmony")
    assert all(words in listed for words in said)
    assert not any(word in field for field in fields for word in ("stratif", "hidden_value", "assign", "teacher"))
    assert {"hidden_value"} <= {name for name, _ in ScDiVa(tiny()).embedding.named_parameters()}
    times = stratified_times(8, torch.Generator().manual_seed(0))
    assert ((times.sort().values * 8).floor() == torch.arange(8)).all()


def tiny() -> ScDiVaConfig:
    return ScDiVaConfig(n_genes=9, dim=16, n_layers=1, n_heads=2, ffn_dim=16)


@pytest.mark.parametrize(("tied", "said"), [(False, "93.43 M"), (True, "72.0 M")])
def test_the_count_of_parameters(tied, said):
    with torch.device("meta"):
        model = ScDiVa(replace(ScDiVaConfig.paper(), tie_gene_head=tied))
    digits = len(said.split()[0].split(".")[1])
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.{digits}f} M" == said
    assert said in PAGE


def test_the_bundled_model():
    card = json.loads((ROOT / "src/scdiva/checkpoints/scdiva-mini/config.json").read_text())
    model = card["model"]
    assert (model["n_layers"], model["dim"], model["n_genes"]) == (4, 128, 19_623)
    assert card["metadata"]["corpus"]["n_cells"] == 29_022
    assert model["state_head"]
    assert not model["anchor_residual"]
    assert "four layers of width 128 and 19,623 genes" in PAGE
    assert "29,022 public cells" in PAGE
