"""Every call runs both kinds of bundled model, through the transformer where the page of the user guide says so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from scdiva.models import ScDiVa, ScDiVaConfig, load_model

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import what_runs  # noqa: E402

KINDS = {
    "scdiva-mini": {"state_head": True, "query_head": True, "reader": True},
    "scdiva-paper-mini": {"anchor": "learned"},
}
"""Architectures of the bundled models; `test_by_transformer.py` has others."""


@pytest.fixture(scope="module")
def models():
    """Small models of each kind, with random weights away from zero, of the genes of the cells."""
    full_vocabulary = load_model().vocabulary
    tokens = full_vocabulary.match(list(what_runs.cells().var_names)).tokens
    vocabulary = full_vocabulary.subset(np.sort(tokens[tokens >= 0]))
    small = {"dim": 16, "n_layers": 2, "n_heads": 2, "ffn_dim": 24, "anchor_linear_dim": 8, "anchor_learned_dim": 4}
    networks = {}
    for kind, fields in KINDS.items():
        config = ScDiVaConfig(
            n_genes=vocabulary.n_genes, anchor_hidden=8, state_rank=4, tie_gene_head=True, **small, **fields
        )
        model = ScDiVa(config, generator=torch.Generator().manual_seed(0)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        model.vocabulary = vocabulary
        networks[kind] = model
    return networks


def page() -> dict[tuple[str, str], tuple[str, str]]:
    """Block runs and parts used by call and bundled model, from the table."""
    rows = re.findall(r"^\| `(.+?)` \| (.*) \|$", (ROOT / "docs" / "method.md").read_text(), flags=re.M)
    table = {}
    for call, columns in rows:
        cells = columns.split(" | ")
        for number, name in enumerate(what_runs.MODELS):
            table[call, name] = cells[2 * number], cells[2 * number + 1]
    return table


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", what_runs.CALLS)
def test_blocks_are_run_and_decide_the_result_as_the_page_says(models, call, kind, monkeypatch):
    monkeypatch.setattr("scdiva.annotation.fit.PROBE_STEPS", 30)
    model = models[kind]
    result, n_runs = what_runs.run(call, model)
    noised_result, _ = what_runs.run(call, what_runs.noised(model, "transformer"))
    assert np.isfinite(result).any()
    matters = what_runs.changed(result, noised_result)
    runs, parts = page()[call, kind]
    assert bool(n_runs) is (runs != "none")
    assert matters is ("transformer" in parts.split(", "))


def test_the_page_has_every_call():
    assert set(page()) == {(call, name) for call in what_runs.CALLS for name in what_runs.MODELS}
