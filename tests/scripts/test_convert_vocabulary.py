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


def test_a_model_folder_is_converted_with_its_sums(script, tmp_path):
    columns = {name: ["A", "B", "C"] for name in _vocabulary_file.TEXTS}
    small = Vocabulary(pd.DataFrame({**columns, "entropy": np.arange(3, dtype=np.float32)}), foreign=["D", "E|F"])
    inner = tmp_path / "model"
    inner.mkdir()
    metadata = {b"scdiva_vocabulary": b"1", b"scdiva_foreign": json.dumps(["D", "E|F"]).encode()}
    table = pa.Table.from_pandas(small.table, preserve_index=False).replace_schema_metadata(metadata)
    pq.write_table(table, inner / "vocabulary.parquet")
    (inner / "SHA256SUMS").write_text("0  config.json\n1  vocabulary.parquet\n")
    (tmp_path / "SHA256SUMS").write_text("2  fitted.json\n3  model/SHA256SUMS\n")
    with pytest.raises(ValueError, match="convert_vocabulary"):
        load_vocabulary(inner)
    script("convert_vocabulary").convert(tmp_path)
    assert load_vocabulary(inner) == small
    assert not (inner / "vocabulary.parquet").exists()
    # what it did not write keeps the sum that it had, right or wrong
    names = "vocabulary.safetensors", "SHA256SUMS"
    new, sums = (hashlib.sha256((inner / name).read_bytes()).hexdigest() for name in names)
    assert (inner / "SHA256SUMS").read_text() == f"0  config.json\n{new}  vocabulary.safetensors\n"
    assert (tmp_path / "SHA256SUMS").read_text() == f"2  fitted.json\n{sums}  model/SHA256SUMS\n"
