"""`scdiva pretrain`, from files to a model folder that loads."""

from __future__ import annotations

import contextlib
import json

import anndata as ad
import numpy as np
import pytest
import torch
import yaml

from scdiva import cli
from scdiva.data.corpus import file_note
from scdiva.data.packed import PackedCells
from scdiva.data.packing import pack_files
from scdiva.models import ScDiVaConfig, load_model
from scdiva.pp import corpus_entropy
from scdiva.tokenizer.vocabulary import Vocabulary
from scdiva.train import PretrainingConfig, _pretrain, fit_linear_map, pretrain
from scdiva.train.pretraining import PretrainingModule
from scdiva.train.runner import read_checkpoint


@pytest.fixture
def command(options, capsys):
    """Run the command with the configuration file and other options; returns its code and what it says."""

    def run(*words, config=options[0]):
        code = cli.main(["pretrain", "--config", str(config), *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out if code == 0 else captured.err

    return run


@contextlib.contextmanager
def interrupted(monkeypatch, batch):
    """Press Ctrl-C at a batch."""
    plain = PretrainingModule.compute_loss

    def stopped(self, *arguments):
        if self.batches_seen == batch:
            raise KeyboardInterrupt
        return plain(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(PretrainingModule, "compute_loss", stopped)
        yield


def test_from_files_to_a_model_that_loads(files, options, command, tmp_path, model_options, training_options):
    _, run = options
    assert command() == (0, f"{run / 'model'}\n")
    model = load_model(run / "model", device="cpu")
    assert model.config.dim == 16
    assert model.config.n_genes == model.vocabulary.n_genes == 60
    # the entropies were counted, since the vocabulary had none
    genes = Vocabulary.read(files / "genes.safetensors")
    assert genes.table["entropy"].isna().all()
    counted = corpus_entropy([files / "a.h5ad", files / "b.h5ad"], genes).entropy()
    np.testing.assert_array_equal(model.vocabulary.table["entropy"], counted[3:])
    assert Vocabulary.read(run / "vocabulary.safetensors") == model.vocabulary
    # the weights are those of the last checkpoint, and those of Python
    state = torch.load(run / "last.ckpt", weights_only=True)["state_dict"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[f"model.{name}"])
    folder = pretrain(
        [files / "a.h5ad", files / "b.h5ad"], tmp_path / "python", PretrainingConfig(**training_options),
        model=ScDiVaConfig(**model_options), validation=files / "c.h5ad", vocabulary=files / "genes.safetensors",
        min_genes=1, accelerator="cpu", progress=False,
    )  # fmt: skip
    assert (folder / "model.safetensors").read_bytes() == (run / "model" / "model.safetensors").read_bytes()
    one, two = (yaml.safe_load((out / "config.yaml").read_text()) for out in (run, tmp_path / "python"))
    assert one | {"out": two["out"]} == two
    # the written configuration runs again, but never over a finished run
    code, output = command(config=run / "config.yaml")
    assert code == 1
    assert "the run is finished" in output


@pytest.mark.parametrize("changes", [{}, {"batch_tokens": 300, "accumulate": 2}])
def test_a_stopped_run_is_resumed_to_the_same_model(options, command, training_options, tmp_path, monkeypatch, changes):
    file, run = options
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(content | {"training": training_options | changes}))
    assert command("--out", tmp_path / "straight")[0] == 0
    with interrupted(monkeypatch, 5):
        code, output = command()
    assert (code, "--resume true" in output) == (130, True)
    assert read_checkpoint(run / "last.ckpt")["scdiva"]["batches_seen"] == 4
    code, output = command()
    assert (code, "Pass --resume" in output) == (1, True)
    assert command("--resume", "true")[0] == 0
    one, two = load_model(tmp_path / "straight" / "model", device="cpu"), load_model(run / "model", device="cpu")
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-6
    written = yaml.safe_load((run / "config.yaml").read_text())["training"]
    assert written.get("batch_tokens") == changes.get("batch_tokens")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training.context", "2000"], "exceeds the model's max_length=1200"),
        (["--train", "[]"], "at least one file"),
        (
            ["--preset", "minni"],
            "preset must be one of 'paper', 'base', 'base-lat', 'mini'; got 'minni' (did you mean 'mini'?)",
        ),
        (["--train", "[nowhere.h5ad]"], "nowhere"),
        (["--resume", "true"], "No checkpoint at"),
        (["--vocabulary", "nothing"], "nothing"),
        (["--training.steps=0"], "steps must be at least 1"),
        (["--model.n_heads", "3"], "3 doesn't divide 16"),
        (["--min_genes", "200"], "no training cell has 200 known genes"),
        (["--validation", "TRAIN"], "1 studies are in train and in validation (first: 'a')"),
        (["--validation_studies", "[a, b]"], "all 2 studies would validate"),
        (["--validation_studies", "[x]"], "there is no study 'x'"),
        (["--validation_studies", "1.5"], "share between 0 and 1; got 1.5"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line_and_leaves_nothing(options, command, arguments, message):
    file, run = options
    train = yaml.safe_load(file.read_text())["train"]
    code, output = command(*(f"[{train[0]}]" if one == "TRAIN" else one for one in arguments))
    assert code == 1
    assert message in output
    assert len(output.splitlines()) == 1
    assert not run.exists()


def test_a_packed_corpus_gives_the_svd_start(files, options, command, model_options, tmp_path):
    studies = [files / "a.h5ad", files / "b.h5ad"]
    assert "packed corpus" in command("--svd_start", "true")[1]
    genes = Vocabulary.read(files / "genes.safetensors")
    genes = genes.with_entropy(corpus_entropy(studies, genes).entropy()[3:])
    genes.write(tmp_path / "genes.safetensors")
    pack_files(studies, genes, tmp_path / "corpus.h5").close()
    arguments = ["--train", f"[{tmp_path / 'corpus.h5'}]", "--vocabulary", tmp_path / "genes.safetensors"]
    arguments += ["--svd_start", "true", "--training.learning_rate", "1e-9"]
    assert "pack those into validation" in command(*arguments, "--validation_studies", "[a]")[1]
    assert command(*arguments, "--validation", "null")[0] == 0
    model = load_model(options[1] / "model", device="cpu")
    expected = fit_linear_map(PackedCells(tmp_path / "corpus.h5"), model_options["anchor_linear_dim"])
    weight = torch.from_numpy(expected.weight)
    torch.testing.assert_close(model.anchor.table.weight[3:], weight[3:], atol=1e-6, rtol=0)
    lead = model.embedding.gene.weight[3:, : model_options["anchor_linear_dim"]]
    cosine = torch.nn.functional.cosine_similarity(lead, weight[3:], dim=1)
    assert cosine[weight[3:].any(dim=1)].min() > 0.999
    decoder = torch.load(options[1] / "last.ckpt", weights_only=True)["state_dict"]["decoder.linear.bias"]
    frequency = torch.from_numpy(expected.frequency[3:]).clamp_min(1e-7)
    torch.testing.assert_close(decoder, frequency.log().float(), atol=1e-5, rtol=0)


def test_config_and_manifest_are_there_from_the_start(files, options, command, monkeypatch):
    _, run = options
    with interrupted(monkeypatch, 0):
        assert command("--validation_cells", "30")[0] == 130
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert written["training"].keys() == PretrainingConfig().to_dict().keys()
    assert written["training"]["learning_rate"] == 3e-4  # the default
    assert (written["model"]["dim"], written["model"]["anchor_balance"]) == (16, 2.0)
    assert (written["validation_cells"], written["preset"]) == (30, None)
    manifest = json.loads((run / "manifest.json").read_text())
    a = files / "a.h5ad"
    assert manifest["files"]["train"]["a.h5ad"] == {"path": str(a)} | file_note(a)
    assert [(one["study"], one["part"], one["cells"]) for one in manifest["studies"]] == [
        ("a", "train", 40), ("b", "train", 20), ("c", "validation", 20),
    ]  # fmt: skip
    # what was written starts the same run, and the model holds it too
    assert command("--out", run / "again", config=run / "config.yaml")[0] == 0
    metadata = load_model(run / "again" / "model", device="cpu").metadata
    assert metadata["config"] == written | {"out": str(run / "again")}
    assert metadata["corpus"] == manifest["studies"]


def test_a_preset_is_the_start_and_options_go_before_it(options, command, monkeypatch):
    """Default, preset, configuration file, command line: each goes before the last."""
    received = {}
    monkeypatch.setattr(_pretrain, "pretrain", lambda **arguments: received.update(arguments) or "")
    file, _ = options
    content = yaml.safe_load(file.read_text()) | {"preset": "mini", "model": {"dim": 16}}
    file.write_text(yaml.safe_dump(content | {"training": {"steps": 7, "clip": 0.5}}))
    for words, training in [
        (["--training.steps", "9", "--model.ffn_dim", "40"], PretrainingConfig.preset("mini", steps=9, clip=0.5)),
        (["--preset", "base"], PretrainingConfig.preset("base", steps=7, clip=0.5)),
        (["--preset", "null"], PretrainingConfig(steps=7, clip=0.5)),
    ]:
        assert command(*words)[0] == 0
        assert received["training"] == training
        if "--model.ffn_dim" in words:
            expected = ScDiVaConfig.preset("mini", dim=16, ffn_dim=40)
            assert _pretrain._model_config("mini", received["model"]) == expected


def test_a_changed_file_stops_a_resumed_run_before_it_is_read(files, command, tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a", "b"):
        (data / f"{name}.h5ad").write_bytes((files / f"{name}.h5ad").read_bytes())
    with interrupted(monkeypatch, 3):
        assert command("--train", f"[{data}]")[0] == 130
    resumed = ["--train", f"[{data}]", "--resume", "true"]
    adata = ad.read_h5ad(data / "b.h5ad")
    adata.X.data[3] += 1
    adata.write_h5ad(data / "b.h5ad")
    with monkeypatch.context() as patch:
        patch.setattr("scdiva.data.datamodule.CellDataModule._open", None)
        code, output = command(*resumed)
    assert (code, len(output.splitlines())) == (1, 1)
    assert "1 of 2 files have changed since the run began (first: 'b.h5ad')" in output
    (data / "b.h5ad").write_bytes((files / "b.h5ad").read_bytes())
    assert "min_genes: 1 then, 2 now" in command(*resumed, "--min_genes", "2")[1]
    assert command(*resumed)[0] == 0


@pytest.mark.filterwarnings("ignore:.* cells are left out")
def test_studies_that_validate_are_not_counted_and_cells_too_small_are_dropped(files, options, command):
    _, run = options
    arguments = ["--validation", "null", "--train", f"[{files}]", "--validation_studies", "[b]", "--min_genes", "47"]
    assert command(*arguments)[0] == 0
    studies = {one["study"]: one for one in json.loads((run / "manifest.json").read_text())["studies"]}
    assert [(name, one["part"]) for name, one in studies.items()] == [
        ("a", "train"), ("b", "validation"), ("c", "train"),
    ]  # fmt: skip
    genes = Vocabulary.read(files / "genes.safetensors")
    histogram = corpus_entropy([files / "a.h5ad", files / "c.h5ad"], genes, min_genes=47)
    np.testing.assert_array_equal(
        Vocabulary.read(run / "vocabulary.safetensors").table["entropy"], histogram.entropy()[3:]
    )
    assert histogram.n_cells == studies["a"]["cells"] + studies["c"]["cells"]
    assert 0 < studies["a"]["cells_dropped"] < 40
