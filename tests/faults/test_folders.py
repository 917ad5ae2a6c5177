"""Faults of a model's folder: no code is run, no missing weight is filled in, and memory is bounded by the weights."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tracemalloc

import pytest
import torch

import scdiva as sd
from scdiva.models import load_model, save_model
from scdiva.models.storage import SUMMED, write_sums

FILES = ("README.md", "config.json", "model.safetensors", "vocabulary.safetensors")


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    return save_model(model, model.vocabulary, tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    write_sums(folder, SUMMED)


# --- damage -----------------------------------------------------------------------------------------------------------
@pytest.mark.fault("truncated weights")
@pytest.mark.parametrize("keep", [0, 7, 1000, -1])
@pytest.mark.parametrize("sums", ["old", "new"])
def test_weights_that_are_cut_short(folder, refused, drawn, keep, sums):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    if sums == "new":
        write_sums(folder, SUMMED)
    refused(lambda a: sd.tl.embed(a, folder), drawn, ValueError, "model.safetensors", "damaged")


@pytest.mark.fault("one flipped byte")
@pytest.mark.parametrize("name", [*FILES, "SHA256SUMS"])
@pytest.mark.parametrize("at", [0.0, 0.37, 0.99])
def test_one_flipped_byte_in_any_file(folder, refused, drawn, name, at):
    data = bytearray((folder / name).read_bytes())
    data[int(at * len(data))] ^= 0x40
    (folder / name).write_bytes(data)
    refused(lambda a: sd.tl.embed(a, folder), drawn, ValueError, name if name == "SHA256SUMS" else "SHA256SUMS")


@pytest.mark.fault("wrong vocabulary")
@pytest.mark.parametrize("which", ["fewer genes", "other genes", "another order", "no vocabulary"])
def test_another_models_vocabulary(folder, refused, drawn, model, which):
    table = model.vocabulary.table.reset_index(drop=True)
    vocabulary = {
        "fewer genes": table.iloc[:-1],
        "other genes": table.assign(symbol=[f"G{i}" for i in range(len(table))]),
        "another order": table.iloc[::-1].reset_index(drop=True),
        "no vocabulary": table,
    }[which]
    type(model.vocabulary)(vocabulary).write(folder / "vocabulary.safetensors")
    if which == "no vocabulary":
        (folder / "vocabulary.safetensors").write_bytes(b"something else")
    write_sums(folder, SUMMED)
    refused(lambda a: sd.tl.embed(a, folder), drawn, ValueError, "vocabulary.safetensors", "not the vocabulary|damaged")


@pytest.mark.fault("wrong vocabulary")
def test_a_model_without_its_vocabulary(model, refused, drawn):
    bare = type(model)(model.config, generator=torch.Generator())
    refused(lambda a: sd.tl.embed(a, bare), drawn, ValueError, "has no vocabulary", "save_model")


# --- pickles ----------------------------------------------------------------------------------------------------------
class Evil:
    """A pickle that leaves a mark when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.fault("a malicious pickle")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocabulary.safetensors", "README.md"])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_is_never_run(folder, tmp_path, drawn, refused, name, kind):
    mark = tmp_path / "it ran"
    if kind == "pickle":
        (folder / name).write_bytes(pickle.dumps(Evil(mark)))
    else:
        torch.save({"weight": Evil(mark)}, folder / name)
    write_sums(folder, SUMMED)
    if name == "README.md":  # any text; it is not looked into
        load_model(folder, device="cpu")
    else:
        refused(lambda a: sd.tl.embed(a, folder), drawn, ValueError, name)
    assert not mark.exists()


@pytest.mark.fault("path traversal in a model folder")
@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "model.safetensors/../../secret", "..\\secret"])
def test_sums_of_files_elsewhere(folder, tmp_path, refused, drawn, name):
    (tmp_path / "secret").write_text("a password")
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    (folder / "SHA256SUMS").write_text("\n".join([*lines[:-1], lines[-1].split("  ")[0] + "  " + name]) + "\n")
    message = refused(lambda a: sd.tl.embed(a, folder), drawn, ValueError, "must list README.md, config.json")
    assert "a password" not in message


@pytest.mark.fault("path traversal in a model folder")
@pytest.mark.parametrize("address", ["hf://../../etc", "hf://..", "hf://a/../b", "hf:///etc/passwd", "hf://../etc"])
def test_addresses_of_the_hub_that_lead_elsewhere(refused, drawn, address):
    refused(lambda a: sd.tl.embed(a, address), drawn, ValueError, r"not the address of a model|\.\./etc")


