"""Pretraining that starts from the weights of a model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from scdiva.datasets import toy
from scdiva.models import ScDiVa, ScDiVaConfig, load_model, save_model
from scdiva.models.pretrained import fingerprint
from scdiva.tokenizer import Vocabulary
from scdiva.train import PretrainingConfig, pretrain
from scdiva.train.pretraining import PretrainingModule

pytestmark = pytest.mark.filterwarnings("ignore:only .* of the counts fall on known genes")

SIZES = {
    "paper": {"anchor": "learned", "dim": 16, "n_layers": 2, "n_heads": 2, "ffn_dim": 24},
    "ours": {
        "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "tie_gene_head": True, "anchor_linear_dim": 8,
        "anchor_learned_dim": 4, "anchor_hidden": 12, "state_head": True, "state_rank": 4, "query_head": True,
    },
}  # fmt: skip
TRAINING = PretrainingConfig(
    steps=3, batch_size=8, warmup_steps=2, context=40, precision="fp32", scored_genes=16, validate_every=3,
    checkpoint_every=1, log_every=1,
)  # fmt: skip
N_OLD = 40


@pytest.fixture(scope="module")
def genes():
    """The vocabulary of the file's 60 genes, with entropies."""
    human = Vocabulary.human()
    every = human.subset(human.match(toy(4, 60).var_names).tokens)
    return every.with_entropy(np.linspace(0.5, 2, every.n_genes))


@pytest.fixture(scope="module")
def old_genes(genes):
    """Vocabulary without every third gene, so that added genes are not at the end of the table."""
    tokens = genes.tokens[np.arange(genes.n_genes) % 3 > 0]
    old = genes.subset(tokens)
    assert old.n_genes == N_OLD
    return old


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "study.h5ad"
    toy(60, 60).write_h5ad(path)
    return str(path)


