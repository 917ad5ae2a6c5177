"""A packed corpus comes back from its carried form bit for bit, and is smaller in between."""

from __future__ import annotations

import json

import numpy as np
import pytest

from scdiva._constants import N_SPECIAL
from scdiva.data.packed import PackedCells


def same(one, other):
    assert one[1] == other[1]
    for name, array in one[0].items():
        assert array.dtype == other[0][name].dtype, name
        assert array.tobytes() == other[0][name].tobytes(), name


@pytest.mark.parametrize("doubt", [None, 1e-4])
def test_every_bit_comes_back(script, prepared, tmp_path, monkeypatch, doubt):
    """With a large doubt thousands of values are carried as they are, which else a corpus of this size never meets."""
    carry = script("carry_corpus")
    if doubt is not None:
        monkeypatch.setattr(carry, "DOUBT", doubt)
    size = carry.pack(prepared, tmp_path / "carried")
    carry.unpack(tmp_path / "carried", tmp_path / "again")
    for part in carry.PARTS:
        same(carry.read_packed(prepared / f"{part}.h5"), carry.read_packed(tmp_path / "again" / f"{part}.h5"))
    assert (tmp_path / "again" / "vocabulary.parquet").read_bytes() == (prepared / "vocabulary.parquet").read_bytes()
    assert PackedCells(tmp_path / "again" / "train.h5").n_obs == 130
    assert size == sum(file.stat().st_size for file in (tmp_path / "carried").iterdir())


def test_counts_are_found_and_other_numbers_kept(script, prepared):
    carry = script("carry_corpus")
    content, header = carry.read_packed(prepared / "train.h5")
    carried = carry.encode(content, header)
    odd = np.flatnonzero(content["study"] == header["study_names"].index("odd"))
    assert (carried["totals"][: odd[0]] > 0).all()
    assert (carried["totals"][odd] == 0).all()
    assert len(carried["kept_cells"]) == np.diff(content["indptr"])[odd].sum()
    assert len(carried["counts_large"]) >= 7


@pytest.mark.parametrize("smallest", [1, 3])
def test_total_and_counts_of_a_cell(script, smallest):
    carry = script("carry_corpus")
    draw = np.random.default_rng(1)
    for total in (500, 7_919, 104_729):
        counts = draw.integers(smallest, 60, 40)
        counts[0] = smallest
        found, whole = carry.recover_counts(carry.value_of(counts, total).astype(np.float32))
        assert found > 0
        np.testing.assert_allclose(whole / found, counts / total)
        assert np.array_equal(
            carry.value_of(whole, found).astype(np.float32), carry.value_of(counts, total).astype(np.float32)
        )


def test_damage_is_noticed(script, prepared):
    carry = script("carry_corpus")
    carried = carry.encode(*carry.read_packed(prepared / "validation.h5"))
    carry.decode(carried)
    carried["counts"] = carried["counts"].copy()
    carried["counts"][5] ^= 1
    with pytest.raises(ValueError, match="different from what was packed"):
        carry.decode(carried)


def test_a_share_of_the_cells(script, prepared, tmp_path):
    carry = script("carry_corpus")
    carry.pack(prepared, tmp_path, share=0.1)
    carry.unpack(tmp_path, tmp_path / "again")
    content, _ = carry.read_packed(tmp_path / "again" / "train.h5")
    assert np.bincount(content["study"]).tolist() == [6, 4, 3]
    whole, _ = carry.read_packed(prepared / "train.h5")
    tenth = slice(whole["indptr"][10], whole["indptr"][11])
    second = slice(content["indptr"][1], content["indptr"][2])
    assert np.array_equal(content["tokens"][second], whole["tokens"][tenth])
    assert content["tokens"].min() >= N_SPECIAL
    said = json.loads((tmp_path / "again" / "carried.json").read_text())
    assert said["train"] == {"cells_packed": 13, "cells_of": 130}
    assert said["share"] == 0.1
