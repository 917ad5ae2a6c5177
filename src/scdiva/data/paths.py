"""Where cells lie: paths of this machine, URLs of any file system that fsspec reads, cells of SOMA experiments."""

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
"""What file systems call the version of an object; the first that is there counts."""


def is_path(given: Any) -> TypeGuard[str | Path]:
    """Tell what says where cells lie from the cells themselves.

    Parameters
    ----------
    given
        Path, URL, cells of a SOMA experiment, or AnnData object.
    """
    return isinstance(given, str | PathLike) or hasattr(given, "stem")


def as_path(given: Any) -> Path:
    """Make a path of what a user gave.

    Parameters
    ----------
    given
        A path or URL, or what :func:`is_path` takes besides, which is given back.

    Returns
    -------
    A :class:`~pathlib.Path` of this machine's own file systems. Of any other a ``UPath``, which has the same methods;
    it is typed as a Path, and is none by `isinstance`.

    Raises
    ------
    ImportError
        If a package is missing for this kind of URL.
    ValueError
        If there is no such kind.
    """
    if not isinstance(given, str | PathLike):
        return cast(Path, given)
    if "://" not in str(given):
        return Path(given)
    path = from_extra("upath", "remote", f"{given!r} needs universal-pathlib").UPath(given)
    with reaching(path):
        _ = path.fs  # imports what reads this kind
    return cast(Path, path)


@contextmanager
def reaching(path: Any) -> Iterator[None]:
    """Let what a remote file system raises name the URL and the remedy; what is wrong with the content passes.

    Parameters
    ----------
    path
        What :func:`as_path` returned; errors of a local one pass as well.

    Raises
    ------
    FileNotFoundError
        If there is nothing.
    ImportError
        If a package is missing.
    OSError
        If it can't be reached.
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
    """List what lies at a path without reading it.

    Parameters
    ----------
    path
        File or folder, from :func:`as_path`.

    Returns
    -------
    Of each file its name below the path, its size in bytes, and what changes with its content: the time of its last
    change, the ETag of an object, or whatever its file system has instead. Nothing of a folder on a server that lists
    none, as those of https rarely do.
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
    """Sizes and times of change, or versions, of a file or all files of a folder: another stamp, another content.

    Parameters
    ----------
    path
        The file or folder, as :func:`scdiva.data.paths.as_path` gives it.
    """
    return digest(path.note() if hasattr(path, "note") else listing(path))


def digest(value: Any) -> str:
    """Give the SHA-256 of plain JSON values.

    Parameters
    ----------
    value
        Plain values, nested as one likes.
    """
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
