"""Cells with labels and cells to annotate, of different batches, and short fits."""

from __future__ import annotations

import pytest

SHORT = {
    "linear": {"method": "linear"}, "knn": {"method": "knn"}, "probe": {"method": "probe"},
    "finetune": {"finetune": True, "epochs": 2},
}  # fmt: skip
"""Arguments of each method of annotation."""


@pytest.fixture(scope="module")
def query(cells):
    """Cells of the third batch; never written to."""
    return cells[cells.obs["batch"] == "batch 3"].copy()


@pytest.fixture(scope="module")
def reference(cells):
    return cells[cells.obs["batch"] != "batch 3"].copy()


@pytest.fixture
def short_probe(monkeypatch):
    """A tenth of the training steps of method "probe"."""
    monkeypatch.setattr("scdiva.annotation.fit.PROBE_STEPS", 30)