@pytest.mark.fault("offline hub")
@pytest.mark.parametrize(
    "call",
    [
        lambda a, m: sd.tl.embed(a, m),
        lambda a, m: sd.tl.annotate(a, "cell_type", model=m, method="knn", rng=0),
        lambda _, m: load_model(m, device="cpu"),
    ],
)
def test_a_model_that_is_neither_here_nor_to_be_had(refused, drawn, tmp_path, monkeypatch, call):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    refused(lambda a: call(a, "hf://owner/name"), drawn, OSError, "(?i)offline|outgoing traffic|internet|cache")


@pytest.mark.fault("symlinks in a model folder")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", ["nowhere", "itself", "a folder", "a device", "another file"])
def test_links_that_lead_to_no_such_file(folder, tmp_path, refused, drawn, name, where):
    (folder / name).unlink()
    (tmp_path / "secret").write_text("a password")
    targets = {"nowhere": "gone", "itself": folder / name, "a folder": tmp_path, "a device": "/dev/zero"}
    (folder / name).symlink_to(targets.get(where, tmp_path / "secret"))
    expected = (
        (ValueError, f"{name} does not match") if where == "another file" else (FileNotFoundError, f"lacks {name}")
    )
    message = refused(lambda a: sd.tl.embed(a, folder), drawn, *expected)
    assert "a password" not in message


@pytest.mark.fault("symlinks in a model folder")
def test_a_save_replaces_a_link_and_not_what_it_leads_to(saved, tmp_path, model):
    before = {name: (saved / name).read_bytes() for name in (*FILES, "SHA256SUMS")}
    (tmp_path / "link").symlink_to(saved)
    save_model(model, model.vocabulary, tmp_path / "link", card="# Another\n", overwrite=True)
    assert {name: (saved / name).read_bytes() for name in before} == before
    assert [path.name for path in tmp_path.iterdir()] == ["link"]
    assert (tmp_path / "link" / "README.md").read_text() == "# Another\n"


ABSURD = {
    "dim": 2**40,
    "n_layers": 10**9,
    "ffn_dim": 10**12,
    "anchor_hidden": 10**11,
    "anchor_linear_dim": 10**15,
    "state_rank": 10**10,
    "max_length": 10**18,
    "n_heads": 2**39,
    "n_genes": 10**12,
    "integrated_hidden": 10**20,
}


@pytest.mark.fault("absurd shapes in a config")
@pytest.mark.parametrize("field", ABSURD)
def test_absurd_sizes_are_refused_before_anything_is_allocated(folder, refused, drawn, field):
    def change(config):
        config["model"][field] = ABSURD[field]
        config["model"] |= {"integrated": True, "adapted": 20} if field == "integrated_hidden" else {}
        if field == "n_heads":
            config["model"]["dim"] = 2**40

    edit(folder, change)
    tracemalloc.start()
    if field == "max_length":  # it says how much is read, and no weight has its size
        load_model(folder, device="cpu")
    else:
        refused(lambda a: sd.tl.embed(a, folder), drawn, ValueError, "config.json|model.safetensors")
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()


@pytest.mark.fault("absurd shapes in a config")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is not JSON"),
        ('{"a":' * 50_000, "is not JSON"),
        ('{"format": ' + "9" * 5_000 + "}", "is not JSON"),
        ('{"format": "scdiva", "format_version": 1e999}', "format version inf"),
    ],
)
def test_json_that_is_meant_to_break_the_reader(folder, refused, drawn, text, message):
    (folder / "config.json").write_text(text)
    write_sums(folder, SUMMED)
    refused(lambda a: sd.tl.embed(a, folder), drawn, ValueError, "config.json", message)


@pytest.mark.fault("absurd shapes in a config")
@pytest.mark.parametrize("entry", ["model", "vocabulary", "metadata"])
@pytest.mark.parametrize("value", [None, [], "text", 7])
def test_an_entry_of_another_kind(folder, refused, drawn, entry, value):
    edit(folder, lambda config: config.update({entry: value}))
    refused(lambda a: sd.tl.embed(a, folder), drawn, ValueError, "config.json", f"'{entry}' must be an object")


@pytest.mark.fault("absurd shapes in a config")
@pytest.mark.parametrize("header", [2**63, 2**40, 200])
def test_weights_that_lie_about_their_size(folder, refused, drawn, header):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(header.to_bytes(8, "little") + data[8:])
    write_sums(folder, SUMMED)
    refused(lambda a: sd.tl.embed(a, folder), drawn, ValueError, "model.safetensors", "damaged")
