from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import scdiva as sd
from scdiva.models import ScDiVa, ScDiVaConfig, load, push, save_model
from scdiva.tokenizer.vocabulary import Vocabulary

pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def model():
    columns = {
        "ensembl_id": [f"ENSG{i:011d}" for i in range(12)], "symbol": [f"GENE{i}" for i in range(12)],
        "previous": "", "alias": "", "biotype": "protein_coding",
        "entropy": np.linspace(0.2, 1.5, 12, dtype=np.float32),
    }  # fmt: skip
    config = ScDiVaConfig(n_genes=12, dim=16, n_layers=1, n_heads=2, ffn_dim=24, anchor="learned")
    network = ScDiVa(config, generator=torch.Generator().manual_seed(0)).eval()
    object.__setattr__(network, "vocabulary", Vocabulary(pd.DataFrame(columns)))
    object.__setattr__(network, "metadata", {"steps": 7})
    return network


@pytest.fixture
def folder(model, tmp_path):
    return save_model(model, model.vocabulary, tmp_path / "model", card="# Mine\n", metadata={"steps": 7})


def same(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_pushed_model_comes_back_by_name_and_by_commit(hub, model, tmp_path):
    address = push(model, "hf://lab/atlas", card="# Our atlas\n")
    assert address == f"hf://lab/atlas@{hub.repos['lab/atlas'][-1][0]}"
    for name in ("hf://lab/atlas", address):
        back = load(name, device="cpu")
        assert same(back, model)
        assert back.metadata == {"steps": 7}
    files = hub.repos["lab/atlas"][-1][1]
    assert set(files) == {"config.json", "model.safetensors", "vocabulary.safetensors", "README.md", "SHA256SUMS"}
    head, card = files["README.md"].decode().split("---\n\n")
    assert "library_name: scdiva" in head
    assert card == "# Our atlas\n"
    assert hub.private == set()


def test_a_folder_is_pushed_as_it_is_but_for_the_head_of_its_card(hub, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    push(folder, "hf://lab/mine", private=True)
    sent = hub.repos["lab/mine"][-1][1]
    assert {name for name in before if sent[name] != before[name]} == {"README.md", "SHA256SUMS"}
    assert sent["README.md"].endswith(before["README.md"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert hub.private == {"lab/mine"}
    # once there, a card that has a head keeps it
    push(folder, "hf://lab/mine", card=sent["README.md"].decode())
    assert hub.repos["lab/mine"][-1][1] == sent


@pytest.mark.fault("offline hub")
def test_a_model_that_was_fetched_is_not_fetched_again_and_loads_offline(hub, folder):
    sha = hub.put("lab/atlas", folder)
    load("hf://lab/atlas", device="cpu")
    files = "README.md", "SHA256SUMS", "config.json", "model.safetensors", "vocabulary.safetensors"
    assert hub.downloads == dict.fromkeys(files, 1)
    load("hf://lab/atlas", device="cpu")
    load(f"hf://lab/atlas@{sha}", device="cpu")
    hub.down = True
    load("hf://lab/atlas", device="cpu")
    hub.leave()
    load("hf://lab/atlas", device="cpu")
    assert set(hub.downloads.values()) == {1}


def one_line(info) -> None:
    assert "\n" not in str(info.value)
    assert len(str(info.value)) < 500


def test_what_is_not_there_is_said_in_one_line(hub, folder):
    hub.put("lab/atlas", folder)
    hub.commit("lab/data", {"table.csv": b"a,b\n"})
    for address, error, message in (
        ("hf://lab/other", FileNotFoundError, "hf://lab/other is not there"),
        ("hf://lab/atlas@v2", FileNotFoundError, "hf://lab/atlas@v2 is not there"),
        ("hf://lab/data", FileNotFoundError, "no model of scdiva"),
        *(
            (name, ValueError, "not the address of a model")
            for name in ("hf://lab/at las", "hf://", "hf://a/b/c", "hf:///b")
        ),
    ):
        with pytest.raises(error, match=message) as info:
            load(address)
        one_line(info)


@pytest.mark.parametrize("how", ["down", "gone", "offline"])
def test_without_a_connection_it_says_so_in_one_line(hub, how, monkeypatch):
    if how == "down":
        hub.down = True
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    elif how == "gone":
        hub.leave()
    else:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"Hub .*reached.*cache") as info:
        load("hf://lab/atlas")
    one_line(info)


def test_pushing_without_connection_or_right_is_said_in_one_line(hub, folder, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.utils._auth._get_token_from_file", lambda: None)
    with pytest.raises(PermissionError, match="hf auth login") as info:
        push(folder, "hf://lab/atlas")
    one_line(info)
    hub.leave()
    with pytest.raises(ConnectionError, match="can't be reached") as info:
        push(folder, "hf://lab/atlas")
    one_line(info)


def test_a_file_that_was_damaged_is_refused_with_the_call_that_mends_it(hub, folder):
    hub.put("lab/atlas", folder)
    cached = sd.models.storage.fetch("hf://lab/atlas") / "model.safetensors"
    data = bytearray(cached.read_bytes())
    data[-3] ^= 1
    cached.resolve().write_bytes(data)
    with pytest.raises(ValueError, match=r"SHA256SUMS.*: huggingface_hub\.") as info:
        load("hf://lab/atlas")
    exec("import huggingface_hub; " + str(info.value).split("again: ")[1])
    load("hf://lab/atlas", device="cpu")

    # swapped on the hub itself
    (folder / "config.json").write_text("{}")
    hub.put("lab/swapped", folder)
    with pytest.raises(ValueError, match=r"config\.json does not match"):
        load("hf://lab/swapped")


def test_nothing_damaged_is_pushed(hub, folder, model):
    (folder / "vocabulary.safetensors").write_bytes(b"other")
    with pytest.raises(ValueError, match="does not match SHA256SUMS"):
        push(folder, "hf://lab/atlas")
    bare = ScDiVa(model.config, generator=torch.Generator())
    with pytest.raises(ValueError, match="no vocabulary"):
        push(bare, "hf://lab/atlas")
    with pytest.raises(ValueError, match="leave @v1 out"):
        push(model, "hf://lab/atlas@v1")
    for address in ("lab/atlas", "hf://atlas", ""):
        with pytest.raises(ValueError, match="not the address"):
            push(model, address)
    assert hub.repos == {}
