"""The judge of denoisers: scores, arms that need no training, goals and the table."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL


@pytest.fixture
def denoising(script):
    return script("denoising")


def asked_of(denoising, cell, gene, present, values=((0, 0, 1.0),)):
    value_cell, value_gene, value = zip(*values, strict=True)
    empty = torch.zeros(0, dtype=torch.long), torch.zeros(0), torch.zeros(max(cell) + 2, dtype=torch.int32)
    return denoising.Asked(
        empty, torch.tensor(cell), torch.tensor(gene) + N_SPECIAL, torch.tensor(present, dtype=torch.float32),
        torch.tensor(value_cell), torch.tensor(value_gene) + N_SPECIAL, torch.tensor(value), True,
    )  # fmt: skip


def test_scores_of_answers_that_know_all_or_nothing(denoising):
    asked = asked_of(denoising, [0, 0, 0, 0], [0, 1, 2, 3], [1, 0, 1, 0], [(0, 0, 1.0), (0, 1, 3.0)])
    perfect = denoising.scores((torch.tensor([9.0, -9, 9, -9]), torch.tensor([1.0, 3.0])), asked)
    assert perfect["log_loss"] < 0.01
    assert perfect["average_precision"] == 1
    assert perfect["rmse"] == 0
    assert "spearman" not in perfect  # no gene is asked of in enough cells
    nothing = denoising.scores((torch.zeros(4), torch.tensor([2.0, 2.0])), asked)
    assert nothing["log_loss"] == pytest.approx(np.log(2))
    assert nothing["rmse"] == pytest.approx(1)


def test_a_head_is_ahead_or_not_by_an_interval_over_studies(denoising, script, monkeypatch, tmp_path):
    rows = []
    for number, name in enumerate(denoising.HELD_OUT):
        for arm, loss in (("head_mlp", 0.6), ("head_offsets", 0.55), ("mine", 0.57 + 0.001 * number),
                          ("mine, context", 0.55)):  # fmt: skip
            rows.append({"set": name, "arm": arm, "n_cells": 200, "log_loss": loss, "average_precision": 0.8,
                         "rmse": 0.3, **({"spearman": 0.4} if number else {})})  # fmt: skip
    judged = {row["what"]: row for row in denoising.goals(rows, ["mine"])}
    alone = judged["mine: log_loss ahead of head_mlp"]
    assert alone["met"] is True
    assert alone["n_ahead"] == 12
    assert judged["mine, context: log_loss ahead of head_offsets"]["met"] is False
    assert judged["mine: spearman ahead of head_mlp"]["over"] == "11 studies"
    monkeypatch.setattr(script("_record"), "RESULTS", tmp_path)
    script("_record").record("denoising", [*rows, *judged.values()])
    text = script("_denoising_table").denoising(json.loads((tmp_path / "denoising.json").read_text()))
    assert "| `mine, context` | 0.5500 | 0.800 | 0.400 (11) | 0.300 |" in text
    assert "missed" in text
