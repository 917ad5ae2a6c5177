"""The parquet file of a vocabulary. It may come from anybody: its sizes are held to a cap before memory is taken."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from scdiva.tokenizer._parquet_pages import stated

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    import pyarrow as pa

COLUMNS = ("ensembl_id", "symbol", "previous", "alias", "biotype", "entropy")
"""Columns of a vocabulary table. All are strings but `entropy` (float32, nats)."""
MOST_GENES = 1_000_000
"""Rows of the largest vocabulary that is read; human has 41,818, and parquet can state any number in a few bytes."""
MOST_BYTES = 2**28
"""Of all its names together. A dictionary page can state one long name a million times."""

_FORMAT = {b"scdiva_vocabulary": b"1"}
_FOREIGN = b"scdiva_foreign"  # in a file's metadata, where there are any: JSON list


def schema() -> pa.Schema:
    """Arrow schema of the file."""
    import pyarrow as pa

    fields = [pa.field(name, pa.float32() if name == "entropy" else pa.string()) for name in COLUMNS]
    return pa.schema(fields, metadata=_FORMAT)


def read_file(data: bytes, path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Read a vocabulary's table and its foreign names from the bytes of a file.

    Parameters
    ----------
    data
        What the file holds.
    path
        The file, for messages.

    Raises
    ------
    ValueError
        If it is no parquet file, is damaged, is no vocabulary or larger than any; the message names the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    strings = [name for name in COLUMNS if name != "entropy"]
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            metadata = file.schema_arrow.metadata or {}
            version = metadata.get(b"scdiva_vocabulary")
            if version != _FORMAT[b"scdiva_vocabulary"]:
                said = "no version" if version is None else f"version {version.decode(errors='replace')[:40]}"
                raise ValueError(f"{path} states {said} of the vocabulary format; this scdiva reads version 1")
            if not file.schema_arrow.equals(schema(), check_metadata=False):
                names = str(file.schema_arrow.names)[:300]
                raise ValueError(f"{path} is no vocabulary: its columns are {names}, not {list(COLUMNS)}")
            try:
                size, rows = stated(data)
            except ValueError as error:
                raise ValueError(f"{path} is damaged or is no vocabulary: {error}") from error
            _refuse_large(path, rows, size)
        # As dictionaries, so that a name that is repeated takes memory once until its whole size is known.
        stored = pq.read_table(pa.BufferReader(data), use_threads=False, read_dictionary=strings)
        stored.validate(full=True)
        _refuse_large(path, stored.num_rows, sum(_decoded_bytes(stored[name]) for name in strings))
        stored = stored.cast(schema())
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged or is no parquet file: {error!s:.300}") from error
    if any(stored[name].null_count for name in COLUMNS):
        raise ValueError(f"{path} is no vocabulary: it holds nulls")
    try:
        foreign = json.loads(metadata.get(_FOREIGN, b"[]"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its foreign names are no JSON: {error!s:.300}") from error
    if not isinstance(foreign, list) or not all(isinstance(name, str) for name in foreign):
        raise ValueError(f"{path}: its foreign names are no list of strings, but {foreign!r:.80}")
    try:
        # pandas' own metadata could name an index, types and time zones of its choice
        return stored.to_pandas(use_threads=False, ignore_metadata=True), foreign
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(f"{path} is no vocabulary: {error!s:.300}") from error


def write_file(table: pd.DataFrame, foreign: tuple[str, ...], path: Any) -> None:
    """Write a vocabulary's table and foreign names. Equal ones give equal bytes (with the same pyarrow)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # from_pandas=False keeps NaN a number; no pandas metadata, which would hold version strings
    columns = [pa.array(table[f.name].to_numpy(), type=f.type, from_pandas=False) for f in schema()]
    names = {_FOREIGN: json.dumps(foreign).encode()} if foreign else {}
    stored = pa.Table.from_arrays(columns, schema=schema().with_metadata(_FORMAT | names))
    pq.write_table(stored, path, compression="zstd", compression_level=19, use_dictionary=["biotype"])


def _refuse_large(path: Path, rows: int, size: int) -> None:
    """Refuse a table that no genes fill."""
    if rows > MOST_GENES or size > MOST_BYTES:
        raise ValueError(
            f"{path} is no vocabulary: it states {rows:,} genes in {size:,} bytes; at most {MOST_GENES:,} in "
            f"{MOST_BYTES:,} are read"
        )


def _decoded_bytes(column: pa.ChunkedArray) -> int:
    """Bytes that a column of dictionaries takes as strings."""
    import pyarrow.compute as pc

    lengths = (pc.sum(pc.take(pc.binary_length(chunk.dictionary), chunk.indices)).as_py() for chunk in column.chunks)
    return sum(length or 0 for length in lengths)
