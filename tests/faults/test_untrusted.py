"""Untrusted corpora, models and datasets: only their own files are read, with memory bounded by their size."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil

import anndata as ad
import h5py
import numpy as np
import pytest
import torch

import scdiva as sd
from scdiva import cli
from scdiva._files import MOST_TEXT
from scdiva.data import PackedCells, open_cells, pack_files
from scdiva.models import load, load_model, save_model
from scdiva.models.storage import SUMMED, write_sums
from scdiva.train import PretrainingConfig, pretrain


@pytest.fixture(scope="module")
def corpus(model, drawn, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    drawn.copy().write_h5ad(folder / "s.h5ad")
    pack_files([folder / "s.h5ad"], model.vocabulary, folder / "packed", part_cells=50)
    return folder / "packed"


@pytest.fixture
def packed(corpus, tmp_path):
    return shutil.copytree(corpus, tmp_path / "packed")


@pytest.fixture
def folder(model, tmp_path):
    return save_model(model, model.vocabulary, tmp_path / "model")


def index(folder, change, sums=False):
    """Change the index of a corpus; with `sums`, also its checksum, as an attacker would."""
    content = json.loads((folder / "index.json").read_text())
    change(content)
    if sums:
        content["sha256"] = hashlib.sha256(
            json.dumps([part["sha256"] for part in content["parts"]]).encode()
        ).hexdigest()
    (folder / "index.json").write_text(json.dumps(content))


def read_corpus(folder):
    corpus = PackedCells(folder)
    return corpus.read(0, corpus.n_obs)


# --- a corpus ---------------------------------------------------------------------------------------------------------
LIES = {
    "a part above": lambda i, f: i["parts"][0].update(file="../secret.bin"),
    "a part by its absolute path": lambda i, f: i["parts"][0].update(file=str(f.parent / "secret.bin")),
    "an array by its absolute path": lambda i, f: i["arrays"].update(lengths=str(f / i["arrays"]["lengths"])),
    "a folder": lambda i, f: i["parts"][0].update(file=".."),
    "an offset that is text": lambda i, f: i["parts"][0]["at"].update(tokens="x"),
    "a negative offset": lambda i, f: i["parts"][1]["at"].update(values=-4),
    "fewer tokens": lambda i, f: i.update(n_tokens=5),
    "more cells": lambda i, f: i["parts"][0].update(cells=51),
    "another checksum": lambda i, f: i["parts"][0].update(sha256="0" * 64),
    "a depth of 900": lambda i, f: i.update(x=eval("[" * 80 + "]" * 80)),
}
"""The first four name files outside the folder."""


@pytest.mark.fault("untrusted corpus")
@pytest.mark.parametrize("what", LIES)
def test_an_index_that_lies(packed, what):
    np.arange(9999, dtype=np.uint16).tofile(packed.parent / "secret.bin")
    index(packed, lambda i: LIES[what](i, packed))
    elsewhere = what in [*LIES][:4]
    pattern = r": index\.json names .* not a file in its folder" if elsewhere else ""
    with pytest.raises(ValueError, match=rf"packed' is damaged{pattern}"):
        read_corpus(packed)


@pytest.mark.fault("untrusted corpus")
@pytest.mark.parametrize(("name", "value"), [("values", np.nan), ("tokens", 60_000)])
@pytest.mark.parametrize("sums", [False, True])
def test_a_part_that_was_changed(packed, name, value, sums):
    """Detected by the checksum, or, if that was changed too, by an unknown token or a value that is not a number."""
    (part,) = packed.glob("part-*-000000000-*.h5")
    with h5py.File(part, "r+") as file:
        column = file[name]
        column[0] = value
        lengths = np.load(next(packed.glob("lengths-*")))[:50].astype(np.int64)
        content = np.concatenate([[0], lengths]).cumsum().tobytes()
        content += file["tokens"][:].tobytes() + file["values"][:].tobytes()
    if sums:
        index(packed, lambda i: i["parts"][0].update(sha256=hashlib.sha256(content).hexdigest()), sums=True)
    with pytest.raises(ValueError, match=r"damaged: .*(does not match its checksum|tokens outside|not finite)"):
        read_corpus(packed)


@pytest.mark.fault("untrusted corpus")
@pytest.mark.parametrize("name", ["index.json", "lengths-*", "part-*-000000000-*"])
def test_what_is_no_file_is_not_waited_for(packed, name):
    (file,) = packed.glob(name)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=r"is not a regular file"):
        PackedCells(packed)


# --- cells ------------------------------------------------------------------------------------------------------------
@pytest.mark.fault("files that lead elsewhere")
@pytest.mark.parametrize("how", ["external link", "external storage", "virtual", "FIFO"])
def test_cells_that_lead_elsewhere(drawn, model, tmp_path, how):
    path, secret = tmp_path / "cells.h5ad", tmp_path / "secret.h5"
    drawn.copy().write_h5ad(path)
    with h5py.File(secret, "w") as file:
        file["x"] = np.arange(80.0)
    if how == "FIFO":
        path.unlink()
        os.mkfifo(path)
    else:
        with h5py.File(path, "r+") as file:
            if how == "external link":
                file["uns/secret"] = h5py.ExternalLink(str(secret), "x")
            elif how == "external storage":
                file.create_dataset("obsm/secret", (80, 1), "f8", external=str(secret))
            else:
                layout = h5py.VirtualLayout((80,), "f8")
                layout[:] = h5py.VirtualSource(str(secret), "x", (80,))
                file.create_virtual_dataset("uns/secret", layout)
    with pytest.raises(ValueError, match=r"cells\.h5ad.*(another file|not a regular file)"):
        open_cells(path, model.vocabulary)


@pytest.mark.fault("size and depth limits")
@pytest.mark.parametrize("what", ["a row", "an array"])
def test_cells_that_claim_billions_of_values(drawn, model, tmp_path, what):
    path = tmp_path / "cells.h5ad"
    drawn.copy().write_h5ad(path)
    with h5py.File(path, "r+") as file:
        if what == "a row":
            file["X/indptr"][:] = [0, *[file["X/indptr"][-1]] * 80]
        else:
            for name in ("data", "indices"):
                old = file["X"].pop(name)
                file["X"].create_dataset(name, (1 << 40,), old.dtype, chunks=(1 << 20,))
    with pytest.raises(ValueError, match=r"cells\.h5ad.*(values for 60 genes|claims 4,398,046,511,104 bytes)"):
        open_cells(path, model.vocabulary)


# --- a model ----------------------------------------------------------------------------------------------------------
@pytest.mark.fault("size and depth limits")
@pytest.mark.parametrize("name", SUMMED)
def test_a_file_larger_than_any_is_refused_before_it_is_read(folder, name):
    with (folder / name).open("r+b") as file:
        file.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=f"{name}' has 1,099,511,627,776 bytes"):
        load_model(folder, device="cpu")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 50_000  # KiB


@pytest.mark.fault("size and depth limits")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 900 + "]" * 900, "more than 64 nested levels"),
        ("[" + "[]," * 1_500_000 + "0]", "more than 2,000,000 values"),
        ('"' + "x" * MOST_TEXT + '"', "the maximum is 16,777,216"),
    ],
)
def test_a_configuration_that_costs_more_than_it_says(folder, text, message):
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"metadata": {}', '"metadata": {"x": ' + text + "}"))
    write_sums(folder, SUMMED)
    with pytest.raises(ValueError, match=f"config.json.* {message}"):
        load_model(folder, device="cpu")


@pytest.mark.fault("size and depth limits")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\ngroups: [*b, *b]\n", "has an alias"),
        ("groups: " + "[" * 100_000 + "]" * 100_000, "nested more than 64 deep"),
        ("groups: [" + "x," * 600_000 + "]", "the maximum is 1,048,576"),
    ],
)
def test_options_that_cost_more_than_they_say(tmp_path, capsys, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(SystemExit):
        cli.main(["embed", "c.h5ad", "-o", "o.h5ad", "--config", str(tmp_path / "run.yaml")])
    assert message in capsys.readouterr().err


@pytest.mark.fault("escape codes in files")
@pytest.mark.parametrize("where", ["metadata", "a field", "uns", "a name"])
def test_escape_codes_do_not_reach_the_terminal(folder, drawn, tmp_path, capsys, where):
    cells, evil = drawn.copy(), "x\x1b]0;evil\x07\x9b2J\r"
    config = json.loads((folder / "config.json").read_text())
    config["metadata"] |= {evil: evil} if where == "metadata" else {}
    config["model"] |= {evil: 1} if where == "a field" else {}
    (folder / "config.json").write_text(json.dumps(config))
    write_sums(folder, SUMMED)
    cells.uns["scdiva"] = {"note": evil if where == "uns" else ""}
    cells.write_h5ad(tmp_path / f"cells{evil * (where == 'a name')}.h5ad")
    (file,) = map(str, tmp_path.glob("cells*"))
    model = ["--model", str(folder)]
    for call in (["info", *model[1:]], ["info", *model[1:], "--json"], ["info", file, *model],
                 ["embed", file, "-o", file, *model]):  # fmt: skip
        code = cli.main(call)
        out, err = capsys.readouterr()
        assert not set("\x1b\x07\x9b\r") & set(out + err)
        if call[-1] == "--json" and where == "metadata":
            assert (code, json.loads(out)["metadata"]) == (0, {evil: evil})
    if where == "a field":
        with pytest.raises(ValueError, match=r"unknown: x\\u001b"):
            load_model(folder, device="cpu")


# --- a checkpoint -----------------------------------------------------------------------------------------------------
class Evil:
    def __reduce__(self):
        return os.mkdir, ("it ran",)


@pytest.fixture(scope="module")
def trained(model, drawn, tmp_path_factory):
    """A run of one step, and the call that resumes it."""
    at = tmp_path_factory.mktemp("run")
    drawn.copy().write_h5ad(at / "s.h5ad")
    model.vocabulary.write(at / "genes.safetensors")
    training = PretrainingConfig(steps=1, batch_size=8, context=40, precision="fp32")
    small = {"dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 24}

    def run(out, **more):
        return pretrain(
            str(at / "s.h5ad"), str(out), training, model=small, vocabulary=str(at / "genes.safetensors"), min_genes=1,
            accelerator="cpu", progress=False, **more,
        )  # fmt: skip

    run(at / "run")
    shutil.rmtree(at / "run" / "model")
    return at / "run", run


def weights(change):
    def edited(file):
        content = torch.load(file, weights_only=True)
        change(content)
        torch.save(content, file)

    return edited


CHECKPOINTS = {
    "cut short": lambda f: f.write_bytes(f.read_bytes()[:5000]),
    "code": lambda f: torch.save({"scdiva": Evil()}, f),
    "other weights": weights(lambda c: c["state_dict"].popitem()),
    "weights of another shape": weights(lambda c: c["state_dict"].update({next(iter(c["state_dict"])): torch.ones(3)})),
}


@pytest.mark.fault("damaged checkpoint")
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_checkpoint_that_is_damaged_is_named(trained, tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    run, resume = shutil.copytree(trained[0], tmp_path / "run"), trained[1]
    CHECKPOINTS[how](run / "last.ckpt")
    with pytest.raises(ValueError, match=r"run/last\.ckpt'? is (damaged|no checkpoint)") as caught:
        resume(run, resume=True)
    assert "weights_only" not in str(caught.getrepr(chain=True).reprcrash)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# --- files of the user ------------------------------------------------------------------------------------------------
@pytest.mark.fault("files of the user in a folder that is replaced")
@pytest.mark.parametrize("kind", ["model", "annotator", "zarr"])
def test_a_file_of_the_user_is_not_deleted(model, drawn, tmp_path, kind):
    if kind == "zarr":
        drawn.copy().write_h5ad(tmp_path / "c.h5ad")
        out = sd.tl.embed_file(tmp_path / "c.h5ad", tmp_path / "out.zarr", model=model)
        again = lambda: sd.tl.embed_file(tmp_path / "c.h5ad", out, model=model, overwrite=True)  # noqa: E731
    elif kind == "model":
        out = model.save(tmp_path / "out")
        again = lambda: model.save(out, overwrite=True)  # noqa: E731
    else:
        fitted = sd.tl.annotate(drawn[:20].copy(), "cell_type", drawn[20:].copy(), model=model, method="knn", rng=0)
        out = fitted.save(tmp_path / "out")
        again = lambda: fitted.save(out, overwrite=True)  # noqa: E731
    again()
    user_file = out / "model" / "notes.txt" if kind == "annotator" else out / "notes.txt"
    user_file.write_text("years of work")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        again()
    assert user_file.read_text() == "years of work"
    user_file.unlink()
    again()
    assert ad.read_zarr(out).n_obs == 80 if kind == "zarr" else load(out) is not None
