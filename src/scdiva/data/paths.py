"""Locations of cells: local paths, URLs of any file system that fsspec reads, cells of SOMA experiments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard, cast

from scdiva._checks import from_extra

_VERSIONS = ("ETag", "etag", "generation", "Last-Modified", "LastModified", "mtime", "created")
"""Names of the version of an object in different file systems; the first that exists is used."""


def is_path(given: Any) -> TypeGuard[str | Path]:
    """Whether `given` is a path, a URL or cells of a SOMA experiment, and not an AnnData object."""
    return isinstance(given, str | PathLike) or hasattr(given, "stem")


def as_path(given: Any) -> Path:
    """Convert a path or URL; cells of a SOMA experiment are returned unchanged.

    Returns
    -------
    A :class:`~pathlib.Path` for local files. For URLs a ``UPath``, which has the same methods but is not an instance of
    Path.

    Raises
    ------
    ImportError
        If a package for this kind of URL is missing.
    ValueError
        If the kind of URL is unknown.
    """
    if not isinstance(given, str | PathLike):
        return cast(Path, given)
    if "://" not in str(given):
        return Path(given)
    path = from_extra("upath", "remote", f"{given!r} needs universal-pathlib").UPath(given)
    with reaching(path):
        _ = path.fs  # imports the file system
    return cast(Path, path)


@contextmanager
def reaching(path: Any) -> Iterator[None]:
    """Add the URL and the remedy to errors of a remote file system; errors about the content pass unchanged.

    Parameters
    ----------
    path
        Result of :func:`as_path`; errors of local paths pass unchanged.

    Raises
    ------
    FileNotFoundError, ImportError, OSError
        If nothing exists at the URL, a package is missing, or the URL can't be reached.
    """
    try:
        yield
    except Exception as error:  # each file system has errors of its own
        # zarr's FileNotFoundErrors are ValueErrors too
        of_content = isinstance(error, KeyError | TypeError | ValueError) and not isinstance(error, OSError)
        if isinstance(path, Path) or of_content or repr(str(path)) in str(error):
            raise
        kind = next((kind for kind in (FileNotFoundError, ImportError) if isinstance(error, kind)), OSError)
        raise kind(
            f"{str(path)!r} can't be read ({type(error).__name__}: {error}). Is there such a bucket and key, and what "
            "reads it (pip install 'scdiva[remote]')? Who you are and where the server is, fsspec reads from the "
            "environment: AWS_PROFILE, AWS_ENDPOINT_URL, FSSPEC_S3_ANON=true for a public bucket, and so on."
        ) from error


def listing(path: Path) -> list[tuple[str, int, str]]:
    """List the files at a path without reading them.

    Returns
    -------
    Of each file its name below the path, its size in bytes, and its version: modification time, ETag of an object, or
    whatever the file system offers. Empty for a folder on a server that can't list folders, such as most https servers.
    """
    from fsspec.core import url_to_fs

    with reaching(path):
        files, root = url_to_fs(str(path))
        files.invalidate_cache()
        found = files.find(root, detail=True)
    return sorted(
        (name.removeprefix(root), int(info["size"] or 0), str(next((info[v] for v in _VERSIONS if info.get(v)), "")))
        for name, info in found.items()
    )


def stamp(path: Path) -> str:
    """Checksum of the sizes and versions of a file, or of all files of a folder; it changes with the content."""
    return digest(path.note() if hasattr(path, "note") else listing(path))


def digest(value: Any) -> str:
    """SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
