from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import torch

from scdiva._constants import N_SPECIAL
from scdiva._rng import step_generator
from scdiva.data.datamodule import CellDataModule
from scdiva.diffusion import mask_tokens
from scdiva.diffusion.ranks import Ranked
from scdiva.train import PretrainingModule, fit
from scdiva.train.pretraining import MASK_RATIOS, ratios_of, score_cells, scores_of, write_table


def slow_scores(hidden, weight, predicted, batch, corrupted, scored, prior):
    """The same, gene by gene."""
    each, seen = np.zeros((batch.n_cells, 5)), 0
    for cell in range(batch.n_cells):
        for i in range(int(batch.cu_seqlens[cell]), int(batch.cu_seqlens[cell + 1])):
            if not corrupted.masked[i]:
                continue
            each[cell, 3:] += [1, (float(predicted[i]) - float(batch.values[i])) ** 2]
            if scored[i]:
                p = torch.softmax(weight.double() @ hidden[i].double() + prior[seen], 0)
                gene = int(batch.tokens[i]) - N_SPECIAL
                each[cell, :3] += [1, -math.log(p[gene]), float(p.argmax() == gene)]
                seen += 1
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

    def logits_of(some):
        return hidden[some] @ weight.T + prior[torch.isin(rows, some)]

    found = score_cells(logits_of, predicted, batch, corrupted, scored)
    np.testing.assert_allclose(
        found, slow_scores(hidden, weight, predicted, batch, corrupted, scored, prior), rtol=1e-5
    )
    each = found.sum(axis=0)
    scores = scores_of(found)
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
        found = [(float(row["mask_ratio"]), int(row["n_cells"])) for row in of_ratio]
        assert found == list(zip(MASK_RATIOS, each_has, strict=False))


def rows(folder):
    with (folder / "log" / "version_0" / "validation.csv").open() as lines:
        return list(csv.DictReader(lines))


@pytest.fixture(scope="module")
def study_files(tmp_path_factory):
    from scdiva.datasets import toy

    folder = tmp_path_factory.mktemp("studies")
    adata = toy(120, 40)
    for name, cells in {"one": range(60), "two": range(60, 100), "three": range(100, 120)}.items():
        adata[list(cells)].copy().write_h5ad(folder / f"{name}.h5ad")
    return folder


def test_a_run_logs_scores_by_ratio_and_keeps_a_table_of_studies(tiny, config, vocabulary, study_files, tmp_path):
    data = CellDataModule(
        [study_files / "one.h5ad"],
        validation=[study_files / "two.h5ad", study_files / "three.h5ad"],
        vocabulary=vocabulary, batch_size=16, context=16,
    )  # fmt: skip
    settings = config(steps=4, validate_every=2, batch_size=16, context=16, anchor_objective="none")
    module = PretrainingModule(tiny(n_genes=vocabulary.n_genes), settings, n_studies=1)
    trainer = fit(module, data, out_dir=tmp_path, accelerator="cpu", progress=False)
    table = rows(tmp_path)
    with (tmp_path / "log" / "version_0" / "metrics.csv").open() as lines:  # what docs/large_data.md draws
        assert {"step", "train/loss", "val/loss", "val/perplexity"} <= set(next(csv.reader(lines)))
    assert [(row["step"], row["study"], row["mask_ratio"], row["n_cells"]) for row in table[:8]] == [
        ("2", "", "", "60"), *(("2", "", str(ratio), "12") for ratio in MASK_RATIOS),
        ("2", "two", "", "40"), ("2", "three", "", "20"),
    ]  # fmt: skip
    assert [row["step"] for row in table] == ["2"] * 8 + ["4"] * 8
    logged = trainer.callback_metrics
    assert float(logged["val/perplexity"]) == pytest.approx(float(table[8]["perplexity"]), rel=1e-5)
    assert {"val/perplexity", "val/accuracy", "val/value_error"} < set(logged)
    # an untrained network hesitates among all genes
    assert float(table[0]["perplexity"]) == pytest.approx(vocabulary.n_genes, rel=0.2)


@torch.no_grad()
def test_training_and_validation_ask_the_model_for_the_same_logits(tiny, config, batch):
    """A part of the positions at a time, with what their ranks say: those of the model, and of each position alone."""
    config = config(scored_genes=4, place_prior=True, anchor_objective="none")
    model = tiny(anchor="encoder", state_head=True)
    model.state_head.gene.normal_(generator=torch.Generator().manual_seed(1))
    denominator = np.linspace(0.5, 2, 30 + N_SPECIAL, dtype=np.float32)
    module = PretrainingModule(model, config, denominator=denominator)
    corrupted = mask_tokens(*batch.packed, torch.full((batch.n_cells,), 0.5), step_generator(0, 0, "test"))
    out = module._denoised(corrupted, batch)
    rows = corrupted.masked.nonzero().squeeze(1)
    logits = module._logits(out, rows, corrupted, batch)
    cells = batch.tokens, batch.values, batch.cu_seqlens
    ranked = Ranked(*cells, ~corrupted.value_mask, torch.from_numpy(denominator))
    torch.testing.assert_close(logits, model.logits(out, corrupted.masked, ranked=ranked))
    assert not torch.allclose(logits, model.logits(out, rows))
    parts = [module._logits(out, part, corrupted, batch) for part in rows.split(3)]
    torch.testing.assert_close(torch.cat(parts), logits)
