"""The judge of denoisers: scores, arms that need no training, goals and the table."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from scdiva._constants import N_SPECIAL
from scdiva.diffusion.thinning import Counts
from scdiva.train.queries import Asked


@pytest.fixture
def denoising(script):
    return script("denoising")


@pytest.fixture
def arms(script):
    return script("_denoising_arms")


N_GENES = 6


@pytest.fixture
def cells():
    """Three cells of the study: tokens, counts and boundaries."""
    tokens = torch.tensor([0, 1, 3, 1, 2, 0, 4]) + N_SPECIAL
    counts = torch.tensor([1, 4, 2, 1, 1, 3, 1], dtype=torch.float64)
    return tokens, Counts(counts, torch.tensor([7.0, 2.0, 4.0], dtype=torch.float64)), torch.tensor([0, 3, 5, 7])


def asked_of(cell, gene, present, values=((0, 0, 1.0),)):
    value_cell, value_gene, value = zip(*values, strict=True)
    empty = torch.zeros(0, dtype=torch.long), torch.zeros(0), torch.zeros(max(cell) + 2, dtype=torch.int32)
    return Asked(
        empty, torch.tensor(cell), torch.tensor(gene) + N_SPECIAL, torch.tensor(present, dtype=torch.float32),
        torch.tensor(value_cell), torch.tensor(value_gene) + N_SPECIAL, torch.tensor(value), True,
    )  # fmt: skip


def test_log_odds_are_shifted_so_that_each_cell_balances(denoising):
    odds, cell = torch.tensor([3.0, 5.0, 4.0, 9.0, -2.0, -8.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    found = denoising.balanced(odds, cell)
    for number in (0, 1):
        assert float(found[cell == number].sigmoid().mean()) == pytest.approx(0.5, abs=1e-4)
        assert np.allclose(np.ptp((found[cell == number] - odds[cell == number]).numpy()), 0)


def test_scores_of_answers_that_know_all_or_nothing(denoising):
    asked = asked_of([0, 0, 0, 0], [0, 1, 2, 3], [1, 0, 1, 0], [(0, 0, 1.0), (0, 1, 3.0)])
    perfect = denoising.scores((torch.tensor([9.0, -9, 9, -9]), torch.tensor([1.0, 3.0])), asked)
    assert perfect["log_loss"] < 0.01
    assert perfect["average_precision"] == 1
    assert perfect["rmse"] == 0
    assert "spearman" not in perfect  # no gene is asked of in enough cells
    nothing = denoising.scores((torch.zeros(4), torch.tensor([2.0, 2.0])), asked)
    assert nothing["log_loss"] == pytest.approx(np.log(2))
    assert nothing["rmse"] == pytest.approx(1)


def test_rank_correlation_is_within_genes(denoising):
    rng = np.random.default_rng(0)
    gene = np.repeat([0, 1, 2], [20, 15, 5])
    value = rng.normal(size=40) + 10 * gene
    predicted = value + rng.normal(size=40)
    expected = np.mean([spearmanr(predicted[gene == g], value[gene == g]).statistic for g in (0, 1)])
    assert denoising.spearman_within(predicted, value, gene) == pytest.approx(expected)
    assert denoising.spearman_within(10.0 * gene, value, gene) == 0, "a gene's mean is no rank within it"


def test_rates_and_means_of_cells_are_their_definition(arms, cells):
    dense = arms.dense(cells, N_GENES)
    weights, prior = torch.tensor([[1.0, 1.0, 2.0]]), torch.full((N_GENES,), 0.25)
    rate, mean = dense.rate(weights, prior)[0], dense.mean(weights, 2 * prior)[0]
    tokens, counts, bounds = cells
    for gene in range(N_GENES):
        late = lacking = 0.0
        there, total = 0.0, 0.0
        for cell, weight in enumerate((1.0, 1.0, 2.0)):
            of = slice(int(bounds[cell]), int(bounds[cell + 1]))
            at = (tokens[of] == gene + N_SPECIAL).nonzero()
            c = float(counts.of_token[of][at]) if len(at) else 0.0
            late, lacking = late + weight * (c > 0) * 2**-c, lacking + weight * 2**-c
            if c:
                there += weight
                total += weight * np.log1p(1e4 * c / float(counts.of_cell[cell]))
        assert float(rate[gene]) == pytest.approx((late + 0.25) / (lacking + 1))
        assert float(mean[gene]) == pytest.approx((total + 0.5) / (there + 1), rel=1e-6)


def test_offsets_are_learned_from_other_cells(arms):
    """The state head says the same of all genes; the study shows one of them always and another never."""
    corpus = arms.Corpus(torch.full((N_GENES,), 0.5), torch.ones(N_GENES))

    class Same(torch.nn.Module):
        gene = torch.zeros(N_GENES, 1)

        def of(self, _, asked):
            return torch.zeros(len(asked.cell)), torch.ones(len(asked.value_cell))

    n = 40
    others = asked_of(
        [*range(n)] * 2, [1] * n + [2] * n, [1] * n + [0] * n, [(cell, 3, 2.0) for cell in range(n)]
    )  # fmt: skip
    asked = asked_of([0, 0, 0], [1, 2, 4], [1, 0, 1], [(0, 3, 2.0), (0, 5, 1.0)])
    study = arms.Study("one", asked, None, None, others)
    odds, values = arms.state_head_offsets(None, Same())(study)
    assert odds[0] > 1.5
    assert odds[1] < -1.5
    assert abs(float(odds[2])) < 0.5
    assert values.tolist() == pytest.approx([2 - 2 / (n + 2), 1.0], abs=1e-3)
    assert arms.unigram(corpus)(study)[0].tolist() == [0, 0, 0]


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
