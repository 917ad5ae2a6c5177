"""Changes of inputs that know their format: what bytes changed at random would break before anything interesting.

Half of all changes are libFuzzer's own, of bytes; the others take a JSON tree, a safetensors header or the columns of a
vocabulary apart, change something in it and put it together again.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

from scdiva.tokenizer.vocabulary import COLUMNS

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 4, 7, 12, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 10**20, 10**400, 1e308,
    5e-324, 0.5, 1.0, -0.0, math.nan, math.inf, "", "x", "F32", "F64", "F16", "BF16", "I64", "F8_E4M3", "F8_E5M2",
    "F4", "C64", "BOOL", "U8", "learned", "pooled", "none", "scdiva", "../../etc/passwd", "__class__", "\ud800", "\0",
    "é" * 40, "a" * 3000, [], {}, [0], [[]], {"": {}}, [0, 2**63], ["a", 1], [{"a": 1}], [None],
)  # fmt: skip
NUMBERS = tuple(value for value in ODD if isinstance(value, int | float))
ODD_NAMES = (b"", b"|", b"a|b||a", b"\0", b" ", b"ENSG00000000003", b"A.B", b"a" * 5000, b"\r", b"\n")
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


def lines(data: bytes, draw: random.Random) -> bytes | None:
    """Columns of a vocabulary with one dropped, doubled, of another type, or with names or entropies changed."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load, save

    try:
        held = load(data)
        for _ in range(draw.choice((1, 1, 2))):
            name = draw.choice(sorted(held))
            what = draw.random()
            if what < 0.05:
                del held[name]
            elif what < 0.1:
                held[draw.choice(("x", f"{name} ", *COLUMNS))] = held[name]
            elif what < 0.2:
                held[name] = held[name].astype(draw.choice(("uint8", "int8", "float32", "float64", "int64", "bool")))
            elif what < 0.25:
                held[name] = held[name].reshape(1, -1)
            elif held[name].dtype == np.uint8:
                names = held[name].tobytes().split(b"\n")
                row = draw.randrange(len(names))
                names[row] = draw.choice((*ODD_NAMES, names[0], names[row] + b"\xff\xfe"))
                names = draw.choice((names, names, names[1:], names * 2, draw.sample(names, len(names))))
                held[name] = np.frombuffer(b"\n".join(names), np.uint8)
            elif len(held[name].ravel()):
                held[name] = held[name].copy()
                held[name].flat[draw.randrange(held[name].size)] = draw.choice(
                    (0, 1, 3, math.nan, math.inf, -1.0, 3e38)
                )
        return save(held)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError):
        return None


CHANGES: dict[str, tuple[Change, ...]] = {
    "sums": (),
    "config": (text,),
    "weights": (safetensors, safetensors, safetensors, retyped),
    "vocabulary": (safetensors, lines, lines),
}


def changed(target: str, data: bytes, draw: random.Random) -> bytes | None:
    """Change an input of a target by its format; None where it has lost its format."""
    if target == "folder":
        kind = ("config", "weights", "vocabulary", "sums", "sums")[data[0] % 5] if data else "sums"
        inner = changed(kind, data[1:], draw)
        return None if inner is None else data[:1] + inner
    changes = CHANGES[target]
    return draw.choice(changes)(data, draw) if changes else None
