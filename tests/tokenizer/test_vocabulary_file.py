"""Malicious or invalid vocabulary files."""

from __future__ import annotations

import contextlib

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load, save

from scdiva.tokenizer import Vocabulary
from scdiva.tokenizer.vocabulary import TEXTS


@pytest.fixture
def small():
    columns = {name: ["A", "B", "C"] for name in TEXTS}
    return Vocabulary(pd.DataFrame({**columns, "entropy": np.arange(3, dtype=np.float32)}), foreign=["D", "E|F"])


@pytest.fixture
def path(tmp_path, small):
    small.write(tmp_path / "genes.safetensors")
    return tmp_path / "genes.safetensors"


def text(*names):
    return np.frombuffer("\n".join(names).encode(), dtype=np.uint8)


def test_bytes_that_were_read_already_need_no_file(path, tmp_path, small):
    data = path.read_bytes()
    assert Vocabulary.read(tmp_path / "nowhere", data) == Vocabulary.read(path) == small
    with pytest.raises(ValueError, match="nowhere is damaged"):
        Vocabulary.read(tmp_path / "nowhere", data[:-9])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scdiva_vocabulary": np.array([3])}, r"version \[3\]"),
        ({"more": np.zeros(3)}, "is not a vocabulary"),
        ({"alias": None}, "is not a vocabulary"),
        ({"alias": text("A", "B")}, "'alias': 2"),
        ({"alias": np.zeros(3, dtype=np.float32)}, "is damaged or is not a vocabulary"),
        ({"entropy": np.zeros(3)}, "entropy is float64"),
        ({"entropy": np.zeros((3, 1), dtype=np.float32)}, "entropy is float32"),
        ({"entropy": np.array([0, -1, 0], dtype=np.float32)}, "1 entropies are negative"),
        ({"symbol": np.frombuffer(b"A\nB\n\xff", dtype=np.uint8)}, "is damaged"),
        ({"symbol": text("x" * 10_000, "x" * 10_000, "C")}, "1 genes repeat the symbol"),
        ({"symbol": text("A", "", "C")}, "1 genes have no symbol"),
        ({"foreign": text("A")}, "1 foreign names are those of genes"),
    ],
)
def test_what_is_no_vocabulary_is_refused_in_brief(path, changes, message):
    held = {**load(path.read_bytes()), **changes}
    path.write_bytes(save({name: array for name, array in held.items() if array is not None}))
    with pytest.raises(ValueError, match=message) as error:
        Vocabulary.read(path)
    assert "genes.safetensors" in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_large_file_is_refused_before_it_is_read(path, monkeypatch):
    monkeypatch.setattr("scdiva.tokenizer.vocabulary.MOST_BYTES", 100)
    with pytest.raises(ValueError, match="the maximum is 100"):
        Vocabulary.read(path)


@pytest.mark.parametrize("at", range(0, 700, 9))
def test_a_broken_byte_is_no_other_error(path, at):
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 0xFF
    with contextlib.suppress(ValueError):  # some bytes say nothing that matters
        Vocabulary.read(path, bytes(data))


@pytest.mark.parametrize("column", ["symbol", "alias"])
def test_a_line_break_would_end_a_name(small, column):
    with pytest.raises(ValueError, match=rf"'{column}' holds 1 values .* line break"):
        Vocabulary(small.table.assign(**{column: ["A", "B\nX", "C"]}))
    with pytest.raises(ValueError, match="line break"):
        Vocabulary(small.table, foreign=["D\n"])
