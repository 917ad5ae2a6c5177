"""The ablation: arms differ in one thing, held-out studies stay held out, rows are made once."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from scdiva.data.batch import from_ragged
from scdiva.data.packed import pack_files
from scdiva.datasets import toy
from scdiva.tokenizer import load_vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two training studies, one that is scored, one for validation, packed as train_mini.py does."""
    folder = tmp_path_factory.mktemp("prepared")
    genes = load_vocabulary("human").subset(np.arange(3, 20_000, 100))
    adata = toy(220, 120, rng=4)
    adata.var_names = genes.symbols[:120]
    cells = {"one": adata[:60], "two": adata[60:120], "scored": adata[120:190], "watched": adata[190:]}
    for name, part in cells.items():
        part.copy().write_h5ad(folder / f"{name}.h5ad")
    for part, names in {"train": ("one", "scored", "two"), "validation": ("watched",)}.items():
        pack_files([folder / f"{name}.h5ad" for name in names], genes, folder / f"{part}.h5", max_length=100).close()
    genes.write(folder / "vocabulary.safetensors")
    return folder


@pytest.fixture
def ablation(script, monkeypatch, tmp_path):
    """The script with a network of a size for tests, writing into a folder of its own."""
    module, arms = script("ablation"), script("_ablation_arms")
    small = {
        "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 16, "max_length": 40, "anchor_linear_dim": 8,
        "anchor_learned_dim": 4, "anchor_hidden": 8, "anchor_length": 100,
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setitem(arms.MODEL, name, value)
    monkeypatch.setitem(arms.TRAINING, "context", 40)
    monkeypatch.setattr(module, "SCORED", ("scored",))
    monkeypatch.setattr(module, "NOT_TRAINED_ON", ("scored",))
    monkeypatch.setattr(module, "VALIDATION_CELLS", 8)
    for one in (module, script("_record")):
        monkeypatch.setattr(one, "RESULTS", tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    return module


def call(ablation, monkeypatch, folder, *options):
    monkeypatch.setattr(
        sys, "argv", ["ablation.py", "--prepared", str(folder), "--corpus", str(folder), "--seeds", "0", *options]
    )
    ablation.main()
    return json.loads((ablation.RESULTS / "ablation.json").read_text())


def test_two_arms_are_trained_and_judged_and_not_made_again(ablation, monkeypatch, folder, capsys):
    options = ("--seconds", "0.1", "--arms")
    result = call(ablation, monkeypatch, folder, *options, "set", "encoder_genes")
    base, trained = result["rows"]
    assert (base["arm"], trained["arm"]) == ("set", "encoder_genes")
    assert result["n_cells"] == 120  # the scored study is not among them
    assert "identity" not in base
    for row in (base, trained):
        assert row["steps"] >= 1
        assert 0.01 < row["cpu_seconds"] < 1.5
        assert row["sets"].keys() == {"scored"}
        assert row["accuracy"] > 0.5
    assert 0 < trained["identity"] < np.log(200) + 1
    assert trained["value"] > 0
    capsys.readouterr()
    again = call(ablation, monkeypatch, folder, *options, "set", "linear")
    assert [row["arm"] for row in again["rows"]] == ["set", "linear", "encoder_genes"]
    assert again["rows"][0] == base
    assert "linear" in (said := capsys.readouterr().out)
    assert "encoder_genes" not in said


def test_every_arm_has_a_configuration_of_its_own(script, folder):
    arms = script("_ablation_arms")
    genes = load_vocabulary(folder / "vocabulary.safetensors")
    told = []
    for name, arm in arms.ARMS.items():
        assert arms.BASES[arm.family] in arms.ARMS
        training = {**(arms.SET_TRAINING if arm.family == arms.SET else arms.TRAINING), **arm.training}
        rest = (arm.start, arm.trains_table, arm.untrained, arm.study, arm.thinning, arm.order)
        told.append(str((arm.family == arms.SET, arms.model_config(arm, genes), sorted(training.items()), rest)))
        assert 0 < len(arm.what) < 100, name
    assert len(set(told)) == len(told)


def test_orders_and_hidden_genes(script, folder):
    arms = script("_ablation_arms")
    genes = load_vocabulary(folder / "vocabulary.safetensors")
    cells = arms.load_cells(folder / "train.h5", genes, ("scored",))
    assert cells.study_names == ["one", "two"]
    base = arms.denominator(arms.ARMS["encoder"], genes, cells)
    again = arms.ranked(cells, base)
    np.testing.assert_array_equal(again.tokens, cells.tokens)
    plain = arms.ranked(cells, arms.denominator(arms.ARMS["by_expression"], genes, cells))
    _, _, values = plain.read(0, 1)
    assert (np.diff(values) <= 0).all()
    medians = arms.denominator(arms.ARMS["by_median"], genes, cells)
    token = int(cells.tokens[0])
    assert medians[token] == pytest.approx(np.median(cells.values[cells.tokens == token]))
    for drawn in (False, True):
        judged = arms.hidden(cells, 8, drawn=drawn)
        kept = arms.order_of(judged.tokens, judged.values, judged.cu_seqlens, base)
        np.testing.assert_array_equal(kept, np.arange(len(kept)))  # they stand in the order of the base
        assert (judged.value_mask >= judged.masked).all()


def test_thinned_cells_keep_their_share_and_their_scale(script):
    arms = script("_ablation_arms")
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.gamma(0.5, 20, size=400))
    counts[0] = 1
    depth = counts.sum() + 500  # of which 500 are of genes that the vocabulary lacks
    tokens, seen = np.arange(3, 403), counts > 0
    values = np.log1p(1e4 * counts[seen] / depth).astype(np.float32)
    batch = from_ragged(np.array([0, seen.sum()]), tokens[seen], values)
    whole = arms.thinned_counts(batch, torch.ones(1), torch.Generator().manual_seed(0))
    torch.testing.assert_close(whole.values, batch.values, rtol=1e-4, atol=1e-5)
    half = arms.thinned_counts(batch, torch.full((1,), 0.5), torch.Generator().manual_seed(0))
    assert 0 < half.tokens.numel() < batch.tokens.numel()
    share = torch.expm1(half.values.double()).sum() / torch.expm1(batch.values.double()).sum()
    assert share == pytest.approx(1, abs=0.02)
    before = dict(zip(batch.tokens.tolist(), batch.values.tolist(), strict=True))
    noisy = [
        abs(value - before[token]) for token, value in zip(half.tokens.tolist(), half.values.tolist(), strict=True)
    ]
    assert 0 < np.mean(noisy) < 0.5
