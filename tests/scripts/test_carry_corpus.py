"""A packed corpus comes back from its carried form bit for bit."""

from __future__ import annotations

from scdiva.data.packed import PackedCells


def test_every_bit_comes_back(script, prepared, tmp_path):
    carry = script("carry_corpus")
    size = carry.pack(prepared, tmp_path / "carried")
    carry.unpack(tmp_path / "carried", tmp_path / "again")
    for part in carry.PARTS:
        (packed, names), (unpacked, again) = (
            carry.read_packed(of / f"{part}.h5") for of in (prepared, tmp_path / "again")
        )
        assert names == again
        assert {name: (a.dtype, a.tobytes()) for name, a in packed.items()} == {
            name: (a.dtype, a.tobytes()) for name, a in unpacked.items()
        }
    genes = [folder / "vocabulary.safetensors" for folder in (prepared, tmp_path / "again")]
    assert genes[0].read_bytes() == genes[1].read_bytes()
    assert PackedCells(tmp_path / "again" / "train.h5").n_obs == 125
    assert size == sum(file.stat().st_size for file in (tmp_path / "carried").iterdir())
