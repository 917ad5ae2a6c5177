"""A file embedded by many jobs: each does a range of rows, and the last one to finish joins them.

Beside the result stands a hidden folder with two files for each shard: its rows, appended part by part as a single run
does it, and once they are all there a note that says so. The notes together are the manifest: no file of it is written
by two jobs. What is found out about the whole matrix before anything is embedded is found out by the first job, and
kept for the others.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import operator
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scdiva._settings import logger
from scdiva._validate import Scan
from scdiva.tl._embed_parts import open_parts


def folder_of(out: Path) -> Path:
    """Give the folder of a result's shards."""
    return out.with_name(f".{out.name}.shards")


def scan_once(folder: Path, key: dict[str, Any], make: Callable[[], Scan]) -> Scan:
    """Scan a matrix, unless another job has; of several that come at once, one does it and the others wait.

    Parameters
    ----------
    folder
        Where the result is kept.
    key
        What it depends on, as plain JSON values.
    make
        Scans the matrix.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(key, sort_keys=True)
    kept = folder / f"scan-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
    with (folder / "scan.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks: then each job scans
            logger.warning("%s can't be locked (%s); jobs that start at once all check the whole matrix", folder, error)
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


class Shard(NamedTuple):
    """One of several equal ranges of rows.

    Attributes
    ----------
    number, n
        Which, from 0, of how many.
    """

    number: int
    n: int

    def rows(self, n_obs: int, window: int) -> tuple[int, int]:
        """Give its first row and the row after its last: whole windows, so that cells share the batches they do alone.

        Parameters
        ----------
        n_obs
            Rows of all.
        window
            Rows of a window.

        Raises
        ------
        ValueError
            If there are more shards than windows.
        """
        n_windows = -(-n_obs // window)
        if self.n > n_windows:
            raise ValueError(
                f"{n_obs:,} cells are {n_windows} windows of {window:,}, which are not divided: ask for at most "
                f"{n_windows} shards, not {self.n}."
            )
        first, stop = (n_windows * number // self.n * window for number in (self.number, self.number + 1))
        return first, min(stop, n_obs)


def as_shard(given: tuple[int, int]) -> Shard:
    """Check what a caller gave.

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
        shard = Shard(*(operator.index(one) for one in given))
    except (TypeError, ValueError) as error:
        raise ValueError(f"shard must be (number from 0, how many), got {given!r}.") from error
    if not 0 <= shard.number < shard.n:
        raise ValueError(f"shard must be (number from 0, how many), such as (0, 64) to (63, 64); got {given!r}.")
    return shard


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

    @property
    def folder(self) -> Path:
        """Where they are."""
        return folder_of(self.out)

    def part(self, number: int) -> Path:
        """Where a shard's rows are."""
        return self.folder / f"{number:05d}-of-{self.n:05d}.part"

    def _note(self, number: int) -> Path:
        return self.part(number).with_suffix(".json")

    def rows(self, number: int) -> tuple[int, int]:
        """Give a shard's first row and the row after its last."""
        return Shard(number, self.n).rows(self.n_obs, self.window)

    def key_of(self, number: int) -> dict[str, Any]:
        """Give what a shard's rows depend on."""
        found: dict[str, Any] = json.loads(json.dumps({**self.key, "rows": self.rows(number)}))
        return found

    def is_finished(self, number: int) -> bool:
        """Whether a shard is finished, of this very run."""
        try:
            note = json.loads(self._note(number).read_text(encoding="utf-8"))
            found: bool = note["key"] == self.key_of(number) and note["bytes"] == self.part(number).stat().st_size
            return found
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def note_finished(self, number: int) -> None:
        """Note that a shard is finished; the rows are on the disk before the note is."""
        part, note = self.part(number), self._note(number)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        beside = note.with_name(f".{note.name}.{os.getpid()}")
        beside.write_text(json.dumps({"key": self.key_of(number), "bytes": part.stat().st_size}), encoding="utf-8")
        beside.replace(note)

    def missing(self) -> list[int]:
        """List the shards that are not finished."""
        return [number for number in range(self.n) if not self.is_finished(number)]

    def read(self) -> Iterator[tuple[int, np.ndarray]]:
        """Read the rows of all shards in order: the first row of each part, and its rows, float32 `(n, width)`.

        Raises
        ------
        ValueError
            If a shard is not what its note says; the shard is then to be made again.
        """
        for number in range(self.n):
            first, stop = self.rows(number)
            with open_parts(self.part(number), self.key_of(number), self.width) as parts:
                if parts.n_rows != stop - first:
                    self._note(number).unlink(missing_ok=True)
                    raise ValueError(
                        f"shard {number} of {self.n} is damaged: {parts.n_rows} of its {stop - first} rows can be "
                        "read. Run it again."
                    )
                for row, states in parts.read():
                    yield first + row, states

    def say_missing(self, number: int) -> None:
        """Log what is left to do after a shard."""
        left = self.missing()
        some = ", ".join(str(one) for one in left[:10]) + (", ..." if len(left) > 10 else "")
        logger.info("shard %d of %d is finished; %d are not: %s", number, self.n, len(left), some)

    def remove(self) -> None:
        """Delete them all, also those of another number of shards."""
        shutil.rmtree(self.folder, ignore_errors=True)
