"""Changes of inputs that know their format: what bytes changed at random would break before anything interesting.

Half of all changes are libFuzzer's own, of bytes; the others take a JSON tree, a safetensors header or a parquet table
apart, change something in it and put it together again.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scdiva.tokenizer._parquet_pages import stated
from scdiva.tokenizer.vocabulary import COLUMNS

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 4, 7, 12, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 10**20, 10**400, 1e308,
    5e-324, 0.5, 1.0, -0.0, math.nan, math.inf, "", "x", "F32", "F64", "F16", "BF16", "I64", "F8_E4M3", "F8_E5M2",
    "F4", "C64", "BOOL", "U8", "learned", "pooled", "none", "scdiva", "../../etc/passwd", "__class__", "\ud800", "\0",
    "é" * 40, "a" * 3000, [], {}, [0], [[]], {"": {}}, [0, 2**63], ["a", 1], [{"a": 1}], [None],
)  # fmt: skip
NUMBERS = tuple(value for value in ODD if isinstance(value, int | float))
CODECS = ("none", "snappy", "gzip", "zstd", "brotli", "lz4")
Change = Callable[[bytes, random.Random], bytes | None]


def tree(value: Any, draw: random.Random) -> Any:
    """A JSON value with something in it changed."""
    inner = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inner or draw.random() < 0.1:
        if isinstance(value, int | float) and draw.random() < 0.6:
            if draw.random() < 0.5 and -(2**64) < value < 2**64:
                return draw.choice([value + 1, value - 1, -value, value * 2, value * 1.0, str(value), [value]])
            return draw.choice(NUMBERS)
        return draw.choice(ODD)
    deeper = [key for key in inner if isinstance(value[key], dict | list)]
    key, copy = draw.choice(deeper if deeper and draw.random() < 0.5 else inner), value.copy()
    what = draw.random()
    if what < 0.75:
        copy[key] = tree(value[key], draw)
    elif what < 0.82:
        del copy[key]
    elif what < 0.9:
        other = draw.choice(inner)
        copy[key], copy[other] = copy[other], copy[key]
    elif isinstance(copy, dict):
        copy[draw.choice(("", "x", f"{key} ", "__metadata__", "__proto__", "\ud800"))] = copy[key]
    else:
        copy.insert(key, draw.choice(ODD))
    return copy


def text(data: bytes, draw: random.Random) -> bytes | None:
    """JSON as bytes with something in it changed; None if it is none."""
    try:
        value = json.loads(data)
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            value = tree(value, draw)
        return json.dumps(value, ensure_ascii=draw.random() < 0.8).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError, OverflowError):
        return b"[" * draw.choice((10, 5000, 100_000)) if draw.random() < 0.01 else None


def safetensors(data: bytes, draw: random.Random) -> bytes | None:
    """A changed header of the length that it states, over the same, shorter or longer numbers."""
    size = int.from_bytes(data[:8], "little")
    if size > len(data):
        return None
    header, numbers = text(data[8 : 8 + size], draw), data[8 + size :]
    if header is None:
        return None
    if draw.random() < 0.3:
        at = draw.randrange(len(numbers) + 1)
        odd = draw.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff", b"\xff" * 8, b"\x00" * 64))
        numbers = draw.choice((numbers[:at], numbers + odd, numbers[:at] + odd + numbers[at + len(odd) :]))
    return len(header).to_bytes(8, "little") + header + numbers


def retyped(data: bytes, draw: random.Random) -> bytes | None:
    """All tensors in another precision, or one, of the size that this takes, so that the header is sound."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load, save

    try:
        tensors = load(data)
        for name in draw.sample(sorted(tensors), draw.choice((1, len(tensors)))):
            kind = draw.choice(("float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int64", "bool",
                                "uint8", "complex64"))  # fmt: skip
            tensors[name] = (tensors[name].float() * draw.choice((1.0, 1e38))).to(getattr(torch, kind))
            if kind == "float64" and draw.random() < 0.5:
                tensors[name] *= 1e200
        return save(tensors)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError, AttributeError):
        return None


