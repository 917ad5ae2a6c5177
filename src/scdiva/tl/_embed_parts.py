"""Finished parts of a long embedding, on disk beside the result: what a killed run had done is not done again.

A file of parts is a line that says what the parts are of, and then the parts, each with its number of rows and a
checksum. They are appended in order, so that a kill can spoil the last one only, and the checksum tells.

A run without shards has one such file, a job of several another one each in a hidden folder, which gets another name
once its rows are all there; the last job to finish joins them. What is found out about the whole matrix before anything
is embedded is found out by the first job, and kept there for the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import operator
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from scdiva._settings import logger
from scdiva._validate import Scan
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

    def rename(self, path: Path) -> None:
        """Give the file another name, once what it holds is on the disk."""
        os.fsync(self._file.fileno())
        self.path.replace(path)


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
    with open_alone(path) as file:
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


def as_shard(given: tuple[int, int]) -> tuple[int, int]:
    """Check what a caller gave as one of several equal ranges of rows: which, from 0, of how many.

    Parameters
    ----------
    given
        `(number, n)`.

    Raises
    ------
    ValueError
        If that is no such pair.
    """
    try:
        number, n = (operator.index(one) for one in given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"shard must be (number from 0, how many), got {given!r}.") from error
    if not 0 <= number < n:
        raise ValueError(f"shard must be (number from 0, how many), such as (0, 64) to (63, 64); got {given!r}.")
    return number, n


@dataclass
class Shards:
    """The shards of one result, on disk.

    Attributes
    ----------
    out
        The result.
    n
        Number of shards.
    key
        What all rows depend on, as plain JSON values.
    n_obs, window, width
        Rows of all, rows of a window, numbers in a row.
    """

    out: Path
    n: int
    key: dict[str, Any]
    n_obs: int
    window: int
    width: int

    def rows(self, number: int) -> tuple[int, int]:
        """Give a shard's first row and that after its last: whole windows, so that cells share batches as in one run.

        Parameters
        ----------
        number
            Of the shard, from 0.

        Raises
        ------
        ValueError
            If there are more shards than windows.
        """
        n_windows = -(-self.n_obs // self.window)
        if self.n > n_windows:
            raise ValueError(
                f"{self.n_obs:,} cells are {n_windows} windows of {self.window:,}, which are not divided: ask for at "
                f"most {n_windows} shards, not {self.n}."
            )
        first, stop = (n_windows * at // self.n * self.window for at in (number, number + 1))
        return first, min(stop, self.n_obs)

    def open(self, number: int, state: str = "part") -> contextlib.AbstractContextManager[Parts]:
        """Open the rows of a shard: what there is of it, or with `state="done"` the finished ones."""
        file = self._file(number, state)
        file.parent.mkdir(exist_ok=True)
        return open_parts(file, self._key_of(number), self.width)

    def finish(self, number: int, parts: Parts) -> None:
        """Give the file of a shard, whose rows are all there, the name that says so."""
        parts.rename(self._file(number, "done"))

    def missing(self) -> list[int]:
        """List the shards that are not finished, of this very run."""
        return [number for number in range(self.n) if not self._is_finished(number)]

    def read(self) -> Iterator[tuple[int, np.ndarray]]:
        """Read the rows of all shards in order: the first row of each part, and its rows, float32 `(n, width)`.

        Raises
        ------
        ValueError
            If a shard is damaged; it is then to be made again, from where it is spoilt.
        """
        for number in range(self.n):
            first, stop = self.rows(number)
            with self.open(number, "done") as parts:
                if parts.n_rows != stop - first:
                    parts.rename(self._file(number, "part"))
                    raise ValueError(
                        f"shard {number} of {self.n} is damaged: {parts.n_rows} of its {stop - first} rows can be "
                        "read. Run it again."
                    )
                for row, states in parts.read():
                    yield first + row, states

    def remove(self) -> None:
        """Delete them all, also those of another number of shards."""
        shutil.rmtree(folder_of(self.out), ignore_errors=True)

    def _file(self, number: int, state: str) -> Path:
        return folder_of(self.out) / f"{number:05d}-of-{self.n:05d}.{state}"

    def _key_of(self, number: int) -> dict[str, Any]:
        key: dict[str, Any] = json.loads(json.dumps({**self.key, "rows": self.rows(number)}))
        return key

    def _is_finished(self, number: int) -> bool:
        try:
            with self._file(number, "done").open("rb") as file:
                return _key_of(file) == self._key_of(number)
        except OSError:
            return False


def folder_of(out: Path) -> Path:
    """Give the folder of a result's shards."""
    return out.with_name(f".{out.name}.shards")


def scan_once(out: Path, key: dict[str, Any], make: Callable[[], Scan]) -> Scan:
    """Scan a matrix, unless another job has; of several that come at once, one does it and the others wait.

    Parameters
    ----------
    out
        The result, beside which it is kept.
    key
        What it depends on, as plain JSON values.
    make
        Scans the matrix.
    """
    text, kept = json.dumps(key, sort_keys=True), folder_of(out) / "scan.npz"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks: then each job scans
            logger.warning("%s can't be locked (%s); jobs that start at once all check the whole matrix", kept, error)
        try:
            with np.load(kept) as found:
                if str(found["key"]) == text:
                    arrays = {name: found[name] for name in ("counts_per_gene", "genes_per_cell", "known_per_cell")}
                    return Scan(str(found["kind"]), bool(found["integer"]), float(found["max"]), **arrays)  # type: ignore[arg-type]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            pass  # none, or a damaged one
        scan = make()
        beside = kept.with_name(f".{os.getpid()}.{kept.name}")
        np.savez(beside, key=text, **asdict(scan))
        beside.replace(kept)
        return scan
