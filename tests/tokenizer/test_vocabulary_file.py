"""A vocabulary's file by somebody who means harm, or who knows no better: each of these once got past the reader."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scdiva.tokenizer import Vocabulary, _vocabulary_file


@pytest.fixture
def table():
    """Three genes as the arrow table of their file."""
    names = pa.array(["A", "B", "C"])
    columns = [pa.array([0, 1, 2], pa.float32()) if name == "entropy" else names for name in _vocabulary_file.COLUMNS]
    return pa.Table.from_arrays(columns, schema=_vocabulary_file.schema())


@pytest.fixture
def refused(table, tmp_path):
    """Write a table, with more metadata, and give the message of its refusal."""
    path = tmp_path / "genes.parquet"

    def call(changed=None, metadata=None, **how):
        stored = table if changed is None else changed
        whole = {**(stored.schema.metadata or {}), **(metadata or {})}
        pq.write_table(stored.replace_schema_metadata(whole), path, **how)
        with pytest.raises(ValueError, match=r"genes\.parquet") as error:
            Vocabulary.read(path)
        return str(error.value)

    return call


def test_the_table_of_these_tests_is_read(table, tmp_path):
    pq.write_table(table, tmp_path / "genes.parquet")
    assert Vocabulary.read(tmp_path / "genes.parquet").symbols.tolist() == ["A", "B", "C"]


def test_bytes_that_were_read_already_need_no_file(table, tmp_path):
    pq.write_table(table, tmp_path / "genes.parquet")
    data = (tmp_path / "genes.parquet").read_bytes()
    assert Vocabulary.read(tmp_path / "nowhere", data) == Vocabulary.read(tmp_path / "genes.parquet")
    with pytest.raises(ValueError, match="nowhere is damaged"):
        Vocabulary.read(tmp_path / "nowhere", data[:-9])


@pytest.mark.parametrize("names", ["7", "{}", '"AB"', "[1]", '["D", null]', "[[]]", '[{"a": 1}]', "null"])
def test_foreign_names_that_are_no_list_of_names(refused, names):
    assert "no list of strings" in refused(metadata={b"scdiva_foreign": names.encode()})


@pytest.mark.parametrize("names", [b"", b"[", b"\xff", b"[" * 100_000, b"[" + b"9" * 5000 + b"]"])
def test_foreign_names_that_are_no_json(refused, names):
    said = refused(metadata={b"scdiva_foreign": names})
    assert "foreign names are no JSON" in said
    assert len(said) < 1000


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"index_columns": 7, "columns": 7, "column_indexes": 7},
        {"index_columns": ["symbol"], "column_indexes": [], "columns": []},
        {"index_columns": [], "column_indexes": [{"numpy_type": "no type", "pandas_type": "x"}], "columns": [{}]},
    ],
)
def test_what_pandas_left_in_a_file_is_not_looked_at(table, tmp_path, metadata):
    path = tmp_path / "genes.parquet"
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"pandas": json.dumps(metadata)}), path)
    assert Vocabulary.read(path).symbols.tolist() == ["A", "B", "C"]


def test_columns_whose_names_are_no_text(table, tmp_path):
    path = tmp_path / "genes.parquet"
    pq.write_table(table, path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"symbol", b"s\xff\xfebol"))
    with pytest.raises(ValueError, match=r"genes\.parquet is damaged"):
        Vocabulary.read(path)


def test_a_name_of_any_length_is_told_of_in_brief(refused, table):
    long = table.set_column(1, "symbol", pa.array(["x" * 10_000, "x" * 10_000, "C"]))
    assert len(refused(long)) < 500


def test_names_that_are_no_text(refused, table):
    raw = pa.array([b"A\xff", b"B", b"C"], pa.binary())
    bad = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    assert "is damaged" in refused(table.set_column(1, "symbol", bad))


def test_more_rows_than_genes_anywhere(refused, table, monkeypatch):
    """A few kilobytes of parquet hold millions of rows."""
    rows = _vocabulary_file.MOST_GENES + 1
    many = pa.table([pa.repeat(table[name][0], rows) for name in table.schema.names], schema=table.schema)
    monkeypatch.setattr(pq, "read_table", None)  # it is refused before it is read
    assert f"it states {rows:,} genes" in refused(many)


def test_one_long_name_that_stands_a_thousand_times(refused, table, monkeypatch):
    """As a dictionary's entry it takes its bytes once, as strings a thousand times as much."""
    rows = 1000
    columns = {name: pa.array([f"{i}" for i in range(rows)]) for name in _vocabulary_file.COLUMNS}
    columns["entropy"] = pa.array(np.zeros(rows, np.float32))
    columns["alias"] = pa.array(["x" * 2**14] * rows)
    long = pa.table(columns, schema=table.schema)
    monkeypatch.setattr(_vocabulary_file, "MOST_BYTES", 2**20)
    assert "1,000 genes in 16,3" in refused(long, use_dictionary=["alias"], row_group_size=200)
    assert "1,000 genes in 16,4" in refused(long, use_dictionary=False)  # the file says so itself


