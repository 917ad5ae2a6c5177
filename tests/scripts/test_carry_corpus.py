"""A packed corpus comes back from its carried form bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from scdiva.data.packed import PackedCells


def test_every_bit_comes_back(script, prepared, tmp_path):
    carry = script("carry_corpus")
    size = carry.pack(prepared, tmp_path / "carried")
    carry.unpack(tmp_path / "carried", tmp_path / "again")
    for part in carry.PARTS:
        (one, names), (other, again) = (carry.read_packed(of / f"{part}.h5") for of in (prepared, tmp_path / "again"))
        assert names == again
        assert {name: (a.dtype, a.tobytes()) for name, a in one.items()} == {
            name: (a.dtype, a.tobytes()) for name, a in other.items()
        }
    genes = [folder / "vocabulary.safetensors" for folder in (prepared, tmp_path / "again")]
    assert genes[0].read_bytes() == genes[1].read_bytes()
    assert PackedCells(tmp_path / "again" / "train.h5").n_obs == 130
    assert size == sum(file.stat().st_size for file in (tmp_path / "carried").iterdir())


@pytest.mark.parametrize("counts", [[1, 300, 7], [2, 4, 9], [0.3, 1.7, 0.9], []])
def test_values_with_and_without_counts_come_back(script, counts):
    carry = script("carry_corpus")
    values = np.log1p(np.array(counts, np.float64) / 2000 * 1e4).astype(np.float32)
    denominator = np.arange(1, 703, dtype=np.float32)
    tokens = np.array([3, 400, 701], np.uint16)[: len(counts)]
    rank = np.lexsort((tokens, -(values / denominator[tokens])))
    content = {
        "indptr": np.array([0, len(counts)]), "tokens": tokens[rank], "values": values[rank],
        "study": np.zeros(1, np.int32), "measured": np.ones((1, 702), bool), "denominator": denominator,
    }  # fmt: skip
    header = {"attributes": {"n_tokens": 702}, "study_names": ["one"]}
    found, again = carry.decode(carry.encode(content, header))
    assert again == header
    for name, array in content.items():
        np.testing.assert_array_equal(found[name], array)
