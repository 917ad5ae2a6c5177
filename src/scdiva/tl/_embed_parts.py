"""Finished parts of a long embedding, in one file beside the result: what a killed run had done is not done again.

The file is a line that says what the parts are of, and then the parts, each with its number of rows and a checksum.
They are appended in order, so that a kill can spoil the last one only, and the checksum tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from scdiva._settings import logger
from scdiva.data.output import open_alone

_PART = struct.Struct("<qI")
"""Before each part: its rows, and the CRC-32 of its bytes."""


@dataclass
class Parts:
    """An open file of parts, which no other process writes to. Made by :func:`open_parts`.

    Attributes
    ----------
    path
        The file.
    width
        Numbers in a row.
    n_rows
        Rows of the finished parts.
    """

    path: Path
    width: int
    n_rows: int
    _file: BinaryIO
    _first: int

    def append(self, states: np.ndarray) -> None:
        """Add the next rows, float32 `(n, width)`."""
        data = np.ascontiguousarray(states, dtype="<f4").tobytes()
        self._file.write(_PART.pack(len(states), zlib.crc32(data)) + data)
        self._file.flush()
        self.n_rows += len(states)

    def read(self) -> Iterator[tuple[int, np.ndarray]]:
        """Read the parts in order: the first row of each, and its rows, float32 `(n, width)`."""
        self._file.seek(self._first)
        row = 0
        while (part := _next_part(self._file, self.width)) is not None:
            yield row, part
            row += len(part)
        if row != self.n_rows:
            raise OSError(f"{str(self.path)!r} was changed while it was in use: {row} of {self.n_rows} rows are left.")

    def remove(self) -> None:
        """Delete the file; what is open stays locked until it is closed."""
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def open_parts(path: Path, key: dict[str, Any], width: int) -> Iterator[Parts]:
    """Open the parts of a run, and those of an earlier run if it was the same.

    Parameters
    ----------
    path
        The file; made if it is not there.
    key
        What the rows depend on, as plain JSON values. Parts under any other key are thrown away.
    width
        Numbers in a row.

    Yields
    ------
    The finished parts, to be added to. The file is left where it is, unless nothing was finished.

    Raises
    ------
    RuntimeError
        If another process has it open.
    """
    file = open_alone(path)
    try:
        key = json.loads(json.dumps(key))
        before = _key_of(file)
        if before != key:
            if before is not None:
                other = [name for name in {**before, **key} if before.get(name) != key.get(name)]
                logger.info("%s is of another run (%s differ): starting anew", path, ", ".join(other))
            file.truncate(0)
            file.write(json.dumps(key).encode() + b"\n")
            file.flush()
        file.seek(0)
        file.readline()
        parts = Parts(path, width, 0, file, file.tell())
        end = parts._first
        while (part := _next_part(file, width)) is not None:
            parts.n_rows += len(part)
            end = file.tell()
        file.truncate(end)
        try:
            yield parts
        finally:
            if not parts.n_rows:
                parts.remove()
    finally:
        file.close()


def _next_part(file: BinaryIO, width: int) -> np.ndarray | None:
    """Read the part at which a file stands; None at the end, or where a part is cut off or spoilt."""
    head = file.read(_PART.size)
    if len(head) < _PART.size:
        return None
    n_rows, checksum = _PART.unpack(head)
    n_bytes = n_rows * width * 4
    if not 0 < n_bytes <= os.fstat(file.fileno()).st_size - file.tell():
        return None
    data = file.read(n_bytes)
    if len(data) < n_bytes or zlib.crc32(data) != checksum:
        return None
    return np.frombuffer(data, dtype="<f4").reshape(n_rows, width)


def _key_of(file: BinaryIO) -> dict[str, Any] | None:
    """Read what the parts of a file are of; None if it is empty, `{}` if that can't be known."""
    file.seek(0)
    line = file.readline()
    try:
        key = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        key = None
    return key if isinstance(key, dict) else {} if line else None


def stamp(path: Path) -> str:
    """Sizes and times of change of a file, or of all files of a folder: another stamp, another content."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        found = file.stat()
        digest.update(f"{file.relative_to(path)} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()
