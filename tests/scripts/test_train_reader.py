"""Training of the reader: batches against slow formulas, and a run that is continued."""

from __future__ import annotations

import sys

import pytest
import torch
from mini_objectives import StudyBatches
from train_reader import SIZES, ReaderConfig, codes_of, draw_task, main, read_readers

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
    n_whole, n_parts = 0, 0
    for number in range(12):
        task = draw_task(stream.batch(number), table, ReaderConfig(batch_size=8), torch.Generator().manual_seed(number))
        visible = {tuple(code) for code in task.cells.codes.tolist()}
        assert not visible & {tuple(code) for code in task.codes.tolist()}
        assert task.counts.shape == (8, len(task.codes))
        assert task.study.counts.shape[1] == len(task.codes)
        assert (task.counts.sum(dim=1) <= task.total).all()
        same = torch.equal(task.total, task.cells.total)
        n_whole, n_parts = n_whole + same, n_parts + (not same)
    assert n_whole
    assert n_parts


@pytest.fixture
def run(prepared, model, tmp_path, monkeypatch):
    """Run the script with a small model; return the model that it wrote."""
    folder = save_model(model, load_vocabulary(prepared / "vocabulary.safetensors"), tmp_path / "model")

    def call(out, *options, on=prepared):
        command = ["train_reader.py", "--model", str(folder), "--prepared", str(on), "--out", str(out), "--toy"]
        monkeypatch.setattr(sys, "argv", [*command, "--accelerator", "cpu", "--batch-size", "8", *options])
        main()
        return load_model(out / "model")

    return call


def test_only_the_reader_is_trained_and_a_run_continues(model, run, tmp_path, same):
    trained = run(tmp_path / "one", "--steps", "4")
    assert trained.metadata["reader"][0]["steps"] == 4
    before, after = model.state_dict(), trained.state_dict()
    assert all(torch.equal(before[name].half(), after[name].half()) for name in before)
    assert trained.reader.out.weight.abs().sum() > 0
    again = run(tmp_path / "one", "--steps", "4", "--resume")
    assert same({**trained.state_dict()}, {**again.state_dict()})


def test_a_run_by_time_is_not_resumed(run, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "--seconds", "4", "--resume")
    assert "--init" in capsys.readouterr().err


def test_readers_of_all_sizes_are_trained_stored_and_continued(run, tmp_path, same):
    first = run(tmp_path / "one", "--steps", "3", "--sizes", *SIZES)
    weights, runs = read_readers(tmp_path / "one" / "readers.safetensors")
    assert list(weights) == list(runs) == list(SIZES)
    assert same({name: value.float() for name, value in weights["1x"].items()}, {**first.reader.state_dict()})
    numbers = [stored[0]["parameters"] for stored in runs.values()]
    assert numbers == sorted(numbers)
    assert len({stored[0]["before"]["base"] for stored in runs.values()}) == 1, "all are scored on the same queries"
    init = "--init", str(tmp_path / "one" / "readers.safetensors")
    run(tmp_path / "two", "--steps", "2", "--sizes", "4x", "1x", *init)
    weights, runs = read_readers(tmp_path / "two" / "readers.safetensors")
    assert {size: [one["steps"] for one in stored] for size, stored in runs.items()} == {
        "1x": [3, 2], "4x": [3, 2], "16x": [3],
    }  # fmt: skip
    for size in ("1x", "4x"):
        earlier, later = runs[size]
        assert later["before"]["nll"] == pytest.approx(earlier["after"]["nll"], abs=1e-3), "half precision"
        assert later["training"]["seed"] == 3
    again = run(tmp_path / "three", "--steps", "0", *init, on=tmp_path / "no corpus")
    assert same({**again.state_dict()}, {**first.state_dict()})
    assert again.metadata["reader"] == first.metadata["reader"]


def test_gene_codes_are_found_by_name(prepared, model, tmp_path):
    genes, human = load_vocabulary(prepared / "vocabulary.safetensors"), load_vocabulary("human")
    loaded = load_model(save_model(model, genes, tmp_path / "model"))
    codes = codes_of(loaded, human.subset([4, *human.match(genes.ensembl_ids[5:9], "human").tokens]))
    assert not codes[0].any(), "the model has no such gene"
    assert torch.equal(codes[1:], gene_codes(model.anchor.table.weight)[N_SPECIAL + 5 : N_SPECIAL + 9])
