"""Numbers in docs/method.md agree with the code and the bundled model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scdiva.models import ScDiVa, ScDiVaConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("tied", "size"), [(False, "93.43 M"), (True, "72.0 M")])
def test_the_count_of_parameters(tied, size):
    with torch.device("meta"):
        model = ScDiVa(replace(ScDiVaConfig.paper(), tie_gene_head=tied))
    digits = len(size.split()[0].split(".")[1])
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.{digits}f} M" == size
    assert size in PAGE


def test_the_bundled_model():
    card = json.loads((ROOT / "src/scdiva/checkpoints/scdiva-mini/config.json").read_text())
    model = card["model"]
    assert (model["n_layers"], model["dim"], model["n_genes"]) == (4, 128, 19_623)
    assert card["metadata"]["corpus"]["n_cells"] == 29_022
    assert model["state_head"]
    assert not model["anchor_residual"]