def lying(data: bytes) -> bytes:
    """The file with its second column, and the whole, said to take one byte in the footer."""
    group = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0)
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    pages, footer = data[:start], data[start:]
    for size in (group.column(1).total_uncompressed_size, group.total_byte_size):
        number = b""
        rest = size << 1  # as zigzag varint
        while rest:
            number += bytes([(rest & 127) | (128 if rest > 127 else 0)])
            rest >>= 7
        assert footer.count(number) == 1
        footer = footer.replace(number, b"\x82" + b"\x80" * (len(number) - 2) + b"\0")
    return pages + footer


def test_pages_that_are_larger_than_the_footer_says(table, tmp_path, monkeypatch):
    """Some kilobytes that would be unpacked to what the page's own header says."""
    path = tmp_path / "genes.parquet"
    large = table.set_column(1, "symbol", pa.array(["x" * 3_000_000, "B", "C"]))
    pq.write_table(large, path, compression="zstd", use_dictionary=False, write_statistics=False)
    path.write_bytes(lying(path.read_bytes()))
    assert pq.ParquetFile(path).metadata.row_group(0).total_byte_size == 1
    assert path.stat().st_size < 10_000
    assert len(Vocabulary.read(path).symbols[0]) == 3_000_000
    monkeypatch.setattr(_vocabulary_file, "MOST_BYTES", 2**20)
    monkeypatch.setattr(pq, "read_table", None)  # it is refused before it is read
    path = path.rename(tmp_path / "later_genes.parquet")  # what this path held was read once, and is kept
    with pytest.raises(ValueError, match=r"genes\.parquet is no vocabulary: it states 3 genes in 3,000,"):
        Vocabulary.read(path)


def test_a_row_group_that_claims_more_rows_than_the_file(table, tmp_path):
    """Arrow takes memory for the rows of the group, whatever its pages hold and the file says."""
    path = tmp_path / "genes.parquet"
    pq.write_table(table, path, write_statistics=False)
    data = path.read_bytes()
    assert data.count(b"\x16\x06\x26") == 1  # the group's count: an integer, 3 as zigzag; then the field after next
    data = data.replace(b"\x16\x06\x26", b"\x16\xfe\xff\xff\xff\x7f\x26")
    footer = int.from_bytes(data[-8:-4], "little") + 4
    data = data[:-8] + footer.to_bytes(4, "little") + b"PAR1"
    assert pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0).num_rows > 10**10
    with pytest.raises(ValueError, match=r"genes\.parquet is no vocabulary: it states 17,\d+,\d+,\d+ genes"):
        Vocabulary.read(path, data)


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_encodings_that_grow(refused, encoding, version):
    """Of a name that begins as the last one did, such a page holds only the end."""
    how = {"use_dictionary": False, "column_encoding": {"symbol": encoding}, "data_page_version": version}
    assert "is damaged or is no vocabulary: a page of" in refused(**how)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("statistics", [True, False])
def test_pages_add_up_to_what_an_honest_footer_says(table, tmp_path, version, codec, dictionary, statistics):
    from scdiva.tokenizer._parquet_pages import stated

    path = tmp_path / "genes.parquet"
    many = pa.concat_tables([table] * 3000).combine_chunks()
    pq.write_table(
        many, path, compression=codec, use_dictionary=dictionary, write_statistics=statistics, row_group_size=4000,
        data_page_version=version, data_page_size=2000, write_page_checksum=statistics,
    )  # fmt: skip
    footer = pq.ParquetFile(path).metadata
    assert stated(path.read_bytes()).rows == len(many)
    said = sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
    assert 0.5 * said < stated(path.read_bytes()).size <= said  # that of the footer counts headers too


@pytest.mark.parametrize("at", range(4, 200, 7))
def test_a_broken_header_of_a_page_is_no_other_error(table, tmp_path, at):
    path = tmp_path / "genes.parquet"
    pq.write_table(table, path)
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    with contextlib.suppress(ValueError):  # some bytes say nothing that matters
        Vocabulary.read(path, bytes(data))
