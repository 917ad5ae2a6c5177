"""Every row names the weights that it used, and the page refuses rows of others that don't say why."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save


@pytest.fixture
def weights(script):
    return script("_weights")


def test_a_part_has_its_fingerprint_whatever_it_is_stored_as(weights):
    parts = {"anchor.table.weight": "encoder", "embedding.gene.weight": "genes", "state_head.value": "state_head",
             "blocks.0.ffn.up.weight": "transformer"}  # fmt: skip
    tensors = {name: np.arange(6, dtype=np.float16).reshape(2, 3) for name in parts}
    base = weights.fingerprints(save(tensors))
    assert len(set(base.values())) == 4
    single = {name: tensor.astype(np.float32) for name, tensor in reversed(tensors.items())}
    assert weights.fingerprints(save(single)) == base
    for name, part in parts.items():
        for changed in (tensors[name] + np.float16(0.5), tensors[name].reshape(3, 2)):
            other = weights.fingerprints(save({**tensors, name: changed}))
            assert [one for one in base if other[one] != base[one]] == [part]


def test_rows_are_stamped_as_they_are_written(script, weights, tmp_path, monkeypatch):
    record, shipped = script("_record"), weights.of_model()
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    encoder = {"encoder": shipped["encoder"]}

    def written(name, *rows):
        return json.loads(record.record(name, list(rows)).read_text())["rows"]

    rows = [
        {"arm": "adapt"}, {"arm": "pca20"}, {"arm": "new_here"}, {"arm": "adapt", "weights": {"encoder": "of before"}},
        {"arm": "left_out", "weights_note": "why"}, {"what": "goal", "met": True},
    ]  # fmt: skip
    found = [row.get("weights") for row in written("embedding", *rows)]
    assert found == [encoder, None, encoder, {"encoder": "of before"}, None, None]
    assert "trains its own" in written("learning_curve", {"curve": "cells"})[0]["weights_note"]
    assert written("loss", {"what": "a", "value": 1.5}) == [{"what": "a", "value": 1.5}]


def test_rows_of_other_weights_are_refused(weights):
    shipped = {"encoder": "e1", "transformer": "t1"}
    own = {"set": "a", "arm": "adapt", "weights": {"encoder": "e1"}}
    other = {**shipped, "encoder": "e2"}
    for row, of, said in (
        (own, shipped, None), ({"arm": "pca20"}, shipped, None),
        (own, {**shipped, "transformer": "t2"}, None),  # another transformer leaves rows of the set encoder as they are
        (own, other, "another encoder"), ({"arm": "adapt"}, shipped, "no fingerprint of encoder"),
        ({**own, "weights_note": "a study left out"}, other, None),
    ):  # fmt: skip
        found = weights.refused("embedding", [row], of)
        assert [said in one for one in found] == ([True] if said else [])


def test_the_page_is_not_written_of_other_weights(script, weights, tmp_path, monkeypatch, capsys):
    tables = script("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    (tmp_path / "_static").mkdir()
    entry = json.loads((script("_record").RESULTS / "embedding.json").read_text())
    row = next(row for row in entry["rows"] if row["arm"] == "adapt")
    for stamp, done in (({"encoder": "0" * 16}, 1), ({}, 1), (weights.of_model(), 0)):
        (tmp_path / "embedding.json").write_text(json.dumps({**entry, "rows": [{**row, "weights": stamp}]}))
        assert tables.main() == done
        assert (tmp_path / "results" / "embedding.md").exists() == (not done)
    assert "embedding: " in capsys.readouterr().err


def test_the_committed_rows_are_of_the_weights_that_are_shipped(script):
    assert script("tables").of_other_weights() == []
