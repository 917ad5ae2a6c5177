"""`scdiva pretrain`, from files to a model folder that loads."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml

from scdiva import cli
from scdiva.datasets import toy
from scdiva.models import load_model
from scdiva.tokenizer.vocabulary import Vocabulary
from scdiva.train.runner import batches_seen

MODEL = {"dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24, "anchor_linear_dim": 8, "anchor_hidden": 12}
TRAINING = {
    "steps": 6, "batch_size": 8, "warmup_steps": 2, "validate_every": 3, "checkpoint_every": 2, "context": 40,
    "precision": "fp32", "log_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three small studies and the vocabulary of their genes, without entropies."""
    folder = tmp_path_factory.mktemp("studies")
    adata = toy(n_cells=80, n_genes=60)
    for name, rows in (("a", slice(40)), ("b", slice(40, 60)), ("c", slice(60, 80))):
        adata[rows].copy().write_h5ad(folder / f"{name}.h5ad")
    human = Vocabulary.human()
    genes = human.subset(human.match(adata.var_names).tokens)
    genes.with_entropy(np.full(genes.n_genes, np.nan)).write(folder / "genes.parquet")
    return folder


@pytest.fixture
def options(files, tmp_path):
    """Write a configuration file; returns it and the run's folder."""
    file = tmp_path / "run.yaml"
    content = {
        "train": [str(files / "a.h5ad"), str(files / "b.h5ad")],
        "validation": [str(files / "c.h5ad")],
        "vocabulary": str(files / "genes.parquet"),
        "out": str(tmp_path / "run"),
        "accelerator": "cpu",
        "progress": False,
        "model": MODEL,
        "training": TRAINING,
    }
    file.write_text(yaml.safe_dump(content))
    return file, tmp_path / "run"


def test_a_model_with_a_state_head_is_told_places(options):
    """The command ranks the cells, so it knows the denominator that the prior of places needs."""
    file, run = options
    content = yaml.safe_load(file.read_text())
    content["model"] |= {"state_head": True, "state_rank": 4}
    content["training"] |= {"scored_genes": 8, "place_prior": True}
    file.write_text(yaml.safe_dump(content))
    assert cli.main(["pretrain", "--config", str(file)]) == 0
    model = load_model(run / "model", device="cpu")
    assert model.state_head.gene.abs().max() > 0


def test_from_files_to_a_model_that_loads(files, options, capsys):
    from scdiva.pp import corpus_entropy

    file, run = options
    assert cli.main(["pretrain", "--config", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "model")
    model = load_model(run / "model", device="cpu")
    assert model.config.dim == 16
    assert model.config.n_genes == model.vocabulary.n_genes == 60
    # the entropies were counted, since the vocabulary had none
    genes = Vocabulary.read(files / "genes.parquet")
    assert genes.table["entropy"].isna().all()
    counted = corpus_entropy([files / "a.h5ad", files / "b.h5ad"], genes).entropy()
    np.testing.assert_array_equal(model.vocabulary.table["entropy"], counted[3:])
    assert Vocabulary.read(run / "vocabulary.parquet") == model.vocabulary
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert written["training"]["steps"] == 6
    assert "n_genes" not in written["model"]
    # the weights are those of the last checkpoint
    state = torch.load(run / "last.ckpt", weights_only=True)["state_dict"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[f"model.{name}"])
    # the written configuration runs again, but never over a finished run
    assert cli.main(["pretrain", "--config", str(run / "config.yaml")]) == 1
    assert "the run is finished" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{}, {"batch_tokens": 300, "accumulate": 2}])
def test_a_stopped_run_is_resumed_to_the_same_model(options, tmp_path, monkeypatch, capsys, changes):
    file, run = options
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(content | {"training": TRAINING | changes}))
    assert cli.main(["pretrain", "--config", str(file), "--out", str(tmp_path / "straight")]) == 0

    from scdiva.train.pretraining import PretrainingModule

    plain = PretrainingModule.compute_loss

    def stopped_by_hand(self, batch, generator):
        if self.batches_seen == 5:
            raise KeyboardInterrupt
        return plain(self, batch, generator)

    with monkeypatch.context() as patch:
        patch.setattr(PretrainingModule, "compute_loss", stopped_by_hand)
        assert cli.main(["pretrain", "--config", str(file)]) == 130
    assert "--resume true" in capsys.readouterr().err
    assert batches_seen(run / "last.ckpt") == 4
    assert cli.main(["pretrain", "--config", str(file)]) == 1
    assert "Pass resume=true" in capsys.readouterr().err
    assert cli.main(["pretrain", "--config", str(file), "--resume", "true"]) == 0
    one, two = load_model(tmp_path / "straight" / "model", device="cpu"), load_model(run / "model", device="cpu")
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-6
    assert yaml.safe_load((run / "config.yaml").read_text())["training"].get("batch_tokens") == changes.get(
        "batch_tokens"
    )


