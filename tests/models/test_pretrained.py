from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from scdiva._settings import settings
from scdiva.models import ScDiVa, ScDiVaConfig, load_model, pretrained, save_model
from scdiva.models.pretrained import load_for
from scdiva.models.storage import SUMMED, available, find_model, write_sums
from scdiva.tokenizer.vocabulary import Vocabulary

FILES = {"config.json", "model.safetensors", "vocabulary.safetensors", "README.md", "SHA256SUMS"}
SIZES = {"n_genes": 12, "dim": 16, "n_layers": 2, "n_heads": 2, "ffn_dim": 24}
SMALL = SIZES | {"anchor_linear_dim": 8, "anchor_hidden": 8}


def make_vocabulary(n: int = 12) -> Vocabulary:
    names = {"ensembl_id": [f"ENSG{i:011d}" for i in range(n)], "symbol": [f"GENE{i}" for i in range(n)]}
    annotation = {"previous": "", "alias": "", "biotype": "protein_coding"}
    return Vocabulary(pd.DataFrame(names | annotation | {"entropy": np.linspace(0.2, 1.5, n, dtype=np.float32)}))


def make_model(seed: int = 0, **changes) -> ScDiVa:
    return ScDiVa(ScDiVaConfig(**{**SMALL, **changes}), generator=torch.Generator().manual_seed(seed)).eval()


def embed(model: ScDiVa) -> torch.Tensor:
    tokens = torch.tensor([3, 5, 9, 14, 7, 4])
    values = torch.tensor([2.0, 1.5, 0.7, 0.2, 3.0, 1.0])
    with torch.no_grad():
        return model.encode(tokens, values, torch.tensor([0, 4, 6], dtype=torch.int32))


@pytest.fixture
def folder(tmp_path):
    return save_model(make_model(), make_vocabulary(), tmp_path / "model", metadata={"steps": 7})


@pytest.mark.parametrize(
    "changes", [{}, {"tie_gene_head": True}, {"anchor": "learned"}, {"integrated": True, "adapted": 5}]
)
def test_what_is_saved_comes_back(tmp_path, changes):
    model, vocabulary = make_model(**changes), make_vocabulary()
    folder = save_model(model, vocabulary, tmp_path / "deep" / "model", metadata={"steps": 7})
    assert {path.name for path in folder.iterdir()} == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    stream = torch.get_rng_state()
    loaded = load_model(folder, device="cpu")
    assert torch.equal(torch.get_rng_state(), stream), "loading draws nothing"
    assert (loaded.config, loaded.vocabulary, loaded.metadata) == (model.config, vocabulary, {"steps": 7})
    assert not loaded.training
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name
        assert weight.dtype == after[name].dtype
    assert torch.equal(embed(model), embed(loaded))


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_half_precision_is_stored_and_loaded_as_float32(tmp_path, dtype, bits):
    model = make_model()
    folder = save_model(model, make_vocabulary(), tmp_path / "model", dtype=dtype)
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {getattr(torch, dtype)}
    loaded = load_model(folder, device="cpu")
    for (name, before), after in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert after.dtype == torch.float32
        assert torch.allclose(before, after, rtol=2.0**-bits, atol=1e-7), name
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}


def test_a_card_is_kept_and_a_default_one_says_what_is_known(tmp_path):
    with_card = save_model(make_model(), make_vocabulary(), tmp_path / "a", "# Mine\n")
    assert (with_card / "README.md").read_text() == "# Mine\n"
    default = save_model(make_model(), make_vocabulary(), tmp_path / "b", metadata={"corpus": "31,303 cells"})
    text = (default / "README.md").read_text()
    assert "12 genes" in text
    assert "corpus: 31,303 cells" in text


def test_a_loaded_model_is_given_back(folder):
    model = load_model(folder, device="cpu")
    assert load_model(model) is model
    with pytest.raises(ValueError, match="has no vocabulary"):
        load_model(make_model())
    with pytest.raises(TypeError, match=r"model must be .*got dict"):
        load_model({})