def parquet(data: bytes, draw: random.Random) -> bytes | None:
    """A changed table, written in one of the many ways in which parquet stores the same."""
    try:
        if max(stated(data)) > 2**20:  # arrow would believe it here as well
            return None
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
        meta = dict(table.schema.metadata or {})
        if table.num_rows > 50:
            table = table.slice(0, 12)
        for _ in range(draw.choice((0, 1, 1, 2))):
            table = _changed_table(table, draw)
        _change_metadata(meta, draw)
        sink = io.BytesIO()
        pq.write_table(
            table.replace_schema_metadata(meta), sink, compression=draw.choice(CODECS),
            use_dictionary=draw.choice((True, False, ["biotype"])), version=draw.choice(("1.0", "2.4", "2.6")),
            data_page_version=draw.choice(("1.0", "2.0")), row_group_size=draw.choice((1, 5, None)),
            write_statistics=draw.random() < 0.5, write_page_checksum=draw.random() < 0.3,
            store_schema=draw.random() < 0.95, write_page_index=draw.random() < 0.2,
        )  # fmt: skip
        return sink.getvalue()
    except (pa.ArrowException, ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError):
        return None


def _changed_table(table: pa.Table, draw: random.Random) -> pa.Table:
    """One column dropped, doubled, moved or changed, or other rows."""
    what = draw.random()
    if table.num_columns == 0:
        return table
    at = draw.randrange(table.num_columns)
    name, column = table.schema.names[at], table.column(at)
    if what < 0.05:
        return table.remove_column(at)
    if what < 0.1:
        return table.append_column(name if draw.random() < 0.5 else "x", column)
    if what < 0.15:
        return table.select([*table.schema.names[1:], table.schema.names[0]])
    if what < 0.25:
        return table.slice(0, draw.choice((0, 1, 5)))
    if what < 0.32:
        return pa.concat_tables([table] * draw.choice((2, 3)))
    if what < 0.37:
        return table.take(draw.sample(range(table.num_rows), table.num_rows))
    if what < 0.5:
        kinds = (
            *(pa.large_string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.null()),
            *(pa.float32(), pa.float64(), pa.int8(), pa.timestamp("ns", "Nowhere/Here"), pa.decimal128(5, 2)),
        )
        return table.set_column(at, name, column.cast(draw.choice(kinds), safe=False))
    if what < 0.6:
        return table.set_column(at, name, pa.array([[value] for value in column.to_pylist()]))
    values = column.to_pylist()
    row = draw.randrange(len(values))
    if name == "entropy":
        values[row] = draw.choice((None, math.nan, math.inf, -1.0, -0.0, 1e-45, 3e38))
    else:
        values[row] = draw.choice((None, "", "|", "a|b||a", values[0], "\0", " ", "ENSG00000000003", "A.B", "a" * 5000))
        if draw.random() < 0.15:  # strings that are not UTF-8
            raw = pa.array([str(value).encode() + b"\xff\xfe" for value in values], pa.binary())
            return table.set_column(at, name, pa.Array.from_buffers(pa.string(), len(raw), raw.buffers()))
    return table.set_column(at, name, pa.array(values, column.type))


def _change_metadata(meta: dict[bytes, bytes], draw: random.Random) -> None:
    """Another version, names that match nothing, or what pandas and arrow leave in a file for themselves."""
    what = draw.random()
    if what < 0.2:
        given = meta.get(b"scdiva_foreign", b'["A.B", "C1ORF5", "MIR1-2"]')
        meta[b"scdiva_foreign"] = text(given, draw) or draw.choice((b"", b"[" * 100_000, b"{}", b"7", b'"ab"', b"\xff"))
    elif what < 0.25:
        meta[b"scdiva_vocabulary"] = draw.choice((b"", b"2", b"\xff", b"1 ", b"1"))
    elif what < 0.4:
        said = {"pandas_type": "unicode", "numpy_type": "object", "metadata": None}
        columns = [{"name": name, "field_name": name, **said} for name in COLUMNS]
        whole = {"index_columns": ["symbol"], "column_indexes": [], "columns": columns, "pandas_version": "2.2.0",
                 "creator": {"library": "pyarrow", "version": "17"}, "attributes": {}}  # fmt: skip
        meta[b"pandas"] = text(meta.get(b"pandas") or json.dumps(whole).encode(), draw) or b"{"
    elif what < 0.45:
        meta[b"ARROW:schema"] = draw.choice((b"", b"AAAA", draw.randbytes(40)))


CHANGES: dict[str, tuple[Change, ...]] = {
    "sums": (),
    "config": (text,),
    "weights": (safetensors, safetensors, safetensors, retyped),
    "vocabulary": (parquet,),
}


def changed(target: str, data: bytes, draw: random.Random) -> bytes | None:
    """Change an input of a target by its format; None where it has lost its format."""
    if target == "folder":
        kind = ("config", "weights", "vocabulary", "sums", "sums")[data[0] % 5] if data else "sums"
        inner = changed(kind, data[1:], draw)
        return None if inner is None else data[:1] + inner
    changes = CHANGES[target]
    return draw.choice(changes)(data, draw) if changes else None
