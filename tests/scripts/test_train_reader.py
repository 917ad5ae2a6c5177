"""Training of the reader: batches against slow formulas, and a run that is continued."""

from __future__ import annotations

import sys

import pytest
import torch
from mini_objectives import StudyBatches
from train_reader import ReaderConfig, ReaderModule, draw_task, main, with_reader

from scdiva._constants import N_SPECIAL
from scdiva.data.packed import PackedCells
from scdiva.models import ScDiVa, ScDiVaConfig, load_model, save_model
from scdiva.models.reader import gene_codes
from scdiva.tokenizer import load_vocabulary

SMALL = {
    "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "max_length": 80, "anchor_linear_dim": 8,
    "anchor_learned_dim": 4, "anchor_hidden": 16, "state_head": True, "state_rank": 4,
}  # fmt: skip


@pytest.fixture
def model(prepared):
    n_genes = load_vocabulary(prepared / "vocabulary.safetensors").n_genes
    return ScDiVa(ScDiVaConfig(n_genes=n_genes, **SMALL), generator=torch.Generator().manual_seed(0))


def test_masked_genes_are_not_visible_and_their_counts_are_asked(prepared, model):
    table = gene_codes(model.anchor.table.weight)[N_SPECIAL:]
    stream = StudyBatches(PackedCells(prepared / "train.h5"), 8, 32, 0)
    whole, parts = 0, 0
    for number in range(12):
        task = draw_task(stream.batch(number), table, ReaderConfig(batch_size=8), torch.Generator().manual_seed(number))
        visible = {tuple(code) for code in task.cells.codes.tolist()}
        assert not visible & {tuple(code) for code in task.codes.tolist()}
        assert task.counts.shape == (8, len(task.codes))
        assert task.study.counts.shape[1] == len(task.codes)
        assert (task.counts.sum(dim=1) <= task.total).all()
        same = torch.equal(task.total, task.cells.total)
        whole, parts = whole + same, parts + (not same)
    assert whole
    assert parts


def test_only_the_reader_is_trained_and_a_run_continues(prepared, model, tmp_path, monkeypatch, same):
    folder = save_model(model, load_vocabulary(prepared / "vocabulary.safetensors"), tmp_path / "model")
    module = ReaderModule(with_reader(load_model(folder)), ReaderConfig())
    assert {name.split(".")[0] for name, weight in module.model.named_parameters() if weight.requires_grad} == {
        "reader"
    }

    def run(out, *options):
        command = ["train_reader.py", "--model", str(folder), "--prepared", str(prepared), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", [*command, "--accelerator", "cpu", "--batch-size", "8", *options])
        main()
        return load_model(out / "model")

    trained = run(tmp_path / "one", "--steps", "4")
    assert trained.metadata["reader"][0]["steps"] == 4
    before, after = model.state_dict(), trained.state_dict()
    assert all(torch.equal(before[name].half(), after[name].half()) for name in before)
    assert trained.reader.out.weight.abs().sum() > 0
    again = run(tmp_path / "one", "--steps", "4", "--resume")
    assert same({**trained.state_dict()}, {**again.state_dict()})