# --- errors on saving ------------------------------------------------------------------------------------------------
def test_nothing_is_overwritten_unasked_or_by_a_save_that_fails(folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_model(make_model(1), make_vocabulary(), folder)
    broken = make_model(1)
    broken.vocabulary = make_vocabulary()
    with torch.no_grad():
        broken.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"'norm.weight' are NaN or infinite"):
        broken.save(folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    save_model(make_model(1), make_vocabulary(), folder, overwrite=True)
    assert torch.equal(embed(load_model(folder, device="cpu")), embed(make_model(1)))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_bad_input_to_save_is_refused_before_anything_is_written(tmp_path):
    model, vocabulary, path = make_model(), make_vocabulary(), tmp_path / "model"
    name, weight = next(iter(model.named_parameters()))
    with torch.no_grad():
        weight.view(-1)[0] = 1e6
    for genes, options, message in (
        (make_vocabulary(n=11), {}, r"12 genes .*vocabulary holds 11"),
        (vocabulary, {"dtype": "float8"}, "float8"),
        (vocabulary, {"metadata": {"x": float("nan")}}, "plain JSON"),
        (vocabulary, {"metadata": {"x": object()}}, "plain JSON"),
        (vocabulary, {"dtype": "float16"}, f"1 values of '{name}' are too large for float16"),
    ):
        with pytest.raises(ValueError, match=message):
            save_model(model, genes, path, **options)
    with pytest.raises(ValueError, match=r"no vocabulary: set `model\.vocabulary`"):
        model.save(path)
    assert list(tmp_path.iterdir()) == []


# --- errors on loading -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(FILES))
def test_a_missing_or_renamed_file_is_named(folder, name):
    (folder / name).rename(folder / f"old_{name}")
    with pytest.raises(FileNotFoundError, match=f"lacks {name}"):
        load_model(folder, device="cpu")


def test_a_sum_file_of_other_content_is_refused(folder):
    file = folder / "SHA256SUMS"
    lines = file.read_text().splitlines()
    for wrong in (lines[:-1], [*lines, lines[0]], [*lines, lines[0].split("  ")[0] + "  more.bin"], ["garbage"], []):
        file.write_text("\n".join(wrong))
        with pytest.raises(ValueError, match="SHA256SUMS must list"):
            load_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=2), "format version 2 .* reads version 1.*update scdiva"),
        (lambda c: c.pop("format_version"), "format version None"),
        (lambda c: c.update(format="other"), "no entry format = 'scdiva'"),
        (lambda c: c.update(note="?"), "must hold"),
        (lambda c: c["model"].update(depth=3), "'model' is not a ScDiVaConfig.*depth"),
        (lambda c: c["model"].update(dim="16"), "'model' is not a ScDiVaConfig.*dim"),
        (lambda c: c["model"].update(rope_base=10**400), "'model' .*rope_base"),
        (lambda c: c["model"].update(n_layers=1001), "'model' .*n_layers .*1,000"),
        (lambda c: c["model"].update(dict.fromkeys(map(str, range(9999)))), r"unknown: 0, 1, .*, \.\.\."),
        (lambda c: c["model"].update(n_genes=13), "13 genes.*vocabulary.safetensors holds 12"),
        (lambda c: c["model"].update(ffn_dim=32), "has shape"),
        (lambda c: c["model"].update(n_layers=3), "lacks .* tensors"),
        (lambda c: c["model"].update(n_layers=1), "has in excess .* tensors"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, change, message):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    write_sums(folder, SUMMED)
    with pytest.raises(ValueError, match=message):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, n: w.pop(n), "lacks 1 tensors, .* first '{n}'"),
        (lambda w, n: w.update(extra=torch.zeros(2)), "has in excess 1 tensors, .* first 'extra'"),
        (lambda w, n: w.update({n: w[n][:-1].clone()}), "'{n}' has shape"),
        (lambda w, n: w.update({n: w[n].to(torch.int64)}), "'{n}' is stored as torch.int64"),
        (lambda w, n: w.update({n: w[n] * float("nan")}), "'{n}' holds NaN"),
        (lambda w, n: w.update({n: w[n].double() + 1e300}), "'{n}' is stored as torch.float64"),  # infinite in float32
        (lambda w, n: w.update({n: w[n].to(torch.float8_e4m3fn)}), "'{n}' is stored as torch.float8_e4m3fn"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder, change, message):
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = sorted(weights)[0]
    change(weights, name)
    save_file(weights, file)
    write_sums(folder, SUMMED)
    with pytest.raises(ValueError, match=message.replace("{n}", name)):
        load_model(folder, device="cpu")


# --- names -----------------------------------------------------------------------------------------------------------


def test_bundled_models_load_by_name(tmp_path, monkeypatch):
    for name in available():
        model = load_model(name, device="cpu")
        assert model.vocabulary.n_genes == model.config.n_genes
        assert np.isfinite(model.vocabulary.entropy).all()
    monkeypatch.setattr("scdiva.models.storage._BUNDLED", tmp_path)
    assert available() == []
    save_model(make_model(), make_vocabulary(), tmp_path / "tiny")
    assert available() == ["tiny"]
    assert find_model("tiny") == tmp_path / "tiny"
    assert torch.equal(embed(load_model("tiny", device="cpu")), embed(make_model()))
    with pytest.raises(FileNotFoundError, match=r"no model 'scdiva-maxi'.*bundled models are tiny"):
        load_model("scdiva-maxi")


def test_a_name_given_twice_is_one_network(folder):
    first = load_for(folder, "cpu")
    assert load_for(str(folder), "cpu") is first
    assert load_for(first, "cpu") is first
    user_copy = load_model(folder)
    assert user_copy is not first
    assert user_copy.vocabulary is first.vocabulary
    with torch.no_grad():
        user_copy.blocks[0].ffn.down.weight.zero_()  # a user's copy is the user's
    assert load_for(str(folder), "cpu") is first


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.blocks[0].ffn.down.weight.data.copy_(torch.zeros(16, 24)),
        lambda model: model.norm.weight.detach().mul_(2.0),
        lambda model: model.train(),
        lambda model: model.requires_grad_(False),
        lambda model: model.blocks.pop(0),
        lambda model: model.half(),
        lambda model: model.metadata.update(corpus="another"),
    ],
)
def test_a_network_that_was_changed_is_read_again(folder, change):
    before = embed(load_model(folder))
    first = load_for(folder, "cpu")
    change(first)
    again = load_for(folder, "cpu")
    assert again is not first
    assert again.metadata.get("corpus") != "another"
    assert not again.training
    assert all(p.requires_grad for p in again.parameters())
    assert torch.equal(embed(again), before)
    with settings.override(keep_model=False):
        first = load_for(folder, "cpu")
        assert not pretrained._cache
        assert load_for(folder, "cpu") is not first
