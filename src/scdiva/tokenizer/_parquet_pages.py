"""What a parquet file will take in memory, from all that it states of its own size.

Footer, row groups, columns and pages state sizes and counts, and arrow believes each where it needs it: a page of
12 kB, said to be small in the footer, would fill a gigabyte, and so would a row group of twelve genes that claims
billions. pyarrow shows no headers of pages, and ends the process when asked where a column lies whose metadata are
broken. Footer and headers are structs of Thrift's compact protocol (parquet-format: `FileMetaData`, `PageHeader`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

PLAIN = {0, 2, 8}
"""Encodings whose values are as long as their pages: plain, and dictionaries by either name."""
_ROWS, _ROW_GROUPS, _COLUMNS, _META = 3, 4, 1, 3
_VALUES, _SIZE, _DATA_OFFSET, _DICTIONARY_OFFSET = 5, 7, 9, 11
_UNCOMPRESSED, _COMPRESSED = 2, 3
_DATA, _DICTIONARY, _DATA_V2 = 5, 7, 8
_COUNT, _ENCODING = 1, {_DATA: 2, _DICTIONARY: 2, _DATA_V2: 4}
_DEEPEST = 12


class Stated(NamedTuple):
    """What a file states: the bytes of its pages together, uncompressed, and its most rows or values at one place."""

    size: int
    rows: int


def stated(data: bytes) -> Stated:
    """Read what a parquet file states to hold.

    Parameters
    ----------
    data
        The file.

    Raises
    ------
    ValueError
        If the footer or a header can't be read, or has a negative number or an encoding that is not in `PLAIN`.
    """
    size, rows = 0, 0
    try:
        for at, end, counts in _columns(data):
            rows = max(rows, *counts)
            while at < end:
                header, at = _struct(data, at, 0)
                kinds = [kind for kind in _ENCODING if kind in header]
                page, stored = int(header[_UNCOMPRESSED]), int(header[_COMPRESSED])
                values = [int(header[kind][_COUNT]) for kind in kinds]
                encodings = {int(header[kind][_ENCODING[kind]]) for kind in kinds}
                if min(page, stored, *values, *counts) < 0 or not encodings <= PLAIN:
                    raise ValueError(f"a page of {page} bytes, {values} values, encoding {sorted(encodings)}")
                size, at, rows = size + page, at + stored, max(rows, *values)
    except (IndexError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("its footer or a page's header is broken") from error
    return Stated(size, rows)


def _columns(data: bytes) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Where each column of each row group begins and ends, and the counts around it, from the footer."""
    size = int.from_bytes(data[-8:-4], "little")
    footer, _ = _struct(data, max(len(data) - 8 - size, 0), 0)
    together = sum(abs(int(group[_ROWS])) for group in footer[_ROW_GROUPS])
    for group in footer[_ROW_GROUPS]:
        for column in group[_COLUMNS]:
            meta = column[_META]
            starts = int(meta[_DATA_OFFSET]), int(meta.get(_DICTIONARY_OFFSET, 0))
            at = min((start for start in starts if start > 0), default=0)
            yield at, at + int(meta[_SIZE]), (int(footer[_ROWS]), together, int(group[_ROWS]), int(meta[_VALUES]))


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
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = _varint(data, at)
        return None, at + size
    if kind in (9, 10):
        return _list(data, at, depth + 1)
    if kind == 12:
        return _struct(data, at, depth + 1)
    raise TypeError  # parquet has no others


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    """Read a list; its booleans, unlike those of a struct, take a byte each."""
    size, kind, at = data[at] >> 4, data[at] & 15, at + 1
    if size == 15:
        size, at = _varint(data, at)
    values = []
    for _ in range(size):
        value, at = _value(data, at, 3 if kind in (1, 2) else kind, depth)
        values.append(value)
    return values, at


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
