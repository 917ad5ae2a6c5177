"""Every row names the weights that it used, and the page refuses rows of others that don't say why."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save


@pytest.fixture
def weights(script):
    return script("_weights")


def tensors(**changes):
    found = {
        "anchor.table.weight": np.arange(6, dtype=np.float16).reshape(2, 3),
        "embedding.gene.weight": np.ones((2, 2), dtype=np.float16),
        "state_head.value": np.zeros(3, dtype=np.float16),
        "blocks.0.ffn.up.weight": np.ones(4, dtype=np.float16),
    }
    return found | changes


def test_a_part_has_its_fingerprint_whatever_it_is_stored_as(weights):
    base = weights.fingerprints(save(tensors()))
    assert set(base) == {"encoder", "genes", "state_head", "transformer"}
    assert len(set(base.values())) == 4
    single = {name: tensor.astype(np.float32) for name, tensor in reversed(tensors().items())}
    assert weights.fingerprints(save(single)) == base
    for name, part in (
        ("anchor.table.weight", "encoder"), ("embedding.gene.weight", "genes"), ("state_head.value", "state_head"),
        ("blocks.0.ffn.up.weight", "transformer"),
    ):  # fmt: skip
        other = weights.fingerprints(save(tensors(**{name: tensors()[name] + np.float16(0.5)})))
        assert [one for one in base if other[one] != base[one]] == [part]
    # the same numbers in another shape are another table
    reshaped = {"anchor.table.weight": tensors()["anchor.table.weight"].reshape(3, 2)}
    assert weights.fingerprints(save(tensors(**reshaped)))["encoder"] != base["encoder"]


def test_rows_are_stamped_as_they_are_written(script, weights, tmp_path, monkeypatch):
    record, shipped = script("_record"), weights.of_model()
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    rows = [
        {"set": "a", "arm": "scdiva"}, {"set": "a", "arm": "pca"}, {"set": "a", "arm": "new_here"},
        {"set": "a", "arm": "scdiva", "weights": {"encoder": "of before"}},
        {"set": "a", "arm": "left_out", "weights_note": "why"}, {"what": "goal", "met": True},
    ]  # fmt: skip
    record.record("zero_shot", rows, model="scdiva-mini")
    found = json.loads((tmp_path / "zero_shot.json").read_text())["rows"]
    encoder = {"encoder": shipped["encoder"]}
    assert [row.get("weights") for row in found] == [encoder, None, encoder, {"encoder": "of before"}, None, None]
    assert "weights" not in rows[0]
    record.record("learning_curve", [{"curve": "cells"}])
    (row,) = json.loads((tmp_path / "learning_curve.json").read_text())["rows"]
    assert "trains its own" in row["weights_note"]
    record.record("loss", [{"what": "a", "value": 1.5}])
    assert json.loads((tmp_path / "loss.json").read_text())["rows"] == [{"what": "a", "value": 1.5}]


def test_an_arm_names_the_parts_that_it_reads(weights):
    def read(name, **row):
        return weights.parts_read(name, row)

    assert read("zero_shot", arm="scdiva") == ("encoder",)
    assert read("reconstruction", part="masked", arm="ours") == weights.WHOLE
    assert read("reconstruction", part="impute", arm="ours") == ("encoder", "state_head", "query_head")
    assert read("reconstruction", part="impute", arm="scvi") == ()
    assert read("grn", arm="embedding") == ("encoder", "genes")
    assert read("pooling", pooling="state") == ("encoder",)
    assert read("scaling", call="entropy") == ()
    assert read("integration", arm="own_components") == ()
    assert "without kang_pbmc_stim_2000" in weights.own_weights("sister_studies", {"trained": "left_out"})
    assert weights.own_weights("sister_studies", {"trained": "shipped"}) is None
    assert read("embedding", what="share of matmul rate") == ()


def test_rows_of_other_weights_are_refused(weights):
    shipped = {"encoder": "e1", "transformer": "t1"}
    own = {"set": "a", "arm": "scdiva", "weights": {"encoder": "e1"}}
    assert weights.refused("zero_shot", [own, {"set": "a", "arm": "pca"}], shipped) == []
    # another transformer leaves rows of the set encoder as they are
    assert weights.refused("zero_shot", [own], {**shipped, "transformer": "t2"}) == []
    (other,) = weights.refused("zero_shot", [own], {**shipped, "encoder": "e2"})
    assert other == "zero_shot: a scdiva: another encoder than the one shipped"
    (silent,) = weights.refused("zero_shot", [{"set": "a", "arm": "scdiva"}], shipped)
    assert "no fingerprint of encoder" in silent
    said = {**own, "weights": {"encoder": "e9"}, "weights_note": "a study left out"}
    assert weights.refused("zero_shot", [said], shipped) == []
    assert weights.notes([own, said]) == "Rows of other weights than those shipped (`scdiva`): a study left out.\n"


def test_the_page_is_not_written_of_other_weights(script, weights, tmp_path, monkeypatch, capsys):
    tables = script("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "_static").mkdir()
    page = tmp_path / "results" / "embedding.md"
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    scores = {key: 0.5 for name in (*tables.SCORES, "average_bio") for key in (name, f"{name}_sd")}
    row = {"set": "some", "arm": "scdiva", "n_cells": 9, "cpu_seconds": 1.0, "wall_seconds": 1.0, **scores}
    machine = {"processor": "Some CPU", "cores": 2, "python": "3.11.7"}
    entry = {"command": "c", "commit": "0123", "date": "2026-01-02", "machine": machine, "versions": {}}

    def write(**more):
        (tmp_path / "zero_shot.json").write_text(json.dumps({**entry, "rows": [{**row, **more}]}))
        return tables.main()

    assert write(weights={"encoder": "0" * 16}) == 1
    assert "zero_shot: some scdiva: another encoder" in capsys.readouterr().err
    assert write() == 1
    assert not page.exists()
    assert write(weights={"encoder": weights.of_model()["encoder"]}) == 0
    assert write(weights={"encoder": "0" * 16}, weights_note="a study left out", name="another model") == 0
    assert "(`scdiva`): a study left out." in page.read_text()


def test_the_committed_rows_are_of_the_weights_that_are_shipped(script):
    assert script("tables").of_other_weights() == []


def test_the_committed_goals_are_those_that_the_committed_rows_give(script):
    restate = script("restate")
    for name, module in restate.GOALS.items():
        result = json.loads((restate.RESULTS / f"{name}.json").read_text())
        rows = [row for row in result["rows"] if "met" not in row]
        stored = [row for row in result["rows"] if "met" in row]
        again = json.loads(json.dumps(script(module).goals(rows)))
        assert stored == again, f"python benchmarks/restate.py and commit {name}.json"