@pytest.fixture(scope="module")
def models(old_genes, tmp_path_factory):
    """Folders of two models with random weights: the paper's architecture, and one with all additional heads."""
    folders = {}
    for name, sizes in SIZES.items():
        config = ScDiVaConfig(n_genes=old_genes.n_genes, **sizes)
        model = ScDiVa(config, generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            for number, weight in enumerate(model.state_dict().values()):
                weight.add_(0.1 * torch.rand(weight.shape, generator=torch.Generator().manual_seed(number)))
        folders[name] = str(save_model(model, old_genes, tmp_path_factory.mktemp(name) / "model"))
    return folders


@pytest.fixture
def started(monkeypatch):
    """Weights of the network at the first batch of each run."""
    snapshots, plain = [], PretrainingModule.on_train_start

    def note(self):
        snapshots.append({name: weight.clone() for name, weight in self.model.state_dict().items()})
        plain(self)

    monkeypatch.setattr(PretrainingModule, "on_train_start", note)
    return snapshots


@pytest.fixture
def stopped(monkeypatch):
    """A run that is interrupted at a batch."""

    def start(number, *arguments, **options):
        plain = PretrainingModule.compute_loss

        def stop(self, batch, generator):
            if self.batches_seen == number:
                raise KeyboardInterrupt
            return plain(self, batch, generator)

        with monkeypatch.context() as patch:
            patch.setattr(PretrainingModule, "compute_loss", stop)
            with pytest.raises(KeyboardInterrupt):
                run(*arguments, **options)

    return start


def run(file, out, training=TRAINING, **options):
    return pretrain(file, str(out), training, min_genes=1, accelerator="cpu", progress=False, **options)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.filterwarnings("ignore:The query head")
def test_training_starts_from_the_weights_and_changes_them(kind, models, file, old_genes, tmp_path, started):
    folder = run(file, tmp_path / "run", init=models[kind])
    before, model = load_model(models[kind], device="cpu"), load_model(folder, device="cpu")
    for name, weight in before.state_dict().items():
        assert torch.equal(started[0][name], weight), name
    assert model.config == before.config
    assert model.vocabulary == old_genes
    now = model.state_dict()
    changed = {name for name, weight in before.state_dict().items() if not torch.equal(weight, now[name])}
    assert {"embedding.gene.weight", "norm.weight", "heads.value.weight"} <= changed
    assert any(name.startswith("blocks.0") for name in changed)
    assert not any(name.startswith("query_head") for name in changed)  # kept as it was
    record = {"model": models[kind], "fingerprint": fingerprint(before)}
    assert model.metadata["init"] == record
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["init"] == record
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["init"] == models[kind]
    assert record["fingerprint"] in (folder / "README.md").read_text()


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.filterwarnings("ignore:The query head")
def test_genes_are_added_after_those_of_the_model(kind, models, file, genes, old_genes, tmp_path, started):
    genes.write(tmp_path / "genes.safetensors")
    folder = run(file, tmp_path / "run", init=models[kind], vocabulary=str(tmp_path / "genes.safetensors"))
    before, model = load_model(models[kind], device="cpu"), load_model(folder, device="cpu")
    assert model.config == replace(before.config, n_genes=60)
    assert model.vocabulary.symbols[:N_OLD].tolist() == old_genes.symbols.tolist()
    assert sorted(model.vocabulary.symbols) == sorted(genes.symbols)
    np.testing.assert_array_equal(model.vocabulary.entropy[: 3 + N_OLD], old_genes.entropy)
    entropy = dict(zip(genes.symbols, genes.entropy[3:], strict=True))
    assert [entropy[symbol] for symbol in model.vocabulary.symbols] == model.vocabulary.entropy[3:].tolist()

    grown = ScDiVa(model.config, generator=torch.Generator().manual_seed(0))
    grown.load_state_dict(started[0])
    grew = []
    for name, weight in before.state_dict().items():
        rows, n = started[0][name], len(weight)
        assert torch.equal(rows[:n], weight), name
        if len(rows) > n:
            grew.append(name)
            assert len(rows) == n + 20
    heads = {"state_head.gene", "state_head.value", "query_head.gene.weight", "anchor.table.weight"}
    assert set(grew) == {"embedding.gene.weight"} | (heads if kind == "ours" else {"heads.gene.weight"})
    new = started[0]["embedding.gene.weight"][-20:]
    assert 0.01 < new.std() < 0.03  # initialised as in a new model, all different
    assert torch.pdist(new).min() > 0.01
    # results for cells with genes of the old vocabulary have the same bits
    tokens, values, cells = torch.arange(3, 3 + N_OLD), torch.linspace(3, 0.1, N_OLD), torch.tensor([0, N_OLD])
    packed = tokens, values, cells.int()
    with torch.no_grad():
        assert torch.equal(grown.eval().encode(*packed), before.encode(*packed))
        one, two = grown(*packed), before(*packed)
        assert torch.equal(one.hidden, two.hidden)
        assert torch.equal(grown.values(one, tokens), before.values(two, tokens))
        rows = torch.arange(N_OLD)
        torch.testing.assert_close(grown.logits(one, rows)[:, :N_OLD], before.logits(two, rows))


def test_a_resumed_run_does_not_read_the_model_again(models, file, genes, tmp_path, stopped):
    genes.write(tmp_path / "genes.safetensors")
    init = tmp_path / "moved"
    shutil.copytree(models["paper"], init)
    options = {"init": str(init), "vocabulary": str(tmp_path / "genes.safetensors")}
    straight = run(file, tmp_path / "straight", **options)
    stopped(2, file, tmp_path / "run", **options)
    for other_init in (None, models["ours"]):
        with pytest.raises(ValueError, match=r"run that started with init='.*moved', not"):
            run(file, tmp_path / "run", resume=True, **options | {"init": other_init})
    shutil.rmtree(init)
    folder = run(file, tmp_path / "run", resume=True, **options)
    one, two = load_model(straight, device="cpu"), load_model(folder, device="cpu")
    assert one.vocabulary == two.vocabulary
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert one.metadata["init"] == two.metadata["init"]


def test_a_resumed_run_keeps_the_batches_that_cells_per_step_were_divided_into(
    file, genes, tmp_path, stopped, monkeypatch
):
    genes.write(tmp_path / "genes.safetensors")
    training = replace(TRAINING, batch_size=None, cells_per_step=12)
    options = {"vocabulary": str(tmp_path / "genes.safetensors"), "model": SIZES["paper"]}
    monkeypatch.setattr("scdiva.train.config.CPU_CELLS", 5)
    straight = run(file, tmp_path / "straight", training, **options)
    stopped(8, file, tmp_path / "run", training, **options)  # in the third step
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["training"]
    assert (written["batch_size"], written["accumulate"], written["cells_per_step"]) == (4, 3, 12)
    monkeypatch.setattr("scdiva.train.config.CPU_CELLS", 16)
    with pytest.raises(ValueError, match="cells_per_step: 12 then, 24 now"):
        run(file, tmp_path / "run", replace(training, cells_per_step=24), resume=True, **options)
    folder = run(file, tmp_path / "run", training, resume=True, **options)
    assert (folder / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore:The query head")
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("paper", {"svd_start": True}, "svd_start replaces the gene embeddings that init keeps"),
        ("paper", {"model": {"n_layers": 3, "dim": 16}}, r"1 fields of model or preset differ .*n_layers=3, not 2"),
        ("paper", {"preset": "mini"}, "fields of model or preset differ"),
        ("paper", {"model": {"widht": 3}}, "widht"),
        ("paper", {"model": ScDiVaConfig(**SIZES["paper"] | {"ffn_dim": 32})}, "ffn_dim=32, not 24"),
        ("missing", {}, "no model 'missing'"),
        ("integrated", {}, "was made by tl.integrate"),
        ("adapted", {}, "was made by tl.adapt"),
    ],
)
def test_what_is_refused_before_anything_is_read(
    kind, options, message, models, old_genes, file, tmp_path, monkeypatch
):
    monkeypatch.setattr("scdiva.data.datamodule.CellDataModule._open", None)
    init = models.get(kind, kind)
    if kind in ("integrated", "adapted"):
        model = ScDiVa(ScDiVaConfig(n_genes=N_OLD, **SIZES["paper"], integrated=kind == "integrated", adapted=20))
        init = str(save_model(model, old_genes, tmp_path / "fitted"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(file, tmp_path / "run", init=init, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("always")
def test_only_the_first_process_warns(genes, tmp_path, monkeypatch, recwarn):
    cells = toy(60, 60)
    cells.var_names = [*cells.var_names[:42], *(f"unknown{number}" for number in range(18))]
    cells.write_h5ad(tmp_path / "foreign.h5ad")
    genes.write(tmp_path / "genes.safetensors")
    options = {"vocabulary": str(tmp_path / "genes.safetensors"), "model": SIZES["paper"]}
    for first in (True, False):
        monkeypatch.setattr("scdiva.train.runner.is_first_process", lambda first=first: first)
        recwarn.clear()
        run(str(tmp_path / "foreign.h5ad"), tmp_path / str(first), TRAINING, **options)
        assert any("known genes" in str(one.message) for one in recwarn) == first


def test_a_name_as_model_is_refused(file, tmp_path):
    with pytest.raises(TypeError, match="model='scdiva-paper-mini' must be a ScDiVaConfig"):
        run(file, tmp_path / "run", init="scdiva-paper-mini", model="scdiva-paper-mini")
    assert not (tmp_path / "run").exists()