def test_a_packed_corpus_without_validation(files, options, tmp_path):
    from scdiva.data.packed import pack_files
    from scdiva.pp import corpus_entropy

    file, run = options
    genes = Vocabulary.read(files / "genes.parquet")
    studies = [files / "a.h5ad", files / "b.h5ad"]
    genes = genes.with_entropy(corpus_entropy(studies, genes).entropy()[3:])
    genes.write(tmp_path / "counted.parquet")
    pack_files(studies, genes, tmp_path / "corpus.h5", max_length=40)
    arguments = ["--train", f"[{tmp_path / 'corpus.h5'}]", "--vocabulary", str(tmp_path / "counted.parquet")]
    assert cli.main(["pretrain", "--config", str(file), *arguments, "--validation", "null"]) == 0
    assert (run / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training.context", "2000"], "exceeds the model's max_length=1200"),
        (["--train", "[]"], "at least one file"),
        (["--train", "[nowhere.h5ad]"], "nowhere"),
        (["--resume", "true"], "No checkpoint at"),
        (["--vocabulary", "nothing"], "nothing"),
        (["--training.steps=0"], "steps must be at least 1"),
        (["--model.n_heads", "3"], "3 doesn't divide 16"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line_and_leaves_nothing(options, capsys, arguments, message):
    file, run = options
    assert cli.main(["pretrain", "--config", str(file), *arguments]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not run.exists()


@pytest.mark.parametrize(
    "arguments",
    [["--training.stepz", "3"], ["--training.steps", "many"], ["--model.n_genes", "5"]],
)
def test_misspelt_options_are_refused(options, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["pretrain", "--config", str(options[0]), *arguments])
    assert stopped.value.code == 2
    assert arguments[0].split(".")[-1] in capsys.readouterr().err


def test_help_needs_no_heavy_package():
    code = (
        "import sys\nfrom scdiva.cli import main\n"
        "try:\n    main(['pretrain', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'pytorch_lightning', 'scanpy', 'anndata'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for option in ("--train", "--model.anchor", "--training.anchor_objective", "--resume"):
        assert option in done.stdout


def test_a_packed_corpus_gives_the_svd_start(files, options, tmp_path, capsys):
    from scdiva.data.packed import PackedCells, pack_files
    from scdiva.pp import corpus_entropy
    from scdiva.train import fit_linear_map

    file, run = options
    studies = [files / "a.h5ad", files / "b.h5ad"]
    assert cli.main(["pretrain", "--config", str(file), "--svd_start", "true"]) == 1
    assert "packed corpus" in capsys.readouterr().err
    genes = Vocabulary.read(files / "genes.parquet")
    genes = genes.with_entropy(corpus_entropy(studies, genes).entropy()[3:])
    genes.write(tmp_path / "genes.parquet")
    pack_files(studies, genes, tmp_path / "corpus.h5").close()
    arguments = ["--train", f"[{tmp_path / 'corpus.h5'}]", "--vocabulary", str(tmp_path / "genes.parquet")]
    arguments += ["--svd_start", "true", "--training.learning_rate", "1e-9"]
    assert cli.main(["pretrain", "--config", str(file), *arguments]) == 0
    model = load_model(run / "model", device="cpu")
    expected = fit_linear_map(PackedCells(tmp_path / "corpus.h5"), MODEL["anchor_linear_dim"])
    weight = torch.from_numpy(expected.weight)
    torch.testing.assert_close(model.anchor.table.weight[3:], weight[3:], atol=1e-6, rtol=0)
    lead = model.embedding.gene.weight[3:, : MODEL["anchor_linear_dim"]]
    cosine = torch.nn.functional.cosine_similarity(lead, weight[3:], dim=1)
    assert cosine[weight[3:].any(dim=1)].min() > 0.999
    decoder = torch.load(run / "last.ckpt", weights_only=True)["state_dict"]["decoder.linear.bias"]
    frequency = torch.from_numpy(expected.frequency[3:]).clamp_min(1e-7)
    torch.testing.assert_close(decoder, frequency.log().float(), atol=1e-5, rtol=0)
