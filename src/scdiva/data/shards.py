"""What jobs that share a disk need to make one result together: ranges, a scan that one of them does, whole files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import zipfile
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from scdiva._files import open_alone, put_whole
from scdiva._validate import Scan
from scdiva.data.paths import listing
from scdiva.data.soma import SomaCells

DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
"""What numpy raises of a file that is not there, or not whole."""


def folder_of(out: Path) -> Path:
    """Give the hidden folder beside a result that holds what is finished of it.

    Parameters
    ----------
    out
        The result.
    """
    return out.with_name(f".{out.name}.parts")


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
    with open_alone(kept.with_suffix(".lock"), waits=True):  # where there are no locks, each job scans
        with contextlib.suppress(*DAMAGED), np.load(kept) as found:
            if str(found["key"]) == text:
                stored = {field.name: found[field.name] for field in fields(Scan)}
                return Scan(**{name: value if value.ndim else value.item() for name, value in stored.items()})
        scan = make()
        put_whole(kept, lambda file: np.savez(file, key=text, **asdict(scan)))
        return scan


def stamp(path: Path) -> str:
    """Sizes and times of change, or versions, of a file or all files of a folder: another stamp, another content.

    Parameters
    ----------
    path
        The file or folder, as :func:`scdiva.data.paths.as_path` gives it.
    """
    return digest(path.note() if isinstance(path, SomaCells) else listing(path))


def digest(value: Any) -> str:
    """Give the SHA-256 of plain JSON values.

    Parameters
    ----------
    value
        Plain values, nested as one likes.
    """
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def as_shard(given: tuple[int, int]) -> tuple[int, int]:
    """Check what a caller gave as one of several ranges of rows.

    Parameters
    ----------
    given
        Which, from 0, of how many.

    Raises
    ------
    ValueError
        If it is no such pair.
    """
    try:
        number, n = (operator.index(one) for one in given)
        if 0 <= number < n:
            return number, n
    except (TypeError, ValueError):
        pass
    raise ValueError(f"shard must be (number from 0, how many), such as (0, 64) to (63, 64); got {given!r}.")
