"""Vocabularies in the first format, which was parquet, converted."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scdiva.tokenizer import Vocabulary, _vocabulary_file, load_vocabulary


@pytest.fixture
def convert(script):
    return script("convert_vocabulary").convert


@pytest.fixture
def small():
    columns = {name: ["A", "B", "C"] for name in _vocabulary_file.TEXTS}
    return Vocabulary(pd.DataFrame({**columns, "entropy": np.arange(3, dtype=np.float32)}), foreign=["D", "E|F"])


def write_parquet(vocabulary, foreign, path):
    metadata = {b"scdiva_vocabulary": b"1", b"scdiva_foreign": json.dumps(foreign).encode()}
    table = pa.Table.from_pandas(vocabulary.table, preserve_index=False)
    pq.write_table(table.replace_schema_metadata(metadata), path)


def test_a_file_is_converted(small, tmp_path, convert):
    old = tmp_path / "genes.parquet"
    write_parquet(small, ["D", "E|F"], old)
    with pytest.raises(ValueError, match="convert_vocabulary"):
        load_vocabulary(old)
    convert(old)
    assert old.exists()
    assert load_vocabulary(old.with_suffix(".safetensors")) == small


def test_a_model_folder_is_converted_with_its_sums(small, tmp_path, convert):
    folder = tmp_path / "fitted"
    inner = folder / "model"
    inner.mkdir(parents=True)
    write_parquet(small, ["D", "E|F"], inner / "vocabulary.parquet")
    (inner / "config.json").write_text("{}")
    (inner / "SHA256SUMS").write_text("0  config.json\n1  vocabulary.parquet\n")
    (folder / "SHA256SUMS").write_text("2  fitted.json\n3  model/SHA256SUMS\n")
    with pytest.raises(ValueError, match="convert"):
        load_vocabulary(inner)
    convert(folder)
    assert load_vocabulary(inner) == small
    assert not (inner / "vocabulary.parquet").exists()

    def sha256(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()

    # what it did not write keeps the sum that it had, right or wrong
    new = sha256(inner / "vocabulary.safetensors")
    assert (inner / "SHA256SUMS").read_text() == f"0  config.json\n{new}  vocabulary.safetensors\n"
    assert (folder / "SHA256SUMS").read_text() == f"2  fitted.json\n{sha256(inner / 'SHA256SUMS')}  model/SHA256SUMS\n"
