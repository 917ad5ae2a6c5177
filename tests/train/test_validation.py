from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva.data.datamodule import CellDataModule
from scdiva.datasets import toy
from scdiva.diffusion import mask_tokens
from scdiva.train.pretraining import MASK_RATIOS, ratios_of, score_cells, scores_of, write_table


def slow_scores(hidden, weight, predicted, batch, corrupted, scored, prior):
    """The same, gene by gene."""
    each, row = np.zeros((batch.n_cells, 5)), 0
    for cell in range(batch.n_cells):
        for i in range(int(batch.cu_seqlens[cell]), int(batch.cu_seqlens[cell + 1])):
            if not corrupted.masked[i]:
                continue
            each[cell, 3:] += [1, (float(predicted[i]) - float(batch.values[i])) ** 2]
            if scored[i]:
                p = torch.softmax(weight.double() @ hidden[i].double() + prior[row], 0)
                gene = int(batch.tokens[i]) - N_SPECIAL
                each[cell, :3] += [1, -math.log(p[gene]), float(p.argmax() == gene)]
                row += 1
    return each


def test_scores_are_those_of_each_gene_in_turn(batch, monkeypatch):
    monkeypatch.setattr("scdiva.train.pretraining._ROWS", 5)  # several chunks
    rng = torch.Generator().manual_seed(0)
    n = batch.tokens.numel()
    hidden, weight = torch.randn(n, 8, generator=rng), torch.randn(30, 8, generator=rng)
    predicted = torch.rand(n, generator=rng)
    corrupted = mask_tokens(batch.tokens, batch.values, batch.cu_seqlens, torch.full((batch.n_cells,), 0.7), rng)
    scored = torch.rand(n, generator=rng) < 0.6
    rows = (corrupted.masked & scored).nonzero().squeeze(1)
    prior = torch.randn(len(rows), 30, generator=rng)
    assert len(rows) > 10

    def logits_of(chunk):
        return hidden[chunk] @ weight.T + prior[torch.isin(rows, chunk)]

    per_cell = score_cells(logits_of, predicted, batch, corrupted, scored)
    np.testing.assert_allclose(
        per_cell, slow_scores(hidden, weight, predicted, batch, corrupted, scored, prior), rtol=1e-5
    )
    each = per_cell.sum(axis=0)
    scores = scores_of(per_cell)
    assert scores.perplexity == pytest.approx(math.exp(each[1] / each[0]))
    assert scores.accuracy == pytest.approx(each[2] / each[0])
    assert scores.value_error == pytest.approx(math.sqrt(each[4] / each[3]))


def test_each_ratio_has_its_turn_across_batches(tmp_path):
    joined = torch.cat([ratios_of(0, 7), ratios_of(7, 6)])
    assert joined.tolist() == pytest.approx([MASK_RATIOS[i % 5] for i in range(13)])
    for n, each_has in ((13, [3, 3, 3, 2, 2]), (2, [1, 1])):
        write_table(tmp_path / f"{n}.csv", 1, np.ones((n, 5)), [], None)
        with (tmp_path / f"{n}.csv").open() as lines:
            _, *of_ratio = csv.DictReader(lines)
        ratios = [(float(row["mask_ratio"]), int(row["n_cells"])) for row in of_ratio]
        assert ratios == list(zip(MASK_RATIOS, each_has, strict=False))


def test_a_run_logs_scores_by_ratio_and_keeps_a_table_of_studies(run, vocabulary, tmp_path):
    cells = toy(120, 40)
    train, *validation = (cells[a:b].copy() for a, b in ((0, 60), (60, 100), (100, 120)))
    data = CellDataModule(train, validation=validation, vocabulary=vocabulary, batch_size=16, context=16)
    settings = {"steps": 4, "validate_every": 2, "batch_size": 16, "context": 16, "anchor_objective": "none"}
    _, trainer = run(tmp_path, model={"n_genes": vocabulary.n_genes}, settings=settings, data=data)
    files = (tmp_path / "log" / "version_0" / f"{name}.csv" for name in ("validation", "metrics"))
    table, metrics = (list(csv.DictReader(file.read_text().splitlines())) for file in files)
    assert {"step", "train/loss", "val/loss", "val/perplexity"} <= metrics[0].keys()  # what docs/large_data.md draws
    assert [(row["step"], row["study"], row["mask_ratio"], row["n_cells"]) for row in table[:8]] == [
        ("2", "", "", "60"), *(("2", "", str(ratio), "12") for ratio in MASK_RATIOS),
        ("2", "validation0", "", "40"), ("2", "validation1", "", "20"),
    ]  # fmt: skip
    assert [row["step"] for row in table] == ["2"] * 8 + ["4"] * 8
    logged = trainer.callback_metrics
    assert float(logged["val/perplexity"]) == pytest.approx(float(table[8]["perplexity"]), rel=1e-5)
    assert {"val/perplexity", "val/accuracy", "val/value_error"} < set(logged)
    # an untrained network hesitates among all genes
    assert float(table[0]["perplexity"]) == pytest.approx(vocabulary.n_genes, rel=0.2)
