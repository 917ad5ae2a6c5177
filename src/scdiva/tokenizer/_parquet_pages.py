"""What the pages of a parquet file will take in memory, from their own headers.

The footer states sizes too, but arrow believes the headers: a page of 12 kB, said to be small in the footer, would fill
a gigabyte. Headers are structs of Thrift's compact protocol (parquet-format, `PageHeader`); pyarrow shows none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow.parquet as pq

PLAIN = {0, 2, 8}
"""Encodings whose values are as long as their pages: plain, and dictionaries by either name."""
_UNCOMPRESSED, _COMPRESSED, _DATA, _DATA_V2 = 2, 3, 5, 8
_ENCODING = {_DATA: 2, _DATA_V2: 4}
_DEEPEST = 8


def page_bytes(data: bytes, metadata: pq.FileMetaData) -> int:
    """Sum what all pages of a file state to be, uncompressed.

    Parameters
    ----------
    data
        The file.
    metadata
        Its footer, which says where the columns begin and end.

    Raises
    ------
    ValueError
        If a header can't be read, or has a negative size or an encoding that is not in `PLAIN`.
    """
    total = 0
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            starts = chunk.data_page_offset, chunk.dictionary_page_offset
            at = min(start for start in starts if start)
            end = at + chunk.total_compressed_size
            while at < end:
                try:
                    header, at = _struct(data, at, 0)
                    size, stored = int(header[_UNCOMPRESSED]), int(header[_COMPRESSED])
                    encodings = {int(header[kind][field]) for kind, field in _ENCODING.items() if kind in header}
                except (IndexError, KeyError, TypeError, RecursionError) as error:
                    raise ValueError("a page has no header") from error
                if size < 0 or stored < 0 or not encodings <= PLAIN:
                    raise ValueError(f"a page of {size} bytes, encoding {sorted(encodings)}")
                total, at = total + size, at + stored
    return total


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Read a struct by the numbers of its fields; give it and where it ends."""
    if depth > _DEEPEST:
        raise RecursionError
    fields: dict[int, Any] = {}
    number = 0
    while (head := data[at]) != 0:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _integer(data, at)
        fields[number], at = _value(data, at, head & 15, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """Read one value: booleans are in the kind itself."""
    if kind in (1, 2):
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _integer(data, at)
    if kind == 8:  # bytes, of a page's statistics
        size, at = _varint(data, at)
        return None, at + size
    if kind == 12:
        return _struct(data, at, depth + 1)
    raise TypeError  # headers of pages have no others


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise TypeError


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
